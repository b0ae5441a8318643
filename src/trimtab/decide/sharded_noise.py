"""A window's noise where gradients are reduced as they come (FSDP2): its micro-batches are those of all ranks.

Rank r weighs micro-batch j by `n_rj / D` with one D for all, and gradients are reduced to a mean over R ranks. What
shows of micro-batch j is `||h_j||^2`, `h_j = sum_r n_rj g_rj / (R D) = N_j g_j / (R D)`: of the gradient `g_j` of its
`N_j = sum_r n_rj` terms on all ranks. No rank knows the terms of another, so that each says its own, and its rows,
beside its share of the norm (math: section 3).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trimtab.decide.noise import WindowNoise, from_partial_sums, window_noise

_OF_EACH = 3  # figures of a micro-batch


def num_figures(num_micro_batches: int) -> int:
    """Return how many figures a rank has of a window."""
    return 1 + _OF_EACH * num_micro_batches


@dataclass(frozen=True)
class JointMicroBatches:
    """The micro-batches of a window, each one of all ranks.

    Args:
        norm2: `||gbar||^2` of the whole window.
        seen: of each micro-batch `||N_j g_j||^2`, or of the sum of all until then.
        terms, rows: `N_j` and `M_j`.
    """

    norm2: float
    seen: Sequence[float]
    terms: Sequence[float]
    rows: Sequence[float]

    @classmethod
    def of_ranks(cls, each: Sequence[Sequence[float]]) -> JointMicroBatches:
        """Return them by the figures of every rank: `num_figures` of as many micro-batches.

        Args:
            each: of a rank `||gbar||^2` of its shards; of its shards `||h_j||^2 D^2` of every j; then `n_rj`; `m_rj`.
        """
        norm2, *of_each = (sum(figures) for figures in zip(*each, strict=True))
        num = len(of_each) // _OF_EACH
        seen, terms, rows = (of_each[first : first + num] for first in range(0, len(of_each), num))
        return cls(norm2, [len(each) ** 2 * norm for norm in seen], terms, rows)

    def noise(self) -> WindowNoise | None:
        """Return what the window says, of norms of single micro-batches; None where that is nothing."""
        n = sum(self.terms)
        if not n > 0:
            return None
        shown = [one for one in zip(self.seen, self.terms, self.rows, strict=True) if one[1] != 0]
        mean_norm2 = sum(norm / terms for norm, terms, _ in shown) / n
        per_row = sum(terms / n / rows for _, terms, rows in shown)
        squares = sum((terms / n) ** 2 / rows for _, terms, rows in shown)
        return window_noise(mean_norm2, self.norm2, per_row - squares, squares, len(shown))

    def noise_of_sums(self) -> WindowNoise | None:
        """Return what it says of norms of sums so far; nothing where terms are not rows."""
        return from_partial_sums(self.seen, self.rows) if self.terms == self.rows else None
