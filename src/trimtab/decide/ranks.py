"""From a plan of one process to one of several ranks."""

from __future__ import annotations

from dataclasses import replace

from trimtab.core.plan import Choice, Mark, Plan


def replicated(plan: Plan, num_ranks: int) -> Plan:
    """Return a plan, made for one rank's share of a batch, for ranks that each hold the whole model.

    One that says how it is shared stays so.
    """
    if plan.zero_stage.value is not None:
        return plan
    reason = "each rank holds the model, and gradients are reduced once a window: what a loop on ranks does"
    return replace(plan, num_ranks=num_ranks, zero_stage=Choice(0, reason, Mark.ROUNDING))
