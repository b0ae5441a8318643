"""What short paired trainings of two plans say: which reaches the other's loss in less time, and whether that is clear.

In a pair both train from the same weights on the same batches. The target is the smoothed loss that the plan as it
stands ends at; the rival's steps to it, and its seconds a step, are held against that plan's. As the smoothed loss lags
behind, few steps to it are told as more than they were. The plan as it stands is trained once more, and the rival held
against that too, by where that ends: the control is the one figure over the other, which differ by chance alone (math:
section 8).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from trimtab.decide.learning_rate import falls_clearly, smoothed
from trimtab.decide.statistics import Interval, is_gain, ratio_interval, resolution


@dataclass(frozen=True)
class ShortRun:
    """One training: the loss of each step from before it, and the median seconds of a step."""

    losses: tuple[float, ...]
    step_s: float

    @property
    def ended_at(self) -> float:
        """The smoothed loss at its end."""
        return smoothed(self.losses)[-1] if self.losses else math.nan

    def steps_to(self, target: float) -> float:
        """Return after how many steps the smoothed loss is at a target and stays there for another; inf: never."""
        smooth = smoothed(self.losses)
        for index, loss in enumerate(smooth):
            if loss <= target and smooth[min(index + 1, len(smooth) - 1)] <= target:
                if index == 0:
                    return 1.0
                before = smooth[index - 1]
                return index + (before - target) / (before - loss)
        return math.inf


@dataclass(frozen=True)
class ShortPair:
    """The plan as it stands, its rival, and the first again; None where the rival had lost already."""

    stands: ShortRun
    rival: ShortRun
    again: ShortRun | None = None

    @property
    def samples(self) -> float:
        """How many times fewer samples the rival took to what the plan as it stands ends at; 0: it never did.

        Over those that the plan as it stands took itself: where its loss has flattened it is there before its end.
        """
        target = self.stands.ended_at
        return self.stands.steps_to(target) / self.rival.steps_to(target)

    @property
    def time(self) -> float:
        """How many times less time it took."""
        return self.samples * self.stands.step_s / self.rival.step_s

    @property
    def stays(self) -> bool:
        """Whether the rival ends no higher than the plan as it stands; no where its loss is no number by then."""
        return self.rival.ended_at <= self.stands.ended_at

    @property
    def control(self) -> float | None:
        """What `time` is of the plan as it stands trained again, over what it is of it; None where either is no number.

        It is the race's own figure, twice: each training has its end as target. To one target that both come to, two
        trainings on a plateau are apart by all of it, though where either ends moves a rival's figure by little.
        """
        if self.again is None:
            return None
        first, again = self.time, ShortPair(self.again, self.rival).time
        return again / first if 0 < first < math.inf and 0 < again < math.inf else None


@dataclass(frozen=True)
class Verdict:
    """Whether the rival is better, and why; how many times the seconds of a step it takes."""

    is_gain: bool
    reason: str
    step_ratio: float = 1.0


def is_lost(pair: ShortPair) -> bool:
    """Return whether a pair ends the race: the rival took as much time or did not stay, or there is nothing to race to.

    One that was there before and ends above has come there by its noise, or is on its way up again.
    """
    return not falls_clearly(pair.stands.losses) or not pair.time > 1 or not pair.stays


def judge(pairs: Sequence[ShortPair], rival: str) -> Verdict:
    """Return what a race says of a rival, by name; it was run until a pair was lost, or for all pairs."""
    last, count = pairs[-1], len(pairs)
    steps = len(last.stands.losses)
    where = f"raced over {steps} steps from the weights as they are"
    if not falls_clearly(last.stands.losses):
        return Verdict(False, f"{where}: the loss did not fall clearly, and there is nothing to be raced to")
    if is_lost(last):
        slower = f"a step took {last.rival.step_s / last.stands.step_s:.2f}x the time"
        if last.samples == 0:
            return Verdict(False, f"{where}, {rival} did not reach the loss that the loop's own ended at; {slower}")
        if not last.stays and last.time > 1:
            there = "was sooner at the loss that the loop's own ended at, and ended above it"
            return Verdict(False, f"{where}, in pair {count} {rival} {there}; {slower}")
        told = f"needed {1 / last.samples:.2f}x the samples to the same loss, and {slower}"
        return Verdict(False, f"{where}, in pair {count} {rival} {told}: later by {1 / last.time:.2f}x")
    effect = ratio_interval([pair.time for pair in pairs])
    controls = [again for pair in pairs if (again := pair.control) is not None]
    control = ratio_interval(controls) if len(controls) == count > 1 else None
    told = f"{_in_words(ratio_interval([pair.samples for pair in pairs]))} fewer samples to the same loss, "
    told += f"{_in_words(effect)} less time"
    ratio = statistics.median(pair.rival.step_s / pair.stands.step_s for pair in pairs)
    if not is_gain(effect, control):
        return Verdict(False, f"{where} in {count} pairs, {rival} took {told}: {_unclear(effect, control, rival)}")
    return Verdict(True, f"{where} in {count} pairs: {told}; what comes after them was not tried", ratio)


def _unclear(effect: Interval, control: Interval | None, rival: str) -> str:
    if not effect.low > 1:
        return "not clear of chance"
    if control is None:
        return f"trained again, the loop ended in some pair where {rival} did not come"
    least = resolution(control)
    return f"below the {100 * least:.{0 if least >= 1 else 1}f}% that this is apart where the loop is trained again"


def _in_words(interval: Interval) -> str:
    return f"{interval.mean:.2f}x ({interval.low:.2f} to {interval.high:.2f})"
