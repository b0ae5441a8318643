"""Search for all objects that a training step can change, starting from model, optimizer, loss and batch.

The walk follows attributes of modules and plain objects, containers, closures, globals, default arguments, partials,
bound methods, hooks, and the methods of the user's classes. For objects of installed packages it follows data
attributes only. It does not enter the code of torch or the standard library, datasets, files, or long containers
outside the model.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import gc
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
from torch.utils.data.dataloader import _BaseDataLoaderIter

from trimtab.state.generators import GENERATORS, is_generator
from trimtab.state.object_snapshots import (
    CONTAINERS,
    MISSING,
    RAW_MEMORY,
    get_attribute,
    has_position,
    is_container,
    is_positioned,
    is_raw_memory,
    key_of,
    put_attribute,
    put_item,
)


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


# The code of a function: used and assigned globals, and containers that it only fills.


def globals_of(function: types.FunctionType) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield (namespace, name) of the globals used by a function, including attributes of the user's modules."""
    space = function.__globals__
    used = _names_in(function.__code__)
    for name in used.globals:
        if name in space:
            value = space[name]
            yield space, name
            if isinstance(value, types.ModuleType) and not (is_library(value.__name__) or is_package(value.__name__)):
                yield from ((vars(value), other) for other in used.all if other in vars(value))
        elif name in used.stored:
            yield space, name


class _Names(NamedTuple):
    """Names in code including inner functions, in order: used globals; globals and attributes; assigned globals."""

    globals: dict[str, None]
    all: dict[str, None]
    stored: frozenset[str]


@functools.lru_cache(4096)
def _names_in(code: types.CodeType) -> _Names:
    # An attribute that is named like a global is no use of the global. `co_names` has both.
    steps = list(dis.get_instructions(code)) if code.co_names else []
    used = dict.fromkeys(each.argval for each in steps if each.opname in _OF_GLOBALS)
    names, stored = dict.fromkeys(code.co_names), {each.argval for each in steps if each.opcode in _STORES}
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            inner = _names_in(constant)
            used |= inner.globals
            names |= inner.all
            stored |= inner.stored
    return _Names(used, names, frozenset(stored))


# LOAD_NAME is in the body of a class.
_OF_GLOBALS = {"LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL", "DELETE_GLOBAL"}
_STORES = {dis.opmap["STORE_GLOBAL"], dis.opmap["DELETE_GLOBAL"]}
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


def slots_of(kind: type) -> Iterator[str]:
    """Yield the names of the slots of a class, with private names as they are stored."""
    for each in kind.__mro__:
        slots = vars(each).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__"):
                private = name.startswith("__") and not name.endswith("__")
                yield f"_{each.__name__.lstrip('_')}{name}" if private else name


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


class ObjectPath(NamedTuple):
    """Location of an object.

    Attributes:
        labels: Attributes and items that lead to the object.
        kind: Kind of the object.
        depth: Number of functions and objects between a root and the object.
        function: Name of the function whose closure or globals start the path.
        is_beside: True if the object was reached through a function and does not belong to the model or optimizer.
    """

    labels: str
    kind: ChangeKind
    depth: int = 0
    function: str = ""
    is_beside: bool = False

    def path(self, more: str = "") -> str:
        """Return the complete path, followed by `more`."""
        path = f"{self.labels}{more}".removeprefix(".") or "model"
        return f"{path} in {self.function}" if self.function else path

    def then(self, label: str, kind: ChangeKind | None = None, *, deeper: bool = False) -> ObjectPath:
        """Return the location of an object that this one refers to."""
        labels = self.labels + label
        return ObjectPath(labels, kind or self.kind, self.depth + deeper, self.function, self.is_beside)


class ReachableObject(NamedTuple):
    """A found object: a tensor, container, array, generator or iterator, or a variable.

    Attributes:
        value: The object.
        place: Its location.
        is_named: True for a dictionary of attributes.
        get: Reads the variable.
        put: Sets the variable.
    """

    value: Any
    place: ObjectPath
    is_named: bool = False
    get: functools.partial[Any] | None = None
    put: Callable[[Any], object] | None = None


