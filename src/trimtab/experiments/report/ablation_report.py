"""Report of an ablation: the plan as a whole, the effect of every change, and all arms."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

from trimtab.experiments.ablation.ablation_result import INTERACTION, MEMORY, QUALITY, THROUGHPUT, Ablation
from trimtab.experiments.report import ablation_tables as tables
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
from trimtab.experiments.report.tables import plan_kind_title

if TYPE_CHECKING:  # Imports matplotlib, which is not needed for text.
    from trimtab.experiments.report.figure_spec import FigureSpec

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
    read = (Paragraph(READ), *_effects(ablation), tables.control_table(ablation))
    yield Section("Effect of each change", read, brief=True)
    if pairs := tuple(_pairs(ablation)):
        yield Section("Pairs of changes", pairs, brief=True)
    yield Section("All arms", tuple(_arms(ablation)), brief=True)


def _whole(ablation: Ablation) -> Iterator[Block]:
    for plan_kind in tables.plan_kinds_of(ablation.whole) or ("equivalent",):
        yield Heading(plan_kind_title(plan_kind))
        yield tables.whole_table(ablation, plan_kind)
        yield from _times(ablation, plan_kind, whole=True)


def _effects(ablation: Ablation) -> Iterator[Block]:
    for plan_kind in tables.plan_kinds_of(ablation.changes):
        yield Heading(plan_kind_title(plan_kind))
        yield Picture("effects", plan_kind)
        for measured in (THROUGHPUT, MEMORY, QUALITY):
            table = tables.effect_table(ablation, measured, plan_kind)
            if table.rows and (measured != QUALITY or any(e.metric == QUALITY for e in ablation.effects)):
                yield table
        yield from _times(ablation, plan_kind, whole=False)
        yield tables.raw_table(ablation, plan_kind)


def _times(ablation: Ablation, plan_kind: str, *, whole: bool) -> Iterator[Block]:
    table = tables.time_table(ablation, plan_kind, whole=whole)
    if table.rows:
        yield table


def _pairs(ablation: Ablation) -> Iterator[Block]:
    found = [effect for effect in ablation.effects if effect.other]
    for plan_kind in tables.plan_kinds_of(found):
        yield Heading(plan_kind_title(plan_kind))
        yield from (tables.pair_table(ablation, measured, plan_kind) for measured in (THROUGHPUT, MEMORY))
        if any(effect.metric == QUALITY and effect.plan_kind == plan_kind for effect in found):
            yield tables.pair_table(ablation, QUALITY, plan_kind)


def _arms(ablation: Ablation) -> Iterator[Block]:
    yield tables.arm_table(ablation)
    failed = tuple(f"{arm.label}: {say.one_line(arm.error)}" for arm in ablation.arms if arm.error)
    if failed:
        yield Bullets(failed)
