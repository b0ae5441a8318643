"""What is refused of a plan that frees the batch, before anything is done."""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Mapping

from trimtab.core.errors import ValueGivenError
from trimtab.core.plan import Plan
from trimtab.runtime.exchange import Exchange


def check_rule(plan: Plan, *, may_split: bool) -> None:
    """Raise `ValueGivenError` for a batch to be cut that cannot be; warn of a `k_max` that allows no other batch."""
    rule, unit = plan.batch_rule, plan.num_micro_batches
    assert rule is not None
    if rule.policy == "throughput_per_memory" and not may_split:
        raise ValueGivenError(
            "plan.batch_rule",
            given="throughput_per_memory, which cuts the batch, and a model that computes over it",
            expected="a model whose batch can be cut",
        )
    if rule.spans_batches and rule.policy != "fixed" and unit > 1 and rule.k_max < 2 * unit:
        warnings.warn(
            f"k_max = {rule.k_max} micro-batches, and a loader batch is cut into {unit}: windows are of one loader "
            f"batch each, and k never changes. BatchRule(k_max={2 * unit}) allows two.",
            RuntimeWarning,
            stacklevel=2,
        )


def require_one_plan(plan: Plan, exchange: Exchange, facts: Mapping[str, object]) -> None:
    """Raise `ValueGivenError` on every rank where their batches or rules differ: each would decide for itself.

    A rank whose plan has no rule does not come here, and the others wait for it as they would in their first window.

    Args:
        facts: what else is decided by, with its name.
    """
    if exchange.num_ranks == 1:
        return
    facts = {"the rule": plan.batch_rule} | dict(facts)
    said = [zlib.crc32(str(value).encode()) for value in facts.values()]
    exchange.put([plan.batch_rows, plan.num_micro_batches, *said])
    shared = exchange.take()
    assert shared is not None
    if any(each != shared[0] for each in shared):
        batches = ", ".join(f"{rows:.0f} rows in {micro:.0f} micro-batches" for rows, micro, *_ in shared)
        others = [name for i, name in enumerate(facts, 2) if any(each[i] != shared[0][i] for each in shared)]
        raise ValueGivenError(
            "plan.batch_rule",
            given=f"ranks that differ in {', '.join(others) or 'their batches'} ({batches})",
            expected="the same on all ranks, which decide by the same figures",
            way_out="Plan on one rank, hand its JSON to the others; make their models and optimizers alike.",
        )
