"""What a window says of its gradient noise: sums over its micro-batches on the device, read later (math: section 3)."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass

import torch
from torch import Tensor

from trimtab.decide.noise import WindowNoise, window_noise
from trimtab.measure.gradient_norms import GradientNorms
from trimtab.measure.late import Late
from trimtab.runtime.accumulation import Count


@dataclass(frozen=True)
class NoiseSums:
    """Sums over micro-batches j of `n_j` terms in `m_j` rows; those of several ranks add up.

    Args:
        norms: sum ||g_j||^2 n_j. terms: n = sum n_j. per_row: sum n_j / m_j. squares: sum n_j^2 / m_j.
        num: micro-batches with terms. norm2: ||gbar||^2 of the whole window, the same on every rank.
    """

    norms: float
    terms: float
    per_row: float
    squares: float
    num: float
    norm2: float

    @classmethod
    def of_ranks(cls, each: Sequence[Sequence[float]], *, sharded: bool = False) -> NoiseSums:
        """Return the sums over ranks.

        Args:
            sharded: norms are of each rank's shards of gradients that are means over the ranks: a micro-batch is then
                one of all ranks, of as many times the rows, and its norm the sum of theirs.
        """
        norms, terms, per_row, squares, num, norm2 = (sum(column) for column in zip(*each, strict=True))
        if not sharded:
            return cls(norms, terms, per_row, squares, num, each[0][-1])
        ranks = len(each)
        return cls(norms * ranks, terms, per_row / ranks, squares, num / ranks, norm2)

    def as_list(self) -> list[float]:
        """Return the figures in order."""
        return list(astuple(self))

    def noise(self) -> WindowNoise | None:
        """Return what the window says, or None."""
        n = self.terms
        if not n > 0:
            return None
        spread = self.per_row / n - self.squares / n**2
        return window_noise(self.norms / n, self.norm2, spread, self.squares / n**2, self.num)


class NoiseMonitor:
    """Watches the backwards of a window. `spent_s`: host seconds that it took of the window."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._norms = GradientNorms(parameters)
        self._seen: list[tuple[Tensor, int, Count]] = []
        self._own_s = 0.0

    @property
    def is_on(self) -> bool:
        """Whether a window is being watched."""
        return self._norms.is_on

    @property
    def spent_s(self) -> float:
        """Host seconds spent on the window so far."""
        return self._own_s + self._norms.spent_s

    def open(self) -> None:
        """Begin to watch."""
        start = time.perf_counter()
        self._seen.clear()
        self._norms.on()
        self._own_s = time.perf_counter() - start

    def backward_done(self, rows: int, terms: Count) -> None:
        """A micro-batch of so many rows and terms had its backward."""
        start, before = time.perf_counter(), self._norms.spent_s
        self._seen.append((self._norms.take(), rows, terms))
        self._own_s += time.perf_counter() - start - (self._norms.spent_s - before)

    def drop(self) -> None:
        """Stop watching; the window says nothing."""
        self._norms.off()
        self._seen.clear()

    def close(self, norm: Tensor, divisor: float | Tensor, scale: float) -> Late:
        """Stop watching; return the window's `NoiseSums`, to be read later.

        Args:
            norm: of the window's gradient, at its true size.
            divisor: D, where micro-batch j's mean loss was weighted by `n_j / D`. scale: the loss scale.
        """
        start = time.perf_counter()
        sums = self._sums(norm, divisor, scale)
        self.drop()
        self._own_s += time.perf_counter() - start
        return Late(sums)

    def _sums(self, norm: Tensor, divisor: float | Tensor, scale: float) -> Tensor:
        # ||g_j||^2 n_j = ||h_j||^2 D^2 / (n_j scale^2), h_j = n_j / D * scale * g_j being what the leaves received
        device = norm.device
        seen = torch.stack([norm2.to(device) for norm2, _, _ in self._seen]).double()
        terms = _on(device, [count for _, _, count in self._seen])
        rows = _on(device, [rows for _, rows, _ in self._seen])
        counts = terms > 0
        each = torch.where(counts, seen / torch.where(counts, terms, 1), 0) * (divisor / scale) ** 2
        parts = [each.sum(), terms.sum(), (terms / rows).sum(), (terms**2 / rows).sum(), counts.sum(), norm.square()]
        return torch.stack([part.double() for part in parts])


def _on(device: torch.device, values: Sequence[Count]) -> Tensor:
    """Return numbers and device scalars as one float64 vector; a copy from the host would wait for the device."""
    each = [
        v.double() if isinstance(v, Tensor) else torch.full((), v, dtype=torch.float64, device=device) for v in values
    ]
    return torch.stack(each)
