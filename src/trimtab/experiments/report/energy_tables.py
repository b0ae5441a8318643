"""Energy section of a report: the meter and its figures, or the reason for missing figures."""

from __future__ import annotations

from trimtab.core.units import format_joules
from trimtab.experiments.comparison.comparison_result import Comparison
from trimtab.experiments.report import formatting as say
from trimtab.experiments.report import tables
from trimtab.experiments.report.tables import Table, arm_against_arm


def joules(value: float | None) -> str:
    """Return an energy as text."""
    return say.UNMEASURED if value is None else format_joules(value)


def meter_sentence(comparison: Comparison) -> str:
    """Return the sentence about the energy meter, shown before the figures or in place of them."""
    said = say.one_line(comparison.meter.describe())
    if comparison.meter.is_absent:
        return f"Energy is {said}."
    return f"Energy is {said}. Figures are for the whole device or processor, including other processes."


def planning_sentence(comparison: Comparison) -> str:
    """Return the energy of planning by plan, or "" if not counted by the meter of the paired runs."""
    spent = comparison.planning_energy
    said = [f"{joules(spent[key].joules)} {_made_for(key)}" for key in tables.plan_kinds(spent)]
    within = "; the figure tuned includes the equivalent plan" if {"equivalent", "tuned"} <= spent.keys() else ""
    return f"Planning took {', '.join(said)}{within}." if said else ""


def _made_for(key: str) -> str:
    words = say.PLANS.get(key, key)
    return words if words.startswith("for ") else f"for {words}"


def arm_energy_table(comparison: Comparison) -> Table:
    """Return the joules and watts of all arms."""
    arms = [arm for arm in comparison.arms if arm.joules]
    rows = tuple(
        (
            say.arm_name(arm),
            say.median_and_range(arm.joules, joules),
            say.median_and_range(arm.watts, lambda w: f"{w:.3g} W"),
        )
        for arm in arms
    )
    columns = ("Arm", "Energy per batch", "Power")
    short = "; ".join(f"{a.short_blocks} of {a.blocks} of {say.arm_name(a)}" for a in comparison.arms if a.short_blocks)
    short = f" Blocks too short for the meter, without energy: {short}." if short else ""
    note = "Median over seeds (lowest to highest), over blocks of a second or more."
    return Table("", columns, rows, f"No energy was measured.{short}", note + short, columns[1:])


def target_energy_table(comparison: Comparison) -> Table:
    """Return joules to each target over pairs with both arms at the target, with and without planning."""
    found = [row for row in comparison.target_rows if row.arm_j]
    rows = tuple(
        (
            say.metric(row.target),
            tables.planning_counted(row),
            f"{joules(say.median_or_none(row.arm_j))} vs {joules(say.median_or_none(row.against_j))}",
            *(say.estimate(row.energy, say.ratio) if row.energy else (say.UNMEASURED, say.UNMEASURED)),
            str(len(row.arm_j)),
        )
        for row in found
    )
    columns = ("Target", "Planning", "Energy", "Ratio", "95% interval", "n")
    numeric = tuple(column for column in columns if column != "Planning")
    note = (
        "Each pair of values: the arm, the other arm; median over pairs. Below 1: the arm takes less energy. Blocks "
        "too short for the meter, up to half of an arm's time, are counted with the arm's mean power."
    )
    groups = tuple(arm_against_arm(comparison, row) for row in found)
    return Table("Energy to target", columns, rows, "No energy to a target was measured.", note, numeric, groups=groups)
