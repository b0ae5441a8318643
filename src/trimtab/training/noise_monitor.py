"""Gradient noise and times of selected windows, computed on the device and read one window later (math: section 3)."""

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
NUM_SECONDS = 4  # Number of time values at the end of a window's measurements.


def noise_of_sums(each: Sequence[Sequence[float]]) -> WindowNoise | None:
    """Return the noise estimate of a window over all ranks, with equal weight per term; None if sums do not suffice.

    Args:
        each: six values per rank, for micro-batches of `m_j` samples with `n_j` terms and gradients `g_j`: sum
            ||g_j||^2 n_j, n = sum n_j, sum n_j / m_j, sum n_j^2 / m_j, number of micro-batches with terms, and
            ||gbar||^2 of the whole window's gradient, equal on all ranks.
    """
    terms = sum(rank[1] for rank in each)
    norms, per_sample, squares = (
        sum(rank[i] for rank in each) / terms**power if terms > 0 else math.nan for i, power in ((0, 1), (2, 1), (3, 2))
    )
    return window_noise(norms, each[0][5], per_sample - squares, squares, sum(rank[4] for rank in each))


@dataclass(frozen=True)
class WindowMeasurements:
    """Measurements of a window that have not been read yet.

    Args:
        noise: noise values.
        watching: overhead during the backward passes.
        closing: overhead after the last backward pass.
        stamps: time stamps.
        rows: samples of each loader batch.
        first: index of the first batch used to estimate the time per sample; the last batch is not used.
        extra_s: additional seconds because the window was enlarged to measure the noise.
        windows: ratio of the window's number of batches to the decided number.
    """

    noise: AsyncScalar
    watching: OverheadTimer
    closing: OverheadTimer
    stamps: StepTimeStamps
    rows: tuple[int, ...]
    first: int
    extra_s: float
    windows: float

    def figures(self, deciding_s: float) -> list[float]:
        """Return the noise values, then four times in seconds: per sample, fixed, per window, and measuring overhead.

        The time per sample includes drawing the data and excludes the overhead. The time per window is for a window of
        the decided size. Times are NaN if the window has too few batches to show them.

        Args:
            deciding_s: seconds spent on decisions since the last measured window.
        """
        seconds, watching = self.stamps.read(), self.watching
        rows, between, drawing_s = sum(self.rows), sum(self.rows[self.first : -1]), seconds.drawing_s
        sample_s = fixed_s = math.nan
        if between:
            sample_s = (sum(seconds.batch_s[self.first :]) - watching.amid(since=self.first)) / between
            fixed_s = seconds.window_s - watching.amid() - sample_s * rows
        whole_s = max(self.extra_s, seconds.window_s + drawing_s - self.extra_s)
        spent_s = watching.read() + self.closing.read() + deciding_s + self.extra_s
        sample_s += drawing_s / rows
        if self.windows > 1:
            further_s = sample_s * rows * (1 - 1 / self.windows)
            least_s = whole_s / self.windows
            whole_s = least_s if math.isnan(further_s) else max(least_s, whole_s - further_s)
        return [*self.noise.read(), sample_s, fixed_s, whole_s, spent_s]


