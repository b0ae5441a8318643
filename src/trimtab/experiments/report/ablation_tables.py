"""The tables of an ablation: the plan as a whole, each change alone and in the plan, and every arm as it ran."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from trimtab.core.units import format_seconds
from trimtab.experiments.ablation import ALONE, INTERACTION, WITHIN, AblatedArm, Ablation, Change, Effect
from trimtab.experiments.report import wording as say
from trimtab.experiments.report.tables import Cell, Table
from trimtab.experiments.result import RatioRow

_SETTINGS = {ALONE: "alone", WITHIN: "in the plan", INTERACTION: "in the plan, over alone"}
_READ = {
    "throughput": "Above 1 is faster.",
    "peak_memory": "Below 1 is better. Counted, so that there is no interval.",
    "final_metric_difference": "Above 0 is better. After the same rows, paired by seed.",
}
_COLUMNS = ("Estimate", "95% interval", "n", "Verdict")


def whole_table(ablation: Ablation, tier: str) -> Table:
    """Return the plan and the engine that changes nothing, each against the user's loop."""
    rows = [row for row in ablation.whole if row.tier == tier]
    return Table(
        title="",
        columns=("Measure", *_COLUMNS),
        rows=tuple((say.measure_of(row.metric, ablation.metric).capitalize(), *_cells(row, ablation)) for row in rows),
        empty="The plan as a whole was not timed.",
        note="Throughput: above 1 is better. Peak memory: below 1 is better.",
        numeric=_COLUMNS[:3],
        groups=tuple(f"{named(ablation, row.arm)} against {named(ablation, row.against)}" for row in rows),
    )


def named(ablation: Ablation, name: str) -> str:
    """Return what an arm is called."""
    label = next((arm.label for arm in ablation.arms if arm.name == name), name)
    return say.one_line(label[:1].upper() + label[1:])


def effect_table(ablation: Ablation, measured: str, tier: str) -> Table:
    """Return what each change of a tier is worth by one measure: alone, in the plan, and the one over the other."""
    changes = [change for change in ablation.changes if change.tier == tier]
    lines = [(change, line) for change in changes for line in _lines(ablation, change, measured)]
    return Table(
        title=say.measure_of(measured, ablation.metric).capitalize(),
        columns=("Change", *_COLUMNS),
        rows=tuple(line for _, line in lines),
        empty="Not measured.",
        note=_READ[measured],
        numeric=_COLUMNS[:3],
        groups=tuple(say.one_line(change.says) for change, _ in lines),
    )


def _lines(ablation: Ablation, change: Change, measured: str) -> Iterator[tuple[Cell, ...]]:
    for setting, words in _SETTINGS.items():
        effect = ablation.effect(change.name, setting, measured)
        if effect is not None:
            yield (words, *_cells(effect, ablation))
        elif setting in change.refusals:
            yield (words, say.one_line(change.refusals[setting]), "", "", "")


def _cells(row: RatioRow | Effect, ablation: Ablation) -> tuple[Cell, ...]:
    figures = say.estimate(row.ratio, say.words_of(row.metric, ablation.unit))
    return (*figures, str(row.ratio.n), say.honest(row.verdict, row.ratio.n, counted=row.ratio.counted))


def pair_table(ablation: Ablation, measured: str, tier: str) -> Table:
    """Return what two changes are worth together, over the product of each alone."""
    found = [e for e in ablation.effects if e.other and (e.metric, e.tier) == (measured, tier)]
    return Table(
        title=say.measure_of(measured, ablation.metric).capitalize(),
        columns=("Changes", *_COLUMNS),
        rows=tuple((_pair(ablation, effect), *_cells(effect, ablation)) for effect in found),
        empty="No two changes were run together.",
        note="Both together, over the product of each alone: 1 where they act apart.",
        numeric=_COLUMNS[:3],
    )


def _pair(ablation: Ablation, effect: Effect) -> str:
    found = (ablation.change(name) for name in (effect.change, effect.other))
    return " with ".join(say.one_line(change.says) for change in found if change is not None)


def raw_table(ablation: Ablation, tier: str) -> Table:
    """Return the raw pairs behind a tier's effects."""
    rows = [e for e in ablation.effects if e.tier == tier and not e.ratio.counted]
    return Table(
        title="Raw pairs",
        columns=("Measure", "Setting", "Pairs, by seed"),
        rows=tuple(
            (
                say.measure_of(e.metric, ablation.metric),
                _SETTINGS[e.setting],
                say.raw_pairs(e.ratio, say.words_of(e.metric, ablation.unit)),
            )
            for e in rows
        ),
        empty="No pair was recorded.",
        folded=True,
        groups=tuple(_of(ablation, e) for e in rows),
    )


def _of(ablation: Ablation, effect: Effect) -> str:
    return _pair(ablation, effect) if effect.change else "all changes, over each alone"


def arm_table(ablation: Ablation) -> Table:
    """Return every arm as it ran: the paper's table III."""
    columns = ("Configuration", "Time per row", "Peak memory", f"Final {say.one_line(ablation.metric)}")
    return Table(
        title="",
        columns=columns,
        rows=tuple(_arm_row(arm) for arm in ablation.arms),
        empty="No arm ran.",
        note="Median over seeds (lowest to highest). Peak memory is counted apart from what is timed.",
        numeric=columns[1:],
    )


def _arm_row(arm: AblatedArm) -> tuple[Cell, ...]:
    return (
        say.one_line(arm.label) + (": failed" if arm.error else ""),
        say.spread(arm.row_s, lambda value: say.UNMEASURED if value is None else format_seconds(value)),
        say.size(arm.peak_bytes),
        say.spread(arm.final_metric, say.metric),
    )


def tiers_of(rows: Sequence[Change] | Sequence[Effect] | Sequence[RatioRow]) -> tuple[str, ...]:
    """Return the tiers that occur, S first."""
    return tuple(sorted({row.tier for row in rows}, key="SF".find))
