"""Tuned plans: changes to training dynamics, from a learning rate range test or from paired short trainings."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from trimtab.core.batch_rule import WARMUP_FRACTION
from trimtab.core.choice import Choice, Effect, Rejected
from trimtab.core.objective import Budget
from trimtab.planner.statistics import Interval, is_gain, ratio_interval, resolution
from trimtab.planner.trial_statistics import over_budget
from trimtab.plans.plan import Plan
from trimtab.settings import unchanged

# Peak learning rate from a range test, in which the rate rises geometrically during training.

# At the lowest smoothed loss the rate is at the edge of divergence. A run holds its peak for long, so it takes at most
# this fraction.
SAFETY = 1 / 3
# After most of the decrease, the loss falls slower and is noisy, so the position of its minimum is random.
FALLEN = 0.85
_WINDOW = 7  # Losses per centred mean; unlike an exponential mean it does not lag behind the rate.
SMOOTHING = 0.8
DIVERGED = 1.5
# Least decrease of the loss, in standard deviations of the same comparison on noise alone.
NOISE = 3.0
_FIRST = 5


@dataclass(frozen=True)
class RatePoint:
    """A step of the range test.

    The loss is from before the step and reflects the rates until then; `FALLEN` and `SAFETY` were set on curves with
    this pairing.

    Args:
        norm: gradient norm before the step and before clipping; None if unknown.
    """

    scale: float
    loss: float
    norm: float | None = None


@dataclass(frozen=True)
class RateChoice:
    """Result of a range test.

    Args:
        norm: typical gradient norm at the factor; None if unknown.
        rising_steps: steps of rising rate until the lowest loss; None if unknown.
        code: stable identifier of the reason, such as "range_test.diverged".
    """

    scale: float
    reason: str
    rejected: tuple[Rejected, ...] = ()
    norm: float | None = None
    rising_steps: int | None = None
    code: str = ""


def has_diverged(losses: Sequence[float]) -> bool:
    """Return True if the test can stop.

    The smoothed loss is non-finite, or exceeds its minimum by half the minimum's absolute value.
    """
    smooth = exponential_average(losses)
    if not smooth or not math.isfinite(smooth[-1]):
        return bool(smooth)
    lowest = min(smooth)
    return smooth[-1] - lowest > (DIVERGED - 1) * abs(lowest)


def choose_rate(points: Sequence[RatePoint]) -> RateChoice:
    """Return the factor on the user's rates that a range test supports.

    The smaller of a third of the rate at the lowest smoothed loss, and the rate at which most of the decrease was done.
    The user's rate is the lower bound, and is kept if the loss is lowest at that rate or did not fall by more than its
    noise.
    """
    finite = [point for point in points if math.isfinite(point.loss)]
    if len(finite) < _FIRST:
        return RateChoice(1.0, "unchanged: the range test diverged at once", code="range_test.diverged")
    smooth = exponential_average([point.loss for point in finite])
    lowest = min(range(len(smooth)), key=smooth.__getitem__)
    edge = finite[lowest].scale
    fallen = _fallen_at(finite)
    scale = float(f"{max(1.0, min(edge * SAFETY, fallen)):.2g}")
    if scale == 1.0:
        lowest_at = f"the loss of the range test was lowest at {edge:.3g}x the user's learning rate"
        if fallen < edge * SAFETY:
            lowest_at = f"{100 * FALLEN:.0f}% of the decrease of the loss was reached at the user's learning rate"
        return RateChoice(1.0, f"unchanged: {lowest_at}", code="range_test.no_higher_rate")
    fall, least = _fall([point.loss for point in finite], lowest)
    if not fall > least:
        text = f"the loss of the range test decreased by {fall:.2g}, which is within its noise ({least:.2g})"
        return RateChoice(1.0, f"unchanged: {text}", code="range_test.no_decrease")
    where = "the highest rate of the range test" if lowest == len(points) - 1 else "the rate with the lowest loss"
    reason, code = f"a third of {edge:.3g}x, {where} ({len(points)} steps)", "range_test.third_of_edge"
    if fallen < edge * SAFETY:
        reason = f"the rate at which {100 * FALLEN:.0f}% of the decrease of the loss was reached ({len(points)} steps)"
        code = "range_test.most_of_decrease"
    rejected = (Rejected(1.0, "the loss decreased further at higher rates", "range_test.still_falling"),)
    return RateChoice(scale, reason, rejected, typical_norm(points, scale), lowest, code)


def typical_norm(points: Sequence[RatePoint], scale: float) -> float | None:
    """Return the median gradient norm of the steps with rates nearest to a factor; None if unknown.

    Most gradients of a run at that rate have about this norm, and a far larger norm is an outlier. Norms at the user's
    own rate, at the begin of the test, are larger: a clipping limit from these norms would let outliers pass.
    """
    known = [(abs(math.log(p.scale / scale)), p.norm) for p in points if p.norm is not None and math.isfinite(p.norm)]
    near = [norm for _, norm in sorted(known)[:_WINDOW]]
    return statistics.median(near) if near else None


def falls_clearly(losses: Sequence[float]) -> bool:
    """Return True if the losses fall by more than their noise; False if any is non-finite."""
    if len(losses) < _FIRST or not all(map(math.isfinite, losses)):
        return False
    fall, least = _fall(losses, len(losses) - 1)
    return fall > least


def _fall(losses: Sequence[float], lowest: int) -> tuple[float, float]:
    """Return (decrease of the smoothed loss to its minimum, upper bound of the decrease by noise alone).

    A smoothed loss has (1 - s) / (1 + s) of the variance of a single step, and the mean of the first n losses 1 / n;
    the bound is NOISE standard deviations of the difference. The deviation of a step is that of changes between steps,
    divided by sqrt(2), so that a steady decrease has none.
    """
    until = losses[: max(lowest + 1, _FIRST)]
    changes = [after - before for before, after in itertools.pairwise(until)]
    step = statistics.stdev(changes) / math.sqrt(2)
    spread = step * math.sqrt((1 - SMOOTHING) / (1 + SMOOTHING) + 1 / _FIRST)
    fall = math.fsum(losses[:_FIRST]) / _FIRST - exponential_average(losses)[lowest]
    rounding = 1e-9 * max(map(abs, until))
    return fall, max(NOISE * spread, rounding)


def _fallen_at(points: Sequence[RatePoint]) -> float:
    """Return the factor, interpolated, at which `FALLEN` of the decrease of the loss's moving average was done."""
    reach = _WINDOW // 2
    losses = [point.loss for point in points]
    near = [losses[max(0, i - reach) : i + reach + 1] for i in range(len(losses))]
    means = [math.fsum(each) / len(each) for each in near]
    limit = means[0] - FALLEN * (means[0] - min(means))
    at = next(i for i, mean in enumerate(means) if mean <= limit)
    if at == 0:
        return points[at].scale
    share = (means[at - 1] - limit) / (means[at - 1] - means[at])
    return float(points[at - 1].scale * (points[at].scale / points[at - 1].scale) ** share)


