"""Gradient noise with sharded gradients (FSDP2): a micro-batch for the estimate spans all ranks.

Rank r weights micro-batch j by `n_rj / D` with a common D, and gradients are averaged over R ranks. The observable for
micro-batch j is `||h_j||^2`, `h_j = sum_r n_rj g_rj / (R D) = N_j g_j / (R D)`: the gradient `g_j` of its `N_j = sum_r
n_rj` loss terms on all ranks. Ranks do not know each other's terms, so every rank sends its number of terms and samples
along with its part of the norm (math: section 3).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trimtab.decide.gradient_noise_scale import WindowNoise, from_partial_sums, window_noise

_OF_EACH = 3  # figures per micro-batch


def num_figures(num_micro_batches: int) -> int:
    """Return the number of figures that a rank sends per step."""
    return 1 + _OF_EACH * num_micro_batches


@dataclass(frozen=True)
class JointMicroBatches:
    """Micro-batches of a step, each over all ranks.

    Args:
        norm2: `||gbar||^2` of the whole step.
        seen: `||N_j g_j||^2` per micro-batch, or of the sum of the micro-batches so far.
        terms: `N_j`, loss terms per micro-batch.
        rows: `M_j`, samples per micro-batch.
    """

    norm2: float
    seen: Sequence[float]
    terms: Sequence[float]
    rows: Sequence[float]

    @classmethod
    def of_ranks(cls, each: Sequence[Sequence[float]]) -> JointMicroBatches:
        """Return the micro-batches from the figures of all ranks.

        Args:
            each: per rank, `num_figures` values: `||gbar||^2` of the local shards; `||h_j||^2 D^2` of the local shards
                for every j; then all `n_rj`; then all `m_rj`.
        """
        norm2, *of_each = (sum(figures) for figures in zip(*each, strict=True))
        num = len(of_each) // _OF_EACH
        seen, terms, rows = (of_each[first : first + num] for first in range(0, len(of_each), num))
        return cls(norm2, [len(each) ** 2 * norm for norm in seen], terms, rows)

    def noise(self) -> WindowNoise | None:
        """Return the step's estimates from norms of single micro-batches; None if there is no information."""
        n = sum(self.terms)
        if not n > 0:
            return None
        shown = [one for one in zip(self.seen, self.terms, self.rows, strict=True) if one[1] != 0]
        mean_norm2 = sum(norm / terms for norm, terms, _ in shown) / n
        per_sample = sum(terms / n / rows for _, terms, rows in shown)
        squares = sum((terms / n) ** 2 / rows for _, terms, rows in shown)
        return window_noise(mean_norm2, self.norm2, per_sample - squares, squares, len(shown))

    def noise_of_sums(self) -> WindowNoise | None:
        """Return the step's estimates from norms of partial sums; None if loss terms are not samples."""
        return from_partial_sums(self.seen, self.rows) if self.terms == self.rows else None
