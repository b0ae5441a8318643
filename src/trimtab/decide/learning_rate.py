"""Peak learning rate from a range test: the rate rises geometrically while training; the loss says where it helps.

Source: Smith, "Cyclical Learning Rates for Training Neural Networks" (2017), section 3.3.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from trimtab.core.plan import Rejected

# The rate at the lowest smoothed loss is already at the edge of divergence; a run holds its peak for long, so it takes
# this fraction of it at the most.
SAFETY = 1 / 3
# Past most of its way down a loss falls slower and turns ragged: where on that floor it is lowest is chance.
FALLEN = 0.85
_WINDOW = 7  # losses of a centred mean, which does not lag behind the rate as an exponential one does
SMOOTHING = 0.8
DIVERGED = 1.5
# A loss fell when it did by this many standard deviations of what the comparison makes of noise alone.
NOISE = 3.0
_FIRST = 5


@dataclass(frozen=True)
class RatePoint:
    """One step of the test: factor on the user's rates, the training loss of that step, and its gradient's norm.

    The loss is from before the step, so that it shows what the rates until then did. `FALLEN` and `SAFETY` were set on
    curves that pair them so. The norm is from before the step, too, and before it is clipped; None: not known.
    """

    scale: float
    loss: float
    norm: float | None = None


@dataclass(frozen=True)
class RateChoice:
    """The factor chosen, why, and what lost; and of the test, where they are known:

    the norm of gradients that is typical at that factor, and how many steps the rate rose until the loss was lowest.
    """

    scale: float
    reason: str
    losers: tuple[Rejected, ...] = ()
    norm: float | None = None
    rising_steps: int | None = None


def has_diverged(losses: Sequence[float]) -> bool:
    """Return whether the test can stop: the smoothed loss is not finite, or half its lowest above it (of any sign)."""
    smooth = smoothed(losses)
    if not smooth or not math.isfinite(smooth[-1]):
        return bool(smooth)
    lowest = min(smooth)
    return smooth[-1] - lowest > (DIVERGED - 1) * abs(lowest)


def choose_rate(points: Sequence[RatePoint]) -> RateChoice:
    """Return a third of the rate at which the smoothed loss was lowest, or where it had come most of its way down.

    The lower of the two, never below the user's own. A test whose loss is lowest at the user's own rate, or did not
    fall by more than its noise, keeps it.
    """
    finite = [point for point in points if math.isfinite(point.loss)]
    if len(finite) < _FIRST:
        return RateChoice(1.0, "the range test diverged at once: the user's rate is kept")
    smooth = smoothed([point.loss for point in finite])
    lowest = min(range(len(smooth)), key=smooth.__getitem__)
    edge = finite[lowest].scale
    fallen = _fallen_at(finite)
    scale = float(f"{max(1.0, min(edge * SAFETY, fallen)):.2g}")
    if scale == 1.0:
        why = "most of its fall had come there" if fallen < edge * SAFETY else f"it was lowest at {edge:.3g}x"
        return RateChoice(1.0, f"the loss gains nothing safe above the user's rate: {why}")
    fall, least = _fall([point.loss for point in finite], lowest)
    if not fall > least:
        figures = f"by {fall:.2g}, and {least:.2g} would be clear of its noise"
        return RateChoice(1.0, f"the loss of the range test did not fall clearly ({figures}): the user's rate is kept")
    where = "where the loss of the range test was lowest"
    if lowest == len(points) - 1:
        where = "the test's limit: the loss still fell there"
    reason = f"a third of {edge:.3g}x, {where} ({len(points)} steps)"
    if fallen < edge * SAFETY:
        reason = f"where {100 * FALLEN:.0f}% of the fall of the loss in the range test had come ({len(points)} steps)"
    losers = (Rejected(1.0, "the loss still fell at higher rates"),)
    return RateChoice(scale, reason, losers, typical_norm(points, scale), lowest)


def typical_norm(points: Sequence[RatePoint], scale: float) -> float | None:
    """Return the median norm of the gradients of the steps whose rates were nearest to a factor; None: none is known.

    In a run at that rate most gradients are about as large, and one that is far larger is an accident. At the user's
    own rate, where the test begins, they are larger: a limit by those would let accidents pass.
    """
    known = [(abs(math.log(p.scale / scale)), p.norm) for p in points if p.norm is not None and math.isfinite(p.norm)]
    near = [norm for _, norm in sorted(known)[:_WINDOW]]
    return statistics.median(near) if near else None


def falls_clearly(losses: Sequence[float]) -> bool:
    """Return whether losses of a training fall to their end by more than their noise; never, where one is no number."""
    if len(losses) < _FIRST or not all(map(math.isfinite, losses)):
        return False
    fall, least = _fall(losses, len(losses) - 1)
    return fall > least


def _fall(losses: Sequence[float], lowest: int) -> tuple[float, float]:
    """Return (how far the smoothed loss fell to its lowest, how far noise alone could have taken it).

    The fall is from the mean of the first losses. A smoothed loss has the share (1 - s) / (1 + s) of the variance of
    one step, a mean of n steps 1 / n of it; NOISE deviations of their difference is the bound. The deviation of one
    step is that of its change to the next, by sqrt(2): a loss that falls evenly has none.
    """
    until = losses[: max(lowest + 1, _FIRST)]
    changes = [after - before for before, after in itertools.pairwise(until)]
    step = statistics.stdev(changes) / math.sqrt(2)
    spread = step * math.sqrt((1 - SMOOTHING) / (1 + SMOOTHING) + 1 / _FIRST)
    fall = math.fsum(losses[:_FIRST]) / _FIRST - smoothed(losses)[lowest]
    rounding = 1e-9 * max(map(abs, until))
    return fall, max(NOISE * spread, rounding)


def _fallen_at(points: Sequence[RatePoint]) -> float:
    """Return the scale at which the loss had come `FALLEN` of its way from its first value to its lowest."""
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


def smoothed(losses: Sequence[float]) -> list[float]:
    """Return the exponential mean, corrected for its start (as Adam's)."""
    out: list[float] = []
    mean = 0.0
    for count, loss in enumerate(losses, 1):
        mean = SMOOTHING * mean + (1 - SMOOTHING) * loss
        out.append(mean / (1 - SMOOTHING**count))
    return out
