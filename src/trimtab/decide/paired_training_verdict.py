"""Verdict on short paired trainings of two plans: which reaches the other's final loss in less time, and significance.

In a pair, both train from the same weights on the same batches. The target is the final smoothed loss of the incumbent;
the rival's steps to the target and seconds per step are compared with the incumbent's. The smoothed loss lags, so small
numbers of steps are overestimated. The incumbent is trained a second time, and the comparison repeated with the second
training's final loss as the target: the ratio of both figures is the control, as they differ by chance only (math:
section 8).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from trimtab.decide.learning_rate import exponential_average, falls_clearly
from trimtab.decide.statistics import Interval, is_gain, ratio_interval, resolution


@dataclass(frozen=True)
class ShortRun:
    """A training: loss before each step, and median seconds per step."""

    losses: tuple[float, ...]
    step_s: float

    @property
    def ended_at(self) -> float:
        """Final smoothed loss."""
        return exponential_average(self.losses)[-1] if self.losses else math.nan

    def steps_to(self, target: float) -> float:
        """Return the steps until the smoothed loss is at the target for two steps in a row; inf if never."""
        smooth = exponential_average(self.losses)
        for index, loss in enumerate(smooth):
            if loss <= target and smooth[min(index + 1, len(smooth) - 1)] <= target:
                if index == 0:
                    return 1.0
                before = smooth[index - 1]
                return index + (before - target) / (before - loss)
        return math.inf


@dataclass(frozen=True)
class ShortPair:
    """The incumbent plan, its rival, and the incumbent again; None if the rival had already lost."""

    stands: ShortRun
    rival: ShortRun
    again: ShortRun | None = None

    @property
    def samples(self) -> float:
        """Ratio of the incumbent's to the rival's samples until the incumbent's final loss; 0 if never reached.

        The incumbent's count may be less than its whole training, if its loss has flattened before the end.
        """
        target = self.stands.ended_at
        return self.stands.steps_to(target) / self.rival.steps_to(target)

    @property
    def time(self) -> float:
        """Ratio of the incumbent's to the rival's time until the target."""
        return self.samples * self.stands.step_s / self.rival.step_s

    @property
    def stays(self) -> bool:
        """True if the rival's final loss is at most the incumbent's; False if non-finite."""
        return self.rival.ended_at <= self.stands.ended_at

    @property
    def control(self) -> float | None:
        """`time` against the second incumbent training, divided by `time`; None if either is not finite and positive.

        The target of both figures is the respective training's own final loss. With a common target, two trainings on a
        plateau may differ by most of their length, although a rival's figure depends little on either end.
        """
        if self.again is None:
            return None
        first, again = self.time, ShortPair(self.again, self.rival).time
        return again / first if 0 < first < math.inf and 0 < again < math.inf else None


@dataclass(frozen=True)
class PairedTrainingVerdict:
    """Verdict on a rival.

    Args:
        is_gain: True if the rival won.
        reason: sentence with the figures.
        step_ratio: ratio of the rival's to the incumbent's seconds per step.
        code: stable identifier of the reason, such as "paired_run.later".
    """

    is_gain: bool
    reason: str
    step_ratio: float = 1.0
    code: str = ""


def is_lost(pair: ShortPair) -> bool:
    """Return True if a pair ends the comparison.

    The rival was not faster or ended higher, or the incumbent's loss did not clearly fall. A rival that reached the
    target earlier but ends above the target did so by noise, or its loss is rising again.
    """
    return not falls_clearly(pair.stands.losses) or not pair.time > 1 or not pair.stays


def judge_rival(pairs: Sequence[ShortPair], rival: str) -> PairedTrainingVerdict:
    """Return the verdict on a rival.

    Args:
        pairs: pairs so far, up to the first lost one or all.
        rival: name of the rival, for the reason.
    """
    last, count = pairs[-1], len(pairs)
    steps = len(last.stands.losses)
    where = f"paired runs of {steps} steps from the current weights"
    if not falls_clearly(last.stands.losses):
        text = f"{where}: the loss of the unchanged loop did not decrease significantly, so there is no target loss"
        return PairedTrainingVerdict(False, text, code="paired_run.no_target")
    if is_lost(last):
        slower = f"a step took {last.rival.step_s / last.stands.step_s:.2f}x the time"
        if last.samples == 0:
            text = f"{where}: {rival} did not reach the final loss of the unchanged loop; {slower}"
            return PairedTrainingVerdict(False, text, code="paired_run.target_not_reached")
        if not last.stays and last.time > 1:
            text = f"in pair {count} {rival} reached the final loss of the unchanged loop earlier, but ended above it"
            return PairedTrainingVerdict(False, f"{where}: {text}; {slower}", code="paired_run.ended_above")
        needed = f"needed {1 / last.samples:.2f}x the samples to the same loss, and {slower}"
        text = f"{where}: in pair {count} {rival} {needed}, so it took {1 / last.time:.2f}x the time to the same loss"
        return PairedTrainingVerdict(False, text, code="paired_run.later")
    effect = ratio_interval([pair.time for pair in pairs])
    controls = [again for pair in pairs if (again := pair.control) is not None]
    control = ratio_interval(controls) if len(controls) == count > 1 else None
    saved = f"{_in_words(ratio_interval([pair.samples for pair in pairs]))} fewer samples to the same loss, "
    saved += f"{_in_words(effect)} less time"
    ratio = statistics.median(pair.rival.step_s / pair.stands.step_s for pair in pairs)
    if not is_gain(effect, control):
        code, text = _insignificant(effect, control, rival)
        return PairedTrainingVerdict(False, f"{where}, {count} pairs: {rival} took {saved}; {text}", code=code)
    text = f"{where}, {count} pairs: {rival} took {saved}; later steps were not tried"
    return PairedTrainingVerdict(True, text, ratio, "paired_run.gain")


def _insignificant(effect: Interval, control: Interval | None, rival: str) -> tuple[str, str]:
    """Return the code and the reason why a gain is not significant."""
    if not effect.low > 1:
        return "paired_run.not_significant", "not significant"
    if control is None:
        text = f"the A/A control failed, because {rival} did not reach the final loss of the repeated loop in some pair"
        return "paired_run.no_control", text
    least = f"{100 * resolution(control):.{0 if resolution(control) >= 1 else 1}f}%"
    return "paired_run.below_control", f"below {least}, the difference between two runs of the unchanged loop"


def _in_words(interval: Interval) -> str:
    return f"{interval.mean:.2f}x ({interval.low:.2f} to {interval.high:.2f})"
