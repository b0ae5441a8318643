"""Attribution of a gain to phases, as flat benchmark rows."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from trimtab.core.record import read_together
from trimtab.core.step_phases import TimedGain
from trimtab.experiments.comparison.comparison_result import ThirdRow
from trimtab.experiments.phase_attribution import SavedTime, attribute, bound_seconds, speedup
from trimtab.planner.statistics import Interval

ROWS_SCHEMA = 1


def phase_object(gains: Sequence[TimedGain], thirds: Sequence[Sequence[ThirdRow]]) -> dict[str, Any]:
    """Return the object printed by `trimtab phases --json`; values that differ between machines are all listed."""
    rows = [row for gain in gains for row in gain_rows(gain)]
    rows += [row for gain, each in zip(gains, thirds, strict=True) for row in third_rows_flat(gain.task, each)]
    where = read_together(gain.environment for gain in gains)
    return {"schema": ROWS_SCHEMA, "name": "phases", "environment": where, "rows": rows}


def gain_rows(gain: TimedGain) -> Iterator[dict[str, Any]]:
    """Yield rows of a gain: by phase, module class and bound, timing overhead and speed-up."""
    found, head = attribute(gain), {"task": gain.task, "ranks": gain.num_ranks, "device": gain.device.name}
    for name, rows in (
        ("phase_saved_s", (*found.phases, found.unattributed, found.whole)),
        ("part_saved_s", found.parts),
    ):
        yield from ({"metric": name} | head | _saved(row) for row in rows)
    arms = {"reference": (gain.reference, found.reference_clock), "plan": (gain.plan, found.plan_clock)}
    for arm, (phases, clock) in arms.items():
        bounds = {} if found.is_distorted else bound_seconds(phases)
        for bound, seconds in bounds.items():
            share = seconds / math.fsum(bounds.values())
            yield {"metric": "bound_share", **head, "arm": arm, "bound": bound, "seconds_s": seconds, "share": share}
        yield {"metric": "clock_ratio", **head, "arm": arm} | _interval(clock)
    yield {"metric": "step_speedup", **head} | _interval(speedup(gain))


def third_rows_flat(task: str, thirds: Sequence[ThirdRow]) -> Iterator[dict[str, Any]]:
    """Yield a row for every ratio and saved fraction of every third."""
    for row in thirds:
        head = {"task": task, "plan_kind": row.plan_kind, "arm": row.arm, "against": row.against, "third": row.third}
        ratios = {f"third_{name}_ratio": getattr(row, name) for name in ("speed", "progress", "progress_per_s")}
        for name, ratio in (ratios | {"third_saved_share": row.saved}).items():
            if ratio is not None:
                figures = {"mean": ratio.mean, "low": ratio.low, "high": ratio.high, "n": ratio.n, "pairs": ratio.pairs}
                yield {"metric": name} | head | figures


def _saved(row: SavedTime) -> dict[str, Any]:
    seconds = {"phase": row.phase, "reference_s": row.reference_s, "plan_s": row.plan_s}
    return seconds | _interval(row.saved) | {"share": row.share}


def _interval(found: Interval) -> dict[str, Any]:
    return {"mean": _finite(found.mean), "low": _finite(found.low), "high": _finite(found.high), "n": found.n}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
