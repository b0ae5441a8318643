"""Removal of CUDA graphs from a plan."""

from __future__ import annotations

from dataclasses import replace

from trimtab.core.compile_mode import is_by_compiler
from trimtab.core.plan import Plan


def without_graphs(plan: Plan, why: str) -> Plan:
    """Return a plan without CUDA graphs; measurements and predictions that used graphs are removed.

    Args:
        why: reason, which continues the phrase "CUDA graphs, which are".
    """
    value = plan.compiled.value
    if not isinstance(value, str):
        return plan
    without = is_by_compiler(value)
    losers = tuple(loser for loser in plan.compiled.losers if loser.value != without)
    said = f"without CUDA graphs, which are {why}: {plan.compiled.reason}"
    chosen = replace(plan.compiled, value=without, reason=said, changed=without, losers=losers)
    return replace(plan, compiled=chosen, predicted=None, measured=None, verified=None, stands_between=None, front=())