_DEPTH = 5  # maximum number of functions and objects between a root and a followed object
# Limits for a container outside the model: entered, and recorded; a longer one is training data.
_MOST_ITEMS, _MOST_HELD = 1000, 1_000_000
_MOST_OF_PACKAGES = 1000  # objects of installed packages that are entered


class ObjectWalk:
    """Graph walk that finds each object once, the model's own objects first.

    Args:
        skips_logs: True to list append-only containers separately, see `logs`. A container outside the model that the
            followed functions fill and never read cannot affect a step.

    Attributes:
        found: Found objects in order.
        modules: Found modules in order.
    """

    most_depth = _DEPTH

    def __init__(self, *, skips_logs: bool = False) -> None:
        self._skips_logs = skips_logs
        self.found: list[ReachableObject] = []
        self.modules: list[nn.Module] = []
        self._logs: dict[int, ReachableObject] = {}
        self._num_of_packages = 0
        self._seen: set[int] = set()
        self._followed: set[Any] = set()  # ids of functions and cells, and keys of globals
        self._alive: list[Any] = []  # references that keep ids from being reused
        self._pending: deque[tuple[Any, ObjectPath]] = deque()
        # Followed last, so that objects are found under attribute names first.
        self._functions: deque[tuple[Any, ObjectPath]] = deque()

    def enter(self, root: Any, label: str, kind: ChangeKind, *, is_beside: bool = False) -> None:
        """Add all objects reachable from a root."""
        self._pending.append((root, ObjectPath(label, kind, is_beside=is_beside)))
        self._drain()

    def enter_optimizer(self, optimizer: Any) -> None:
        """Add all objects reachable from an optimizer of any class."""
        self._seen.add(id(optimizer))
        self._optimizer(optimizer, ObjectPath("optimizer", ChangeKind.OPTIMIZER))
        self._drain()

    def enter_function(self, function: Any) -> None:
        """Add all objects reachable from a loss: a function, method, partial or callable object, from any package."""
        inner = function.__func__ if isinstance(function, types.MethodType) else function
        if isinstance(inner, types.FunctionType):
            self._function(inner, 0, always=True)
        elif self._handler_of(type(function)) is None:
            self._object(function, ObjectPath("loss_fn", ChangeKind.CLOSURE, is_beside=True))
        self.enter(function, "loss_fn", ChangeKind.CLOSURE, is_beside=True)

    def logs(self) -> list[ReachableObject]:
        """Return the containers to which functions only append and that cannot affect a step.

        A container that the walk also found elsewhere, such as in a module's attribute, may be read there, and is
        listed in `found` instead.
        """
        return [each for each in self._logs.values() if id(each.value) not in self._seen]

    def _drain(self) -> None:
        while self._pending or self._functions:
            while self._pending:
                self._visit(*self._pending.popleft())
            if self._functions:
                with contextlib.suppress(Exception):  # an attribute access may run user code that raises
                    self._follow(*self._functions.popleft())

    def _visit(self, value: Any, place: ObjectPath) -> None:
        if id(value) in self._seen:
            return
        self._seen.add(id(value))
        self._alive.append(value)
        handler = self._handler_of(type(value))
        if handler is not None:
            with contextlib.suppress(Exception):  # an attribute access may run user code that raises
                handler(self, value, place)

    def _handler_of(self, kind: Any) -> _Handler | None:
        return _handler_of(kind)

    def _push(self, value: Any, place: ObjectPath) -> None:
        if type(value) not in _IGNORED:
            self._pending.append((value, place))

    # Handlers for the types of values.

    def _value(self, value: Any, place: ObjectPath) -> None:
        """Add an object that refers to no others: an array or a generator."""
        kind = ChangeKind.GENERATOR if is_generator(value) else None
        self.found.append(ReachableObject(value, place.then("", kind)))

    def _tensor(self, tensor: Tensor, place: ObjectPath) -> None:
        self.found.append(ReachableObject(tensor, place))
        for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
            if hooks := getattr(tensor, name, None):
                self._push(hooks, place.then(f".{name}", ChangeKind.ATTRIBUTE))
        if isinstance(tensor, nn.Parameter):
            self._names(vars(tensor), place.then("", ChangeKind.ATTRIBUTE))

    def _names(self, held: dict[str, Any], place: ObjectPath) -> None:
        """Add the attributes of an object."""
        self._seen.add(id(held))
        self.found.append(ReachableObject(held, place, is_named=True))
        for name, each in held.items():
            if type(each) in _IGNORED:
                continue
            if type(each) not in (dict, OrderedDict) or each or id(each) in self._seen:
                self._pending.append((each, place.then(f".{name}")))
            else:  # an empty table of hooks: each module has a dozen
                self._seen.add(id(each))
                self.found.append(ReachableObject(each, place.then(f".{name}")))

    def _container(self, value: Any, place: ObjectPath) -> None:
        if not place.is_beside or len(value) <= _MOST_HELD:
            self.found.append(ReachableObject(value, place))
            self._tuple(value, place)

    def _tuple(self, value: Any, place: ObjectPath) -> None:
        if place.is_beside and len(value) > _MOST_ITEMS:
            return
        kind = ChangeKind.CONTAINER if place.kind is ChangeKind.ATTRIBUTE else place.kind
        pairs = dict.items(value) if isinstance(value, dict) else enumerate(tuple(value))
        for key, item in pairs:
            if type(item) not in _IGNORED:
                self._pending.append((item, place.then(f"[{key!r:.40}]", kind)))

    def _module(self, module: nn.Module, place: ObjectPath) -> None:
        self.modules.append(module)
        held = vars(module)
        # Depth restarts at 0: objects of modules are followed to any depth.
        here = place.then("", ChangeKind.ATTRIBUTE)._replace(depth=0)
        for name, kind in _TABLES.items():
            if isinstance(table := held.get(name), dict):
                self._table(table, here, kind)
        self._names(held, here)
        if not isinstance(module, torch.jit.ScriptModule):
            self._methods(type(module), here)
            return
        tensors = dict((*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)))
        for name, tensor in tensors.items():
            self._pending.append((tensor, here.then(f".{name}", _kind_of(tensor, ChangeKind.BUFFER))))

    def _table(self, table: dict[str, Any], here: ObjectPath, kind: ChangeKind) -> None:
        """Add the parameters, buffers or submodules of a module."""
        self._seen.add(id(table))
        self.found.append(ReachableObject(table, here.then("", kind), is_named=True))
        for key, each in table.items():
            if each is not None:
                self._pending.append((each, here.then(f".{key}", _kind_of(each, kind))))

    def _optimizer(self, optimizer: Any, place: ObjectPath) -> None:
        here = place.then("", ChangeKind.OPTIMIZER)
        self._object(optimizer, here)
        for name in ("state", "param_groups"):  # a wrapped optimizer may provide these as properties
            self._push(getattr(optimizer, name, None), here.then(f".{name}"))

    def _object(self, value: Any, place: ObjectPath) -> None:
        if place.depth > self.most_depth:
            return
        held = getattr(value, "__dict__", None)
        if isinstance(held, dict):
            self._names(held, place.then("", deeper=True))
        for name in slots_of(type(value)):
            self._attribute(value, name, place.then(f".{name}"))
        self._methods(type(value), place)

    def _package_object(self, value: Any, place: ObjectPath) -> None:
        """Follow the data attributes of an object of an installed package."""
        held = getattr(value, "__dict__", None)
        self._num_of_packages += 1
        if not isinstance(held, dict) or place.depth > self.most_depth or self._num_of_packages > _MOST_OF_PACKAGES:
            return
        self._seen.add(id(held))
        self.found.append(ReachableObject(held, place, is_named=True))
        for name, each in held.items():
            is_sequence = isinstance(each, tuple) or is_container(each)
            if not isinstance(each, _FUNCTIONS) and not (is_sequence and len(each) > _MOST_ITEMS):
                self._push(each, place.then(f".{name}", deeper=True))

    def _iterator(self, value: Any, place: ObjectPath) -> None:
        """Add an iterator or queue, and the functions and user objects from which it takes its items."""
        self.found.append(ReachableObject(value, place))
        for each in () if isinstance(value, _BaseDataLoaderIter) else gc.get_referents(value):
            if callable(each) or (hasattr(each, "__next__") and not has_position(each)):
                self._push(each, place.then(f".{getattr(each, '__name__', type(each).__name__)}", deeper=True))

    def _shared(self, value: Any, place: ObjectPath) -> None:
        self._push(value.get_obj(), place)

    def _memory(self, value: Any, place: ObjectPath) -> None:
        if is_raw_memory(value) and not (place.is_beside and memoryview(value).nbytes > _MOST_HELD):
            self._value(value, place)

    def _loader(self, value: Any, place: ObjectPath) -> None:
        """Add the random generators of a data loader or sampler, but no data."""
        for name in ("generator", "sampler", "batch_sampler"):
            if (each := getattr(value, name, None)) is not None:
                self._push(each, place.then(f".{name}", deeper=True))

    def _class(self, value: type, place: ObjectPath) -> None:
        self._seen.discard(id(value))  # a class seen as a value was marked as visited without being entered
        self._methods(value, place)

    def _callable(self, value: Any, place: ObjectPath) -> None:
        self._functions.append((value, place))

    def _attribute(self, owner: Any, name: str, place: ObjectPath) -> None:
        """Add a variable that is an attribute of a class, a slot, or the content of a cell."""
        get = functools.partial(get_attribute, owner, name)
        self._variable(get, functools.partial(put_attribute, owner, name), place)

    def _variable(
        self, get: functools.partial[Any], put: Callable[[Any], object], place: ObjectPath, code: Any = None
    ) -> None:
        """Add a variable and its value; `code` is that of the function that uses a closure or global."""
        value = get()
        if code is not None:
            if (key := key_of(get)) in self._followed:
                return
            if self._skips_logs and is_container(value) and is_log(code, place.labels):
                self._logs.setdefault(id(value), ReachableObject(value, place))
                return
            self._followed.add(key)
        if not isinstance(value, _CODE):
            self.found.append(ReachableObject(value, place, get=get, put=put))
        self._push(value, place)

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
                here = ObjectPath(f"{each.__name__}.{name}", ChangeKind.CLOSURE, place.depth, is_beside=True)
                if isinstance(value, type):
                    self._push(value, here)
                elif isinstance(value, _CODE) or hasattr(value, "__wrapped__"):
                    self._functions.append((value, place))
                elif not (name.startswith("__") and name.endswith("__")) and not isinstance(value, _DESCRIPTORS):
                    self._attribute(each, name, here)

    def _follow(self, value: Any, place: ObjectPath) -> None:
        self._alive.append(value)
        if place.depth > self.most_depth or value is None:
            return
        if isinstance(value, types.FunctionType):
            self._function(value, place.depth + 1)
        elif isinstance(value, functools.partial):
            positional = {f"argument {index}": each for index, each in enumerate(value.args)}
            self._parts(value.func, positional | value.keywords, place)
        elif isinstance(value, types.MethodType):
            self._parts(value.__func__, {"self": value.__self__}, place)
        elif isinstance(value, types.BuiltinMethodType | types.MethodWrapperType):
            if is_generator(value.__self__) or has_position(value.__self__):
                self._push(value.__self__, place)
        elif isinstance(value, property):
            self._functions.extend((each, place) for each in (value.fget, value.fset))
        elif isinstance(value, staticmethod | classmethod):
            self._functions.append((value.__func__, place))
        else:  # functools.cache and other decorators
            self._functions.append((getattr(value, "__wrapped__", None), place))

    def _parts(self, function: Any, others: Mapping[str, Any], place: ObjectPath) -> None:
        self._functions.append((function, place))
        name = getattr(function, "__qualname__", "")
        for label, each in others.items():
            self._push(each, ObjectPath(label, ChangeKind.CLOSURE, place.depth + 1, name, is_beside=True))

    def _function(self, function: types.FunctionType, depth: int, *, always: bool = False) -> None:
        if id(function) in self._followed:
            return
        self._followed.add(id(function))
        here = ObjectPath("", ChangeKind.CLOSURE, depth, function.__qualname__, is_beside=True)
        if not always and is_library(function.__globals__.get("__name__", "")):
            # A decorator's wrapper, such as that of torch.no_grad.
            self._functions.append((getattr(function, "__wrapped__", None), here))
            return
        code = function.__code__
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            get = functools.partial(get_attribute, cell, "cell_contents")
            self._variable(get, functools.partial(put_attribute, cell, "cell_contents"), here.then(name), code)
        for space, name in globals_of(function):
            get, put = functools.partial(space.get, name, MISSING), functools.partial(put_item, space, name)
            self._variable(get, put, here.then(name), code)
        for default in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            self._push(default, here.then("default argument"))
        self._names(vars(function), here.then(function.__name__))


