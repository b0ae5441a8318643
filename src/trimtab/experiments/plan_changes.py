"""Changes of a plan against the unchanged loop, and plans with only some of their changes."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

from trimtab.core.choice import Scalar
from trimtab.core.objective import Reference
from trimtab.plans.plan import Plan
from trimtab.settings import SETTINGS, unchanged

_BELONGS = {"warmup_fraction": "schedule"}  # Settings that only refine another setting -> that setting.


def changes_of(plan: Plan, reference: Reference) -> tuple[str, ...]:
    """Return the names of the choices with a value different from the user's loop, in the plan's order.

    `Choice.changed` is ignored. Refinements of a choice, such as `warmup_fraction` of the schedule, are left out.
    """
    loop = loop_values(plan, reference)
    return tuple(name for name, choice in plan.choices() if choice.value != loop[name] and name not in _BELONGS)


def with_only(plan: Plan, kept: Collection[str], reference: Reference) -> Plan:
    """Return a plan with only the given changes; all other choices keep the loop's value.

    Raises:
        ValueGivenError, FormatError: a kept change requires a change that is left out.
    """
    loop = loop_values(plan, reference)
    values: dict[str, Any] = {
        name: replace(unchanged(name), value=value)
        for name, value in loop.items()
        if _BELONGS.get(name, name) not in kept and getattr(plan, name).value != value
    }
    if "batch_policy" in values:
        values["batch_rule"] = None
    if "recompute" in values:
        values["recompute_blocks"] = ()
    # These fields describe the whole plan, so they do not apply to a reduced one.
    return replace(
        plan, **values, predicted=None, measured=None, verified=None, timing_noise=None, front=(), stages=(), advice=()
    )


def loop_values(plan: Plan, reference: Reference) -> dict[str, Scalar]:
    """Return the value of every setting in the unchanged loop; the loop's own fused optimizer counts as unchanged."""
    kept: dict[str, Scalar] = {name: setting.default for name, setting in SETTINGS.items()}
    clip_norm = reference.clip_norm if plan.clip_norm.value is not None else None  # The loop's own limit applies then.
    micro_batch = -(-plan.batch_size // plan.reference.accumulate)
    kept |= {"micro_batch": micro_batch, "precision": reference.precision, "clip_norm": clip_norm}
    kept |= {} if plan.fused_optimizer.changed else {"fused_optimizer": plan.fused_optimizer.value}
    return kept if plan.num_ranks == 1 else kept | {"zero_stage": 0}
