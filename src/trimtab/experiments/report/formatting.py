"""Formatting of all numbers in a report."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence

from trimtab.core.energy_reading import Provenance
from trimtab.core.units import format_bytes, format_count, format_seconds
from trimtab.experiments.comparison.comparison_result import NO_VERDICT, Arm, Comparison, Ratio, RatioRow, Verdict
from trimtab.experiments.comparison.comparison_statistics import bounds
from trimtab.planner.statistics import MIN_PAIRS_FOR_VERDICT as PAIRS_FOR_A_VERDICT

Words = Callable[[float], str]
UNMEASURED = "not measured"
NEVER = "never"
PLAN_KINDS = {"equivalent": "Equivalent plan", "tuned": "Tuned plan", "": "Recipes and controls"}
PLANS = {"equivalent": "the equivalent plan", "tuned": "the tuned plan", "strong": "for P2 (equivalent plan)"}
MAX_PAIRS_SHOWN = 16  # report.json contains all pairs.
MAX_TEXT = 600  # Keeps a traceback in an error field from filling the page.


def seconds(value: float | None) -> str:
    """Return a duration as text; infinity is "never"."""
    if value is None or math.isnan(value):
        return UNMEASURED
    return format_seconds(value) if value else "0 s"


def signed_seconds(value: float) -> str:
    """Return a duration as text, negative for lost time."""
    return f"-{seconds(-value)}" if value < 0 else seconds(value)


def size(value: float | None) -> str:
    """Return a size in binary units."""
    return UNMEASURED if value is None else format_bytes(value)


def rate(value: float | None, terms: str) -> str:
    """Return a rate such as `12.3 k tokens/s`."""
    return UNMEASURED if value is None or not math.isfinite(value) else f"{format_count(value)} {terms}/s"


def ratio(value: float) -> str:
    """Return a ratio such as `1.423x`: three decimals, because relevant effects can be as small as the resolution."""
    if not math.isfinite(value):
        return NEVER if value > 0 else UNMEASURED
    return f"{value:.3f}x" if abs(value) < 10 else f"{value:.4g}x"


def pairs(row: RatioRow) -> str:
    """Return the number of pairs of a ratio, such as `8 (5 whole)` if some pairs were only timed for a few steps."""
    if row.whole in (None, 0, row.ratio.n):
        return str(row.ratio.n)
    return f"{row.ratio.n} ({row.whole} whole)"


def percent(value: float | None) -> str:
    """Return a signed relative difference such as `+3.1%`."""
    if value is None or not math.isfinite(value):
        return UNMEASURED
    return f"{round(100 * value, 2) + 0.0:+.2f}%"  # Adding zero avoids "-0.00%".


def share(value: float | None) -> str:
    """Return a fraction such as `42.3%`."""
    return UNMEASURED if value is None or not math.isfinite(value) else f"{100 * value:.1f}%"


def signed_points(value: float) -> str:
    """Return a signed absolute difference such as `+0.12 points`."""
    return f"{value:+.3g} points" if math.isfinite(value) else UNMEASURED


def metric(value: float | None) -> str:
    """Return a held-out metric as text; a diverged run is "non-finite"."""
    if value is None:
        return UNMEASURED
    if not math.isfinite(value):
        return "non-finite"
    return f"{value:,.0f}" if 9999.5 <= abs(value) < 1e9 else f"{value:.4g}"  # 20,000 rather than 2e+04.


def setting_text(value: object) -> str:
    """Return the value of a setting as text."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "none" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def median_or_none(values: Sequence[float]) -> float | None:
    """Return the median; None for no values, NaN if any value is NaN."""
    if any(math.isnan(value) for value in values):
        return math.nan
    return statistics.median(values) if values else None


def median_and_range(values: Sequence[float], words: Callable[[float | None], str]) -> str:
    """Return the values as `median (lowest to highest)`."""
    text = words(median_or_none(values))
    if len(values) < 2 or any(math.isnan(value) for value in values):
        return text
    return f"{text} ({words(min(values))} to {words(max(values))})"


