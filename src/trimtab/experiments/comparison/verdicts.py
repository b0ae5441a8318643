"""Verdicts from confidence intervals (math: section 8)."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from trimtab.experiments.comparison.comparison_result import NO_HARM, NO_VERDICT, Ratio, Verdict
from trimtab.experiments.comparison.comparison_statistics import bounds
from trimtab.planner.statistics import MIN_PAIRS_FOR_VERDICT, Interval, resolution

NON_INFERIOR = 0.97
QUALITY = 0.5  # points of accuracy, or percent of perplexity
_POWER = 0.90


def ratio_in_words(ratio: Ratio) -> str:
    """Return a ratio as `1.31x (95% 1.20 to 1.43, n=8)`, or the mean alone without an interval."""
    if ratio.low is None or ratio.high is None:
        return f"{ratio.mean:.2f}x"
    return f"{ratio.mean:.2f}x (95% {ratio.low:.2f} to {ratio.high:.2f}, n={ratio.n})"


def speed_verdict(ratio: Ratio, control: Interval | None, arm: str, against: str) -> Verdict:
    """Return gain, harm or no gain; no verdict below five pairs of the ratio or of the A/A control."""
    side = clear_side(ratio, control)
    if isinstance(side, Verdict):
        return side
    found = ratio_in_words(ratio)
    if side > 0:
        return Verdict("gain", f"{arm} is {found} as fast as {against}", "speed.gain")
    if side < 0:
        return Verdict("harm", f"{arm} is slower than {against}: {found}", "speed.harm")
    sentence = f"{arm} against {against}: {found}, not significant; {_resolved(control)}"
    return Verdict("no gain", sentence, "speed.not_significant")


def interaction_verdict(ratio: Ratio, control: Interval | None, what: str) -> Verdict:
    """Return the verdict on an interaction: "more together", "less together", "none found" or "no verdict".

    Args:
        ratio: gain of the changes together over the product of the separate gains.
        control: the same ratio for identical loops, with a true value of 1.
        what: name of the changes.
    """
    side = clear_side(ratio, control)
    if isinstance(side, Verdict):
        return side
    found = ratio_in_words(ratio)
    if side == 0:
        sentence = f"{what}: {found} the product of the separate effects, not significant; {_resolved(control)}"
        return Verdict("none found", sentence, "interaction.not_significant")
    more = "more" if side > 0 else "less"
    sentence = f"{what}: {found} the product of the separate effects, {more} gain together"
    return Verdict(f"{more} together", sentence, f"interaction.{more}")


def clear_side(ratio: Ratio, control: Interval | None) -> int | Verdict:
    """Return 1 or -1 if a ratio is significantly above or below 1, beyond the control's resolution; otherwise 0.

    Returns a "no verdict" below five pairs of the ratio or of the A/A control.
    """
    if (ends := bounds(ratio)) is None:
        return too_few(ratio)
    low, high = ends
    if control is None or control.n < MIN_PAIRS_FOR_VERDICT:
        return without_control(control, ratio_in_words(ratio))
    resolved = resolution(control)
    # If the control's interval excludes 1, the ratio must also be clear of that bias.
    least, most = (1.0, 1.0) if control.low <= 1 <= control.high else (min(1.0, control.low), max(1.0, control.high))
    return int(low > most and ratio.mean - 1 > resolved) - int(high < least and 1 - ratio.mean > resolved)


def without_control(control: Interval | None, found: str) -> Verdict:
    """Return the "no verdict" for a figure without an A/A control, or with too few pairs of the control."""
    if control is None:
        return Verdict(NO_VERDICT, f"no A/A control ran, so {found} may be noise", "control.missing")
    sentence = f"the A/A control has {control.n} of {MIN_PAIRS_FOR_VERDICT} pairs, so {found} may be noise"
    return Verdict(NO_VERDICT, sentence, "control.too_few")


def _resolved(control: Interval | None) -> str:
    return f"the A/A control resolves {100 * resolution(control):.2g}%"


def control_verdict(ratio: Ratio, what: str = "the reference") -> Verdict:
    """Return the verdict on the A/A control: its interval is the resolution, and should contain 1."""
    if (ends := bounds(ratio)) is None:
        return too_few(ratio)
    low, high = ends
    if low <= 1 <= high:
        sentence = f"{what} against itself: {ratio_in_words(ratio)}; this interval is the resolution"
        return Verdict("no gain", sentence, "control.unbiased")
    sentence = f"two runs of the same loop differ significantly: {ratio_in_words(ratio)}"
    return Verdict(NO_VERDICT, sentence, "control.biased")


def non_inferiority(ratio: Ratio) -> Verdict:
    """Return "no harm" if the interval lies at or above 0.97, "harm" if below, otherwise "no verdict"."""
    if (ends := bounds(ratio)) is None:
        return too_few(ratio)
    low, high = ends
    found = f"{ratio.mean:.3f}x (95% {low:.3f} to {high:.3f}, n={ratio.n}), limit {NON_INFERIOR}; {_power(ratio)}"
    if low >= NON_INFERIOR:
        return Verdict(NO_HARM, f"no harm: {found}", "non_inferiority.passed")
    if high < NON_INFERIOR:
        return Verdict("harm", f"harm: {found}", "non_inferiority.failed")
    return Verdict(NO_VERDICT, f"undecided: {found}", "non_inferiority.undecided")


def _power(ratio: Ratio) -> str:
    pairs = pairs_for_power(ratio.pairs)
    if pairs is None:
        return f"no number of pairs gives {_POWER:.0%} power at this mean"
    return f"{pairs} pairs give {_POWER:.0%} power at this noise"


def pairs_for_power(ratios: Sequence[float]) -> int | None:
    """Return the number of pairs needed to show non-inferiority with 90% power at the observed mean and deviation.

    `n = ((z_.975 + z_.90) * s / (mean_log - log .97))^2` on log ratios (normal approximation), at least 5; None for a
    mean at or below 0.97.
    """
    logs = [math.log(ratio) for ratio in ratios]
    margin = statistics.fmean(logs) - math.log(NON_INFERIOR)
    if margin <= 0:
        return None
    normal = statistics.NormalDist()
    z = normal.inv_cdf(0.975) + normal.inv_cdf(_POWER)
    return max(MIN_PAIRS_FOR_VERDICT, math.ceil((z * statistics.stdev(logs) / margin) ** 2))


def quality_verdict(ratio: Ratio, plan_kind: str, unit: str) -> Verdict:
    """Return the verdict on a difference of the final metric: significant, and above half a point or percent.

    "no gain" means an interval within the limit; for a tuned plan, a lower bound within the limit suffices. An
    equivalent plan keeps the numerics, so a better metric is no gain.

    Args:
        ratio: differences of the final metric.
        plan_kind: "equivalent" for an equivalent plan, "tuned" for a tuned plan.
        unit: unit of the metric, as in `Metric`.
    """
    ends = _finite(ratio)
    if isinstance(ends, Verdict):
        return ends
    low, high = ends
    found = f"{quality_figures(ratio, unit)}, limit {QUALITY}"
    if plan_kind == "tuned" and low > 0 and ratio.mean > QUALITY:
        return Verdict("gain", f"quality is higher: {found}", "quality.higher")
    if low >= -QUALITY and (plan_kind == "tuned" or high <= QUALITY):
        return Verdict("no gain", f"quality is within the limit: {found}", "quality.within_limit")
    if high < 0 and ratio.mean < -QUALITY:
        return Verdict("harm", f"quality is lower: {found}", "quality.lower")
    return Verdict(NO_VERDICT, f"equal quality is not shown: {found}", "quality.undecided")


def quality_interaction(ratio: Ratio, what: str) -> Verdict:
    """Return the verdict on an interaction in quality: significant, and above half a point or percent.

    Args:
        ratio: difference of two metric differences, or ratio of two ratios in percent; above 0 is better.
        what: name of the changes.
    """
    ends = _finite(ratio)
    if isinstance(ends, Verdict):
        return ends
    low, high = ends
    found = f"{what}: {quality_figures(ratio)} in addition to the separate effects"
    if low > 0 and ratio.mean > QUALITY:
        return Verdict("more together", found, "interaction.more")
    if high < 0 and ratio.mean < -QUALITY:
        return Verdict("less together", found, "interaction.less")
    if low >= -QUALITY and high <= QUALITY:
        return Verdict("none found", f"{found}, limit {QUALITY}", "interaction.within_limit")
    return Verdict(NO_VERDICT, f"{found}, limit {QUALITY}: undecided", "interaction.undecided")


def quality_figures(ratio: Ratio, unit: str = "") -> str:
    """Return a difference as `+4.70 points (95% +2.72 to +6.68, n=5)`, or the mean alone without an interval."""
    words = {"share": " points", "percent": " points", "relative": " percent"}.get(unit, "")
    if ratio.low is None or ratio.high is None:
        return f"{ratio.mean:+.2f}{words}"
    return f"{ratio.mean:+.2f}{words} (95% {ratio.low:+.2f} to {ratio.high:+.2f}, n={ratio.n})"


def _finite(ratio: Ratio) -> tuple[float, float] | Verdict:
    """Return the interval of metric differences, or a "no verdict" with the reason."""
    if not all(map(math.isfinite, ratio.pairs)):
        return Verdict(NO_VERDICT, "the metric is NaN or infinite in some pair", "metric.nonfinite")
    return bounds(ratio) or too_few(ratio)


def too_few(ratio: Ratio) -> Verdict:
    """Return a "no verdict" for too few pairs."""
    return Verdict(NO_VERDICT, f"{ratio.n} pairs: a verdict needs {MIN_PAIRS_FOR_VERDICT}", "pairs.too_few")