def exponential_average(losses: Sequence[float]) -> list[float]:
    """Return the exponential moving average with bias correction, as in Adam."""
    out: list[float] = []
    mean = 0.0
    for count, loss in enumerate(losses, 1):
        mean = SMOOTHING * mean + (1 - SMOOTHING) * loss
        out.append(mean / (1 - SMOOTHING**count))
    return out


# Verdict on short paired trainings of two plans: which reaches the other's final loss in less time, and
# significance.


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
    def samples_at_equal_loss(self) -> float:
        """Ratio of the incumbent's to the rival's samples until the higher of both final losses; 0 if non-finite."""
        target = max(self.stands.ended_at, self.rival.ended_at)
        if not (math.isfinite(self.stands.ended_at) and math.isfinite(self.rival.ended_at)):
            return 0.0
        return self.stands.steps_to(target) / self.rival.steps_to(target)

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
    """Return the verdict on a rival from its pairs so far, up to the first lost one or all."""
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
    if not effect.low > 1:
        return "paired_run.not_significant", "not significant"
    if control is None:
        text = f"the A/A control failed, because {rival} did not reach the final loss of the repeated loop in some pair"
        return "paired_run.no_control", text
    least = f"{100 * resolution(control):.{0 if resolution(control) >= 1 else 1}f}%"
    return "paired_run.below_control", f"below {least}, the difference between two runs of the unchanged loop"


def _in_words(interval: Interval) -> str:
    return f"{interval.mean:.2f}x ({interval.low:.2f} to {interval.high:.2f})"


_LATER, _LATER_CODE = "takes longer to the same loss", "paired_run.later"
_UNCLIPPED = "not tried: a range test is too short for rare outliers"
# The warm-up takes at most this fraction of a short run, so that enough steps remain at the full rate.
_LONGEST_RISE = 0.3


def adapt_learning_rate(
    plan: Plan, rates: RateChoice, search_s: float, *, may_clip: bool = False, run_steps: int | None = None
) -> Plan:
    """Return the tuned plan with the peak learning rate from a range test, warm-up and cosine decay.

    If the test keeps the user's rate, the user's schedule also stays, as nothing supports a change.

    Args:
        search_s: seconds of the search, charged to the plan.
        may_clip: gradients may be clipped at the typical norm for the rate if the loop does not clip. Allowed for
            optimizers with a step length independent of the gradient's scale.
        run_steps: steps of the run, if known: the warm-up is no shorter than the rise of the test, or 5% of the run.
    """
    plan = _searched(plan, search_s)
    scale = Choice(rates.scale, rates.reason, Effect.TRAINING, rates.scale != 1.0, rates.rejected, rates.code)
    if not scale.changed:
        text = "unchanged: the learning rate is unchanged, and a schedule was not tried alone"
        kept = replace(plan.schedule, reason=text, code="schedule.rate_unchanged")
        return plan.having(learning_rate_scale=scale, schedule=kept)
    schedule = Choice(
        "warmup_cosine",
        "linear warm-up to the higher learning rate, then cosine decay to a tenth of it (paper eq. 10)",
        Effect.TRAINING,
        changed=True,
        rejected=(
            Rejected("user", "not tried: a range test finds a peak rate, not a constant rate", "setting.not_tried"),
        ),
        code="schedule.for_higher_rate",
    )
    rise = _rise(rates.rising_steps, run_steps)
    plan = plan.having(learning_rate_scale=scale, schedule=schedule, warmup_fraction=rise)
    if not may_clip or not rates.norm or plan.clip_norm.value is not None:
        return plan
    reason = "the median gradient norm at this learning rate in the range test; larger gradients are clipped"
    unclipped = (Rejected(None, _UNCLIPPED, "setting.not_tried"),)
    norm = float(f"{rates.norm:.2g}")
    clip = Choice(norm, reason, Effect.TRAINING, changed=True, rejected=unclipped, code="clip.median_norm")
    return plan.having(clip_norm=clip)


