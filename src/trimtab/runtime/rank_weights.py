"""Weights that make the mean over ranks of a window's gradients equal one big batch's (math: section 2).

Ranks reduce to a mean, whatever each one has of the window. So every micro-batch is weighted `n_j / n_ref`, with one
`n_ref` for all ranks, and the reduced gradient is multiplied by `R n_ref / n`, where `n` are the terms of all R ranks:
1, and nothing to do, where every rank has as many rows as planned.
"""

from __future__ import annotations

import math

from torch import Tensor

from trimtab.core.plan import Plan
from trimtab.losses import Count
from trimtab.runtime.accumulation import WindowWeights, or_one, power_of_two
from trimtab.runtime.peers import Peers


class RankWeights(WindowWeights):
    """As `WindowWeights`, on one of several ranks.

    Args:
        batch_rows: of a full loader batch, the same on every rank.
    """

    def __init__(self, peers: Peers, batch_rows: int) -> None:
        self._peers, self._batch_rows = peers, batch_rows
        self._planned = batch_rows
        self._is_padding = False
        super().__init__()

    def open(self, rows: int, num_micro_batches: int, num_batches: int = 1) -> None:
        """Begin a window of `rows` rows, one of `num_batches` loader batches as all ranks decided."""
        super().open(rows, num_micro_batches, num_batches)
        self._planned = self._batch_rows * num_batches
        self._divisor = self._first if self._kept is None else power_of_two(self._kept * self._planned)

    def _keep(self) -> None:
        """Keep nothing: what all ranks had of a window is known as it closes."""

    def close(self) -> None:
        """The window's step is done; what it held in all says how many terms a row has."""
        agreed = self._peers.agreed()
        if self._is_sum and self._kept is None and agreed.rows:
            terms = float(agreed.terms)  # waits for the device, in the first window alone
            self._kept = terms / agreed.rows if 0 < terms < math.inf else None

    def weigh(self, loss: Tensor, count: Count | None, rows: int) -> Tensor:
        """As in one process; a micro-batch of no rows weighs nothing, whatever it counts."""
        self._is_padding = rows == 0
        return super().weigh(loss, count, rows)

    @property
    def _divides_at_once(self) -> bool:
        return False

    def _first_divisor(self, terms: float) -> float:
        if self._first is None:  # a rank that begins its window anew has asked before: the others do not again
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
        """Factor still to be applied to the reduced gradient: the float 1.0 where every rank had what was planned."""
        agreed, reference = self._peers.agreed(), float(self.divisor)
        terms = agreed.terms if self._is_sum else agreed.rows
        if isinstance(terms, Tensor):
            return self._peers.num_ranks * reference / or_one(terms)
        return self._peers.num_ranks * reference / terms if terms else 1.0

    @property
    def share(self) -> float | Tensor:
        """As in one process, where ranks have told each other of the window; waits for those that have not."""
        agreed = self._peers.agreed()
        own, of_all = (self._count, agreed.terms) if self._is_sum else (self._rows, agreed.rows)
        own = own.double() if isinstance(own, Tensor) else own
        return self._peers.num_ranks * own / or_one(of_all)

    @property
    def divisor(self) -> float | Tensor:
        """`n_ref`."""
        return float(self._planned) if not self._is_sum or self._divisor is None else self._divisor

    @property
    def counted(self) -> Count | None:
        """The count of all ranks; None where the loss is a mean."""
        return self._peers.agreed().terms if self._is_sum else None


def weights_of(peers: Peers, plan: Plan) -> WindowWeights:
    """Return the weights of a run of one process, or of one of several ranks."""
    return WindowWeights() if peers.num_ranks == 1 else RankWeights(peers, plan.batch_rows)
