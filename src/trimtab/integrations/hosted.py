"""What all hosts share: what a plan may not decide where a host does, its ranks, and batches that are a window."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from trimtab.api import start
from trimtab.core.errors import InfeasibleError, ValueGivenError
from trimtab.core.plan import Plan
from trimtab.core.sharing import STAGES
from trimtab.distributed.process_group import limited_to
from trimtab.runtime.batches import count_rows
from trimtab.runtime.engine import Run
from trimtab.runtime.splitting import has_batch_statistics

# What torch's groups of gloo wait for a rank by default: a host's checkpoint may keep one of them for minutes.
LIMIT_S = 1800.0
# Of a plan, what a host's own settings decide.
_LEFT = {"schedule": "user", "learning_rate_scale": 1.0, "clip_norm": None, "optimizer": "user", "batch_policy": "user"}


def checked_plan(plan: Plan | None, host: str) -> Plan | None:
    """Return a plan that leaves to a host what is the host's.

    Raises:
        ValueGivenError: no plan, or one that sets what the host's settings do.
    """
    if plan is None:
        return None
    if not isinstance(plan, Plan):
        raise ValueGivenError("plan", given=f"a {type(plan).__name__}", expected="a trimtab.Plan")
    for name, left in _LEFT.items():
        if (value := getattr(plan, name).value) != left:
            given, way_out = f"{value!r}, which {host} decides", "Plan without adapt, and set it there."
            raise ValueGivenError(f"plan.{name}", given=given, expected=f"{left!r}", way_out=way_out)
    return plan


def refuse_both(plan: Plan | None, planning: Mapping[str, Any] | None) -> None:
    """Raise where a plan is given, and arguments to make one."""
    if plan is not None and planning:
        expected = "the one or the other"
        raise ValueGivenError("planning", given="arguments for a plan, and a plan", expected=expected)


def refuse_running(running: Mapping[str, Any] | None) -> None:
    """Raise where a run is asked for what the host does, or what only `run.windows` can do."""
    for name in ("clip_norm", "stop", "checkpoints", "total_samples", "total_tokens"):
        if (running or {}).get(name) is not None:
            way_out = "Set it there: clipping, the run's length and its checkpoints are the host's."
            raise ValueGivenError(f"running.{name}", given="a value", expected="the host's own", way_out=way_out)


def require_shared(plan: Plan | None, num_processes: int, stages: Collection[int | None] = STAGES) -> None:
    """Raise where a plan does not say how a host's processes share the model: each would train one of its own.

    Args:
        stages: that the host can train at.
    """
    if plan is None or num_processes == 1 or plan.zero_stage.value in stages:
        return
    given = f"{plan.zero_stage.value}, on {num_processes} processes"
    way_out = f"A plan made on them, or Plan.fixed(rows, num_ranks={num_processes}, zero_stage=0)."
    expected = " or ".join(map(str, stages))
    raise ValueGivenError("plan.zero_stage", given=given, expected=expected, way_out=way_out)


def started(
    model: nn.Module, optimizer: torch.optim.Optimizer, plan: Plan, limit_s: float = LIMIT_S, **running: Any
) -> Run:
    """Return a run in a host's process group.

    Args:
        limit_s: after which a rank that is waited for is taken for dead. running: more arguments of `trimtab.start`.
    """
    with limited_to(limit_s):
        return start(model, optimizer, plan, **running)


def planned(
    batches: Sequence[Any],
    planning: Mapping[str, Any],
    model: nn.Module,
    make: Callable[[Any], Plan],
    *,
    is_alone: bool = True,
) -> Plan:
    """Return a plan of a window's batches as one, where training on them so is proved to keep the maths; else of one.

    Ranks come to the same: they have one plan, and as many batches.

    Args:
        planning: with the longest batch what is planned is one of the loader's. make: plans for an example. is_alone:
            one process; else what of a window does not fit in memory is told by one rank alone, and ends planning.
    """
    if len(batches) == 1 or "longest_batch" in planning or has_batch_statistics(model):
        return make(batches[0])
    window = _together(batches)
    if is_alone and len(window) > 1:  # where one rank's are of one shape another's may not be
        return make(batches[0])
    try:
        plan = make(window[0])
    except InfeasibleError:
        if not is_alone:
            raise
        return make(batches[0])
    return plan if plan.check is not None and plan.check.splittable else make(batches[0])


def joined(batches: Sequence[Any], planning: Mapping[str, Any], model: nn.Module, plan: Plan) -> list[Any]:
    """Return batches as one where that keeps the maths, so that micro-batches may be larger; else unchanged.

    It is known of a plan that proved it, and left to one that was set by hand for more rows than a batch has. Batch
    statistics are those of the host's batches, whatever is set.

    Args:
        planning: with the longest batch, what is planned is a batch of the loader: rows that happen to be of one shape
            are left apart, as they would be more than was measured.
    """
    if len(batches) == 1 or "longest_batch" in planning or has_batch_statistics(model):
        return list(batches)
    is_by_hand = plan.check is None and plan.batch_rows > count_rows(batches[0])
    is_proved = plan.check is not None and plan.check.splittable
    return _together(batches) if is_by_hand or is_proved else list(batches)


def _together(batches: Sequence[Any]) -> list[Any]:
    """Return batches as one where their rows are of one shape; else unchanged."""
    first = batches[0]
    if not all(_is_alike(first, batch) for batch in batches):
        return list(batches)
    if isinstance(first, Mapping):
        return [{name: torch.cat([batch[name] for batch in batches]) for name in first}]
    return [type(first)(torch.cat(columns) for columns in zip(*batches, strict=True))]


def _is_alike(one: Any, other: Any) -> bool:
    if isinstance(one, Mapping) and isinstance(other, Mapping) and set(one) == set(other):
        pairs = [(one[name], other[name]) for name in one]
    elif type(one) is type(other) and type(one) in (tuple, list) and len(one) == len(other):
        pairs = list(zip(one, other, strict=True))
    else:
        return False
    return all(isinstance(a, Tensor) and isinstance(b, Tensor) and _shape(a) == _shape(b) is not None for a, b in pairs)


def _shape(tensor: Tensor) -> tuple[Any, ...] | None:
    """Return what rows have in common; None where there are none."""
    return (tensor.shape[1:], tensor.dtype, tensor.device) if tensor.dim() else None
