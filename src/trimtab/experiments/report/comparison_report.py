"""Report of a comparison: the verdict, the evidence, and the command to reproduce it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from trimtab.core.step_phases import MEANINGS, TimedGain
from trimtab.core.units import format_joules
from trimtab.experiments.comparison.comparison_result import Comparison, Ratio, ThirdRow
from trimtab.experiments.phase_attribution import (
    BOUNDS,
    COMPUTE,
    MEMORY,
    UNATTRIBUTED,
    UNBOUND,
    WHOLE,
    Attribution,
    SavedTime,
    attribute,
    bound_seconds,
    is_distorted,
    of_the_roof,
)
from trimtab.experiments.phase_attribution import speedup as speedup_of
from trimtab.experiments.report import formatting as say
from trimtab.experiments.report import plan_tables, tables
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
from trimtab.experiments.report.tables import Table, arm_against_arm, plan_kind_title
from trimtab.planner.statistics import MIN_PAIRS_FOR_VERDICT, Interval

if TYPE_CHECKING:
    from trimtab.experiments.report.figure_spec import FigureSpec


# Tables of a gain: by phase, by limiting resource, and by third of training.

_NAMES = {WHOLE: "whole step, without phase timing", UNATTRIBUTED: "overhead of phase timing (not attributed)"}
_SAVED = ("Reference", "Plan", "Saved", "95% interval", "Share of the gain")
_NO_INTERVAL, _NO_SHARE, _UNKNOWN = "none", "not reported", "unknown"
_NOT_APART = "No times by module: the model is compiled, or the task has a step function."
_DISTORTED = (
    "Phase timing makes a step wait longer for the CPU, so these phases differ from those of the untimed loops, and no "
    "shares are reported."
)


def phase_gain_table(gain: TimedGain) -> Table:
    """Return the seconds saved by phase of a step."""
    found = attribute(gain)
    rows = (*found.phases, found.unattributed, found.whole)
    return Table(
        "Seconds per batch saved by phase",
        ("Phase", *_SAVED),
        tuple((_NAMES.get(row.phase, row.phase), *_saved(row)) for row in rows),
        "No phases were measured.",
        f"Mean of {len(gain.plan.laps)} interleaved paired rounds with one seed and arms that are built once, so the "
        "intervals exclude the effect of memory layout. The rows add up to the last row. Shares are reported only "
        f"for a significant saving. {_clock(found)}",
        _SAVED,
    )


def _clock(found: Attribution) -> str:
    arms = (("reference", found.reference_clock), ("plan", found.plan_clock))
    costs = (
        f"{say.percent(each.mean - 1)} ({_between(each, _longer)}) of the step of the {name}" for name, each in arms
    )
    said = f"Overhead of phase timing: {', '.join(costs)}."
    return f"{said} {_DISTORTED}" if found.is_distorted else said


def _longer(ratio: float) -> str:
    return say.percent(ratio - 1)


def _saved(row: SavedTime) -> tuple[str, ...]:
    share = _NO_SHARE if row.share is None else say.share(row.share)
    shown = (say.signed_seconds(each) for each in (row.reference_s, row.plan_s, row.saved.mean))
    return *shown, _between(row.saved, say.signed_seconds), share


def _between(interval: Interval, words: Callable[[float], str]) -> str:
    if interval.n < MIN_PAIRS_FOR_VERDICT or not (math.isfinite(interval.low) and math.isfinite(interval.high)):
        return _NO_INTERVAL
    return f"{words(interval.low)} to {words(interval.high)}"


def part_table(gain: TimedGain, *, folded: bool) -> Table:
    """Return the seconds saved in forward and backward by class of module."""
    rows = tuple((_part(row.phase), *_saved(row)) for row in attribute(gain).parts)
    note = (
        "Time of a module without its submodules. The backward of a module begins when the gradient of its output "
        "arrives; operations between two modules count for the later one."
    )
    return Table("By class of module", ("Module", *_SAVED), rows, _NOT_APART, note, _SAVED, folded=folded)


def _part(name: str) -> str:
    phase, _, part = name.partition(" ")
    return f"{phase}: {part or 'outside modules'}"


def bound_table(gain: TimedGain) -> Table:
    """Return the seconds of a step of both arms by limiting resource (compute, memory, communication, ...)."""
    columns, title = ("Bound by", "Reference", "Plan"), "Limiting resource"
    if is_distorted(gain):
        return Table(title, columns, (), f"Not reported. {_DISTORTED}", "", columns[1:])
    arms = [bound_seconds(gain.reference), bound_seconds(gain.plan)]
    rows = tuple((name, *(_of_step(arm, name) for arm in arms)) for name in _in_any(arms))
    return Table(title, columns, rows, "The roofline bounds are unknown.", _roofs(gain), columns[1:])


def _in_any(found: Iterable[Mapping[str, float]]) -> tuple[str, ...]:
    """Return the roofline bounds (compute, memory, ...) that any of the mappings contains, in display order."""
    present = {name for each in found for name in each}
    return tuple(name for name in BOUNDS if name in present)


def _is_unknown(found: Mapping[str, float], name: str) -> bool:
    """Return True if an arm's seconds of this bound are part of its seconds with an unknown bound."""
    return name in (COMPUTE, MEMORY) and UNBOUND in found and name not in found


