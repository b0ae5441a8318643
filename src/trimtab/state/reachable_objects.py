"""Search for all objects that a training step can change, starting from model, optimizer, loss and batch.

The walk follows attributes of modules and plain objects, containers, closures, globals, default arguments, partials,
bound methods, hooks, iterators, and the methods of the user's classes. For objects of installed packages it follows
data attributes only. It does not enter the code of torch or the standard library, datasets, files, or long containers
outside the model.
"""

from __future__ import annotations

import contextlib
import contextvars
import dis
import functools
import io
import itertools
import queue
import random
import sys
import threading
import types
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping
from enum import Enum, StrEnum
from multiprocessing.sharedctypes import SynchronizedBase
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.quasirandom import SobolEngine
from torch.utils.data import DataLoader, Dataset, Sampler

from trimtab.state.generators import is_generator
from trimtab.state.iterators import has_position, is_positioned, iterators_in, parts_of
from trimtab.state.object_snapshots import MISSING, is_container
from trimtab.state.raw_memory import MEMORY, bytes_of, is_raw_memory

# Access to variables: globals of functions, closure cells, slots and class attributes.


@functools.cache
def is_library(module: str) -> bool:
    """Return True for a module of torch, NumPy, the standard library or trimtab's own machinery."""
    top, _, rest = module.partition(".")
    if top == "trimtab":
        return rest.partition(".")[0] not in ("nn", "tasks", "recipes", "experiments")
    return top in sys.stdlib_module_names or top in ("torch", "numpy", "torchvision", "triton")


@functools.cache
def is_package(module: str) -> bool:
    """Return True for a module of an installed package, False for the user's code."""
    file = getattr(sys.modules.get(module.partition(".")[0]), "__file__", None) or ""
    return "site-packages" in file or "dist-packages" in file


def globals_of(function: types.FunctionType) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield (namespace, name) of the globals used by a function, including attributes of the user's modules."""
    space = function.__globals__
    names, stored = _names_in(function.__code__)
    for name in names:
        if name in space:
            value = space[name]
            yield space, name
            if isinstance(value, types.ModuleType) and not (is_library(value.__name__) or is_package(value.__name__)):
                yield from ((vars(value), other) for other in names if other in vars(value))
        elif name in stored:
            yield space, name


_FILLS = {"append", "appendleft", "add", "extend", "extendleft", "insert", "update"}


@functools.lru_cache(4096)
def is_log(code: types.CodeType, name: str) -> bool:
    """Return True if a function only adds to the container under a name and never reads it."""
    inner = [each for each in code.co_consts if isinstance(each, types.CodeType)]
    steps = list(dis.get_instructions(code)) if name in (*code.co_names, *code.co_freevars, *code.co_cellvars) else []
    for step, after in itertools.pairwise(steps):
        if step.argval != name or step.opname in ("LOAD_CLOSURE", "MAKE_CELL", "COPY_FREE_VARS"):
            continue
        fills = after.opname in ("LOAD_METHOD", "LOAD_ATTR") and after.argval in _FILLS
        if not (fills and step.opname in ("LOAD_DEREF", "LOAD_GLOBAL")):
            return False
    return all(is_log(each, name) for each in inner)


@functools.lru_cache(4096)
def _names_in(code: types.CodeType) -> tuple[tuple[str, ...], frozenset[str]]:
    """Return the names of globals and attributes used in code including inner functions, and the globals assigned."""
    names, stored = dict.fromkeys(code.co_names), set[str]()
    if any(each in _STORES for each in code.co_code[::2]):
        stored = {each.argval for each in dis.get_instructions(code) if each.opcode in _STORES}
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            more, also = _names_in(constant)
            names |= dict.fromkeys(more)
            stored |= also
    return tuple(names), frozenset(stored)


_STORES = {dis.opmap["STORE_GLOBAL"], dis.opmap["DELETE_GLOBAL"]}


def slots_of(kind: type) -> Iterator[str]:
    for each in kind.__mro__:
        slots = vars(each).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__"):
                private = name.startswith("__") and not name.endswith("__")
                yield f"_{each.__name__.lstrip('_')}{name}" if private else name


