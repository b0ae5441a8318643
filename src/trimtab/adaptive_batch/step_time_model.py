"""Seconds of a micro-batch and of a step's fixed part, and the time to reach a loss by batch size (math: section 4)."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trimtab.core import validation
from trimtab.core.errors import FormatError
from trimtab.core.stateful import Load, Stateful

# Batch sizes, in noise scales, at which a loss takes twice the samples with a learning rate proportional to the batch,
# and sqrt(2) times with a square-root rule; measured (docs/math.md, section 4).
DOUBLED, BENT = 2.0, 1.5


@dataclass(frozen=True)
class StepTimes:
    """Seconds of a micro-batch (maximum over ranks), and of the fixed part of a step (minimum over ranks)."""

    micro_s: float
    fixed_s: float


def rows_needed(scales: float, *, normalises: bool) -> float:
    """Return the samples needed to reach a loss, relative to the smallest batch.

    Args:
        scales: x, the batch size divided by the gradient noise scale.
        normalises: True for optimizers that divide by the root mean square of gradients, such as Adam.

    1 + x if every batch size has the learning rate with the best next step (McCandlish et al. 2018, eq. 2.7). A rate
    that is best in the long run is lower, so larger batches lose less: 1 + x / 2 lies between the measurements.

    For an optimizer that divides by the root mean square of gradients, with a square-root learning rate rule (Malladi
    et al. 2022), a sample's step is a = 1 / sqrt(1 + x) times as long as with the smallest batch, and its noise a^2
    times as large, as if the learning rate were scaled by a. At the optimal learning rate, progress does not change to
    first order in x. Far beyond the noise scale, the number of steps counts, not of samples. sqrt(1 + (x / 1.5)^2)
    joins both limits and lies between the measurements.
    """
    return math.hypot(1.0, scales / BENT) if normalises else 1 + scales / DOUBLED


def relative_time(k: float, noise_scale: float, rows: float, times: StepTimes, *, normalises: bool = False) -> float:
    """Return the time to reach a loss up to a constant: number of steps times seconds per step.

    The inverse of goodput (Qiao et al., OSDI 2021), which uses `1 + x` for the samples needed. For infinite N, the
    number of steps is proportional to 1 / k.

    Args:
        rows: r, samples of a micro-batch over all ranks.
    """
    per_window = k * times.micro_s + times.fixed_s
    if math.isinf(noise_scale):
        return per_window / k
    if noise_scale == 0:
        return per_window
    scales = k * rows / noise_scale
    return rows_needed(scales, normalises=normalises) / scales * per_window


def goodput_k(noise_scale: float, rows: float, times: StepTimes, *, normalises: bool = False) -> float:
    """Return the k with the least time to reach a loss.

    With n = N / r and f = t_fixed / t_micro: sqrt(2 n f); for normalising optimizers cbrt((1.5 n)^2 f).
    """
    scales, fixed = noise_scale / rows, times.fixed_s / times.micro_s
    if not (scales and fixed):
        return 0.0
    if normalises:
        return math.cbrt(fixed) * math.cbrt(BENT * scales) ** 2
    return math.sqrt(DOUBLED * scales * fixed)


# Steps in the medians, and first steps to skip, in which kernels are selected and memory is allocated.
MEMORY, SKIPPED = 50, 2
MIN_WINDOWS = 3


class UsualWindow:
    """Median time of a loader batch over the last unmodified steps."""

    def __init__(self) -> None:
        self._batch_s: deque[float] = deque(maxlen=15)

    def add(self, seconds: float, num_batches: int) -> None:
        """Add an unmodified step."""
        self._batch_s.append(seconds / num_batches)

    def extra(self, seconds: float, num_batches: int) -> float:
        """Return the seconds of a step beyond its number of usual loader batches; 0 while those are unknown."""
        return max(0.0, seconds - num_batches * statistics.median(self._batch_s)) if self._batch_s else 0.0


class WindowTimes(Stateful):
    """Medians over the last steps, robust to disturbed steps."""

    def __init__(self, memory: int = MEMORY) -> None:
        self._sample_s: deque[float] = deque(maxlen=memory)
        self._fixed_s: deque[float] = deque(maxlen=memory)
        self._seen = 0
        self._since_loaded: int | None = None

    def add(self, sample_s: float, fixed_s: float) -> None:
        """Add a step.

        Args:
            sample_s: seconds per sample, data loading included, in the loader batches between the first (creates
                gradients) and the last (includes the reduction).
            fixed_s: seconds of the step beyond `sample_s` for all samples.
        """
        self._seen += 1
        if self._since_loaded is not None and self._since_loaded < 0:  # kernels are selected again
            self._since_loaded += 1
        elif self._seen > SKIPPED:
            self._sample_s.append(sample_s)
            self._fixed_s.append(max(0.0, fixed_s))
            self._drop_loaded()

    def _drop_loaded(self) -> None:
        """Drop loaded times once there are enough of this run, because loaded times may be from another machine."""
        if self._since_loaded is None:
            return
        self._since_loaded += 1
        if self._since_loaded == MIN_WINDOWS:
            for kept in (self._sample_s, self._fixed_s):
                own = list(kept)[-MIN_WINDOWS:]
                kept.clear()
                kept.extend(own)
            self._since_loaded = None

    def forget(self) -> None:
        """Discard the times of all steps."""
        self._sample_s.clear()
        self._fixed_s.clear()
        self._seen, self._since_loaded = 0, None

    @property
    def is_known(self) -> bool:
        """True if enough steps were added."""
        return len(self._sample_s) >= MIN_WINDOWS

    @property
    def is_own(self) -> bool:
        """True if enough steps were added since a state was loaded, possibly from another machine."""
        return self.is_known and self._since_loaded is None

    def times(self, micro_batch_samples: float) -> StepTimes | None:
        """Return the times for a micro-batch size; None while too few steps were added."""
        if not self.is_known:
            return None
        return StepTimes(statistics.median(self._sample_s) * micro_batch_samples, statistics.median(self._fixed_s))

    def state_dict(self) -> dict[str, Any]:
        """Return the recent times for a resumed run."""
        return {"sample_s": list(self._sample_s), "fixed_s": list(self._fixed_s), "seen": self._seen}

    def loading(self, state: Mapping[str, Any]) -> Load:
        names = ("sample_s", "fixed_s")
        lists = isinstance(state, Mapping) and all(isinstance(state.get(name), list) for name in names)
        if not lists or len(state["sample_s"]) != len(state["fixed_s"]):
            raise FormatError(
                "state.times", got=f"{state!r:.80}", expected="the lists sample_s and fixed_s of equal length"
            )
        seen = validation.integer("state.times.seen", state.get("seen"), low=0)
        sample_s, fixed_s = ([validation.number(f"state.times.{n}", v, low=0) for v in state[n]] for n in names)

        def load() -> None:
            self._seen, self._since_loaded = seen, -SKIPPED
            for kept, loaded in ((self._sample_s, sample_s), (self._fixed_s, fixed_s)):
                kept.clear()
                kept.extend(loaded)

        return load