def _of_step(found: Mapping[str, float], name: str) -> str:
    if _is_unknown(found, name):
        return _UNKNOWN
    seconds = found.get(name, 0.0)
    return f"{say.seconds(seconds)} ({say.share(seconds / math.fsum(found.values()))})"


def _roofs(gain: TimedGain) -> str:
    device = gain.device
    said = (
        "By roofline: each operator takes the time of its FLOP or of the bytes of its arguments and results, "
        f"whichever is longer at the peaks of {say.one_line(device.name)} ({say.one_line(device.source)}). The "
        "seconds of a phase are split in proportion to its operators' times."
    )
    for name, arm in (("reference", gain.reference), ("plan", gain.plan)):
        if found := of_the_roof(arm):
            shares = ", ".join(f"{phase} {say.share(share)}" for phase, share in found.items())
            said += f" Lower bound of the operators' time over the measured time of the {name}: {shares}."
    return said + " Above 100%, caches serve part of the bytes."


def gain_notes(gain: TimedGain) -> tuple[str, ...]:
    """Return notes on missing figures with reasons, and the meaning of the phases."""
    theirs, ours = set(gain.reference.notes), set(gain.plan.notes)
    told = (("both", theirs & ours), ("the reference", theirs - ours), ("the plan", ours - theirs))
    notes = (f"{whose}: {say.one_line(note)}" for whose, found in told for note in sorted(found))
    seen = [phase for phase in MEANINGS if phase in gain.reference.has or phase in gain.plan.has]
    return (*notes, "; ".join(f"{phase}: {MEANINGS[phase]}" for phase in seen))


def thirds_table(thirds: Sequence[ThirdRow], plan_kind: str) -> Table:
    """Return the gain in the early, middle and late third of training, for a kind of plan."""
    rows = [row for row in thirds if row.plan_kind == plan_kind]
    columns = ("Third", "Samples per second", "Progress", "Progress per second", "Fraction of the saving", "n")
    note = (
        "Thirds of each run by samples; the arm over the reference, above 1 is better, paired by seed, with the 95% "
        "interval. Progress: improvement of the held-out metric in the third, on a log scale for relative metrics. "
        "Fraction of the saving: part of the seconds saved by a full run over the same samples."
    )
    shown = tuple(_third(row) for row in rows)
    of = plan_kind_title(plan_kind) if plan_kind else "Paper recipe (P1)"
    return Table(f"Early, middle and late: {of}", columns, shown, "No run completed its budget.", note, columns[1:])


def _third(row: ThirdRow) -> tuple[str, ...]:
    ratios = (row.speed, row.progress, row.progress_per_s)
    n = next((str(ratio.n) for ratio in ratios if ratio is not None), "0")
    saved = say.UNMEASURED if row.saved is None else _figure(row.saved, say.share)
    return (row.third, *(_with_interval(ratio, row.why) for ratio in ratios), saved, n)


def _with_interval(ratio: Ratio | None, why: str) -> str:
    if ratio is None:
        return f"unknown: {say.one_line(why)}" if why else say.UNMEASURED
    return _figure(ratio, say.ratio)