def put_slot(owner: Any, name: str, value: Any) -> None:
    if value is MISSING:
        object.__delattr__(owner, name)
    else:
        object.__setattr__(owner, name, value)


def put_attribute(owner: type, name: str, value: Any) -> None:
    if value is MISSING:
        delattr(owner, name)
    else:
        setattr(owner, name, value)


def put_arguments(function: functools.partial[Any], args: tuple[Any, ...]) -> None:
    function.__setstate__((function.func, args, function.keywords, vars(function) or None))  # type: ignore[attr-defined]


def put_context(variable: contextvars.ContextVar[Any], value: Any) -> None:
    """Set a context variable. A variable without an earlier value keeps its new one, because Python cannot unset it."""
    if value is not MISSING:
        variable.set(value)


def put_item(space: dict[str, Any], name: str, value: Any) -> None:
    if value is MISSING:
        space.pop(name, None)
    else:
        space[name] = value


def value_of(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # a variable without a value
        return MISSING


def put_cell(cell: types.CellType, value: Any) -> None:
    if value is MISSING:
        del cell.cell_contents
    else:
        cell.cell_contents = value


# Paths and kinds of the objects that a training step can change.


class ChangeKind(StrEnum):
    """Kind of a changed object."""

    PARAMETER = "parameter"
    FROZEN_PARAMETER = "frozen_parameter"
    BUFFER = "buffer"
    ATTRIBUTE = "attribute"
    CONTAINER = "container"
    CLOSURE = "closure"
    GENERATOR = "generator"
    OPTIMIZER = "optimizer"
    GRADIENT = "gradient"
    BATCH = "batch"


class ObjectPath:
    """Location of an object: a label appended to its parent's path, and the object's kind.

    Args:
        label: Last part of the path.
        kind: Kind of the object.
        parent: Location of the referring object.
        function: Name of the function whose closure or globals start the path.
        depth: Number of functions and objects between a root and the object.
    """

    __slots__ = ("depth", "function", "kind", "label", "parent")

    def __init__(
        self, label: str, kind: ChangeKind, parent: ObjectPath | None = None, function: str = "", depth: int = 0
    ) -> None:
        self.label, self.kind, self.parent, self.function, self.depth = label, kind, parent, function, depth

    def path(self, more: str = "") -> str:
        """Return the complete path, followed by `more`."""
        labels, each, function = [more], self, ""
        while True:
            labels.append(each.label)
            if each.parent is None:
                function = each.function
                break
            each = each.parent
        path = "".join(reversed(labels)).removeprefix(".") or "model"
        return f"{path} in {function}" if function else path

    def then(self, label: str, kind: ChangeKind | None = None, *, deeper: bool = False) -> ObjectPath:
        """Return the location of an object that this one refers to."""
        return ObjectPath(label, kind or self.kind, self, "", self.depth + deeper)


class ReachableObject(NamedTuple):
    """A found object: a tensor, container, array or generator, or a variable.

    Attributes:
        value: The object.
        place: Its location.
        is_beside: True if it was reached through a function and does not belong to the model or optimizer.
        is_named: True for a dictionary of attributes.
        is_log: True for an append-only container, whose items are not followed.
        get: Reads the variable.
        put: Sets the variable.
    """

    value: Any
    place: ObjectPath
    is_beside: bool
    is_named: bool = False
    is_log: bool = False
    get: functools.partial[Any] | None = None
    put: Callable[[Any], None] | None = None


_DEPTH = 5  # maximum number of functions and objects between a root and a followed object
# Limits for a container outside the model: entered, and recorded; a longer one is training data.
_MOST_ITEMS, _MOST_HELD = 1000, 1_000_000
_MOST_OF_PACKAGES = 1000  # objects of installed packages that are entered, per container and in total


_Get = functools.partial[Any]
_Put = Callable[[Any], None]


class ObjectWalk:
    """Graph walk that finds each object once, the model's own objects first.

    Args:
        skips_logs: True to list append-only containers separately, see `logs`. A container outside the model that the
            followed functions fill and never read cannot affect a step.

    Attributes:
        found: Found objects in order.
        modules: Found modules in order.
    """

    def __init__(self, *, skips_logs: bool = False) -> None:
        self._skips_logs = skips_logs
        self.found: list[ReachableObject] = []
        self.modules: list[nn.Module] = []
        self._logs: dict[int, ReachableObject] = {}
        self._of_packages = 0
        self._seen: set[int] = set()
        self._followed: set[Any] = set()  # ids of functions and cells, and keys of globals
        self._alive: list[Any] = []  # references that keep ids from being reused
        self._pending: deque[tuple[Any, ObjectPath, bool]] = deque()
        # Followed last, so that objects are found under attribute names first.
        self._functions: deque[tuple[Any, ObjectPath]] = deque()

    def enter(self, root: Any, label: str, kind: ChangeKind, *, is_beside: bool = False) -> None:
        """Add all objects reachable from a root."""
        self._pending.append((root, ObjectPath(label, kind), is_beside))
        self._drain()

    def _drain(self) -> None:
        while self._pending or self._functions:
            while self._pending:
                self._visit(*self._pending.popleft())
            if self._functions:
                with contextlib.suppress(Exception):  # an attribute access may run user code that raises
                    self._follow(*self._functions.popleft())

    def enter_optimizer(self, optimizer: Any) -> None:
        """Add all objects reachable from an optimizer of any class."""
        self._seen.add(id(optimizer))
        self._optimizer(optimizer, ObjectPath("optimizer", ChangeKind.OPTIMIZER), False)
        self._drain()

    def enter_function(self, function: Any) -> None:
        """Add all objects reachable from a loss: a function, method, partial or callable object, from any package."""
        place = ObjectPath("loss_fn", ChangeKind.CLOSURE)
        inner = function.__func__ if isinstance(function, types.MethodType) else function
        if isinstance(inner, types.FunctionType):
            self._function(inner, 0, always=True)
        elif _handler_of(type(function)) is None:  # type: ignore[arg-type]  # a class is hashable
            self._object(function, place, True)
        self.enter(function, "loss_fn", ChangeKind.CLOSURE, is_beside=True)

    def logs(self) -> list[ReachableObject]:
        """Return the containers to which functions only append and that cannot affect a step.

        A container that the walk also found elsewhere, such as in a module's attribute, may be read there, and is
        listed in `found` instead.
        """
        return [each for each in self._logs.values() if id(each.value) not in self._seen]

    def _visit(self, value: Any, place: ObjectPath, is_beside: bool) -> None:
        if id(value) in self._seen:
            return
        self._seen.add(id(value))
        self._alive.append(value)
        handler = _handler_of(type(value))  # type: ignore[arg-type]  # a class is hashable
        if handler is not None:
            with contextlib.suppress(Exception):  # an attribute access may run user code that raises
                handler(self, value, place, is_beside)

    def _push(self, value: Any, place: ObjectPath, is_beside: bool) -> None:
        if type(value) not in _IGNORED:
            self._pending.append((value, place, is_beside))

    # Handlers for the types of values.

    def _tensor(self, tensor: Tensor, place: ObjectPath, is_beside: bool) -> None:
        self.found.append(ReachableObject(tensor, place, is_beside))
        for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
            if hooks := getattr(tensor, name, None):
                self._push(hooks, place.then(f".{name}", ChangeKind.ATTRIBUTE), is_beside)
        if isinstance(tensor, nn.Parameter):
            self._names(vars(tensor), place.then("", ChangeKind.ATTRIBUTE), is_beside)

    def _names(self, held: dict[str, Any], place: ObjectPath, is_beside: bool, *, deeper: bool = False) -> None:
        """Add the attributes of an object."""
        self._seen.add(id(held))
        self.found.append(ReachableObject(held, place, is_beside, is_named=True))
        for name, each in held.items():
            if type(each) not in _IGNORED:
                self._pending.append((each, place.then(f".{name}", deeper=deeper), is_beside))

    def _container(self, value: Any, place: ObjectPath, is_beside: bool) -> None:
        size = len(value)
        if is_beside and size > _MOST_HELD:
            return
        self.found.append(ReachableObject(value, place, is_beside))
        if is_beside and size > _MOST_ITEMS:
            return
        self._items(value, place, is_beside)

    def _items(self, value: Any, place: ObjectPath, is_beside: bool) -> None:
        kind = ChangeKind.CONTAINER if place.kind is ChangeKind.ATTRIBUTE else place.kind
        pairs = dict.items(value) if isinstance(value, dict) else enumerate(tuple(value))
        for key, item in pairs:
            if type(item) not in _IGNORED:
                self._pending.append((item, place.then(f"[{key!r:.40}]", kind), is_beside))

    def _tuple(self, value: Any, place: ObjectPath, is_beside: bool) -> None:
        if not is_beside or len(value) <= _MOST_ITEMS:
            self._items(value, place, is_beside)

    def _module(self, module: nn.Module, place: ObjectPath, is_beside: bool) -> None:
        self.modules.append(module)
        held = vars(module)
        # Depth restarts at 0: objects of modules are followed to any depth.
        here = ObjectPath("", ChangeKind.ATTRIBUTE, place)
        self.found.append(ReachableObject(held, here, is_beside, is_named=True))
        self._seen.add(id(held))
        for name, value in held.items():
            if type(value) in _IGNORED:
                continue
            if name in _TABLES and isinstance(value, dict):
                self._named(name, value, here, is_beside)
            # Fast path for empty hook tables, which saves milliseconds in total.
            elif not _is_full(value) and id(value) not in self._seen:
                self._seen.add(id(value))
                self.found.append(ReachableObject(value, here.then(f".{name}"), is_beside))
            else:
                self._pending.append((value, here.then(f".{name}"), is_beside))
        if isinstance(module, torch.jit.ScriptModule):
            for name, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
                kind = _kind_of(tensor) if isinstance(tensor, nn.Parameter) else ChangeKind.BUFFER
                self._pending.append((tensor, here.then(f".{name}", kind), is_beside))
            return
        self._methods(type(module), here)

    def _named(self, name: str, value: dict[str, Any], here: ObjectPath, is_beside: bool) -> None:
        kind = _TABLES[name]
        self._seen.add(id(value))
        self.found.append(ReachableObject(value, here.then("", kind), is_beside, is_named=True))
        for key, each in value.items():
            if each is not None:
                of_it = _kind_of(each) if kind is ChangeKind.PARAMETER else kind
                self._pending.append((each, here.then(f".{key}", of_it), is_beside))

    def _optimizer(self, optimizer: Any, place: ObjectPath, is_beside: bool) -> None:
        here = ObjectPath(place.label, ChangeKind.OPTIMIZER, place.parent, place.function, place.depth)
        self._object(optimizer, here, is_beside)
        for name in ("state", "param_groups"):  # a wrapped optimizer may provide these as properties
            self._push(getattr(optimizer, name, None), here.then(f".{name}"), is_beside)

    def _object(self, value: Any, place: ObjectPath, is_beside: bool) -> None:
        if place.depth > _DEPTH:
            return
        held = getattr(value, "__dict__", None)
        if isinstance(held, dict):
            self._names(held, place, is_beside, deeper=True)
        for name in slots_of(type(value)):
            get = functools.partial(getattr, value, name, MISSING)
            self._binding(get, functools.partial(put_slot, value, name), place.then(f".{name}"), is_beside)
        self._methods(type(value), place)

    def _package_object(self, value: Any, place: ObjectPath, is_beside: bool) -> None:
        """Follow an object of an installed package: completely if all its attributes are data, else these only."""
        held = getattr(value, "__dict__", None)
        self._of_packages += 1
        if not isinstance(held, dict) or place.depth > _DEPTH:
            return
        if all(map(_is_data, held.values())):
            self._object(value, place, is_beside)
            return
        is_full = self._of_packages > _MOST_OF_PACKAGES
        if not is_full:
            self._seen.add(id(held))
            self.found.append(ReachableObject(held, place, is_beside, is_named=True))
        for name, each in held.items():
            is_trained = isinstance(each, nn.Module | Optimizer | Tensor)
            if is_trained or not (is_full or isinstance(each, _FUNCTIONS) or _is_long(each)):
                self._push(each, place.then(f".{name}", deeper=True), is_beside)

    def _iterator(self, value: Any, place: ObjectPath, is_beside: bool) -> None:
        self.found.append(ReachableObject(value, place, is_beside))
        for each in parts_of(value):
            self._push(each, place.then(f".{getattr(each, '__name__', type(each).__name__)}", deeper=True), is_beside)

    def _memory(self, value: Any, place: ObjectPath, is_beside: bool) -> None:
        if is_raw_memory(value) and not (is_beside and bytes_of(value) > _MOST_HELD):
            self.found.append(ReachableObject(value, place, is_beside))

    def _view(self, value: memoryview, place: ObjectPath, is_beside: bool) -> None:
        self._push(value.obj, place, is_beside)

    def _shared(self, value: Any, place: ObjectPath, is_beside: bool) -> None:
        self._push(value.get_obj(), place, is_beside)

    def _context_variable(self, value: contextvars.ContextVar[Any], place: ObjectPath, is_beside: bool) -> None:
        self._binding(functools.partial(value.get, MISSING), functools.partial(put_context, value), place, is_beside)

    def _loader(self, value: Any, place: ObjectPath, is_beside: bool) -> None:
        """Add the random generators of a data loader or sampler, but no data."""
        for name in ("generator", "sampler", "batch_sampler"):
            if (each := getattr(value, name, None)) is not None:
                self._push(each, place.then(f".{name}", deeper=True), is_beside)

    def _generator(self, value: Any, place: ObjectPath, is_beside: bool) -> None:
        self.found.append(ReachableObject(value, place.then("", ChangeKind.GENERATOR), is_beside))

    def _array(self, value: Any, place: ObjectPath, is_beside: bool) -> None:
        self.found.append(ReachableObject(value, place, is_beside))

    def _class(self, value: type, place: ObjectPath, is_beside: bool) -> None:
        self._seen.discard(id(value))  # a class seen as a value was marked as visited without being entered
        self._methods(value, place)

    def _callable(self, value: Any, place: ObjectPath, is_beside: bool) -> None:
        self._functions.append((value, place))

    def _variable(self, function: types.FunctionType, key: Any, get: _Get, put: _Put, place: ObjectPath) -> None:
        if key in self._followed:
            return
        value = get()
        if self._skips_logs and is_container(value) and is_log(function.__code__, place.label):
            self._logs.setdefault(id(value), ReachableObject(value, place, True, is_log=True))
            return
        self._followed.add(key)
        self._binding(get, put, place, True)

    def _binding(self, get: _Get, put: _Put, place: ObjectPath, is_beside: bool) -> None:
        value = get()
        if not isinstance(value, _CODE):
            self.found.append(ReachableObject(value, place, is_beside, get=get, put=put))
        self._push(value, place, is_beside)

    # Functions.

    def _methods(self, kind: type, place: ObjectPath) -> None:
        """Follow methods and class attributes of a user class.

        For a class of an installed package, follow only `forward`.
        """
        for each in kind.__mro__:
            if id(each) in self._seen or is_library(each.__module__):
                continue
            self._seen.add(id(each))
            if is_package(each.__module__):
                self._functions.append((vars(each).get("forward"), place))
                continue
            for name, value in tuple(vars(each).items()):
                if isinstance(value, type):
                    self._push(value, place, True)
                elif isinstance(value, _CODE) or hasattr(value, "__wrapped__"):
                    self._functions.append((value, place))
                elif not (name.startswith("__") and name.endswith("__")) and not isinstance(value, _DESCRIPTORS):
                    get = functools.partial(_of_class, each, name)
                    here = ObjectPath(f"{each.__name__}.{name}", ChangeKind.CLOSURE, depth=place.depth)
                    self._binding(get, functools.partial(put_attribute, each, name), here, True)

    def _follow(self, value: Any, place: ObjectPath) -> None:
        self._alive.append(value)
        if place.depth > _DEPTH or value is None:
            return
        if isinstance(value, types.FunctionType):
            self._function(value, place.depth + 1)
        elif isinstance(value, functools.partial):
            positional = {f"argument {index}": each for index, each in enumerate(value.args)}
            self._parts(value.func, positional | value.keywords, place)
            # An iterator argument is restored by replacing the arguments.
            if iterators_in((value.args, *value.keywords.values())):
                here = ObjectPath("arguments", ChangeKind.CLOSURE, depth=place.depth + 1)
                get, put = functools.partial(getattr, value, "args"), functools.partial(put_arguments, value)
                self._binding(get, put, here, True)
                self._push(value.keywords, here, True)
        elif isinstance(value, types.MethodType):
            self._parts(value.__func__, {"self": value.__self__}, place)
        elif isinstance(value, types.BuiltinMethodType | types.MethodWrapperType):
            if is_generator(value.__self__) or has_position(value.__self__):
                self._push(value.__self__, place, True)
        elif isinstance(value, property):
            self._functions.extend((each, place) for each in (value.fget, value.fset))
        elif isinstance(value, staticmethod | classmethod):
            self._functions.append((value.__func__, place))
        elif (wrapped := getattr(value, "__wrapped__", None)) is not None:  # functools.cache and other decorators
            self._functions.append((wrapped, place))

    def _parts(self, function: Any, others: Mapping[str, Any], place: ObjectPath) -> None:
        self._functions.append((function, place))
        name = getattr(function, "__qualname__", "")
        for label, each in others.items():
            self._push(each, ObjectPath(label, ChangeKind.CLOSURE, function=name, depth=place.depth + 1), True)

    def _function(self, function: types.FunctionType, depth: int, *, always: bool = False) -> None:
        if id(function) in self._followed:
            return
        self._followed.add(id(function))
        if not always and is_library(
            function.__globals__.get("__name__", "")
        ):  # a decorator's wrapper, such as torch.no_grad
            self._functions.append(
                (getattr(function, "__wrapped__", None), ObjectPath("", ChangeKind.CLOSURE, depth=depth))
            )
            return
        name = function.__qualname__

        def at(label: str) -> ObjectPath:
            return ObjectPath(label, ChangeKind.CLOSURE, function=name, depth=depth)

        for variable, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            get = functools.partial(value_of, cell)
            self._variable(function, id(cell), get, functools.partial(put_cell, cell), at(variable))
        for space, variable in globals_of(function):
            get, put = functools.partial(space.get, variable, MISSING), functools.partial(put_item, space, variable)
            self._variable(function, (id(space), variable), get, put, at(variable))
        for default in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            self._push(default, at("default argument"), True)
        if iterators_in(function.__defaults__):
            get = functools.partial(getattr, function, "__defaults__")
            self._binding(get, functools.partial(setattr, function, "__defaults__"), at("default arguments"), True)
        if function.__kwdefaults__:
            self._push(function.__kwdefaults__, at("default arguments"), True)
        self._names(vars(function), at(function.__name__), True)


def modules_of(function: Any) -> list[nn.Module]:
    """Return the modules reachable from a function, including submodules."""
    walk = ObjectWalk()
    walk.enter_function(function)
    return walk.modules


def _of_class(kind: type, name: str) -> Any:
    return vars(kind).get(name, MISSING)


def _is_full(value: Any) -> bool:
    """Return False for an empty table of hooks."""
    return type(value) not in _HOOKS or bool(value)


def _kind_of(parameter: Tensor) -> ChangeKind:
    return ChangeKind.PARAMETER if parameter.requires_grad else ChangeKind.FROZEN_PARAMETER


_TABLES = {"_parameters": ChangeKind.PARAMETER, "_buffers": ChangeKind.BUFFER, "_modules": ChangeKind.ATTRIBUTE}
_HOOKS = (dict, OrderedDict, set)
_DESCRIPTORS = (types.MemberDescriptorType, types.GetSetDescriptorType, functools.cached_property)
_CODE = (types.FunctionType, types.BuiltinFunctionType, types.ModuleType, type, property, staticmethod, classmethod)
_WEAK = (weakref.WeakKeyDictionary, weakref.WeakValueDictionary, weakref.WeakSet)
_BOUND = (types.BuiltinMethodType, types.MethodWrapperType)
_FUNCTIONS = (*_CODE, types.MethodType, functools.partial)
_PLAIN = (bool, int, float, complex, str, bytes, type(None), type(Ellipsis), type(NotImplemented))
_IGNORED = {*_PLAIN, torch.dtype, torch.device, torch.layout, torch.memory_format, type(MISSING), range, slice}
_DATA = (*_PLAIN, Tensor, numpy.ndarray, numpy.generic, tuple, frozenset, type, torch.dtype, torch.device, Enum)
_NEVER = (
    Enum,
    Dataset,
    io.IOBase,
    weakref.ReferenceType,
    types.ModuleType,
    torch.jit.ScriptFunction,
)
_Handler = Callable[[ObjectWalk, Any, ObjectPath, bool], None]


def _is_long(value: Any) -> bool:
    return (isinstance(value, tuple | frozenset) or is_container(value)) and len(value) > _MOST_OF_PACKAGES


def _is_data(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_data, value[:8]))
    if isinstance(value, _DATA) or is_container(value):
        return True
    held = getattr(value, "__dict__", None)
    return isinstance(held, dict) and not callable(value) and all(isinstance(each, _DATA) for each in held.values())


