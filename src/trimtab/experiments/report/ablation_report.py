"""Report of an ablation: the plan as a whole, the effect of every change, and all arms."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

from trimtab.core.units import format_seconds
from trimtab.experiments.ablation.ablation_result import (
    ALONE,
    INTERACTION,
    MEMORY,
    QUALITY,
    THROUGHPUT,
    WHOLE,
    WITHIN,
    AblatedArm,
    AblatedChange,
    Ablation,
    ChangeEffect,
    ChangeTime,
)
from trimtab.experiments.comparison.comparison_result import RatioRow, Verdict
from trimtab.experiments.report import formatting as say
from trimtab.experiments.report import plan_tables
from trimtab.experiments.report.comparison_report import facts
from trimtab.experiments.report.document import (
    Block,
    Bullets,
    Code,
    Document,
    Heading,
    Paragraph,
    Picture,
    Section,
    Tile,
)
from trimtab.experiments.report.key_figures import tile_of
from trimtab.experiments.report.tables import Cell, Table, plan_kind_title, plan_kinds, planning_counted, target_cells

if TYPE_CHECKING:
    from trimtab.experiments.report.figure_spec import FigureSpec


# Tables of an ablation: the plan as a whole, every change alone and in the plan, and all arms.

_SETTINGS = {ALONE: "alone", WITHIN: "in the plan", INTERACTION: "in the plan, over alone"}
_BEYOND = "in the plan, minus alone"  # For a difference of the metric.
_ALL = ("all changes", "together, over each alone")
_READ = {
    "throughput": "Above 1 is faster.",
    "peak_memory": "Below 1 is better. Peaks are counted bytes, so there is no interval.",
    "final_metric_difference": "Above 0 is better. Paired by seed, at equal samples (within 2% for tuned settings).",
}
_NOT_TRIED = Verdict("no verdict", "this setting failed", "arm.failed")
_COLUMNS = ("Estimate", "95% interval", "n", "Verdict")


def whole_table(ablation: Ablation, plan_kind: str) -> Table:
    """Return the plan and the unchanged run, both against the user's loop."""
    rows = [row for row in ablation.whole if row.plan_kind == plan_kind]
    return Table(
        title="",
        columns=("Measure", *_COLUMNS),
        rows=tuple((_capital(say.measure_of(row.metric, ablation.metric)), *_cells(row, ablation)) for row in rows),
        empty="The plan as a whole was not timed.",
        note="Throughput: above 1 is better. Peak memory: below 1 is better.",
        numeric=_COLUMNS[:3],
        groups=tuple(f"{_capital(_label(ablation, row.arm))} against {_label(ablation, row.against)}" for row in rows),
    )


def control_table(ablation: Ablation) -> Table:
    """Return the A/A controls: the noise an effect must exceed."""
    found = [(f"{_capital(_label(ablation, row.against))}, against itself", row.ratio) for row in ablation.controls]
    if ablation.interaction_control is not None:
        found.append(("Both together, over the product of separate effects", ablation.interaction_control))
    return Table(
        title="Resolution (A/A controls)",
        columns=("A/A control", *_COLUMNS[:3]),
        rows=tuple((what, *say.estimate(ratio, say.ratio), str(ratio.n)) for what, ratio in found),
        empty="No A/A control ran, so small effects may be noise.",
        note="Throughput. An effect within the interval of its control may be noise: the control of the loop "
        "applies to effects alone, the control of the plan to effects in the plan, and both to their ratio.",
        numeric=_COLUMNS[:3],
    )


def _label(ablation: Ablation, name: str) -> str:
    return say.one_line(next((arm.label for arm in ablation.arms if arm.name == name), name))


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def effect_table(ablation: Ablation, measured: str, plan_kind: str) -> Table:
    """Return the effect of the changes of a kind of plan on a measure: alone, in the plan, and the ratio of both."""
    lines = [
        line
        for change in ablation.changes
        if change.plan_kind == plan_kind
        for line in _lines(ablation, change, measured)
    ]
    whole = ablation.effect("", INTERACTION, measured)
    if whole is not None and whole.plan_kind == plan_kind:
        lines.append((*_ALL, *_cells(whole, ablation)))
    before = ["", *(line[0] for line in lines)]
    return Table(
        title=_capital(say.measure_of(measured, ablation.metric)),
        columns=("Change", "Setting", *_COLUMNS),
        rows=tuple(("" if line[0] == name else line[0], *line[1:]) for name, line in zip(before, lines, strict=False)),
        empty="Not measured.",
        note=_READ[measured],
        numeric=_COLUMNS[:3],
    )


