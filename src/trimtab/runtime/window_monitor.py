"""Measurement of a window: gradient norms, times and numbers of samples."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence

from torch import Tensor, nn
from torch.optim import Optimizer

from trimtab.decide.gradient_noise_scale import WindowNoise
from trimtab.decide.step_time_model import UsualWindow
from trimtab.losses import Count
from trimtab.measure.step_timer import StepTimer
from trimtab.runtime.accumulation import WindowWeights
from trimtab.runtime.noise_monitor import NoiseFigures, NoiseMonitor
from trimtab.runtime.window_measurements import NUM_SECONDS, NoMeasurements, WindowMeasurements


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