@functools.cache
def _handler_of(kind: type) -> _Handler | None:
    """Return the method of `ObjectWalk` that enters objects of a class, or None for an ignored class."""
    if kind in _IGNORED or issubclass(kind, _NEVER) or issubclass(kind, numpy.generic):
        return None
    handlers: Mapping[Any, _Handler] = {
        Tensor: ObjectWalk._tensor,
        nn.Module: ObjectWalk._module,
        Optimizer: ObjectWalk._optimizer,
        (
            torch.Generator,
            numpy.random.Generator,
            numpy.random.RandomState,
            numpy.random.BitGenerator,
        ): ObjectWalk._generator,
        (tuple, frozenset): ObjectWalk._tuple,
        numpy.ndarray: ObjectWalk._array,
        (types.FunctionType, types.MethodType, functools.partial, *_BOUND): ObjectWalk._callable,
        type: ObjectWalk._class,
        (DataLoader, Sampler): ObjectWalk._loader,
        (LRScheduler, SobolEngine, threading.local, queue.Queue, *_WEAK): ObjectWalk._object,
        contextvars.ContextVar: ObjectWalk._context_variable,
        memoryview: ObjectWalk._view,
        SynchronizedBase: ObjectWalk._shared,
    }
    for kinds, handler in handlers.items():
        if issubclass(kind, kinds):
            return handler
    return _handler_of_object(kind)


def _handler_of_object(kind: type) -> _Handler | None:
    if issubclass(kind, random.Random):
        return None if issubclass(kind, random.SystemRandom) else ObjectWalk._generator
    if issubclass(kind, (dict, list, set, deque, bytearray)):
        return ObjectWalk._container
    if is_positioned(kind):  # type: ignore[arg-type]  # a class is hashable
        return ObjectWalk._iterator
    if issubclass(kind, MEMORY):
        return ObjectWalk._memory
    if hasattr(kind, "__wrapped__"):
        return None
    module = kind.__module__
    if module.startswith("torch.amp") or kind in (types.SimpleNamespace,) or module in ("argparse", "collections"):
        return ObjectWalk._object
    if is_library(module):
        return None
    return ObjectWalk._package_object if is_package(module) else ObjectWalk._object
