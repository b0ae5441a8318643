"""Gradient noise of a window from sums over its micro-batches, computed on the device and read later.

See math, section 3.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trimtab.adaptive_batch import gradient_noise_scale
from trimtab.adaptive_batch.gradient_noise_scale import WindowNoise, window_noise
from trimtab.adaptive_batch.step_time_model import UsualWindow
from trimtab.core.errors import ValueGivenError
from trimtab.losses import Count
from trimtab.measure.gradient_norms import (
    GradientNorms,
    PartialNorms,
    ShardedNorms,
    has_replicas,
    is_flat_sharded,
    is_shard,
    is_sharded,
    local_shard,
    shows_reductions,
    squared_norm,
)
from trimtab.measure.timing import AsyncScalar, OverheadTimer, StepTimer, StepTimeStamps
from trimtab.training.accumulation import WindowWeights

_NUM_SUMS = 6  # Number of sums per window and rank.


@dataclass(frozen=True)
class NoiseSums:
    """Weighted sums over micro-batches j of `m_j` samples, with gradients `g_j` and weights `w_j` that add up to 1.

    Args:
        norms: sum w_j ||g_j||^2.
        per_sample: sum w_j / m_j.
        squares: sum w_j^2 / m_j.
        num: number of micro-batches with a non-zero term count.
        norm2: ||gbar||^2 of the whole window's gradient, equal on all ranks.
    """

    norms: float
    per_sample: float
    squares: float
    num: float
    norm2: float

    @classmethod
    def of_ranks(cls, each: Sequence[Sequence[float]]) -> NoiseSums:
        """Return the sums over all ranks, with equal weight per term.

        Args:
            each: six values per rank, for micro-batches with `n_j` terms: sum ||g_j||^2 n_j, n = sum n_j, sum n_j /
                m_j, sum n_j^2 / m_j, number of micro-batches with terms, ||gbar||^2.
        """
        terms = sum(rank[1] for rank in each)
        norms, per_sample, squares = (
            sum(rank[i] for rank in each) / terms**power if terms > 0 else math.nan
            for i, power in ((0, 1), (2, 1), (3, 2))
        )
        return cls(norms, per_sample, squares, sum(rank[4] for rank in each), each[0][5])

    def noise(self) -> WindowNoise | None:
        """Return the noise estimate of the window; None if the sums do not suffice."""
        return window_noise(self.norms, self.norm2, self.per_sample - self.squares, self.squares, self.num)


@dataclass(frozen=True)
class NoiseFigures:
    """Values measured in a window.

    Args:
        said: sums for `noise_of`.
        watching: overhead during the backward passes.
        closing: overhead after the last backward pass.
    """

    said: AsyncScalar
    watching: OverheadTimer
    closing: OverheadTimer


class NoiseMonitor:
    """Measures gradient norms of a window's micro-batches, or of partial sums if single gradients are not visible.

    Raises:
        ValueGivenError: the model is under FSDP1, or under FSDP2 with trained parameters outside or a mesh of several
            dimensions.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        if is_flat_sharded(model):
            raise ValueGivenError(
                "plan.batch_rule",
                got="a model wrapped in FullyShardedDataParallel (FSDP1), which hides the gradients of parameters",
                expected="a model under DistributedDataParallel or fully_shard (FSDP2)",
                hint="Shard the model with fully_shard, or use a plan without an adaptive batch size.",
                code="batch_rule.fsdp1",
            )
        self._optimizer = optimizer
        self.is_sharded = is_sharded(model)
        if self.is_sharded and not all(is_shard(p) for p in _SteppedParameters(optimizer)):
            raise ValueGivenError(
                "plan.batch_rule",
                problem="The gradient norm cannot be measured, because the optimizer trains parameters that FSDP2 does "
                "not shard.",
                got="a partly sharded model",
                hint="Call fully_shard(model) on the whole model after its submodules.",
                code="batch_rule.partly_sharded",
            )
        if any(map(has_replicas, _SteppedParameters(optimizer))):
            raise ValueGivenError(
                "plan.batch_rule",
                problem="The gradient norm cannot be measured, because the model is sharded over a mesh of several "
                "dimensions or over only some of the ranks.",
                got="a mesh of several dimensions, or of some of the ranks",
                hint="Use fully_shard(model) without a mesh, or DistributedDataParallel.",
                code="batch_rule.mesh",
            )
        self._norms = _norms_of(model, optimizer)
        self._seen: list[tuple[Tensor, int, Count]] = []

    def open(self) -> None:
        """Start observing a window."""
        self._seen.clear()
        self._norms.on()

    def at_once(self) -> None:
        """Prepare for the backward that reduces gradients, in which a new gradient may be the reduced tensor itself."""
        self._norms.at_once()

    def batch_begins(self) -> None:
        """Note the first micro-batch of a loader batch."""
        self._norms.spent.mark()

    def backward_begins(self) -> None:
        """Discard gradients computed by the loss itself, before a micro-batch's backward."""
        self._norms.forget()

    def backward_done(self, rows: int, terms: Count) -> None:
        """Record a micro-batch of `rows` samples and `terms` terms after its backward."""
        self._seen.append((self._norms.take(), rows, terms))

    def drop(self) -> None:
        """Stop observing and discard the window."""
        self._norms.off()
        self._seen.clear()

    def end(self) -> None:
        """Stop observing for good."""
        self.drop()
        self._norms.close()

    def close(self, divisor: float | Tensor, correction: float | Tensor, scale: float | Tensor) -> NoiseFigures:
        """Stop observing; return the window's values.

        Args:
            divisor: D, if micro-batch j's mean loss was weighted by `n_j / D`.
            correction: factor still to be applied to the window's gradient.
            scale: loss scale.
        """
        closing = OverheadTimer()
        with closing.span(self._seen[0][0].device):
            says = self._each if self.is_sharded else self._sums
            late = AsyncScalar(says(divisor, correction, scale))
        self.drop()
        return NoiseFigures(late, self._norms.spent, closing)

    def num_figures(self, num_micro_batches: int) -> int:
        """Return the number of values per rank for a window, equal on all ranks."""
        return gradient_noise_scale.num_figures(num_micro_batches) if self.is_sharded else _NUM_SUMS

    def noise_of(self, ranks: Sequence[Sequence[float]]) -> WindowNoise | None:
        """Return the noise estimate of a window from the values of all ranks; None if they do not suffice."""
        if not self.is_sharded:
            return NoiseSums.of_ranks(ranks).noise()
        found = gradient_noise_scale.JointMicroBatches.of_ranks(ranks)
        return found.noise_of_sums() if isinstance(self._norms, PartialNorms) else found.noise()

    def _each(self, divisor: float | Tensor, correction: float | Tensor, scale: float | Tensor) -> Tensor:
        """Return this rank's values of each micro-batch of a sharded model.

        A micro-batch then extends over all ranks, and no rank knows the term counts of the others.
        """
        whole = self._norm2() * (correction / scale) ** 2
        device = whole.device
        seen = torch.stack([each.to(device) for each, _, _ in self._seen]).double() * (divisor / scale) ** 2
        terms, rows = (_on(device, [each[i] for each in self._seen]) for i in (2, 1))
        return torch.cat([whole.reshape(1), seen, terms, rows])

    def _sums(self, divisor: float | Tensor, correction: float | Tensor, scale: float | Tensor) -> Tensor:
        # ||g_j||^2 n_j = ||h_j||^2 D^2 / (n_j scale^2), where h_j = n_j / D * scale * g_j is the gradient at the
        # leaves.
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
        return squared_norm(
            [local_shard(p.grad) for p in _SteppedParameters(self._optimizer) if p.grad is not None]
        ).double()