def modules_of(function: Any) -> list[nn.Module]:
    """Return the modules reachable from a function, including submodules."""
    walk = ObjectWalk()
    walk.enter_function(function)
    return walk.modules


def _kind_of(value: Any, kind: ChangeKind) -> ChangeKind:
    if not isinstance(value, nn.Parameter) or kind is ChangeKind.ATTRIBUTE:
        return kind
    return ChangeKind.PARAMETER if value.requires_grad else ChangeKind.FROZEN_PARAMETER


_TABLES = {"_parameters": ChangeKind.PARAMETER, "_buffers": ChangeKind.BUFFER, "_modules": ChangeKind.ATTRIBUTE}
_DESCRIPTORS = (types.MemberDescriptorType, types.GetSetDescriptorType, functools.cached_property)
_CODE = (types.FunctionType, types.BuiltinFunctionType, types.ModuleType, type, property, staticmethod, classmethod)
_FUNCTIONS = (*_CODE, types.MethodType, functools.partial)
_IGNORED = {
    *(bool, int, float, complex, str, bytes, type(None), type(Ellipsis), type(NotImplemented), range, slice),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, type(MISSING)),
}
NEVER_ENTERED: tuple[Any, ...] = (
    Enum,
    weakref.ReferenceType,
    types.ModuleType,
    torch.jit.ScriptFunction,
    numpy.generic,
    *_IGNORED,
)
_Handler = Callable[[Any, Any, ObjectPath], None]
_HANDLERS: Mapping[Any, _Handler] = {
    Tensor: ObjectWalk._tensor,
    nn.Module: ObjectWalk._module,
    Optimizer: ObjectWalk._optimizer,
    (tuple, frozenset): ObjectWalk._tuple,
    numpy.ndarray: ObjectWalk._value,
    (types.FunctionType, types.MethodType, functools.partial): ObjectWalk._callable,
    (types.BuiltinMethodType, types.MethodWrapperType): ObjectWalk._callable,
    type: ObjectWalk._class,
    (DataLoader, Sampler): ObjectWalk._loader,
    (LRScheduler, SobolEngine, threading.local, queue.Queue): ObjectWalk._object,
    (weakref.WeakKeyDictionary, weakref.WeakValueDictionary, weakref.WeakSet): ObjectWalk._object,
    SynchronizedBase: ObjectWalk._shared,
}


@functools.cache
def _handler_of(kind: Any) -> _Handler | None:
    """Return the method of `ObjectWalk` that enters objects of a class, or None for an ignored class."""
    if issubclass(kind, (*NEVER_ENTERED, Dataset, io.IOBase)):
        return None
    for kinds, handler in _HANDLERS.items():
        if issubclass(kind, kinds):
            return handler
    if issubclass(kind, CONTAINERS):
        return ObjectWalk._container
    if issubclass(kind, GENERATORS):
        return None if issubclass(kind, random.SystemRandom) else ObjectWalk._value
    if is_positioned(kind):
        return ObjectWalk._iterator
    if issubclass(kind, RAW_MEMORY):
        return ObjectWalk._memory
    if hasattr(kind, "__wrapped__"):
        return None
    module = kind.__module__
    if module.startswith("torch.amp") or kind is types.SimpleNamespace or module in ("argparse", "collections"):
        return ObjectWalk._object
    if is_library(module):
        return None
    return ObjectWalk._package_object if is_package(module) else ObjectWalk._object
