"""Records as a race leaves them, made by hand."""

from __future__ import annotations

from collections.abc import Sequence

from trimtab.core.record import End, Evaluation, Event, Header, RunRecord

STEP_ROWS = 10


def record(
    *,
    blocks: Sequence[tuple[int, float]] = ((STEP_ROWS, 1.0),) * 3,
    evaluations: Sequence[tuple[int, float, float]] = (),
    metric: str = "accuracy",
    name: str = "arm",
    end: str | None = "budget",
    cpu_share: float | None = None,
) -> RunRecord:
    """Return the record of one arm: (rows, seconds) by block, and (rows, train seconds, metric) by evaluation.

    `cpu_share`: processor time over wall-clock time; without it none was recorded.
    """
    details = [{"rows": rows, "seconds": seconds} for rows, seconds in blocks]
    if cpu_share is not None:
        details = [detail | {"cpu_s": detail["seconds"] * cpu_share} for detail in details]
    events = tuple(Event("block", i, detail) for i, detail in enumerate(details))
    total = {"rows": sum(rows for rows, _ in blocks), "train_s": sum(seconds for _, seconds in blocks)}
    found = tuple(Evaluation(rows, seconds, {metric: value}) for rows, seconds, value in evaluations)
    return RunRecord(Header(name, 0), (), found, events, None if end is None else End(end, total))


def timed(step_s: float, steps: int = 4) -> RunRecord:
    """Return an arm whose every step is a block and took as long as every other, but for a slow first one."""
    return record(blocks=[(STEP_ROWS, 10 * step_s), *[(STEP_ROWS, step_s)] * steps])


def climbing(seconds: Sequence[float], values: Sequence[float], metric: str = "accuracy") -> RunRecord:
    """Return an arm that was evaluated at these train seconds with these values, every 100 rows."""
    before = [0.0, *seconds[:-1]]
    blocks = [(100, now - then) for now, then in zip(seconds, before, strict=True)]
    points = [(100 * i, s, value) for i, (s, value) in enumerate(zip(seconds, values, strict=True), 1)]
    return record(blocks=blocks, evaluations=points, metric=metric)
