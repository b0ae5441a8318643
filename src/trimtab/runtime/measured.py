"""What a window showed, on its way: the device may still be at it when the next one begins."""

from __future__ import annotations

import math
from dataclasses import dataclass

from trimtab.measure.window_clock import Stamped
from trimtab.runtime.noise_monitor import Figures

NUM_SECONDS = 4  # the last of a window's figures


@dataclass(frozen=True)
class Measured:
    """A window whose figures are on their way.

    Args:
        rows: of its loader batches. first: of those that show the time of one, all from it on but the last. extra_s:
            what it took beyond others, made to show more. windows: how many times the batches of one as decided it has.
    """

    said: Figures
    stamps: Stamped
    rows: tuple[int, ...]
    first: int
    extra_s: float
    windows: float

    def wait(self) -> None:
        """Wait until the device has done the window: it has had another's time to."""
        self.stamps.wait()

    def figures(self, deciding_s: float) -> list[float]:
        """Return what it says of noise, then seconds a row, fixed, whole, and spent.

        They are nan where a window has too few batches to show them. A row's have those of drawing the data in them;
        watching is in neither. The whole is of a window as decided.
        """
        seconds, watching = self.stamps.read(), self.said.watching
        rows, between, drawing_s = sum(self.rows), sum(self.rows[self.first : -1]), seconds.drawing_s
        row_s = fixed_s = math.nan
        if between:
            row_s = (sum(seconds.batch_s[self.first :]) - watching.amid(since=self.first)) / between
            fixed_s = seconds.window_s - watching.amid() - row_s * rows
        whole_s = max(self.extra_s, seconds.window_s + drawing_s - self.extra_s)
        spent_s = watching.read() + self.said.closing.read() + deciding_s + self.extra_s
        row_s += drawing_s / rows
        if self.windows > 1:
            further_s = row_s * rows * (1 - 1 / self.windows)
            least_s = whole_s / self.windows
            whole_s = least_s if math.isnan(further_s) else max(least_s, whole_s - further_s)
        return [*self.said.said.read(), row_s, fixed_s, whole_s, spent_s]


@dataclass(frozen=True)
class Nothing:
    """A window that is measured on other ranks, and shows nothing on this one, whose batches may be fewer.

    Args:
        num_figures: of each rank.
    """

    num_figures: int

    def wait(self) -> None:
        """There is nothing to wait for."""

    def figures(self, deciding_s: float) -> list[float]:
        """Return as many figures."""
        return [math.nan] * self.num_figures