def words_for(row: RatioRow, comparison: Comparison) -> Words:
    """Return the formatter of a row's figures."""
    return words_of(row.metric, comparison.unit)


def words_of(measured: str, unit: str) -> Words:
    """Return the formatter of a measure: a ratio, or a difference of the held-out metric in its unit."""
    if measured != "final_metric_difference":
        return ratio
    return relative_text if unit == "relative" else signed_points


def relative_text(value: float) -> str:
    """Return a relative difference given in percent as text."""
    return percent(value / 100)


def is_perplexity(comparison: Comparison) -> bool:
    """Return True if the metric is drawn on a log axis."""
    return "perplexity" in comparison.metric.lower()


def measure(name: str, comparison: Comparison) -> str:
    """Return the name of a ratio row's metric."""
    is_estimated = name == "energy" and comparison.meter.provenance is Provenance.ESTIMATED
    return f"{name}, estimated" if is_estimated else measure_of(name, comparison.metric)


def measure_of(name: str, held_out: str) -> str:
    """Return the name of a measure, for a task with this held-out metric."""
    if name == "final_metric_difference":
        return f"final {one_line(held_out)}, difference (above 0 is better)"
    return name.replace("_", " ")


def estimate(value: Ratio, words: Words) -> tuple[str, str]:
    """Return (estimate, interval) as text; below 5 pairs the raw pairs replace both."""
    if value.counted:
        return words(value.mean), "counted once"
    if value.n < PAIRS_FOR_A_VERDICT:
        return raw_pairs(value, words), "none"
    return words(value.mean), interval(value, words)


def is_resolved(control: Ratio | None) -> bool:
    """Return True if an A/A control has an interval usable as the resolution."""
    ends = None if control is None else bounds(control)
    return ends is not None and all(map(math.isfinite, ends))


def interval(value: Ratio, words: Words) -> str:
    """Return an interval such as `1.31x to 1.54x`."""
    if value.low is None or value.high is None or not (math.isfinite(value.low) and math.isfinite(value.high)):
        return UNMEASURED
    return f"{words(value.low)} to {words(value.high)}"


def raw_pairs(value: Ratio, words: Words) -> str:
    """Return the raw pairs as text, truncated if there are many."""
    if not value.pairs:
        return UNMEASURED
    text = ", ".join(words(pair) for pair in value.pairs[:MAX_PAIRS_SHOWN])
    more = len(value.pairs) - MAX_PAIRS_SHOWN
    return f"{text} and {more} more in report.json" if more > 0 else text


def verdict_with_enough_pairs(verdict: Verdict, n: int, *, counted: bool = False) -> Verdict:
    """Return the verdict, replaced by "no verdict" below the required number of pairs."""
    if counted or n >= PAIRS_FOR_A_VERDICT or verdict.kind == NO_VERDICT:
        return verdict
    return Verdict(NO_VERDICT, f"Fewer than {PAIRS_FOR_A_VERDICT} pairs: only raw pairs are shown.", "pairs.too_few")


def arm_name(arm: Arm, limit: int = MAX_TEXT) -> str:
    """Return an arm's label, which names the kind of plan."""
    label = one_line(arm.label or arm.name, limit)
    return f"{label} ({arm.plan_kind} plan)" if arm.plan_kind and arm.plan_kind not in label else label


def label_of_arm(comparison: Comparison, name: str, limit: int = MAX_TEXT) -> str:
    """Return the label of the arm with this name, or the name if there is no such arm."""
    arm = comparison.arm(name)
    return arm_name(arm, limit) if arm else one_line(name, limit)


def one_line(text: object, limit: int = MAX_TEXT) -> str:
    """Return text without line breaks and control characters, cut at `limit`."""
    line = "".join(c for c in " ".join(str(text).split()) if c.isprintable())
    return line if len(line) <= limit else line[: limit - 1].rstrip() + "…"


def without_control_characters(text: str) -> str:
    """Return text without control characters; line breaks are kept."""
    return "\n".join("".join(c for c in line if c.isprintable()) for line in text.splitlines())
