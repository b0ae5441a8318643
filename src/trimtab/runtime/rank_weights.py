"""Loss weights that make the mean over ranks equal to the full-batch gradient (math: section 2).

Ranks reduce gradients to a mean, independent of each rank's number of samples. Every micro-batch is therefore weighted
by `n_j / n_ref`, with the same `n_ref` on all ranks, and the reduced gradient is multiplied by `R n_ref / n`, where `n`
is the number of terms of all R ranks. This factor is 1 if every rank has the planned number of samples.
"""

from __future__ import annotations

import math

from torch import Tensor

from trimtab.core.plan import Plan
from trimtab.losses import Count
from trimtab.runtime.accumulation import WindowWeights, or_one, power_of_two
from trimtab.runtime.rank_sync import RankSync


class RankWeights(WindowWeights):
    """`WindowWeights` for one of several ranks.

    Args:
        peers: metadata exchange with the other ranks.
        batch_size: samples of a full loader batch, equal on all ranks.
    """

    def __init__(self, peers: RankSync, batch_size: int) -> None:
        self._peers, self._batch_size = peers, batch_size
        self._planned = batch_size
        self._is_padding = False
        super().__init__()

    def open(self, rows: int, num_micro_batches: int, num_batches: int = 1) -> None:
        """Begin a window of `rows` samples; `num_batches` is the number of loader batches decided by all ranks."""
        super().open(rows, num_micro_batches, num_batches)
        self._planned = self._batch_size * num_batches
        self._divisor = self._first if self._kept is None else power_of_two(self._kept * self._planned)

    def _keep(self) -> None:
        """Do nothing: `close` computes the terms per sample from all ranks' counts."""

    def close(self) -> None:
        """End the window and compute the terms per sample from all ranks' counts."""
        agreed = self._peers.agreed()
        if self._is_sum and self._kept is None and agreed.rows:
            terms = float(agreed.terms)  # Synchronises, in the first window only.
            self._kept = terms / agreed.rows if 0 < terms < math.inf else None

    def weigh(self, loss: Tensor, count: Count | None, rows: int) -> Tensor:
        """Return the weighted loss of a micro-batch; zero for padding micro-batches without samples."""
        self._is_padding = rows == 0
        return super().weigh(loss, count, rows)

    @property
    def _divides_at_once(self) -> bool:
        return False

    def _first_divisor(self, terms: float) -> float:
        # A rank that repeats its window must not ask again, because other ranks would not answer.
        if self._first is None:
            self._first = power_of_two(self._peers.most(max(float(self._rows), terms)))
        return self._first

    def _weigh_mean(self, loss: Tensor, rows: int) -> Tensor:
        self._add(loss.detach() * (rows / max(self._rows, 1)))
        return loss if rows == self._planned else loss * (rows / self._planned)

    def _weigh_sum(self, loss: Tensor, count: Count) -> Tensor:
        assert self._divisor is not None
        if self._is_padding:
            return loss * 0.0
        self._add(loss.detach())
        self._count = self._count + count
        return loss * (1.0 / self._divisor)

    @property
    def correction(self) -> float | Tensor:
        """Factor still to be applied to the reduced gradient; 1.0 if every rank had the planned number of samples."""
        agreed, reference = self._peers.agreed(), float(self.divisor)
        terms = agreed.terms if self._is_sum else agreed.rows
        if isinstance(terms, Tensor):
            return self._peers.num_ranks * reference / or_one(terms)
        return self._peers.num_ranks * reference / terms if terms else 1.0

    @property
    def share(self) -> float | Tensor:
        """Weight of this rank's mean loss in the mean over ranks. Waits for the other ranks' metadata."""
        agreed = self._peers.agreed()
        own, of_all = (self._count, agreed.terms) if self._is_sum else (self._rows, agreed.rows)
        own = own.double() if isinstance(own, Tensor) else own
        return self._peers.num_ranks * own / or_one(of_all)

    @property
    def divisor(self) -> float | Tensor:
        """Divisor `n_ref` of the window."""
        return float(self._planned) if not self._is_sum or self._divisor is None else self._divisor

    @property
    def counted(self) -> Count | None:
        """Token count of all ranks; None if the loss is a mean."""
        return self._peers.agreed().terms if self._is_sum else None


def weights_of(peers: RankSync, plan: Plan) -> WindowWeights:
    """Return the loss weights for a single process or for one of several ranks."""
    return WindowWeights() if peers.num_ranks == 1 else RankWeights(peers, plan.batch_size)
