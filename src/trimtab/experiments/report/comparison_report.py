"""Report of a comparison: the verdict, the evidence, and the command to reproduce it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from trimtab.core.step_phases import TimedGain
from trimtab.experiments.comparison.comparison_result import Comparison, ThirdRow
from trimtab.experiments.report import energy_tables, gain_tables, plan_tables, tables
from trimtab.experiments.report import formatting as say
from trimtab.experiments.report.document import (
    Block,
    Bullets,
    Code,
    Document,
    Heading,
    Paragraph,
    Picture,
    Section,
)
from trimtab.experiments.report.key_figures import key_figures
from trimtab.experiments.report.tables import Table

if TYPE_CHECKING:  # Imports matplotlib, which is not needed for text.
    from trimtab.experiments.report.figure_spec import FigureSpec

TIER_NOTE = (
    "An equivalent plan keeps batch size, learning rate, schedule and optimizer; results differ by rounding "
    "at most. A tuned plan also changes the training settings named by --adapt. The two kinds never share a "
    "table of ratios or a figure of curves."
)
CURVE_NOTE = (
    "Held-out metric against seconds of training, without evaluation, planning and search. The equivalent plan "
    "is shown with the reference only, because the recipes use other training settings."
)

GAIN = "Where the gain comes from"


def document(comparison: Comparison) -> Document:
    """Return the report of a comparison."""
    return Document(
        "comparison",
        comparison.task,
        say.verdict_with_enough_pairs(comparison.headline, comparison.num_pairs),
        comparison.description,
        details_line(comparison),
        key_figures(comparison),
        sections(comparison),
        partial(_draw, comparison),
    )


def _draw(comparison: Comparison, picture: Picture) -> FigureSpec:
    from trimtab.experiments.report.figures import draw

    return draw(picture, comparison)


def details_line(comparison: Comparison) -> str:
    """Return the line under the headline: pairs, arms, metric and date."""
    direction = "higher" if comparison.higher_is_better else "lower"
    parts = (
        f"{comparison.num_pairs} paired runs of {len(comparison.arms)} arms",
        f"on {comparison.num_ranks} ranks" if comparison.num_ranks > 1 else "",
        f"{say.one_line(comparison.metric)} ({direction} is better)",
        say.one_line(comparison.created),
    )
    return " · ".join(part for part in parts if part)


def sections(comparison: Comparison) -> tuple[Section, ...]:
    """Return the sections of the report in reading order."""
    return (
        Section("What the plans change", _plans(comparison), brief=True),
        Section("Throughput, memory and quality", _ratios(comparison), brief=True),
        Section("Time to target", _targets(comparison), brief=True),
        Section("Learning curves", (Paragraph(CURVE_NOTE), *_curves(comparison))),
        Section("All arms", _arms(comparison), brief=True),
        Section("Energy", _energy(comparison), brief=True),
        Section("Memory against time", (Picture("memory_time"), plan_tables.trial_table(comparison))),
        Section("Memory of a step", (Picture("timeline"), plan_tables.memory_table(comparison))),
        Section("Where the time goes", (Picture("phases"), tables.phase_table(comparison))),
        gain_section(comparison.gain, comparison.thirds),
        Section("Rejected alternatives", _rejected(comparison)),
        Section("Predictions and measurements", (Picture("predictions"), plan_tables.prediction_table(comparison))),
        Section("Cost of planning", _cost(comparison), brief=True),
        Section("Environment and data", _environment(comparison)),
        Section("Reproduce", (Code(comparison.command or "not recorded"),)),
        Section("Notes", (Bullets(comparison.notes or ("None.",)),), brief=True),
    )


def gain_section(
    gain: TimedGain | None, thirds: Sequence[ThirdRow], title: str = GAIN, *, folded: bool = True
) -> Section:
    """Return the attribution of a gain: by phase and bound from interleaved steps, by third from the records.

    Args:
        gain: the measured gain, or None.
        thirds: comparison by thirds of training.
        title: title of the section.
        folded: True to collapse the table of module classes.
    """
    blocks: list[Block] = [Paragraph("The phases of a step were not measured.")]
    if gain is not None:
        changes = say.one_line(gain.changes) or "nothing"
        blocks = [Paragraph(f"The plan changes: {changes}."), gain_tables.phase_gain_table(gain)]
        blocks += [
            gain_tables.part_table(gain, folded=folded),
            gain_tables.bound_table(gain),
            Bullets(gain_tables.gain_notes(gain)),
        ]
    blocks += [
        gain_tables.thirds_table(thirds, plan_kind) for plan_kind in tables.plan_kinds(row.plan_kind for row in thirds)
    ]
    return Section(title, tuple(blocks), brief=gain is not None)


def gain_sections(gains: Sequence[TimedGain], thirds: Sequence[Sequence[ThirdRow]]) -> tuple[Section, ...]:
    """Return the attribution of every gain, and a side-by-side table for several gains."""
    each = [
        gain_section(gain, rows, f"{GAIN}: {say.one_line(gain.task)}", folded=False)
        for gain, rows in zip(gains, thirds, strict=True)
    ]
    beside = Section("Side by side", (gain_tables.side_by_side(gains),), brief=True)
    return (*each, beside) if len(gains) > 1 else tuple(each)


def _plans(comparison: Comparison) -> tuple[Block, ...]:
    if not comparison.plans:
        return (Paragraph("No plan was made."),)
    blocks: list[Block] = [Paragraph(TIER_NOTE)]
    for plan_kind in tables.plan_kinds(comparison.plans):
        plan = comparison.plans[plan_kind]
        sentences = plan_tables.plan_sentences(plan, plan_tables.arm_of(comparison, plan_kind))
        blocks += [Heading(tables.plan_title(plan_kind)), Paragraph(" ".join(sentences))]
        blocks += [Bullets(tuple(f"Advice: {each.text}" for each in plan.advice))] if plan.advice else []
        blocks += [plan_tables.change_table(plan, changed=changed) for changed in (True, False)]
    return tuple(blocks)


def _ratios(comparison: Comparison) -> tuple[Block, ...]:
    blocks: list[Block] = [Paragraph(_resolution(comparison))]
    for plan_kind in tables.plan_kinds(row.plan_kind for row in comparison.ratios):
        blocks += [tables.ratio_table(comparison, plan_kind), tables.ratio_pairs_table(comparison, plan_kind)]
        blocks.append(Picture("forest", plan_kind))
    return tuple(blocks) if comparison.ratios else (*blocks, Paragraph("No ratio was recorded."))


def _resolution(comparison: Comparison) -> str:
    control = comparison.resolution
    if control is None:
        return "Resolution: not measured (no A/A control ran), so small effects may be noise."
    value, interval = say.estimate(control, say.ratio)
    if not say.is_resolved(control):
        return f"Resolution: unknown; the reference against itself gave {value} (n = {control.n}), too few pairs for "
        "an interval."
    return (
        f"Resolution: the reference against itself gave {value} (95% interval {interval}, n = {control.n}). "
        "An effect within this interval may be noise."
    )


def _targets(comparison: Comparison) -> tuple[Block, ...]:
    found = tables.plan_kinds(row.plan_kind for row in comparison.target_rows)
    if not found:
        return (Paragraph("No target was set, or no arm ran to the end."),)
    builders = (tables.target_table, tables.target_pairs_table)
    return tuple(build(comparison, plan_kind) for plan_kind in found for build in builders)


def _curves(comparison: Comparison) -> Iterator[Block]:
    found = tables.plan_kinds(arm.plan_kind for arm in comparison.arms if arm.plan_kind)
    for plan_kind in found:
        yield Heading(tables.plan_kind_title(plan_kind))
        yield Picture("curves", plan_kind)
    if not found:
        yield Picture("curves")


def _arms(comparison: Comparison) -> tuple[Block, ...]:
    failed = [arm for arm in comparison.arms if arm.error]
    errors = tuple(f"{say.arm_name(arm)} stopped with an error: {say.one_line(arm.error)}" for arm in failed)
    return (tables.arm_table(comparison), tables.origin_table(comparison), *((Bullets(errors),) if errors else ()))


def _energy(comparison: Comparison) -> tuple[Block, ...]:
    said = Paragraph(energy_tables.meter_sentence(comparison))
    if comparison.meter.is_absent:
        return (said,)
    found = energy_tables.target_energy_table(comparison)
    planning = energy_tables.planning_sentence(comparison)
    told = (said, *((Paragraph(planning),) if planning else ()))
    return (*told, energy_tables.arm_energy_table(comparison), *((found,) if found.rows else ()))


def _rejected(comparison: Comparison) -> tuple[Block, ...]:
    return (plan_tables.rejected_table(comparison), plan_tables.failed_table(comparison))


def _cost(comparison: Comparison) -> tuple[Block, ...]:
    whole = f"Planning took {say.seconds(comparison.planning_s)} in total."
    whole += " Planning of the tuned plan continues from the equivalent plan." if "tuned" in comparison.plans else ""
    return (Paragraph(whole), plan_tables.cost_table(comparison))


def _environment(comparison: Comparison) -> tuple[Block, ...]:
    return facts("Environment", comparison.environment), facts("Data source", comparison.data_source)


def facts(title: str, found: Mapping[str, str]) -> Table:
    """Return a two-column table of facts."""
    rows = tuple((say.one_line(key).replace("_", " "), say.one_line(value)) for key, value in found.items())
    return Table(title, ("", " "), rows, f"{title}: not recorded.")
