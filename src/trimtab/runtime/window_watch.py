"""What a measured window shows while it runs: its gradients' norms, its seconds, and its rows."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence

from torch import Tensor, nn
from torch.optim import Optimizer

from trimtab.decide.noise import WindowNoise
from trimtab.decide.window_times import UsualWindow
from trimtab.losses import Count
from trimtab.measure.window_clock import WindowClock
from trimtab.runtime.accumulation import WindowWeights
from trimtab.runtime.measured import NUM_SECONDS, Measured, Nothing
from trimtab.runtime.noise_monitor import Figures, NoiseMonitor


class WindowWatch:
    """Watches the windows it is told to. What the others take is known too, by the host's clock.

    Of a window that is not watched nobody calls `begun`, `backward_begins`, `backward_done` or `stepping`.

    Attributes:
        seen_apart: ranks whose micro-batches show one by one.

    Raises:
        ValueGivenError: a model whose gradients cannot be seen, as of `NoiseMonitor`.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, num_ranks: int) -> None:
        self._monitor = NoiseMonitor(model, optimizer)
        self._clock = WindowClock(next(model.parameters()).device)
        self._usual = UsualWindow()
        self.seen_apart = 1 if self._monitor.is_sharded else num_ranks
        self._rows: list[int] = []  # of each loader batch
        self._opened_s = 0.0
        self._said: Figures | None = None

    def drawing(self) -> contextlib.AbstractContextManager[None]:
        """Take the time of what runs inside: the next window's batches are drawn."""
        return self._clock.drawing()

    def opened(self, *, watched: bool) -> None:
        """A window begins."""
        self._opened_s = time.perf_counter()
        if watched:
            self._rows.clear()
            self._monitor.open()
            self._clock.open()

    def begun(self, rows: int, *, of_next: bool, last: bool) -> None:
        """A micro-batch is about to be handed out, of the next loader batch or of the same; `last`: of the window."""
        if last and self.seen_apart > 1:
            self._monitor.at_once()
        if of_next:
            self._rows.append(0)
            self._monitor.batch_begins()
            self._clock.begin()
        self._rows[-1] += rows

    def backward_begins(self) -> None:
        """A micro-batch's loss was computed."""
        self._monitor.backward_begins()

    def backward_done(self, rows: int, terms: Count) -> None:
        """A micro-batch had its backward."""
        self._monitor.backward_done(rows, terms)

    def stepping(self, weights: WindowWeights, scale: float | Tensor) -> None:
        """The window's gradient is whole, at its loss scale, and nobody has changed it."""
        with self._clock.aside():
            self._said = self._monitor.close(weights.divisor, weights.correction, scale)

    def stepped(self, num_batches: int, decided: int, *, is_probe: bool, first: int) -> Measured | None:
        """A window that counts is over; returns what it shows, None if it was not watched.

        Args:
            decided: batches of a window that is no probe. is_probe: it was made to show more. first: of its loader
                batches that show the time of one.
        """
        seconds = time.perf_counter() - self._opened_s
        if self._said is None:
            if num_batches:  # of one that joins other ranks' nothing is usual
                self._usual.add(seconds, num_batches)
            return None
        extra_s = self._usual.extra(seconds, num_batches) if is_probe else 0.0
        windows = max(1.0, num_batches / decided)
        return Measured(self._said, self._clock.end(), tuple(self._rows), first, extra_s, windows)

    def nothing(self, num_micro_batches: int) -> Nothing:
        """Return what stands for a window of so many micro-batches, as on every rank, where this one shows nothing."""
        return Nothing(self._monitor.num_figures(num_micro_batches) + NUM_SECONDS)

    def drop(self) -> None:
        """The window was given up, or is over."""
        self._monitor.drop()
        self._clock.drop()
        self._said = None

    def noise_of(self, ranks: Sequence[Sequence[float]]) -> WindowNoise | None:
        """Return what a window says of the noise by the figures of all ranks; None where that is nothing."""
        return self._monitor.noise_of([figures[:-NUM_SECONDS] for figures in ranks])

    def close(self) -> None:
        """Watch no more windows."""
        self._monitor.end()
