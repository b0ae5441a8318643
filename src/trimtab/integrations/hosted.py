"""What all hosts share: what a plan may not decide where a host does, and its ranks."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from trimtab.api import start
from trimtab.core.errors import ValueGivenError
from trimtab.core.objective import ASSUMED_REFERENCE, Reference
from trimtab.core.plan import Plan
from trimtab.core.sharing import STAGES
from trimtab.core.without_graphs import without_graphs
from trimtab.distributed.process_group import limited_to
from trimtab.runtime.engine import Run

# What torch's groups of gloo wait for a rank by default: a host's checkpoint may keep one of them for minutes.
LIMIT_S = 1800.0
# Of a plan, what a host's own settings decide.
_LEFT = {"schedule": "user", "learning_rate_scale": 1.0, "clip_norm": None, "optimizer": "user", "batch_policy": "user"}
_LEFT |= {"weight_decay": None}


def accumulating(planning: Mapping[str, Any], num_batches: int) -> dict[str, Any]:
    """Return arguments of `trimtab.plan` for an example that holds a number of batches which the host accumulates over.

    A reference of the user's that says how many stays as it is.
    """
    reference = planning.get("reference") or ASSUMED_REFERENCE
    if num_batches == 1 or not isinstance(reference, Reference) or reference.accumulate > 1:
        return {**planning}
    return {**planning, "reference": replace(reference, accumulate=num_batches)}


def checked_plan(plan: Plan | None, host: str) -> Plan | None:
    """Return a plan that leaves to a host what is the host's.

    A host calls the model by a way and with values of its own, which planning does not: nothing is launched as graphs.

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
    return without_graphs(plan, "of loops that call the model as it was planned")


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