def time_table(ablation: Ablation, plan_kind: str, *, whole: bool) -> Table:
    """Return seconds to each target with and without a change, as in the paper's table III.

    Args:
        ablation: the ablation.
        plan_kind: "equivalent" or "tuned".
        whole: True for the plan as a whole, False for its changes.
    """
    rows = [each for each in ablation.times if each.row.plan_kind == plan_kind and (each.setting == WHOLE) is whole]
    columns = ("Set in", "Target", "Search", "Reached", "Time", "Speed-up", "95% interval", "n", "Verdict")
    return Table(
        title="Time to target",
        columns=columns,
        rows=tuple(_time_cells(each) for each in rows),
        empty="Not measured: no arm ran to the end.",
        note="Each pair of values: with the change, without the change. Speed-up above 1: faster with the change. "
        "Counted: the planning time of the whole plan, or the search time of a tuned setting. A bound is shown if "
        "an arm did not reach the target in some pair, or had reached it by its first evaluation.",
        numeric=columns[1:2] + columns[3:8],
        groups=tuple(_timed_of(ablation, each) for each in rows),
    )


def _time_cells(each: ChangeTime) -> tuple[Cell, ...]:
    setting = "against the reference" if each.setting == WHOLE else _SETTINGS[each.setting]
    return setting, say.metric(each.row.target), planning_counted(each.row), *target_cells(each.row)


def _timed_of(ablation: Ablation, each: ChangeTime) -> str:
    change = ablation.change(each.change)
    return "The plan as a whole" if change is None else _capital(say.one_line(change.says))


def _lines(ablation: Ablation, change: AblatedChange, measured: str) -> Iterator[tuple[Cell, ...]]:
    for setting, usual in _SETTINGS.items():
        words = _words(setting, measured, usual)
        effect, name = ablation.effect(change.name, setting, measured), say.one_line(change.says)
        if effect is not None:
            yield (name, words, *_cells(effect, ablation))
        elif setting in change.refusals:
            yield (name, words, "none", "see the notes", "0", _NOT_TRIED)


def _words(setting: str, measured: str, usual: str) -> str:
    return _BEYOND if (setting, measured) == (INTERACTION, QUALITY) else usual


def _cells(row: RatioRow | ChangeEffect, ablation: Ablation) -> tuple[Cell, ...]:
    figures = say.estimate(row.ratio, say.words_of(row.metric, ablation.unit))
    return (
        *figures,
        str(row.ratio.n),
        say.verdict_with_enough_pairs(row.verdict, row.ratio.n, counted=row.ratio.counted),
    )


def pair_table(ablation: Ablation, measured: str, plan_kind: str) -> Table:
    """Return the effect of two changes together over the product of the separate effects."""
    found = [e for e in ablation.effects if e.other and (e.metric, e.plan_kind) == (measured, plan_kind)]
    return Table(
        title=_capital(say.measure_of(measured, ablation.metric)),
        columns=("Changes", *_COLUMNS),
        rows=tuple((_pair(ablation, effect), *_cells(effect, ablation)) for effect in found),
        empty="No two changes were run together.",
        note="Effect together minus the sum of the separate effects: 0 without interaction."
        if measured == QUALITY
        else "Effect together over the product of the separate effects: 1 without interaction.",
        numeric=_COLUMNS[:3],
    )


def _pair(ablation: Ablation, effect: ChangeEffect) -> str:
    found = (ablation.change(name) for name in (effect.change, effect.other))
    return " with ".join(say.one_line(change.says) for change in found if change is not None)


def raw_table(ablation: Ablation, plan_kind: str) -> Table:
    """Return the raw pairs behind the effects of a kind of plan."""
    rows = [e for e in ablation.effects if e.plan_kind == plan_kind and not e.ratio.counted]
    return Table(
        title="Raw pairs",
        columns=("Measure", "Setting", "Pairs, by seed"),
        rows=tuple(
            (
                say.measure_of(e.metric, ablation.metric),
                _words(e.setting, e.metric, _SETTINGS[e.setting]) if e.change and not e.other else _ALL[1],
                say.raw_pairs(e.ratio, say.words_of(e.metric, ablation.unit)),
            )
            for e in rows
        ),
        empty="No pair was recorded.",
        folded=True,
        groups=tuple(_of(ablation, e) for e in rows),
    )


def _of(ablation: Ablation, effect: ChangeEffect) -> str:
    return _pair(ablation, effect) if effect.change else ", ".join(_ALL)


def arm_table(ablation: Ablation) -> Table:
    """Return all arms with their measurements, as in the paper's table III."""
    columns = ("Configuration", "Time per sample", "Peak memory", f"Final {say.one_line(ablation.metric)}")
    return Table(
        title="",
        columns=columns,
        rows=tuple(_arm_row(arm) for arm in ablation.arms),
        empty="No arm ran.",
        note="Median over seeds (lowest to highest). Peak memory is counted in separate steps, without timing.",
        numeric=columns[1:],
    )


def _arm_row(arm: AblatedArm) -> tuple[Cell, ...]:
    return (
        say.one_line(arm.label) + (": failed" if arm.error else ""),
        say.median_and_range(arm.sample_s, lambda value: say.UNMEASURED if value is None else format_seconds(value)),
        say.size(arm.peak_bytes),
        say.median_and_range(arm.final_metric, say.metric),
    )


