"""Measurements of a window, read asynchronously while the device may still be working on the window."""

from __future__ import annotations

import math
from dataclasses import dataclass

from trimtab.measure.step_timer import StepTimeStamps
from trimtab.runtime.noise_monitor import NoiseFigures

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
