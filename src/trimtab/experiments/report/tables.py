"""The tables of measured results as rows of text, formatted once for the page, Markdown and the terminal."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from trimtab.experiments.report import wording as say
from trimtab.experiments.result import Arm, Comparison, Ratio, RatioRow, TargetRow, Verdict

Cell = str | Verdict


@dataclass(frozen=True)
class Table:
    """Rows of text under column names.

    Args:
        empty: the sentence that stands in for a table without rows. note: how to read it.
        numeric: names of the columns that hold figures. folded: shown on demand where that is possible.
        extras: per row, sentences shown on demand; `extras_label` names them.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    empty: str
    note: str = ""
    numeric: tuple[str, ...] = ()
    folded: bool = False
    extras: tuple[tuple[str, ...], ...] = ()
    extras_label: str = ""


@dataclass(frozen=True)
class Tile:
    """One key figure: what it is, the figure, and how sure it is."""

    label: str
    value: str
    detail: str


def tiers(values: Iterable[str]) -> tuple[str, ...]:
    """Return the tiers that occur, S and F first: each gets a table of its own, never one for both."""
    found = set(values)
    return tuple(tier for tier in say.TIERS if tier in found) + tuple(sorted(found - say.TIERS.keys()))


def tier_title(tier: str) -> str:
    """Return the heading of a tier."""
    return say.TIERS.get(tier, f"Tier {say.one_line(tier)}")


def ratio_table(comparison: Comparison, tier: str) -> Table:
    """Return throughput, memory and quality of one tier's arms against others."""
    rows = [row for row in comparison.ratios if row.tier == tier]
    return Table(
        title=tier_title(tier),
        columns=("Measure", "Arm", "Against", "Estimate", "95% interval", "n", "Verdict"),
        rows=tuple(_ratio_row(row, comparison) for row in rows),
        empty="No ratio was recorded.",
        note="Throughput: above 1 is better. Peak memory: below 1 is better. Paired by seed; geometric mean.",
        numeric=("Estimate", "95% interval", "n"),
        extras=tuple(_pairs(row.ratio, row, comparison) for row in rows),
        extras_label="raw pairs",
    )


def _ratio_row(row: RatioRow, comparison: Comparison) -> tuple[Cell, ...]:
    value, interval = say.estimate(row.ratio, say.words_for(row, comparison))
    names = (say.named(comparison, row.arm), say.named(comparison, row.against))
    verdict = say.honest(row.verdict, row.ratio.n)
    return (say.measure(row.metric, comparison), *names, value, interval, str(row.ratio.n), verdict)


def _pairs(value: Ratio, row: RatioRow, comparison: Comparison) -> tuple[str, ...]:
    shown_already = value.n < say.PAIRS_FOR_A_VERDICT
    return () if shown_already else (say.raw_pairs(value, say.words_for(row, comparison)),)


def target_table(comparison: Comparison, tier: str) -> Table:
    """Return seconds to each target, with and without the cost of planning and search."""
    rows = [row for row in comparison.target_rows if row.tier == tier]
    return Table(
        title=tier_title(tier),
        columns=("Target", "Search", "Arm", "Against", "Reached", "Time", "Speed-up", "95% interval", "n", "Verdict"),
        rows=tuple(_target_row(row, comparison) for row in rows),
        empty="No target was set, or none was tried.",
        note="Time: median over pairs, arm against other; reached: of n pairs. Speed-up above 1: the arm is faster. "
        "A bound stands where an arm did not reach the target in some pair.",
        numeric=("Target", "Reached", "Time", "Speed-up", "95% interval", "n"),
        extras=tuple(_target_pairs(row) for row in rows),
        extras_label="each pair",
    )


def _target_row(row: TargetRow, comparison: Comparison) -> tuple[Cell, ...]:
    value, interval = target_estimate(row)
    return (
        say.metric(row.target),
        "counted" if row.charged else "not counted",
        say.named(comparison, row.arm),
        say.named(comparison, row.against),
        f"{row.reached_arm}/{row.n} vs {row.reached_against}/{row.n}",
        f"{say.seconds(say.middle(row.arm_s))} vs {say.seconds(say.middle(row.against_s))}",
        value,
        interval,
        str(row.n),
        say.honest(row.verdict, row.ratio.n if row.ratio else row.n),
    )


def target_estimate(row: TargetRow) -> tuple[str, str]:
    """Return (speed-up, interval) of a target row; a censored row has its bound and no interval."""
    if row.bound:
        return say.one_line(row.bound), "none: censored"
    if row.n and row.reached_arm == 0:
        return say.NEVER, "none: never reached"
    return say.estimate(row.ratio, say.ratio) if row.ratio else (say.UNMEASURED, say.UNMEASURED)


