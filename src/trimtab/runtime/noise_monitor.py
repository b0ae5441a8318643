"""What a window says of its gradient noise: sums over its micro-batches on the device, read later (math: section 3)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trimtab.core.errors import ValueGivenError
from trimtab.decide import sharded_noise
from trimtab.decide.noise import WindowNoise, window_noise
from trimtab.losses import Count
from trimtab.measure.gradient_norms import GradientNorms, squared_norm
from trimtab.measure.late import Late
from trimtab.measure.sharded_norms import (
    PartialNorms,
    ShardedNorms,
    has_replicas,
    is_flat_sharded,
    is_shard,
    is_sharded,
    local,
    shows_reductions,
)
from trimtab.measure.spent import Spent

_NUM_SUMS = 6  # of a window, from each rank


@dataclass(frozen=True)
class NoiseSums:
    """Weighted sums over micro-batches j of `m_j` rows: weights `w_j` add up to 1.

    Args:
        norms: sum w_j ||g_j||^2. per_row: sum w_j / m_j. squares: sum w_j^2 / m_j.
        num: micro-batches with terms. norm2: ||gbar||^2 of the whole window, the same on every rank.
    """

    norms: float
    per_row: float
    squares: float
    num: float
    norm2: float

    @classmethod
    def of_ranks(cls, each: Sequence[Sequence[float]]) -> NoiseSums:
        """Return the sums over ranks, whose terms weigh alike.

        Args:
            each: of a rank: sum ||g_j||^2 n_j, n = sum n_j, sum n_j / m_j, sum n_j^2 / m_j of `n_j` terms, number of
                micro-batches with terms, ||gbar||^2.
        """
        terms = sum(rank[1] for rank in each)
        norms, per_row, squares = (
            sum(rank[i] for rank in each) / terms**power if terms > 0 else math.nan
            for i, power in ((0, 1), (2, 1), (3, 2))
        )
        return cls(norms, per_row, squares, sum(rank[4] for rank in each), each[0][5])

    def noise(self) -> WindowNoise | None:
        """Return what the window says, or None."""
        return window_noise(self.norms, self.norm2, self.per_row - self.squares, self.squares, self.num)


@dataclass(frozen=True)
class Figures:
    """What a window says.

    Args:
        said: which `noise_of` reads. watching: what was spent on it in the backwards. closing: and after the last.
    """

    said: Late
    watching: Spent
    closing: Spent


class NoiseMonitor:
    """Watches the backwards of a window: each one's gradient, or sums of them where single ones do not show.

    Raises:
        ValueGivenError: a model under FSDP1; under FSDP2 one with parameters stepped that it does not hold, or over a
            mesh of several dimensions.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        if is_flat_sharded(model):
            raise ValueGivenError(
                "plan.batch_rule", given="a model under FSDP1, whose gradients cannot be seen", expected="DDP or FSDP2"
            )
        self._optimizer = optimizer
        self.is_sharded = is_sharded(model)
        if self.is_sharded and not all(is_shard(p) for p in _Stepped(optimizer)):
            raise ValueGivenError(
                "plan.batch_rule",
                given="a model of which FSDP2 holds a part, and the optimizer steps another",
                expected="all of what is stepped under FSDP2: a norm is added up from every rank's shards",
                way_out="fully_shard(model) holds what its parts do not.",
            )
        if any(map(has_replicas, _Stepped(optimizer))):
            raise ValueGivenError(
                "plan.batch_rule",
                given="a model sharded over a mesh of several dimensions, or of some of the ranks",
                expected="one over all ranks: a norm is added up from every rank's shards, of which each has its own",
                way_out="fully_shard(model) without a mesh, or DistributedDataParallel.",
            )
        self._norms = _norms_of(model, optimizer)
        self._seen: list[tuple[Tensor, int, Count]] = []

    def open(self) -> None:
        """Begin to watch."""
        self._seen.clear()
        self._norms.on()

    def at_once(self) -> None:
        """The next backward is the one that is reduced: where a gradient's first is this one, in its own memory."""
        self._norms.at_once()

    def batch_begins(self) -> None:
        """A loader batch's first micro-batch is about to begin."""
        self._norms.spent.mark()

    def backward_begins(self) -> None:
        """A micro-batch is about to have its backward: gradients that its loss itself asked for are none of it."""
        self._norms.forget()

    def backward_done(self, rows: int, terms: Count) -> None:
        """A micro-batch of so many rows and terms had its backward."""
        self._seen.append((self._norms.take(), rows, terms))

    def drop(self) -> None:
        """Stop watching; the window says nothing."""
        self._norms.off()
        self._seen.clear()

    def end(self) -> None:
        """Watch no more windows."""
        self.drop()
        self._norms.close()

    def close(self, divisor: float | Tensor, correction: float | Tensor, scale: float | Tensor) -> Figures:
        """Stop watching; return what the window says.

        Args:
            divisor: D, where micro-batch j's mean loss was weighted by `n_j / D`. correction: factor still to be
                applied to the window's gradient. scale: the loss scale.
        """
        closing = Spent()
        with closing.span(self._seen[0][0].device):
            says = self._each if self.is_sharded else self._sums
            late = Late(says(divisor, correction, scale))
        self.drop()
        return Figures(late, self._norms.spent, closing)

    def num_figures(self, num_micro_batches: int) -> int:
        """Return how many figures a rank has of a window, the same number on all."""
        return sharded_noise.num_figures(num_micro_batches) if self.is_sharded else _NUM_SUMS

    def noise_of(self, ranks: Sequence[Sequence[float]]) -> WindowNoise | None:
        """Return what a window says, by the figures of all ranks; None where that is nothing."""
        if not self.is_sharded:
            return NoiseSums.of_ranks(ranks).noise()
        found = sharded_noise.JointMicroBatches.of_ranks(ranks)
        return found.noise_of_sums() if isinstance(self._norms, PartialNorms) else found.noise()

    def _each(self, divisor: float | Tensor, correction: float | Tensor, scale: float | Tensor) -> Tensor:
        """Return what this rank has of each micro-batch, which is one of all ranks: no rank knows its terms."""
        whole = self._norm2() * (correction / scale) ** 2
        device = whole.device
        seen = torch.stack([each.to(device) for each, _, _ in self._seen]).double() * (divisor / scale) ** 2
        terms, rows = (_on(device, [each[i] for each in self._seen]) for i in (2, 1))
        return torch.cat([whole.reshape(1), seen, terms, rows])

    def _sums(self, divisor: float | Tensor, correction: float | Tensor, scale: float | Tensor) -> Tensor:
        # ||g_j||^2 n_j = ||h_j||^2 D^2 / (n_j scale^2), h_j = n_j / D * scale * g_j being what the leaves received
        norm2 = self._norm2()
        device = norm2.device
        seen = torch.stack([each.to(device) for each, _, _ in self._seen]).double()
        terms = _on(device, [count for _, _, count in self._seen])
        rows = _on(device, [rows for _, rows, _ in self._seen])
        counts = terms > 0
        each = torch.where(counts, seen / torch.where(counts, terms, 1), 0) * (divisor / scale) ** 2
        whole = norm2 * (correction / scale) ** 2
        parts = [each.sum(), terms.sum(), (terms / rows).sum(), (terms**2 / rows).sum(), counts.sum(), whole]
        return torch.stack([part.double() for part in parts])

    def _norm2(self) -> Tensor:
        return squared_norm([local(p.grad) for p in _Stepped(self._optimizer) if p.grad is not None]).double()


def _norms_of(model: nn.Module, optimizer: Optimizer) -> GradientNorms | ShardedNorms | PartialNorms:
    if not is_sharded(model):
        return GradientNorms(_Stepped(optimizer))
    return ShardedNorms(model) if shows_reductions(model) else PartialNorms(_Stepped(optimizer))


class _Stepped:
    """The parameters an optimizer steps, as they are each time."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer

    def __iter__(self) -> Iterator[Tensor]:
        return itertools.chain.from_iterable(group["params"] for group in self._optimizer.param_groups)


def _on(device: torch.device, values: Sequence[Count]) -> Tensor:
    """Return numbers and device scalars as one float64 vector; a copy from the host would wait for the device."""
    each = [
        v.double() if isinstance(v, Tensor) else torch.full((), v, dtype=torch.float64, device=device) for v in values
    ]
    return torch.stack(each)
