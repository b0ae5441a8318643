"""Argument validation of plans with an adaptive batch size."""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Mapping

from trimtab.core.errors import ValueGivenError
from trimtab.core.plan import Plan
from trimtab.runtime.metadata_exchange import MetadataExchange


def check_rule(plan: Plan, *, may_split: bool) -> None:
    """Raise `ValueGivenError` if the rule must split a batch that cannot be split; warn if `k_max` allows no change."""
    rule, unit = plan.batch_rule, plan.num_micro_batches
    assert rule is not None
    if rule.policy == "throughput_per_memory" and not may_split:
        raise ValueGivenError(
            "plan.batch_rule",
            problem='The batch policy "throughput_per_memory" splits batches, but splitting a batch of this loop '
            "changes its gradient.",
            hint='Use BatchRule("goodput"), or a loss that is a mean over samples and a model without batch '
            "statistics.",
            code="batch_rule.not_splittable",
        )
    if rule.spans_batches and rule.policy != "fixed" and unit > 1 and rule.k_max < 2 * unit:
        warnings.warn(
            f"BatchRule(k_max={rule.k_max}) has no effect: a loader batch has {unit} micro-batches, so that every step "
            f"has one loader batch. Pass k_max={2 * unit} or more to allow steps of two loader batches.",
            RuntimeWarning,
            stacklevel=2,
        )


def require_alike(exchange: MetadataExchange, facts: Mapping[str, object]) -> None:
    """Raise `ValueGivenError` on every rank if ranks differ in facts that decisions about k depend on.

    Args:
        exchange: metadata exchange with the other ranks.
        facts: name and value of each fact.
    """
    if exchange.num_ranks == 1:
        return
    shared = exchange.share([zlib.crc32(str(value).encode()) for value in facts.values()])
    others = [name for i, name in enumerate(facts) if any(each[i] != shared[0][i] for each in shared)]
    if others:
        raise ValueGivenError(
            "plan.batch_rule",
            got=f"ranks that differ in {', '.join(others)}",
            expected="equal values on all ranks",
            hint="Build the same model and the same optimizer on every rank.",
            code="batch_rule.ranks_differ",
        )