def _target_pairs(row: TargetRow) -> tuple[str, ...]:
    shown = list(zip(row.arm_s, row.against_s, strict=False))[: say.MAX_PAIRS_SHOWN]
    text = "; ".join(f"{say.seconds(ours)} vs {say.seconds(theirs)}" for ours, theirs in shown)
    at_first = f"{row.left_censored} crossed at the first evaluation" if row.left_censored else ""
    return tuple(line for line in (text, at_first) if line)


def arm_table(comparison: Comparison) -> Table:
    """Return every arm as it ran, failed ones with their error."""
    return Table(
        title="",
        columns=("Arm", "Step", "Throughput", "Peak memory", "MFU", f"Final {comparison.metric}", "Runs from"),
        rows=tuple(_arm_row(arm, comparison) for arm in comparison.arms),
        empty="No arm ran.",
        note=f"Median over seeds (lowest to highest). MFU against {say.one_line(comparison.peak_source)}.",
        numeric=("Step", "Throughput", "Peak memory", "MFU", f"Final {comparison.metric}"),
    )


def _arm_row(arm: Arm, comparison: Comparison) -> tuple[Cell, ...]:
    name = say.arm_name(arm)
    return (
        f"{name}: failed" if arm.error else name,
        say.spread(arm.step_s, say.seconds),
        say.rate(say.middle(arm.terms_per_s), comparison.terms),
        say.size(arm.peak_bytes),
        say.share(arm.mfu),
        say.spread(arm.final_metric, say.metric),
        say.one_line(arm.source) or "not recorded",
    )


def phase_table(comparison: Comparison) -> Table:
    """Return seconds per step by phase."""
    arms = [arm for arm in comparison.arms if arm.phases_s]
    names = phase_names(comparison)
    rows = tuple((say.arm_name(arm), *(say.seconds(arm.phases_s.get(name)) for name in names)) for arm in arms)
    columns = ("Arm", *(name.replace("_", " ") for name in names))
    return Table("Seconds per step by phase", columns, rows, "No phases were measured.", "", columns[1:], folded=True)


def phase_names(comparison: Comparison) -> tuple[str, ...]:
    """Return the phases that occur, in the order in which arms name them."""
    return tuple(dict.fromkeys(name for arm in comparison.arms for name in arm.phases_s))


def key_figures(comparison: Comparison) -> tuple[Tile, ...]:
    """Return the tiles under the headline; of one plan only, tier S when there is one."""
    leading = next((arm for tier in ("S", "F") for arm in comparison.arms if arm.tier == tier), None)
    if leading is None:
        return ()
    metrics = ("throughput", "peak_memory", "final_metric_difference")
    tiles = [_ratio_tile(comparison, leading, name) for name in metrics]
    return (*tiles, *_target_tile(comparison, leading))


def _ratio_tile(comparison: Comparison, arm: Arm, name: str) -> Tile:
    rows = [row for row in comparison.ratios if row.arm == arm.name and row.metric == name]
    row = next((row for row in rows if row.against == "reference"), rows[0] if rows else None)
    label = say.measure(name, comparison).capitalize()
    if row is None:
        return Tile(label, say.UNMEASURED, say.arm_name(arm))
    return _tile(label, row.ratio, say.words_for(row, comparison), f"against {say.named(comparison, row.against)}")


def _target_tile(comparison: Comparison, arm: Arm) -> tuple[Tile, ...]:
    rows = [row for row in comparison.target_rows if row.arm == arm.name and row.charged]
    rows = [row for row in rows if row.against == "reference"] or rows
    if not rows:
        return ()
    order = {target: rung for rung, target in enumerate(comparison.targets)}
    row = max(rows, key=lambda row: (row.reached_arm > 0, order.get(row.target, -1)))
    label = f"Time to {comparison.metric} {say.metric(row.target)}, planning counted"
    value, _ = target_estimate(row)
    if row.ratio and not row.bound and row.reached_arm:
        return (_tile(label, row.ratio, say.ratio, f"against {say.named(comparison, row.against)}"),)
    return (Tile(label, value, f"reached by {row.reached_arm} of {row.n}, other arm {row.reached_against}"),)


def _tile(label: str, value: Ratio, words: say.Words, against: str) -> Tile:
    if value.n < say.PAIRS_FOR_A_VERDICT:
        return Tile(label, say.NO_VERDICT, f"raw pairs {say.raw_pairs(value, words)}; {against}")
    return Tile(label, words(value.mean), f"95% interval {say.interval(value, words)}, n = {value.n}; {against}")
