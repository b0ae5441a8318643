"""Scaling table as text with caveats, and as flat rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict

from trimtab.core.hardware import Link
from trimtab.core.units import format_bytes, format_seconds
from trimtab.experiments.scaling.scaling_result import (
    PLAN_KINDS,
    RECIPES,
    PlanSharding,
    RefusedRecipe,
    Scaling,
    ScalingRow,
)
from trimtab.planner.statistics import MIN_PAIRS_FOR_VERDICT, Interval

_TIMED = ("scaling", "recipe", "ranks", "batch", "samples/s", "efficiency (95%)", "waiting", "step")
_COLUMNS = (*_TIMED, "stage", "micro-batches", "reduced in", "peak per rank", "predicted", "n")


def tables(found: Scaling) -> dict[str, tuple[tuple[str, ...], ...]]:
    """Return tables of text by title, headers first; equivalent plans and adaptive batch sizes are separate."""
    parts = {
        "Equivalent plan": [row for row in found.rows if PLAN_KINDS[row.recipe] != "tuned"],
        "Adaptive batch size": [row for row in found.rows if PLAN_KINDS[row.recipe] == "tuned"],
    }
    refused = tuple(map(_refused_cells, found.refused))
    return {
        title: (_COLUMNS, *map(_cells, rows), *(refused if title == "Equivalent plan" else ()))
        for title, rows in parts.items()
        if rows
    }


def _refused_cells(row: RefusedRecipe) -> tuple[str, ...]:
    found = (
        row.mode if row.ranks > 1 else "",
        row.recipe,
        f"{row.ranks}",
        "",
        f"{'non-finite' if row.nonfinite else 'no plan'}: see notes",
    )
    return (*found, *("" for _ in _COLUMNS[len(found) :]))


def _why(row: RefusedRecipe) -> str:
    return row.why if row.nonfinite else f"no plan meets the limit: {row.why}"


def _cells(row: ScalingRow) -> tuple[str, ...]:
    return (
        row.mode if row.ranks > 1 else "",
        row.recipe,
        f"{row.ranks}" + (f" (share {row.crowded})" if row.crowded else ""),
        f"{row.window_samples:.0f}",
        f"{row.samples_per_s.mean:.4g}",
        _efficiency(row),
        "" if row.waiting is None else _share(row.waiting),
        format_seconds(row.window_s),
        *(_each(row, part) for part in (_stage, _split, _sent)),
        "" if row.peak_bytes is None else format_bytes(row.peak_bytes),
        _each(row, _told),
        str(_num(row)),
    )


def _num(row: ScalingRow) -> int:
    """Return the number of rounds behind the efficiency; on a single rank, the number of timed rounds."""
    return row.samples_per_s.n if row.efficiency is None else len(row.pairs)


def _each(row: ScalingRow, said: Callable[[PlanSharding], str]) -> str:
    """Return the descriptions of the plans over all rounds."""
    return " / ".join(dict.fromkeys(said(each) for each in row.sharings))


def _stage(each: PlanSharding) -> str:
    return "" if each.zero_stage is None else f"{each.zero_stage}{'' if each.reduces_once else ', each reduced'}"


def _split(each: PlanSharding) -> str:
    return f"{each.num_micro_batches} x {each.micro_batch}"


def _sent(each: PlanSharding) -> str:
    return "" if each.zero_stage is None else each.reduce_dtype


def _told(each: PlanSharding) -> str:
    return "" if each.predicted_bytes is None else format_bytes(each.predicted_bytes)


def _efficiency(row: ScalingRow) -> str:
    """Return the efficiency with its interval, or the value of every round if there are too few rounds."""
    if row.efficiency is None:
        return ""
    found = row.efficiency
    if not row.has_verdict:
        return ", ".join(f"{100 * pair:.1f}%" for pair in row.pairs)
    return f"{100 * found.mean:.1f}% ({100 * found.low:.1f} to {100 * found.high:.1f})"


def _share(value: Interval) -> str:
    half = "" if value.n < MIN_PAIRS_FOR_VERDICT else f" ± {50 * (value.high - value.low):.1f}"
    return f"{100 * value.mean:.1f}%{half}"


def text(found: Scaling) -> str:
    """Return the tables with caveats for a terminal."""
    parts = [f"{title}\n{_aligned(rows)}" for title, rows in tables(found).items()]
    return "\n\n".join([*parts, "\n".join(notes(found))])


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[i]) for row in rows) for i in range(len(_COLUMNS))]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)
    return "\n".join(lines)


def notes(found: Scaling) -> list[str]:
    """Return the caveats of the table."""
    recipes = list(dict.fromkeys(row.recipe for row in found.rows))
    said = [f"{recipe}: {RECIPES[recipe]}" for recipe in recipes]
    said += [f"{row.recipe}, {_where(row.ranks, row.mode)}: {row.says}" for row in found.rows if row.says]
    said += [f"{row.recipe}, {_where(row.ranks, row.mode)}: {_why(row)}" for row in found.refused]
    said += [f"link: {link.name}, {_speed(link)}" for link in found.links]
    said.append(f"threads of a rank: {', '.join(map(str, found.threads))}")
    said.append("waiting: fraction of a step that the same loop does not need without communication")
    if any(row.peak_bytes is not None for row in found.rows):
        said.append("peak: largest over ranks, counted in separate steps, without timing")
    controls = {f"{row.ranks} ranks, {row.mode}": row.resolution for row in found.rows if row.resolution is not None}
    said += [f"{where}: the A/A control resolves {100 * least:.1f}%" for where, least in controls.items()]
    if any(PLAN_KINDS[row.recipe] == "tuned" for row in found.rows):
        said.append("an adaptive batch size may need more or fewer samples to reach a loss; this is not measured here")
    if any(not row.settled for row in found.rows):
        said.append("the adaptive batch size was still changing in some round; the figure is for its size then")
    if shared := {row.crowded for row in found.rows if row.crowded}:
        said.append(f"ranks that share {' or '.join(shared)} do not measure scaling")
    if any(_num(row) < MIN_PAIRS_FOR_VERDICT for row in found.rows):
        said.append(
            f"fewer than {MIN_PAIRS_FOR_VERDICT} rounds: efficiencies of all rounds are shown, without a verdict"
        )
    return said


def _where(ranks: int, mode: str) -> str:
    return "one rank" if ranks == 1 else f"{ranks} ranks, {mode}"


def _speed(link: Link) -> str:
    return f"{format_seconds(link.latency_s)} per hop, {link.bytes_per_s / 1e6:.4g} MB/s"


def benchmark_object(found: Scaling, link: str | None) -> dict[str, object]:
    """Return the object printed by `trimtab scale --json`; the arguments are those of `benchmark_rows`."""
    rows = list(benchmark_rows(found, link))
    return {"schema": 1, "name": "scale", "environment": found.environment or {}, "rows": rows}


def benchmark_rows(found: Scaling, link: str | None) -> Iterable[dict[str, object]]:
    """Yield a flat row for every recipe and number of ranks.

    Args:
        found: the table.
        link: name of the link, such as "local" or "slow"; None for the measured link of the row's ranks.
    """
    names = {ranks: each.name for ranks, each in zip(found.linked, found.links, strict=False)}
    for row in found.rows:
        yield {
            "metric": "scaling_efficiency",
            "task": found.task,
            "scaling": row.mode,
            "ranks": row.ranks,
            "link": names.get(row.ranks, "") if link is None else link,
            "recipe": row.recipe,
            "plan_kind": PLAN_KINDS[row.recipe],
            "effective_batch": row.window_samples,
            "samples_per_s": row.samples_per_s.mean,
            "window_s": row.window_s,
            **_bounds(row),
            "pairs": list(row.pairs),
            "n": len(row.pairs),
            "resolution": row.resolution,
            "waiting_share": None if row.waiting is None else row.waiting.mean,
            "threads": list(found.threads),
            "shares": row.crowded,
            "says": row.says,
            "peak_bytes": row.peak_bytes,
            "plans": [asdict(each) for each in row.sharings],
        }
    for refused in found.refused:
        yield {
            "metric": "scaling_efficiency",
            "task": found.task,
            "scaling": refused.mode,
            "ranks": refused.ranks,
            "link": names.get(refused.ranks, "") if link is None else link,
            "recipe": refused.recipe,
            "plan_kind": PLAN_KINDS[refused.recipe],
            "mean": None,
            "n": 0,
            "refused": refused.why,
        }


def _bounds(row: ScalingRow) -> dict[str, float | None]:
    found = row.efficiency
    bounds = (found.low, found.high) if found is not None and row.has_verdict else (None, None)
    return {"mean": None if found is None else found.mean, "low": bounds[0], "high": bounds[1]}