def _figure(ratio: Ratio, words: Callable[[float], str]) -> str:
    return _beside(*say.estimate(ratio, words))


def _beside(value: str, interval: str) -> str:
    return value if interval == _NO_INTERVAL else f"{value} ({interval})"


def side_by_side(gains: Sequence[TimedGain]) -> Table:
    """Return tasks side by side: fractions of a step by phase and bound, and the saved time."""
    founds = [attribute(gain) for gain in gains]
    phases = [phase for phase in MEANINGS if any(row.phase == phase for found in founds for row in found.phases)]
    rows = [(phase, *(cell for found in founds for cell in _phase_cells(found, phase))) for phase in phases]
    bounds = [
        ({}, {}) if is_distorted(gain) else (bound_seconds(gain.reference), bound_seconds(gain.plan)) for gain in gains
    ]
    names = _in_any(each for pair in bounds for each in pair)
    rows += [(name, *(cell for pair in bounds for cell in _bound_cells(pair, name))) for name in names]
    rows.append(("speed-up", *(cell for gain in gains for cell in ("", _speedup_cell(gain), ""))))
    columns = [f"{_title(gain)}: {name}" for gain in gains for name in ("reference", "plan", "of the gain")]
    note = "Fractions of a step; then the phase's fraction of the seconds saved, if the saving is significant."
    return Table("Side by side", ("", *columns), tuple(rows), "No task was measured.", note, tuple(columns))


def _title(gain: TimedGain) -> str:
    return f"{say.one_line(gain.task)} {gain.on_ranks}".rstrip()


def _speedup_cell(gain: TimedGain) -> str:
    found = speedup_of(gain)
    return _beside(say.ratio(found.mean), _between(found, say.ratio))


def _phase_cells(found: Attribution, phase: str) -> tuple[str, str, str]:
    row = next((row for row in found.phases if row.phase == phase), None)
    if found.is_distorted:
        return _NO_SHARE, _NO_SHARE, _NO_SHARE
    if row is None:
        return "none", "none", ""
    wholes = [math.fsum(getattr(each, name) for each in found.phases) for name in ("reference_s", "plan_s")]
    share = _NO_SHARE if row.share is None else say.share(row.share)
    return say.share(row.reference_s / wholes[0]), say.share(row.plan_s / wholes[1]), share


def _bound_cells(pair: tuple[dict[str, float], dict[str, float]], name: str) -> tuple[str, str, str]:
    theirs, ours = (_bound_cell(each, name) for each in pair)
    return theirs, ours, ""


def _bound_cell(found: Mapping[str, float], name: str) -> str:
    if not found:
        return _NO_SHARE
    return _UNKNOWN if _is_unknown(found, name) else say.share(found.get(name, 0.0) / math.fsum(found.values()))


# Energy section of a report: the meter and its figures, or the reason for missing figures.


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
        blocks = [Paragraph(f"The plan changes: {changes}."), phase_gain_table(gain)]
        blocks += [
            part_table(gain, folded=folded),
            bound_table(gain),
            Bullets(gain_notes(gain)),
        ]
    blocks += [thirds_table(thirds, plan_kind) for plan_kind in tables.plan_kinds(row.plan_kind for row in thirds)]
    return Section(title, tuple(blocks), brief=gain is not None)


def gain_sections(gains: Sequence[TimedGain], thirds: Sequence[Sequence[ThirdRow]]) -> tuple[Section, ...]:
    """Return the attribution of every gain, and a side-by-side table for several gains."""
    each = [
        gain_section(gain, rows, f"{GAIN}: {say.one_line(gain.task)}", folded=False)
        for gain, rows in zip(gains, thirds, strict=True)
    ]
    beside = Section("Side by side", (side_by_side(gains),), brief=True)
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
    said = Paragraph(meter_sentence(comparison))
    if comparison.meter.is_absent:
        return (said,)
    found = target_energy_table(comparison)
    planning = planning_sentence(comparison)
    told = (said, *((Paragraph(planning),) if planning else ()))
    return (*told, arm_energy_table(comparison), *((found,) if found.rows else ()))


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