def _rise(rising_steps: int | None, run_steps: int | None) -> Choice:
    """Return the warm-up fraction: no shorter than the range test's rise, as transients last a number of steps."""
    share, bound = float(f"{(rising_steps or 0) / (run_steps or 1):.2g}"), ""
    if run_steps is None or share <= WARMUP_FRACTION:
        return unchanged("warmup_fraction")
    if share > _LONGEST_RISE:
        share, bound = _LONGEST_RISE, f", limited to {100 * _LONGEST_RISE:.0f}% of the run"
    reason = f"as long as the rise to the lowest loss in the range test: {rising_steps} of {run_steps} steps{bound}"
    shorter = "not tried: the range test did not raise the learning rate faster"
    rejected = (Rejected(WARMUP_FRACTION, shorter, "setting.not_tried"),)
    return Choice(share, reason, Effect.TRAINING, changed=True, rejected=rejected, code="warmup.of_range_test")


def adapt_setting(
    name: str, stands: Plan, rival: Plan, verdict: PairedTrainingVerdict, search_s: float, what: str = ""
) -> Plan:
    """Return the rival, with another value of a setting, as a tuned plan if it won; else the incumbent with the reason.

    Args:
        what: description of the rival's value, put before the reason.
    """
    mine, theirs, why = getattr(stands, name), getattr(rival, name), verdict.reason
    if not verdict.is_gain:
        lost = (Rejected(theirs.value, why, verdict.code),)
        kept = replace(getattr(Plan, name), reason=why, rejected=lost, code=verdict.code)
        return replace(_searched(stands, search_s), **{name: kept})
    lost = (Rejected(mine.value, _LATER, _LATER_CODE),)
    won = replace(theirs, reason=f"{what}; {why}" if what else why, rejected=lost, code=verdict.code)
    return replace(_won(stands, rival, verdict, search_s), **{name: won})


def adapt_schedule(stands: Plan, rival: Plan, verdict: PairedTrainingVerdict, search_s: float) -> Plan:
    """Return the plan with the rival's schedule if it won; otherwise the incumbent with the rejected schedule.

    A schedule does not change a step's cost.
    """
    mine, theirs = stands.schedule, rival.schedule
    if not verdict.is_gain:
        kept = replace(mine, rejected=(*mine.rejected, Rejected(theirs.value, verdict.reason, verdict.code)))
        return _searched(stands, search_s).having(schedule=kept)
    rejected = (*mine.rejected, Rejected(mine.value, _LATER, _LATER_CODE))
    won = replace(theirs, reason=verdict.reason, rejected=rejected, code=verdict.code)
    return _searched(stands, search_s).having(schedule=won)


def within_limits(budget: Budget, rival: Plan, verdict: PairedTrainingVerdict) -> PairedTrainingVerdict:
    """Return the verdict, with no gain if the rival's measured step exceeds a hard limit.

    Energy assumes the plan's power.
    """
    cost = rival.measured or rival.predicted
    if cost is None or not verdict.is_gain:
        return verdict
    energy_j = None if cost.energy_j is None else cost.energy_j * verdict.step_ratio
    over = over_budget(cost.step_s * verdict.step_ratio, None, budget, energy_j)
    if over is None:
        return verdict
    return replace(verdict, is_gain=False, reason=f"{over.text}; {verdict.reason}", code=over.code)


def _searched(plan: Plan, search_s: float) -> Plan:
    return replace(plan, search_s=plan.search_s + search_s, planning_s=plan.planning_s + search_s)


def _won(stands: Plan, rival: Plan, verdict: PairedTrainingVerdict, search_s: float) -> Plan:
    """Return the rival with the search time of both plans, and step times corrected by the comparison."""
    told = {name: getattr(rival, name) for name in ("predicted", "measured")}
    slower: dict[str, Any] = {
        name: cost and replace(cost, step_s=cost.step_s * verdict.step_ratio, between_s=None, energy_j=None)
        for name, cost in told.items()
    }
    slower["verified"] = rival.verified and tuple(bound / verdict.step_ratio for bound in rival.verified)
    spent = _searched(stands, search_s)
    return replace(rival, search_s=spent.search_s, planning_s=spent.planning_s, **slower)
