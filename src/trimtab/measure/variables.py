"""Access to variables: globals of functions, closure cells, slots and class attributes."""

from __future__ import annotations

import contextvars
import dis
import functools
import itertools
import sys
import types
from collections.abc import Iterator
from typing import Any

from trimtab.measure.object_snapshots import MISSING


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