def _norms_of(model: nn.Module, optimizer: Optimizer) -> GradientNorms | ShardedNorms | PartialNorms:
    if not is_sharded(model):
        return GradientNorms(_SteppedParameters(optimizer))
    return ShardedNorms(model) if shows_reductions(model) else PartialNorms(_SteppedParameters(optimizer))


class _SteppedParameters:
    """Iterable over the parameters that an optimizer currently steps."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer

    def __iter__(self) -> Iterator[Tensor]:
        return itertools.chain.from_iterable(group["params"] for group in self._optimizer.param_groups)


def _on(device: torch.device, values: Sequence[Count]) -> Tensor:
    """Return numbers and device scalars as a float64 vector. A copy from the host would synchronise."""
    each = [
        v.double() if isinstance(v, Tensor) else torch.full((), v, dtype=torch.float64, device=device) for v in values
    ]
    return torch.stack(each)


# Measurements of a window, read asynchronously while the device may still be working on the window.

NUM_SECONDS = 4  # Number of time values at the end of a window's measurements.


@dataclass(frozen=True)
class WindowMeasurements:
    """Measurements of a window that have not been read yet.

    Args:
        said: noise sums and measuring overhead.
        stamps: time stamps.
        rows: samples of each loader batch.
        first: index of the first batch used to estimate the time per sample; the last batch is not used.
        extra_s: additional seconds because the window was enlarged to measure the noise.
        windows: ratio of the window's number of batches to the decided number.
    """

    said: NoiseFigures
    stamps: StepTimeStamps
    rows: tuple[int, ...]
    first: int
    extra_s: float
    windows: float

    def wait(self) -> None:
        """Wait until the device has finished the window, one window after it was queued."""
        self.stamps.wait()

    def figures(self, deciding_s: float) -> list[float]:
        """Return the noise values, then four times in seconds: per sample, fixed, per window, and measuring overhead.

        The time per sample includes drawing the data and excludes the overhead. The time per window is for a window of
        the decided size. Times are NaN if the window has too few batches to show them.

        Args:
            deciding_s: seconds spent on decisions since the last measured window.
        """
        seconds, watching = self.stamps.read(), self.said.watching
        rows, between, drawing_s = sum(self.rows), sum(self.rows[self.first : -1]), seconds.drawing_s
        sample_s = fixed_s = math.nan
        if between:
            sample_s = (sum(seconds.batch_s[self.first :]) - watching.amid(since=self.first)) / between
            fixed_s = seconds.window_s - watching.amid() - sample_s * rows
        whole_s = max(self.extra_s, seconds.window_s + drawing_s - self.extra_s)
        spent_s = watching.read() + self.said.closing.read() + deciding_s + self.extra_s
        sample_s += drawing_s / rows
        if self.windows > 1:
            further_s = sample_s * rows * (1 - 1 / self.windows)
            least_s = whole_s / self.windows
            whole_s = least_s if math.isnan(further_s) else max(least_s, whole_s - further_s)
        return [*self.said.said.read(), sample_s, fixed_s, whole_s, spent_s]


@dataclass(frozen=True)
class NoMeasurements:
    """Placeholder for a window that other ranks measure but this rank, for example with fewer batches, does not.

    Args:
        num_figures: number of values per rank.
    """

    num_figures: int

    def wait(self) -> None:
        """Return at once."""

    def figures(self, deciding_s: float) -> list[float]:
        """Return `num_figures` NaN values."""
        return [math.nan] * self.num_figures


# Measurement of a window: gradient norms, times and numbers of samples.


class WindowMonitor:
    """Measures selected windows, and the host time of all other windows.

    `begun`, `backward_begins`, `backward_done` and `stepping` are called only in measured windows.

    Attributes:
        seen_apart: number of ranks whose micro-batch gradients are visible separately; 1 under FSDP2.

    Raises:
        ValueGivenError: the model's gradients are not visible (see `NoiseMonitor`).
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, num_ranks: int) -> None:
        self._monitor = NoiseMonitor(model, optimizer)
        self._clock = StepTimer(next(model.parameters()).device)
        self._usual = UsualWindow()
        self.seen_apart = 1 if self._monitor.is_sharded else num_ranks
        self._rows: list[int] = []  # Samples of each loader batch.
        self._opened_s = 0.0
        self._said: NoiseFigures | None = None

    def drawing(self) -> contextlib.AbstractContextManager[None]:
        """Return a context that measures the time to draw the next window's batches."""
        return self._clock.drawing()

    def opened(self, *, watched: bool) -> None:
        """Begin a window; `watched` selects it for measurement."""
        self._opened_s = time.perf_counter()
        if watched:
            self._rows.clear()
            self._monitor.open()
            self._clock.open()

    def begun(self, rows: int, *, of_next: bool, last: bool) -> None:
        """Begin a micro-batch.

        Args:
            rows: samples of the micro-batch.
            of_next: True for the first micro-batch of a loader batch.
            last: True for the window's last micro-batch.
        """
        if last and self.seen_apart > 1:
            self._monitor.at_once()
        if of_next:
            self._rows.append(0)
            self._monitor.batch_begins()
            self._clock.begin()
        self._rows[-1] += rows

    def backward_begins(self) -> None:
        """Note that a micro-batch's loss was computed."""
        self._monitor.backward_begins()

    def backward_done(self, rows: int, terms: Count) -> None:
        """Note that a micro-batch's backward has run."""
        self._monitor.backward_done(rows, terms)

    def stepping(self, weights: WindowWeights, scale: float | Tensor) -> None:
        """Measure the window's complete gradient, still multiplied by the loss scale."""
        with self._clock.aside():
            self._said = self._monitor.close(weights.divisor, weights.correction, scale)

    def stepped(self, num_batches: int, decided: int, *, is_probe: bool, first: int) -> WindowMeasurements | None:
        """End an applied window; return its measurements, or None if it was not measured.

        Args:
            num_batches: loader batches of the window.
            decided: decided number of loader batches.
            is_probe: True if the window was enlarged or split to measure the noise.
            first: index of the first loader batch used to estimate the time per batch.
        """
        seconds = time.perf_counter() - self._opened_s
        if self._said is None:
            if num_batches:  # A window of padding only, which joins other ranks, is not typical.
                self._usual.add(seconds, num_batches)
            return None
        extra_s = self._usual.extra(seconds, num_batches) if is_probe else 0.0
        windows = max(1.0, num_batches / decided)
        return WindowMeasurements(self._said, self._clock.end(), tuple(self._rows), first, extra_s, windows)

    def nothing(self, num_micro_batches: int) -> NoMeasurements:
        """Return the placeholder for a window that this rank does not measure.

        Args:
            num_micro_batches: micro-batches of the window, equal on all ranks.
        """
        return NoMeasurements(self._monitor.num_figures(num_micro_batches) + NUM_SECONDS)

    def drop(self) -> None:
        """Stop measuring the window, after it ended or was dropped."""
        self._monitor.drop()
        self._clock.drop()
        self._said = None

    def noise_of(self, ranks: Sequence[Sequence[float]]) -> WindowNoise | None:
        """Return the noise estimate from the values of all ranks; None if they do not suffice."""
        return self._monitor.noise_of([figures[:-NUM_SECONDS] for figures in ranks])

    def close(self) -> None:
        """Stop measuring for good."""
        self._monitor.end()
