"""Caveats of a comparison on several ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from trimtab.experiments.comparison.arm_metrics import ArmMetrics
from trimtab.experiments.task_plans import Plans

# A larger difference in term counts between ranks weights samples differently from a single process.
_UNEVEN = 1e-6


@dataclass(frozen=True)
class RankConditions:
    """Number of ranks, and the oversubscribed resource ("cores", "devices" or "")."""

    num: int = 1
    crowded: str = ""

    @property
    def headline(self) -> str:
        """The note about ranks in a report's headline, or ""."""
        if self.num == 1:
            return ""
        on = f"Measured on {self.num} ranks; the reference is the loop in DistributedDataParallel."
        return f"{on} {self.warning}" if self.crowded else on

    @property
    def warning(self) -> str:
        """The note about oversubscribed ranks."""
        return f"The ranks share {self.crowded}, so their times do not measure scaling."


ONE_RANK = RankConditions()


def rank_notes(ranks: RankConditions, plans: Plans, facts: Mapping[str, ArmMetrics], batch_size: int) -> list[str]:
    """Return the caveats; empty on a single rank."""
    if ranks.num == 1:
        return []
    found = [
        f"Each of {ranks.num} ranks trains on its shard of every batch; the reference is the task's loop in "
        "DistributedDataParallel with default settings.",
        "Block times are of the slowest rank, peaks of the rank with the largest peak, CPU time is summed over ranks; "
        "phases, FLOP and held-out metrics are of rank 0, and utilisation is per rank.",
        "The memory of a step was not traced, because traces support one process only.",
    ]
    if ranks.crowded:
        found.insert(1, ranks.warning)
    if plans.profiles:
        found.append(
            "Trials and predictions of the plan cover the shard of rank 0 without communication and without buckets."
        )
    if batch_size % ranks.num or _is_uneven(facts.get("reference")):
        found.append(
            "Ranks have different numbers of samples or loss terms. DistributedDataParallel averages gradients over "
            "ranks, so the reference weights samples differently; the plan weights them equally, as one process does."
        )
    return found


def _is_uneven(fact: ArmMetrics | None) -> bool:
    terms = fact.terms_by_rank if fact else ()
    return bool(terms) and not math.isclose(min(terms), max(terms), rel_tol=_UNEVEN)
