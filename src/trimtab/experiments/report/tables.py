"""Tables of results as rows of text, formatted once for HTML, Markdown and the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from trimtab.experiments.comparison.arms import PLAN_LOOPS
from trimtab.experiments.comparison.comparison_result import Arm, Comparison, RatioRow, TargetRow, Verdict
from trimtab.experiments.report import formatting as say

Cell = str | Verdict
_PHASE_STEPS = 4  # Timed steps per arm, as in `paired_runs.inspect_arm`, which imports torch.


@dataclass(frozen=True)
class Table:
    """Rows of text under column names.

    Args:
        title: title of the table.
        columns: column names.
        rows: cells of every row.
        empty: sentence shown instead of a table without rows.
        note: explanation shown with the table.
        numeric: names of the columns with figures.
        folded: True to collapse the table if the format allows.
        extras: collapsible sentences of every row.
        extras_label: label of the extras.
        groups: group name of every row, shown once for consecutive rows.
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
    groups: tuple[str, ...] = ()


def with_groups(table: Table) -> Table:
    """Return the table with groups as a first column, for formats without spanning rows."""
    if not table.groups:
        return table
    repeated = zip(table.groups, ("", *table.groups), table.rows, strict=False)
    rows = tuple(("" if group == before else group, *row) for group, before, row in repeated)
    return replace(table, columns=("Compared", *table.columns), rows=rows, groups=())


def plan_kinds(values: Iterable[str]) -> tuple[str, ...]:
    """Return the kinds of plan present, equivalent first; every kind gets a separate table."""
    found = set(values)
    return tuple(plan_kind for plan_kind in say.PLAN_KINDS if plan_kind in found) + tuple(
        sorted(found - say.PLAN_KINDS.keys())
    )


def plan_kind_title(plan_kind: str) -> str:
    """Return the heading of a kind of plan."""
    return say.PLAN_KINDS.get(plan_kind, f"{say.one_line(plan_kind)} plan")


def plan_name(key: str) -> str:
    """Return the name of a plan in tables of several plans."""
    return f"plan, {say.one_line(say.PLANS.get(key, key))}"


def plan_title(key: str) -> str:
    """Return the heading of a plan."""
    return f"The plan {say.PLANS[key]}" if key in PLAN_LOOPS else plan_kind_title(key)


def ratio_table(comparison: Comparison, plan_kind: str) -> Table:
    """Return throughput, memory and quality of the arms of a kind of plan against other arms."""
    rows = [row for row in comparison.ratios if row.plan_kind == plan_kind]
    return Table(
        title=plan_kind_title(plan_kind),
        columns=("Measure", "Estimate", "95% interval", "n", "Verdict"),
        rows=tuple(line for row in rows for line in _ratio_rows(row, comparison)),
        empty="No ratio was recorded.",
        note="Throughput: above 1 is better. Peak memory, energy: below 1 is better. Paired by seed; geometric mean.",
        numeric=("Estimate", "95% interval", "n"),
        groups=tuple(arm_against_arm(comparison, row) for row in rows for _ in _ratio_rows(row, comparison)),
    )


def arm_against_arm(comparison: Comparison, row: RatioRow | TargetRow) -> str:
    """Return the label of a comparison, "arm against arm"."""
    return f"{say.label_of_arm(comparison, row.arm)} against {say.label_of_arm(comparison, row.against)}"


def _ratio_rows(row: RatioRow, comparison: Comparison) -> Iterator[tuple[Cell, ...]]:
    """Yield a ratio's row, and a second row without verdict for CPU time if recorded."""
    words, name = say.words_for(row, comparison), say.measure(row.metric, comparison)
    verdict = say.verdict_with_enough_pairs(row.shown, row.ratio.n, counted=row.ratio.counted)
    yield (name, *say.estimate(row.ratio, words), say.pairs(row), verdict)
    if row.cpu is not None:
        yield (f"{name}, by CPU time", *say.estimate(row.cpu, words), say.pairs(row), "")


def ratio_pairs_table(comparison: Comparison, plan_kind: str) -> Table:
    """Return the raw pairs behind the ratios of a kind of plan."""
    rows = [row for row in comparison.ratios if row.plan_kind == plan_kind]
    return Table(
        title="Raw pairs",
        columns=("Measure", "Pairs, by seed"),
        rows=tuple(
            (say.measure(row.metric, comparison), say.raw_pairs(row.ratio, say.words_for(row, comparison)))
            for row in rows
        ),
        empty="No pair was recorded.",
        folded=True,
        groups=tuple(arm_against_arm(comparison, row) for row in rows),
    )


def target_table(comparison: Comparison, plan_kind: str) -> Table:
    """Return seconds to each target, with and without the cost of planning and search."""
    rows = [row for row in comparison.target_rows if row.plan_kind == plan_kind]
    return Table(
        title=plan_kind_title(plan_kind),
        columns=("Target", "Planning", "Reached", "Time", "Speed-up", "95% interval", "n", "Verdict"),
        rows=tuple(_target_row(row) for row in rows),
        empty="No target was set, or no arm ran to the end.",
        note="Each pair of values: the arm, the other arm. Reached: of n pairs. Time: median over pairs. Speed-up "
        "above 1: the arm is faster. A bound is shown if an arm did not reach the target in some pair, or had "
        "reached it by its first evaluation.",
        numeric=("Target", "Reached", "Time", "Speed-up", "95% interval", "n"),
        groups=tuple(arm_against_arm(comparison, row) for row in rows),
    )