def plan_kinds_of(rows: Sequence[AblatedChange] | Sequence[ChangeEffect] | Sequence[RatioRow]) -> tuple[str, ...]:
    """Return the kinds of plan present, "equivalent" first."""
    return plan_kinds(row.plan_kind for row in rows)


READ = (
    "Alone: the loop with the change, over the loop. In the plan: the plan, over the plan without the change. Here the "
    "loop is trained by a run without changes, so that the overhead of a run is part of no change. "
    "Without interactions, both figures of a change are equal."
)


def document(ablation: Ablation) -> Document:
    """Return the report of an ablation."""
    verdict = ablation.headline
    return Document(
        "ablation",
        ablation.task,
        say.verdict_with_enough_pairs(verdict, ablation.num_seeds) if ablation.changes else verdict,
        ablation.description,
        _byline(ablation),
        _tiles(ablation),
        _sections(ablation),
        partial(_draw, ablation),
    )


def _draw(ablation: Ablation, picture: Picture) -> FigureSpec:
    from trimtab.experiments.report.ablation_figure import effects_figure

    return effects_figure(ablation, picture.plan_kind)


def _byline(ablation: Ablation) -> str:
    direction = "higher" if ablation.higher_is_better else "lower"
    parts = (
        f"{ablation.num_seeds} paired runs of {len(ablation.arms)} arms" if ablation.arms else "nothing was measured",
        f"{say.one_line(ablation.metric)} ({direction} is better)",
        say.one_line(ablation.created),
    )
    return " · ".join(parts)


def _tiles(ablation: Ablation) -> tuple[Tile, ...]:
    found = [row for row in ablation.whole if row.arm == "plan"]
    tiles = [
        tile_of(
            say.measure_of(row.metric, ablation.metric).capitalize(),
            row.ratio,
            say.words_of(row.metric, ablation.unit),
            "the plan against the reference",
        )
        for row in found
    ]
    whole = ablation.effect("", INTERACTION)
    if whole is not None:
        tiles.append(
            tile_of("All changes together", whole.ratio, say.ratio, "over the product of the separate effects")
        )
    return tuple(tiles)


def _sections(ablation: Ablation) -> tuple[Section, ...]:
    return (
        Section("What the plan changes", (plan_tables.change_table(ablation.plan, changed=True),)),
        *(_measured(ablation) if ablation.changes else ()),
        Section(
            "Environment and data",
            (facts("Environment", ablation.environment), facts("Data source", ablation.data_source)),
        ),
        Section("Reproduce", (Code(ablation.command or "not recorded"),)),
        Section("Notes", (Bullets(ablation.notes or ("None.",)),), brief=True),
    )


def _measured(ablation: Ablation) -> Iterator[Section]:
    yield Section("The plan as a whole", tuple(_whole(ablation)), brief=True)
    read = (Paragraph(READ), *_effects(ablation), control_table(ablation))
    yield Section("Effect of each change", read, brief=True)
    if pairs := tuple(_pairs(ablation)):
        yield Section("Pairs of changes", pairs, brief=True)
    yield Section("All arms", tuple(_arms(ablation)), brief=True)


def _whole(ablation: Ablation) -> Iterator[Block]:
    for plan_kind in plan_kinds_of(ablation.whole) or ("equivalent",):
        yield Heading(plan_kind_title(plan_kind))
        yield whole_table(ablation, plan_kind)
        yield from _times(ablation, plan_kind, whole=True)


def _effects(ablation: Ablation) -> Iterator[Block]:
    for plan_kind in plan_kinds_of(ablation.changes):
        yield Heading(plan_kind_title(plan_kind))
        yield Picture("effects", plan_kind)
        for measured in (THROUGHPUT, MEMORY, QUALITY):
            table = effect_table(ablation, measured, plan_kind)
            if table.rows and (measured != QUALITY or any(e.metric == QUALITY for e in ablation.effects)):
                yield table
        yield from _times(ablation, plan_kind, whole=False)
        yield raw_table(ablation, plan_kind)


def _times(ablation: Ablation, plan_kind: str, *, whole: bool) -> Iterator[Block]:
    table = time_table(ablation, plan_kind, whole=whole)
    if table.rows:
        yield table


def _pairs(ablation: Ablation) -> Iterator[Block]:
    found = [effect for effect in ablation.effects if effect.other]
    for plan_kind in plan_kinds_of(found):
        yield Heading(plan_kind_title(plan_kind))
        yield from (pair_table(ablation, measured, plan_kind) for measured in (THROUGHPUT, MEMORY))
        if any(effect.metric == QUALITY and effect.plan_kind == plan_kind for effect in found):
            yield pair_table(ablation, QUALITY, plan_kind)


def _arms(ablation: Ablation) -> Iterator[Block]:
    yield arm_table(ablation)
    failed = tuple(f"{arm.label}: {say.one_line(arm.error)}" for arm in ablation.arms if arm.error)
    if failed:
        yield Bullets(failed)
