"""Fingerprint of a task: hash of its source code, bound arguments, model and optimizer."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from trimtab.state.process_state import ProcessState
from trimtab.tasks.task import Task

_PLAIN = (bool, int, float, str, type(None))


def code_of(task: Task) -> str:
    """Return the sha256 of the source files of the task's functions and of their bound arguments.

    Imported modules and closure variables are not included.
    """
    functions = _functions(task)
    # Sorted, to be independent of file locations.
    each = sorted({hashlib.sha256(path.read_bytes()).hexdigest() for path in _files(functions)})
    bound = repr([_bound(function) for function in functions])
    return hashlib.sha256(" ".join([*each, bound]).encode()).hexdigest()


def build_of(task: Task) -> str:
    """Return the sha256 of the model's tensors (name, shape, dtype) and of the optimizer's groups.

    A task that cannot be built gets a constant; the next step to run it reports the error.
    """
    outside = ProcessState.capture()
    try:
        torch.manual_seed(0)
        model = task.make_model()
        optimizer = task.make_optimizer(model)
    except Exception:
        return "cannot be built"
    finally:
        outside.restore()
    tensors = [(name, tuple(t.shape), str(t.dtype)) for name, t in model.state_dict().items() if _is_tensor(t)]
    groups = [_group(group) for group in optimizer.param_groups]
    said = (tensors, type(optimizer).__qualname__, groups)
    return hashlib.sha256(repr(said).encode()).hexdigest()


def _group(group: dict[str, Any]) -> list[tuple[str, Any]]:
    held = {name: value.tolist() if _is_tensor(value) else value for name, value in group.items() if name != "params"}
    named = [(name, value) for name, value in sorted(held.items()) if isinstance(value, (*_PLAIN, tuple, list))]
    return [*named, ("params", len(group["params"]))]


def _is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor)


def _functions(task: Task) -> list[Callable[..., Any] | None]:
    functions = [task.make_model, task.make_optimizer, task.loss_fn, task.load_data, task.metric.evaluate, task.step]
    for recipe in task.recipes.values():
        functions += [recipe.make_optimizer, recipe.make_model, recipe.loss_fn]
    return functions


def _bound(value: object) -> object:
    """Return a representation of a value without memory addresses, including bound arguments of a `partial`."""
    if isinstance(value, functools.partial):
        named = [(name, _bound(each)) for name, each in sorted(value.keywords.items())]
        return "partial", _bound(value.func), [_bound(each) for each in value.args], named
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, tuple | list | set | frozenset):
        each = [_bound(one) for one in value]
        return type(value).__name__, sorted(each, key=repr) if isinstance(value, set | frozenset) else each
    if isinstance(value, Mapping):
        return "mapping", sorted(((_bound(key), _bound(each)) for key, each in value.items()), key=repr)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        held = [(field.name, _bound(getattr(value, field.name))) for field in dataclasses.fields(value)]
        return type(value).__qualname__, held
    return getattr(value, "__qualname__", type(value).__qualname__)


def _files(functions: Iterable[Callable[..., Any] | None]) -> Iterator[Path]:
    for function in functions:
        module = sys.modules.get(getattr(_plain(function), "__module__", None) or "")
        path = getattr(module, "__file__", None)
        if path is not None and Path(path).is_file():
            yield Path(path)


def _plain(function: Callable[..., Any] | None) -> Any:
    while isinstance(function, functools.partial):
        function = function.func
    return function
