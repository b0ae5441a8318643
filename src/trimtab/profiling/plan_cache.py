"""Plans kept between starts of a script, in files named by all that the plan depends on.

A key covers the structure and code of the model, the optimizer's class and settings except its learning rates, the
code of the loss, the shapes of a batch, the arguments of planning, the machine and all versions. It does not cover
values that the loss reads from elsewhere.
"""

from __future__ import annotations

import hashlib
import json
import os
import types
from collections.abc import Iterator, Mapping
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

_RATES = {"lr", "initial_lr", "params"}  # Of an optimizer's groups: left out of a key.


def default_folder() -> Path:
    """Return the folder of cached plans: TRIMTAB_CACHE, or trimtab/plans in the user's cache folder."""
    if own := os.environ.get("TRIMTAB_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "trimtab" / "plans"


class CachedPlan:
    """The file of a plan in a cache.

    Args:
        folder: the folder of the cache.
        parts: all that the plan depends on.
    """

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
        """Store a plan."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(self.path, to_json(plan, indent=1))


def parts_of_key(
    model: nn.Module, optimizer: torch.optim.Optimizer, loss_fn: Any, batch: Any, arguments: Mapping[str, Any]
) -> dict[str, Any]:
    """Return all that a plan depends on, as values for JSON."""
    device = next(model.parameters()).device
    groups = [{name: value for name, value in group.items() if name not in _RATES} for group in optimizer.param_groups]
    return {
        "model": repr(model),
        "code": sorted({f"{_name_of(type(each))} {_digest(type(each).forward)}" for each in model.modules()}),
        "tensors": [
            (name, *_shape(each), each.requires_grad)
            for name, each in (*model.named_parameters(), *model.named_buffers())
        ],
        "training": [each.training for each in model.modules()],
        "optimizer": [_name_of(type(optimizer)), groups, [len(group["params"]) for group in optimizer.param_groups]],
        "loss": _digest(loss_fn),
        "batch": _shapes(batch),
        "arguments": {name: _plain(value) for name, value in arguments.items()},
        "device": str(device),
        "environment": environment(has_gpu=device.type == "cuda"),
    }


def _name_of(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _shape(tensor: Tensor) -> tuple[Any, ...]:
    return tuple(tensor.shape), str(tensor.dtype)


def _shapes(batch: Any) -> list[Any]:
    leaves, structure = tree_flatten(batch)
    return [str(structure), *(_shape(leaf) if isinstance(leaf, Tensor) else _name_of(type(leaf)) for leaf in leaves)]


def _plain(value: Any) -> Any:
    if callable(value) and not is_dataclass(value):
        return _digest(value)
    if isinstance(value, nn.Module):
        return repr(value)
    if isinstance(value, Tensor) or (
        isinstance(value, tuple | list) and any(isinstance(each, Tensor) for each in value)
    ):
        return _shapes(value)
    try:
        return to_jsonable(value)
    except (TypeError, ValueError):
        return _name_of(type(value))


def _digest(function: Any) -> str:
    """Return a digest of a function's code and constants; the class of a callable object."""
    function = getattr(function, "func", function)  # Of functools.partial.
    code = getattr(getattr(function, "__func__", function), "__code__", None)
    if code is None:
        call = getattr(type(function), "__call__", None)  # noqa: B004  # The code of an object's call, not whether it has one.
        own = getattr(call, "__code__", None)
        return _name_of(type(function)) + ("" if own is None else _digest_of(own))
    return f"{getattr(function, '__qualname__', '')} {_digest_of(code)}"


def _digest_of(code: types.CodeType) -> str:
    digest = hashlib.sha256()
    for part in _parts(code):
        digest.update(part)
    return digest.hexdigest()[:16]


def _parts(code: types.CodeType) -> Iterator[bytes]:
    yield code.co_code
    yield repr(code.co_names).encode()
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _parts(constant)
        else:
            yield repr(constant).encode()
