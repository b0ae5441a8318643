"""Generated tables and sentences within the pages of docs, from the newest records, for `make figures`.

Pages contain the statements; all measured figures are generated here from `benchmarks/results`.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks import records
from trimtab.planner.statistics import MIN_PAIRS_FOR_VERDICT as FEW

Row = dict[str, Any]
BEHIND, ON_TIME = 0.04, 0.33  # limit on goodput's regret; allowance in predicted seconds
INTERVAL = 0.15  # minimum relative half-width of the interval of predicted seconds


def newest(root: Path, name: str) -> list[Row]:
    """Return the rows of the newest record whose name starts with `name`."""
    return list(records.newest(root, name).rows)


def blocks(root: Path) -> dict[str, dict[str, list[str]]]:
    """Return the generated lines by page and block name."""

    def of(write: Callable[..., Iterator[str]], *names: str) -> list[str]:
        return list(write(*(newest(root, name) for name in names)))

    goodput = [f"regret-{task}" for task in ("cifar10_resnet_small", "source_gpt_small")]
    links = " and ".join(records.newest(root, name).link for name in goodput)
    return {
        "accumulation.md": {
            "goodput": [*of(_goodput, *goodput), f"({links})."],
            "monitor": of(_monitor, "monitor-source_gpt", "monitor-digits_resnet"),
        },
        "memory.md": {
            "traced": list(_traced(records.every(root, "prediction"))),
            "least": of(_least, "frontier-epyc", "frontier-no_dropout"),
        },
        "planning.md": {
            "interval": of(_missed, "prediction"),
            "elsewhere": of(_elsewhere, "published", "prediction"),
            "planned": of(_planned, "planning_time"),
            "measured": of(_measured, "probing"),
            "searched": of(_searched, "exhaustive", "budget_sweep"),
        },
        "ranks.md": {"told": of(_told, "scaling-windows")},
        "scaling.md": {
            "bytes": of(_bytes, "rank_memory", "rank_memory_deepspeed"),
            "published": of(_published, "published_ranks"),
        },
    }


# docs/accumulation.md


def _goodput(*each: list[Row]) -> Iterator[str]:
    """Yield a line per task and link: regret for the mean of the losses, and the worst single loss."""
    columns = "task, link | `f` | best fixed k | k = 1 | `goodput` | paired by seed (95%) | `goodput`, new seeds"
    yield f"| {columns} | at most {BEHIND:.0%} slower | `paper` | `paper`, new seeds |"
    yield "|---" * 10 + "|"
    for rows in each:
        means = [row for row in rows if row["easiest"] != row["target"]]
        for link in dict.fromkeys(row["link"] for row in means):
            yield _of_link({row["policy"]: row for row in means if row["link"] == link})
    singles = [row["regret"] for rows in each for row in rows if _is_single(row)]
    yield ""
    yield f"For a single target loss, `goodput` takes {max(singles):.1%} more time than the best fixed k at worst"


def _is_single(row: Row) -> bool:
    return row["policy"] == "goodput" and row["easiest"] == row["target"] and row["regret"] is not None


def _of_link(arms: Mapping[str, Row]) -> str:
    ours, paper, one = arms["goodput"], arms["paper"], arms["k=1"]
    fixed = f"{ours['fixed_s'] / ours['micro_s']:.2f}"
    paired = f"{ours['mean']:.2f} ({ours['low']:.2f} to {ours['high']:.2f}), n = {ours['n']}"
    within = "yes" if ours["regret"] <= BEHIND else "only with new seeds" if ours["over_again"] <= BEHIND else "no"
    theirs = f"reached from {paper['n']} of {paper['seeds']} seeds | "
    if paper["regret"] is not None:
        theirs = f"{paper['regret']:+.1%} | {paper['over_again']:+.1%}"
    over = f"{one['regret']:+.1%} | {ours['regret']:+.1%} | {paired} | {ours['over_again']:+.1%} | {within}"
    return f"| {ours['task']}, {ours['link']} | {fixed} | {ours['best_k']} | {over} | {theirs} |"


def _monitor(*each: list[Row]) -> Iterator[str]:
    for row in (row for rows in each for row in rows if "control_half_width" in row):
        bounds = f"{row['low'] - 1:+.1%} to {row['high'] - 1:+.1%}"
        own = f"{row['price_of_a_run']:.2%} of the time of 2,000 steps by the overhead timer alone"
        where = f"- {row['task']}, k={row['num_micro_batches']}"
        yield f"{where}: {row['mean'] - 1:+.1%} ({bounds}, n={row['n']}); {own}"


# docs/memory.md


_PREDICTED = {"error": "peak memory", "bare_error": "peak memory, workspaces not counted", "time_error": "step time"}


def _traced(found: Iterable[records.Record]) -> Iterator[str]:
    """Yield the error of each predicted quantity, one line per record."""
    yield "| predicted | record | steps | median error | range |"
    yield "|---|---|---|---|---|"
    for key, quantity in _PREDICTED.items():
        for record in found:
            errors = _known(map(_of_one_form, record.rows), key)
            if errors:
                sizes = sorted(map(abs, errors))
                middle = f"{statistics.median(sizes):.2%}, worst {sizes[-1]:.1%}"
                head = f"| {quantity} | {record.link} | {len(errors)}"
                yield f"{head} | {middle} | {_span(errors, 1)} |"


def _of_one_form(row: Row) -> Row:
    """Return a prediction row with current field names. Records of 2026-11-22 have operator workspaces separately."""
    if "calibrated_error" not in row:
        return row
    return row | {"bare_error": row["error"], "error": row["calibrated_error"]}


SAVED = {"a fourth less": 0.75, "half less": 0.5}
TO_SLOTS = 0.005  # tolerance on the requested fraction, because sizes are rounded to slots


def _least(*each: list[Row]) -> Iterator[str]:
    yield f"| model | {' | '.join(SAVED)} | n |"
    yield "|---" * (len(SAVED) + 2) + "|"
    for rows in each:
        for model, precision, found in optimal(rows):
            cells = " | ".join(_took(found, share) for share in SAVED.values())
            yield f"| {model}, {precision} | {cells} | {found[0]['n']} |"


def _took(rows: list[Row], share: float) -> str:
    """Return, as text, time and memory of the schedule for a fraction of the peak, or of the smallest schedule."""
    row, least = cheapest(rows, share), min(rows, key=lambda row: row["share"])
    took = "{over_none:.2f} times ({low:.2f} to {high:.2f}), at {saved:+.0%}"
    shown = row or least
    told = took.format(**shown | {"saved": shown["share"] - 1})
    return told if row else f"not reachable; {told}"


def optimal(rows: list[Row]) -> Iterator[tuple[str, str, list[Row]]]:
    """Yield model, precision and rows of optimal schedules, with `share` of the peak without recomputation."""
    for model, precision, of in by_model(rows):
        whole = next(row["peak_bytes"] for row in of if row["schedule"] == "none")
        found = [row | {"share": row["peak_bytes"] / whole} for row in of if row["schedule"] == "optimal"]
        yield model, precision, found


def cheapest(rows: list[Row], share: float) -> Row | None:
    """Return the largest schedule within a fraction of the peak; None if all are larger."""
    enough = [row for row in rows if row["share"] <= share + TO_SLOTS]
    return max(enough, key=lambda row: row["share"], default=None)


def by_model(rows: list[Row]) -> Iterator[tuple[str, str, list[Row]]]:
    """Yield model, precision and rows of each model."""
    for model, precision in dict.fromkeys((row["model"], row["precision"]) for row in rows):
        yield model, precision, [row for row in rows if (row["model"], row["precision"]) == (model, precision)]


# docs/planning.md


def _missed(rows: list[Row]) -> Iterator[str]:
    errors = _known(rows, "time_error")
    within = f"{_within(errors, INTERVAL)} of {len(errors)} steps in [this table](memory.md)"
    yield f"{within} were within {INTERVAL:.0%} of the prediction."


def _elsewhere(published: list[Row], run_here: list[Row]) -> Iterator[str]:
    errors, peaks = _known(published, "time_error"), _known(published, "error")
    slow = sum(1 / (1 + error) - 1 > ON_TIME for error in errors)
    yield f"- Step time of {len(errors)} published steps: {_off(errors)}. {slow} took longer than"
    yield f"  the margin of {ON_TIME:.0%} allows."
    models = " and ".join(dict.fromkeys(row["model"].split()[0] for row in published if row["error"] is not None))
    yield f"- Reserved memory of {len(peaks)} published steps, all of {models}: {_span(peaks)}."
    roofs = _known(run_here, "roofline_error")
    yield f"- The same roofline for {len(roofs)} steps on a CPU: {_middle(roofs)} off in the median."


def _planned(times: list[Row]) -> Iterator[str]:
    yield "| model | target device | memory limit | seconds to plan (95%) | n |"
    yield "|---|---|---|---|---|"
    for row in (row for row in times if row.get("budget_bytes")):
        limit = f"{row['budget_bytes'] / 2**30:g} GiB"
        seconds = f"{row['mean']:.2f} ({row['low']:.2f} to {row['high']:.2f})"
        yield f"| {row['model']} | {row['device']} | {limit} | {seconds} | {row['n']} |"


def _measured(probing: list[Row]) -> Iterator[str]:
    yield "| task | run, steps | run, seconds | measurement budget, s | measured for, s | of these, final rounds, s |"
    yield "|---|---|---|---|---|---|"
    for row in probing:
        seconds = f"{row['run_s']:.0f} | {row['allowed_s']:.0f} | {row['seconds']:.1f} | {row['final_s']:.1f}"
        yield f"| {row['task']} | {row['steps']} | {seconds} |"


def _searched(picks: list[Row], budgets: list[Row]) -> Iterator[str]:
    for task in dict.fromkeys(row["task"] for row in picks):
        of = [row for row in picks if row["task"] == task]
        slower = sum(row["low"] > 1 for row in of)
        slowest = max(of, key=lambda row: row["mean"])
        ratio = f"{slowest['mean']:.3f} ({slowest['low']:.3f} to {slowest['high']:.3f}, n={slowest['n']})"
        yield f"- {task}: all {of[0]['space']} combinations were run. {slower} of the {len(of)} best alternatives were"
        yield f"  significantly faster than the plan's choice. Largest ratio of step times: {ratio}."
    met = [row for row in budgets if row["feasible"]]
    yield f"- {sum(row['is_met'] for row in met)} of {len(met)} feasible memory limits were met when the plan was run;"
    yield f"  {sum(row['is_between'] for row in met)} step times were inside the predicted interval."


# docs/ranks.md and docs/scaling.md


_STAGES: dict[str, Callable[[Row], bool]] = {
    "0 and 1": lambda row: row["zero_stage"] < 2,
    "2, one reduction per step": lambda row: row["zero_stage"] == 2 and row["reduces_once"],
    "3, one reduction per step": lambda row: row["zero_stage"] == 3 and row["reduces_once"],
    "2 and 3, a reduction per micro-batch": lambda row: not row["reduces_once"],
}


def _bytes(rows: list[Row], deepspeed: list[Row]) -> Iterator[str]:
    yield "| ZeRO stages | cases | error for the median of all steps | largest peak of a step, above the prediction |"
    yield "|---|---|---|---|"
    for stages, is_of in _STAGES.items():
        of = [row for row in rows if is_of(row)]
        most = max(row["most_bytes"] / row["predicted_bytes"] - 1 for row in of)
        yield f"| {stages} | {len(of)} | {_span(_known(of, 'error'), 2)} | {most:.0%} |"
    for name, stages in (("DeepSpeed 1 and 2", (1, 2)), ("DeepSpeed 3", (3,))):
        errors = [row["error"] for row in deepspeed if row["zero_stage"] in stages]
        yield f"| {name}, one model | {len(errors)} | {_span(errors)} | |"


def _published(rows: list[Row]) -> Iterator[str]:
    steps = [row for row in rows if row["metric"] == "published_ranks"]
    eager = [row for row in steps if not row["compiled"]]
    errors = _known(eager, "time_error")
    yield f"- Step time of {len(errors)} steps without compilation: {_off(errors)}."
    for name in dict.fromkeys(_by(row) for row in eager):
        of = _known((row for row in eager if _by(row) == name), "time_error")
        if len(of) >= FEW:
            yield f"- Of these, {name}: {_off(of)}."
    pairs = [row["predicted"] - row["published"] for row in rows if row["metric"] == "published_efficiency"]
    ends = f"{100 * min(pairs):+.0f} to {100 * max(pairs):+.0f}"
    middle = f"{100 * statistics.median(pairs):+.0f} percentage points in the median"
    yield f"- Scaling efficiency, {len(pairs)} pairs: {middle} ({ends})."
    for is_reserved, quantity in ((True, "reserved memory"), (False, "memory of tensors")):
        peaks = _known((row for row in steps if row["is_reserved"] is is_reserved), "error")
        yield f"- {len(peaks)} published peaks of {quantity}: {_span(peaks)}."


def _by(row: Row) -> str:
    return f"{row['source'].split(',')[0].removeprefix('github.com/')} on {row['device'].split()[0]}"


def _told(windows: list[Row]) -> Iterator[str]:
    for name, stages in (("stages 0 and 1", (0, 1)), ("stages 2 and 3", (2, 3))):
        errors = [row["error"] for row in windows if row["zero_stage"] in stages]
        yield f"- Step time predicted from one process, {name}, {len(errors)} cases: {_span(errors)}."
    worst, *others = sorted((row["rehearsal_error"] for row in windows), key=abs, reverse=True)
    peaks = [row["rehearsed_bytes"] / row["measured_bytes"] - 1 for row in windows]
    took = sorted(row["rehearsal_s"] for row in windows)
    yield f"- Step time after a dry run of {took[0]:.0f} to {took[-1]:.0f} s: {_span(others)}; one case {worst:+.0%}."
    yield f"- Peak memory after a dry run, {len(peaks)} cases: {_span(peaks, 1)}."


# Formatting of figures.


def _known(rows: Iterable[Row], name: str) -> list[float]:
    return [row[name] for row in rows if row.get(name) is not None]


def _off(errors: list[float]) -> str:
    return f"{_middle(errors)} off in the median, {_span(errors)}, {_within(errors, 0.25)} within 25%"


def _middle(errors: list[float]) -> str:
    return f"{statistics.median(map(abs, errors)):.0%}"


def _within(errors: list[float], limit: float) -> int:
    return sum(abs(error) <= limit for error in errors)


def _span(errors: list[float], digits: int = 0) -> str:
    least, most = (round(100 * end, digits) + 0.0 for end in (min(errors), max(errors)))  # no -0.0
    return f"{least:+.{digits}f}% to {most:+.{digits}f}%"
