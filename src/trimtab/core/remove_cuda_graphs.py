"""Removal of CUDA graphs from a plan."""

from __future__ import annotations

from dataclasses import replace

from trimtab.core.compile_mode import is_by_compiler
from trimtab.core.plan import Plan


def without_graphs(plan: Plan, why: str) -> Plan:
    """Return a plan without CUDA graphs; measurements and predictions that used graphs are removed.

    Args:
        why: full sentence with the reason.
    """
    value = plan.compiled.value
    if not isinstance(value, str):
        return plan
    without = is_by_compiler(value)
    rejected = tuple(loser for loser in plan.compiled.rejected if loser.value != without)
    reason = f"without CUDA graphs: {why}. Trials with CUDA graphs: {plan.compiled.reason}"
    chosen = replace(
        plan.compiled, value=without, reason=reason, changed=without, rejected=rejected, code="graphs.removed"
    )
    return replace(plan, compiled=chosen, predicted=None, measured=None, verified=None, stands_between=None, front=())
