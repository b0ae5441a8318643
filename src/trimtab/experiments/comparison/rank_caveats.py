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
        return f"On {self.num} ranks; the reference is the loop in DDP.{f' {self._warning}.' if self.crowded else ''}"

    @property
    def _warning(self) -> str:
        return f"Ranks share {self.crowded}: correctness only, no claim of scaling"


ONE_RANK = RankConditions()


def rank_notes(ranks: RankConditions, plans: Plans, facts: Mapping[str, ArmMetrics], batch_rows: int) -> list[str]:
    """Return the caveats; empty on a single rank."""
    if ranks.num == 1:
        return []
    found = [
        f"{ranks.num} ranks, each its share of every batch; the reference is the task's loop in torch's "
        "DistributedDataParallel with its defaults",
        "a block takes as long as its slowest rank, a peak is the largest of all ranks', processor time is that of all "
        "of them; phases, FLOP and held-out metrics are rank 0's, and utilisation is of one rank",
        "what a step holds was not traced: that is of one process",
    ]
    if ranks.crowded:
        found.insert(1, f"ranks share {ranks.crowded}: correctness only, no claim of scaling")
    if plans.profiles:
        found.append(
            "trials and predictions of the plan are of rank 0's share alone, with nothing sent and no buckets held"
        )
    if batch_rows % ranks.num or _is_uneven(facts.get("reference")):
        found.append(
            "DDP takes the mean of the ranks' gradients, and here ranks differ in the rows or terms that theirs are "
            "of: the reference weighs these unlike, the plan alike, as one process does"
        )
    return found


def _is_uneven(fact: ArmMetrics | None) -> bool:
    terms = fact.terms_by_rank if fact else ()
    return bool(terms) and not math.isclose(min(terms), max(terms), rel_tol=_UNEVEN)