def _target_row(row: TargetRow) -> tuple[Cell, ...]:
    return say.metric(row.target), planning_counted(row), *target_cells(row)


def target_cells(row: TargetRow) -> tuple[Cell, ...]:
    """Return the cells of a time to target, from the reached counts to the verdict."""
    value, interval = target_estimate(row)
    return (
        f"{row.reached_arm}/{row.n} vs {row.reached_against}/{row.n}",
        f"{say.seconds(say.median_or_none(row.arm_s))} vs {say.seconds(say.median_or_none(row.against_s))}",
        value,
        interval,
        str(row.n),
        say.verdict_with_enough_pairs(row.verdict, row.ratio.n if row.ratio else row.n),
    )


def planning_counted(row: TargetRow) -> str:
    """Return "counted" if times include planning and search, otherwise "not counted"."""
    return "counted" if row.charged else "not counted"


def target_pairs_table(comparison: Comparison, plan_kind: str) -> Table:
    """Return the seconds of all pairs behind the times to target of a kind of plan."""
    rows = [row for row in comparison.target_rows if row.plan_kind == plan_kind]
    return Table(
        title="Each pair",
        columns=("Target", "Planning", "Seconds by seed, arm vs other", "At first evaluation"),
        rows=tuple(
            (say.metric(row.target), planning_counted(row), _target_pairs(row), str(row.left_censored)) for row in rows
        ),
        empty="No pair was recorded.",
        note="At first evaluation: runs that had reached the target by their first evaluation, so their time is an "
        "upper bound.",
        numeric=("Target", "At first evaluation"),
        folded=True,
        groups=tuple(arm_against_arm(comparison, row) for row in rows),
    )


def _target_pairs(row: TargetRow) -> str:
    shown = list(zip(row.arm_s, row.against_s, strict=False))[: say.MAX_PAIRS_SHOWN]
    return "; ".join(f"{say.seconds(ours)} vs {say.seconds(theirs)}" for ours, theirs in shown) or say.UNMEASURED


def target_estimate(row: TargetRow) -> tuple[str, str]:
    """Return (speed-up, interval) of a target row; a censored row has a bound and no interval."""
    if row.bound:
        return say.one_line(row.bound), "none: censored"
    if row.n and row.reached_arm == 0:
        return say.NEVER, "none: never reached"
    return say.estimate(row.ratio, say.ratio) if row.ratio else (say.UNMEASURED, say.UNMEASURED)


def arm_table(comparison: Comparison) -> Table:
    """Return all arms with their measurements, and errors of failed arms."""
    return Table(
        title="",
        columns=("Arm", "Precision", "Step", "Throughput", "Peak memory", "MFU / HFU", f"Final {comparison.metric}"),
        rows=tuple(_arm_row(arm, comparison) for arm in comparison.arms),
        empty="No arm ran.",
        note="Step: seconds per batch of the task; an optimizer step of the paper recipe (P1) takes several batches. "
        "Median over seeds (lowest to highest). MFU counts the FLOP of the reference's step, HFU the FLOP of the arm "
        f"with recomputation, both relative to this peak: {say.one_line(comparison.peak_source)}.",
        numeric=("Step", "Throughput", "Peak memory", "MFU / HFU", f"Final {comparison.metric}"),
    )


def _arm_row(arm: Arm, comparison: Comparison) -> tuple[Cell, ...]:
    name = say.arm_name(arm)
    return (
        f"{name}: failed" if arm.error else name,
        say.one_line(arm.precision) or "not recorded",
        say.median_and_range(arm.step_s, say.seconds),
        say.rate(say.median_or_none(arm.terms_per_s), comparison.terms),
        say.size(arm.peak_bytes),
        _utilisation(arm),
        say.median_and_range(arm.final_metric, say.metric),
    )


def _utilisation(arm: Arm) -> str:
    if arm.mfu is None and arm.hfu is None:
        return say.UNMEASURED
    return f"{say.share(arm.mfu)} / {say.share(arm.hfu)}"


def origin_table(comparison: Comparison) -> Table:
    """Return the source file, samples trained on and charged planning of all arms."""
    rows = tuple(
        (
            say.arm_name(arm),
            say.one_line(arm.source) or "not recorded",
            f"{arm.final_samples:,}" if arm.final_metric else say.UNMEASURED,
            say.seconds(arm.search_s) if arm.search_s else "none",
        )
        for arm in comparison.arms
    )
    columns = ("Arm", "Source file", "Samples trained on", "Planning charged")
    return Table("Source of each arm", columns, rows, "No arm ran.", "", columns[2:], folded=True)


def phase_table(comparison: Comparison) -> Table:
    """Return seconds per batch by phase."""
    arms = [arm for arm in comparison.arms if arm.phases_s]
    names = phase_names(comparison)
    rows = tuple((say.arm_name(arm), *(say.seconds(arm.phases_s.get(name)) for name in names)) for arm in arms)
    columns = ("Arm", *(name.replace("_", " ") for name in names))
    note = (
        f"Mean of {_PHASE_STEPS} steps per arm, timed one arm after the other without pairing, so small differences "
        "may be noise."
    )
    return Table(
        "Seconds per batch by phase", columns, rows, "No phases were measured.", note, columns[1:], folded=True
    )


def phase_names(comparison: Comparison) -> tuple[str, ...]:
    """Return the phases present, in the arms' order."""
    return tuple(dict.fromkeys(name for arm in comparison.arms for name in arm.phases_s))