class NoiseMonitor:
    """Measures selected windows, and the host time of all other windows.

    A measured window has the gradient norms of its micro-batches, or of partial sums if single gradients are not
    visible. Its methods from `open` to `close` are called in measured windows only.

    Attributes:
        seen_apart: number of ranks whose micro-batch gradients are visible separately; 1 under FSDP2.

    Raises:
        ValueGivenError: the model is under FSDP1, or under FSDP2 with trained parameters outside or a mesh of several
            dimensions.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, num_ranks: int) -> None:
        self._optimizer, self._is_sharded = optimizer, is_sharded(model)
        self._require_visible(model)
        self.seen_apart = 1 if self._is_sharded else num_ranks
        self._norms: GradientNorms | ShardedNorms | PartialNorms
        if not self._is_sharded:
            self._norms = GradientNorms(_SteppedParameters(optimizer))
        elif shows_reductions(model):
            self._norms = ShardedNorms(model)
        else:
            self._norms = PartialNorms(_SteppedParameters(optimizer))
        self._clock, self._usual = StepTimer(next(model.parameters()).device), UsualWindow()
        self._seen: list[tuple[Tensor, int, Count]] = []  # Squared norm, samples and terms of each micro-batch.
        self._rows: list[int] = []  # Samples of each loader batch.
        self._began_s = 0.0
        self._noise: tuple[AsyncScalar, OverheadTimer, OverheadTimer] | None = None

    def _require_visible(self, model: nn.Module) -> None:
        if is_flat_sharded(model):
            raise ValueGivenError(
                "plan.batch_rule",
                got="a model wrapped in FullyShardedDataParallel (FSDP1), which hides the gradients of parameters",
                expected="a model under DistributedDataParallel or fully_shard (FSDP2)",
                hint="Shard the model with fully_shard, or use a plan without an adaptive batch size.",
                code="batch_rule.fsdp1",
            )
        if self._is_sharded and not all(map(is_shard, _SteppedParameters(self._optimizer))):
            raise ValueGivenError(
                "plan.batch_rule",
                problem="The gradient norm cannot be measured, because the optimizer trains parameters that FSDP2 does "
                "not shard.",
                got="a partly sharded model",
                hint="Call fully_shard(model) on the whole model after its submodules.",
                code="batch_rule.partly_sharded",
            )
        if any(map(has_replicas, _SteppedParameters(self._optimizer))):
            raise ValueGivenError(
                "plan.batch_rule",
                problem="The gradient norm cannot be measured, because the model is sharded over a mesh of several "
                "dimensions or over only some of the ranks.",
                got="a mesh of several dimensions, or of some of the ranks",
                hint="Use fully_shard(model) without a mesh, or DistributedDataParallel.",
                code="batch_rule.mesh",
            )

    def drawing(self) -> contextlib.AbstractContextManager[None]:
        """Return a context that measures the time to draw the next window's batches."""
        return self._clock.drawing()

    def begin(self) -> None:
        """Begin a window, measured or not."""
        self._began_s = time.perf_counter()

    def open(self) -> None:
        """Begin to measure a window."""
        self._rows.clear()
        self._seen.clear()
        self._norms.on()
        self._clock.open()

    def micro_batch_begins(self, rows: int, *, of_next: bool, last: bool) -> None:
        """Begin a micro-batch; `of_next` and `last` as in `hooks.Hook`."""
        if last and self.seen_apart > 1:  # A new gradient may be the reduced tensor itself.
            self._norms.at_once()
        if of_next:
            self._rows.append(0)
            self._norms.spent.mark()
            self._clock.begin()
        self._rows[-1] += rows

    def backward_begins(self) -> None:
        """Discard gradients computed by the loss itself, before a micro-batch's backward."""
        self._norms.forget()

    def backward_ends(self, rows: int, terms: Count) -> None:
        """Record a micro-batch of `rows` samples and `terms` terms after its backward."""
        self._seen.append((self._norms.take(), rows, terms))

    def close(self, weights: WindowWeights, scale: float | Tensor) -> None:
        """Measure the window's complete gradient, still multiplied by the loss scale."""
        with self._clock.aside():
            closing = OverheadTimer()
            with closing.span(self._seen[0][0].device):
                figures = self._each if self._is_sharded else self._sums
                noise = AsyncScalar(figures(weights.divisor / scale, weights.correction / scale))
            self._norms.off()
            self._noise = noise, self._norms.spent, closing

    def _each(self, divisor: float | Tensor, correction: float | Tensor) -> Tensor:
        """Return this rank's values of each micro-batch of a sharded model.

        A micro-batch then extends over all ranks, and no rank knows the term counts of the others.
        """
        whole = self._norm2() * correction**2
        device = whole.device
        seen = torch.stack([norm2.to(device) for norm2, _, _ in self._seen]).double() * divisor**2
        terms = _on(device, [terms for _, _, terms in self._seen])
        return torch.cat([whole.reshape(1), seen, terms, _on(device, [rows for _, rows, _ in self._seen])])

    def _sums(self, divisor: float | Tensor, correction: float | Tensor) -> Tensor:
        """Return this rank's six values of `noise_of_sums`.

        Args:
            divisor: D / scale, if micro-batch j's mean loss was weighted by `n_j / D`. The gradient at the leaves is
                h_j = n_j scale / D * g_j, so that ||g_j||^2 n_j = ||h_j||^2 (D / scale)^2 / n_j.
            correction: factor still to be applied to the window's gradient.
        """
        norm2 = self._norm2()
        device = norm2.device
        seen = torch.stack([norm2.to(device) for norm2, _, _ in self._seen]).double()
        terms, rows = (_on(device, [each[i] for each in self._seen]) for i in (2, 1))
        counts = terms > 0
        each = torch.where(counts, seen / torch.where(counts, terms, 1), 0) * divisor**2
        whole = norm2 * correction**2
        parts = [each.sum(), terms.sum(), (terms / rows).sum(), (terms**2 / rows).sum(), counts.sum(), whole]
        return torch.stack([part.double() for part in parts])

    def _norm2(self) -> Tensor:
        stepped = [local_shard(p.grad) for p in _SteppedParameters(self._optimizer) if p.grad is not None]
        return squared_norm(stepped).double()

    def ended(self, num_batches: int, decided: int, *, is_probe: bool, first: int) -> WindowMeasurements | None:
        """End an applied window; return its measurements, or None if it was not measured.

        Args:
            num_batches: loader batches of the window.
            decided: decided number of loader batches.
            is_probe: True if the window was enlarged or split to measure the noise.
            first: index of the first loader batch used to estimate the time per batch.
        """
        seconds = time.perf_counter() - self._began_s
        if self._noise is None:
            if num_batches:  # A window of padding only, which joins other ranks, is not typical.
                self._usual.add(seconds, num_batches)
            return None
        extra_s = self._usual.extra(seconds, num_batches) if is_probe else 0.0
        windows = max(1.0, num_batches / decided)
        return WindowMeasurements(*self._noise, self._clock.end(), tuple(self._rows), first, extra_s, windows)

    def nothing(self, num_micro_batches: int) -> list[float]:
        """Return NaN for each value of a window measured by further ranks only.

        Args:
            num_micro_batches: micro-batches of the window, equal on all ranks.
        """
        num = gradient_noise_scale.num_figures(num_micro_batches) if self._is_sharded else _NUM_SUMS
        return [math.nan] * (num + NUM_SECONDS)

    def drop(self) -> None:
        """Stop measuring the window, after it ended or was dropped."""
        self._norms.off()
        self._seen.clear()
        self._clock.drop()
        self._noise = None

    def noise_of(self, ranks: Sequence[Sequence[float]]) -> WindowNoise | None:
        """Return the noise estimate from the values of all ranks; None if they do not suffice."""
        each = [figures[:-NUM_SECONDS] for figures in ranks]
        if not self._is_sharded:
            return noise_of_sums(each)
        found = gradient_noise_scale.JointMicroBatches.of_ranks(each)
        return found.noise_of_sums() if isinstance(self._norms, PartialNorms) else found.noise()

    def end(self) -> None:
        """Stop measuring for good."""
        self.drop()
        self._norms.close()


class _SteppedParameters:
    """Iterable over the parameters that an optimizer currently steps."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer

    def __iter__(self) -> Iterator[Tensor]:
        return itertools.chain.from_iterable(group["params"] for group in self._optimizer.param_groups)


def _on(device: torch.device, values: Sequence[Count]) -> Tensor:
    """Return numbers and device scalars as a float64 vector. A copy from the host would synchronise."""
    return torch.stack(
        [v.double() if isinstance(v, Tensor) else torch.full((), v, dtype=torch.float64, device=device) for v in values]
    )
