"""Peak learning rate from a range test, in which the rate rises geometrically during training.

Source: Smith, "Cyclical Learning Rates for Training Neural Networks" (2017), section 3.3.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from trimtab.core.plan import Rejected

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
        scale: factor on the user's learning rates.
        loss: training loss.
        norm: gradient norm before the step and before clipping; None if unknown.
    """

    scale: float
    loss: float
    norm: float | None = None


@dataclass(frozen=True)
class RateChoice:
    """Result of a range test.

    Args:
        scale: chosen factor on the user's learning rates.
        reason: reason for the factor.
        rejected: rejected alternatives.
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

    The decrease starts at the mean of the first losses. A smoothed loss has a fraction (1 - s) / (1 + s) of the
    variance of a single step, and a mean of n steps 1 / n; the bound is NOISE standard deviations of the difference.
    The standard deviation of a step is estimated from changes between steps, divided by sqrt(2), so that a steady
    decrease has none.
    """
    until = losses[: max(lowest + 1, _FIRST)]
    changes = [after - before for before, after in itertools.pairwise(until)]
    step = statistics.stdev(changes) / math.sqrt(2)
    spread = step * math.sqrt((1 - SMOOTHING) / (1 + SMOOTHING) + 1 / _FIRST)
    fall = math.fsum(losses[:_FIRST]) / _FIRST - exponential_average(losses)[lowest]
    rounding = 1e-9 * max(map(abs, until))
    return fall, max(NOISE * spread, rounding)


def _fallen_at(points: Sequence[RatePoint]) -> float:
    """Return the learning-rate factor of a range test at which most of the decrease of the loss was done.

    The decrease is that of the moving average of the loss, from the first point to the minimum; "most" is the fraction
    `FALLEN`. The factor is interpolated between points.
    """
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
