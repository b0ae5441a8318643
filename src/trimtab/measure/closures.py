"""Objects reachable from a function: globals, closures, partial arguments, owners of methods, container items."""

from __future__ import annotations

import contextlib
import functools
import inspect
import types
from collections.abc import Iterator
from typing import Any, TypeVar

from torch import Tensor

from trimtab.measure.object_snapshots import is_container

T = TypeVar("T")
_DEPTH = 4  # a loss, a function called by it, that method's owner, an attribute of the owner
_MOST_ITEMS = 1000  # a longer container is training data


def reachable_instances(user: Any, kind: type[T]) -> Iterator[T]:
    """Yield the instances of a class reachable from a function, object or tuple. Yielded objects are not entered."""
    seen, pending = set[int](), [(user, 0)]
    while pending:
        value, depth = pending.pop()
        if id(value) in seen or depth > _DEPTH:
            continue
        seen.add(id(value))
        if isinstance(value, kind):
            yield value
        else:
            pending.extend((each, depth + 1) for each in references(value))


def references(value: Any) -> Iterator[Any]:
    """Yield the objects referenced directly by a function, object or container; nothing for classes and modules."""
    if isinstance(value, functools.partial):
        yield from (value.func, *value.args, *value.keywords.values())
    elif isinstance(value, types.MethodType):
        yield from (value.__func__, value.__self__)
    elif isinstance(value, types.FunctionType):
        with contextlib.suppress(ValueError):  # a variable that is not bound yet
            found = inspect.getclosurevars(value)
            yield from (*found.nonlocals.values(), *found.globals.values(), *(value.__defaults__ or ()))
            yield from (value.__kwdefaults__ or {}).values()
    elif isinstance(value, tuple) or is_container(value):
        if len(value) <= _MOST_ITEMS:
            yield from value.values() if isinstance(value, dict) else value
    elif not isinstance(value, type | types.ModuleType | Tensor):
        yield from (*getattr(value, "__dict__", {}).values(), vars(type(value)).get("__call__"))
