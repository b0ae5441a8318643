"""Plans kept between starts of a script, in files named by all that the plan depends on.

A key covers the structure and code of the model, the optimizer's class and settings except its learning rates, the
code of the loss, all source files of the user that are imported, the shapes of a batch, the arguments of planning, the
machine and all versions. A plan is thus made again after every change of the user's code. A key does not cover values
that the loss reads from elsewhere, such as a file or a global variable.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import sys
import sysconfig
import types
import warnings
from collections.abc import Mapping
from dataclasses import is_dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from trimtab.core.choice import Note
from trimtab.core.errors import FormatError
from trimtab.core.serialization import read_json, to_json, to_jsonable, write_whole
from trimtab.core.units import format_seconds
from trimtab.measure.machine import environment
from trimtab.plans.plan import Plan

_PLAIN = (bool, int, float, str, type(None))
_RATES = {"lr", "initial_lr", "params"}  # Of an optimizer's groups: left out of a key.


def default_folder() -> Path:
    """Return the folder of cached plans: TRIMTAB_CACHE, or trimtab/plans in the user's cache folder."""
    if own := os.environ.get("TRIMTAB_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "trimtab" / "plans"


class CachedPlan:
    """The file of a plan in a cache folder, named by all that the plan depends on."""

    def __init__(self, folder: Path, parts: Mapping[str, Any]) -> None:
        text = json.dumps(parts, sort_keys=True, default=str)
        self.path = folder / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"

    def read(self) -> Plan | None:
        """Return the plan; None if there is none, or if the file cannot be read."""
        if not self.path.is_file():
            return None
        try:
            plan = read_json(Plan, self.path)
        except (FormatError, OSError):
            return None
        text = f"the plan was read from the cache ({self.path}); it was made in {format_seconds(plan.planning_s)}"
        return replace(plan, planning_s=0.0, notes=(*plan.notes, Note("plan.cached", text)))

    def write(self, plan: Plan) -> None:
        """Store a plan; warn if the folder cannot be written. A plan made on a loaded machine is not stored."""
        if any(note.code == "timing.processor_time" for note in plan.notes):
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(self.path, to_json(plan, indent=1))
        except OSError as error:
            warnings.warn(f"The plan was not cached, because {self.path} cannot be written: {error}.", stacklevel=3)


def parts_of_key(
    model: nn.Module, optimizer: torch.optim.Optimizer, loss_fn: Any, batch: Any, arguments: Mapping[str, Any]
) -> dict[str, Any]:
    """Return all that a plan depends on, as values for JSON."""
    device = next(model.parameters()).device
    groups = [{name: value for name, value in group.items() if name not in _RATES} for group in optimizer.param_groups]
    tensors = (*model.named_parameters(), *model.named_buffers())
    return {
        "model": _module(model),
        "fp32": torch.get_float32_matmul_precision(),
        "code": sorted({f"{_name_of(type(each))} {_digest(type(each).forward)}" for each in model.modules()}),
        "tensors": [(name, *_shape(each), each.requires_grad) for name, each in tensors],
        "optimizer": [_name_of(type(optimizer)), groups, [len(group["params"]) for group in optimizer.param_groups]],
        "loss": _digest(loss_fn),
        "sources": _own_sources(),
        "batch": _shapes(batch),
        "arguments": {name: plain_value(value) for name, value in arguments.items()},
        "device": str(device),
        "environment": environment(has_gpu=device.type == "cuda"),
    }


def _module(module: nn.Module) -> list[Any]:
    """Return a module's structure and the plain attributes of all submodules, such as modes and numbers of heads."""
    attributes = [
        {name: value for name, value in sorted(vars(each).items()) if isinstance(value, _PLAIN)}
        for each in module.modules()
    ]
    return [repr(module), attributes]


def _own_sources() -> dict[str, str]:
    """Return digests of the imported source files that belong to no installed package, by module.

    Without a file, as in a notebook, of the functions and classes of the main module.
    """
    installed = [Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    installed.append(Path(__file__).parents[1])
    found = {}
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if file is None or not file.endswith(".py") or any(Path(file).is_relative_to(each) for each in installed):
            continue
        with contextlib.suppress(OSError):
            found[name] = hashlib.sha256(Path(file).read_bytes()).hexdigest()[:16]
    main = sys.modules.get("__main__")
    if main is not None and getattr(main, "__file__", None) is None:
        for name, value in list(vars(main).items()):
            parts = vars(value).items() if isinstance(value, type) else [("", value)]
            found |= {f"{name}.{part}": _digest(each) for part, each in parts if isinstance(each, types.FunctionType)}
    return found


def _name_of(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _shape(tensor: Tensor) -> tuple[Any, ...]:
    return tuple(tensor.shape), str(tensor.dtype)


def _shapes(batch: Any) -> list[Any]:
    leaves, structure = tree_flatten(batch)
    return [str(structure), *(_shape(leaf) if isinstance(leaf, Tensor) else _name_of(type(leaf)) for leaf in leaves)]


def plain_value(value: Any) -> Any:
    """Return an argument as a value for JSON, equal in every process: functions by code, tensors by shape."""
    if isinstance(value, nn.Module):
        return _module(value)
    if callable(value) and not is_dataclass(value):
        return _digest(value)
    if isinstance(value, tuple | list) and any(isinstance(each, nn.Module) for each in value):
        return [plain_value(each) for each in value]
    if any(isinstance(leaf, Tensor) for leaf in tree_flatten(value)[0]):
        return _shapes(value)
    try:
        return to_jsonable(value)
    except (TypeError, ValueError):
        return _name_of(type(value))


def _digest(function: Any) -> str:
    """Return a digest of a function's code, constants and defaults; of a module or another object, of its call."""
    if isinstance(function, functools.partial):
        given = [plain_value(each) for each in (*function.args, *function.keywords.values())]
        return f"{_digest(function.func)} {[*function.keywords]} {given}"
    if isinstance(function, nn.Module):
        return f"{_module(function)} {_digest(type(function).forward)}"
    inner = getattr(function, "__func__", function)
    code = getattr(inner, "__code__", None)
    if code is None:
        own = getattr(getattr(type(function), "__call__", None), "__code__", None)  # noqa: B004  # Code, not existence.
        return _name_of(type(function)) + ("" if own is None else _digest_of(own))
    defaults = [plain_value(each) for each in (*(inner.__defaults__ or ()), *(inner.__kwdefaults__ or {}).values())]
    closed: list[Any] = []
    for cell in inner.__closure__ or ():
        with contextlib.suppress(ValueError):  # An empty cell.
            value = cell.cell_contents
            # Of closed-over functions the code alone, because functions may refer to each other.
            if isinstance(value, types.FunctionType):
                closed.append(_digest_of(value.__code__))
            elif isinstance(value, _PLAIN):
                closed.append(value)
    return f"{getattr(function, '__qualname__', '')} {_digest_of(code)} {defaults} {closed}"


def _digest_of(code: types.CodeType) -> str:
    constants = [
        # The order of a set's items differs between processes.
        sorted(map(repr, each)) if isinstance(each, frozenset) else repr(each)
        for each in code.co_consts
        if not isinstance(each, types.CodeType)
    ]
    inner = [_digest_of(each) for each in code.co_consts if isinstance(each, types.CodeType)]
    return hashlib.sha256(repr((code.co_code, code.co_names, constants, inner)).encode()).hexdigest()[:16]
