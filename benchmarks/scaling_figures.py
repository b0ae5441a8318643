"""Tables of scaling.py and sending.py, one per metric, for `make figures`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from trimtab.planner.statistics import MIN_PAIRS_FOR_VERDICT as FEW

Row = dict[str, Any]


def scaling(rows: list[Row]) -> Iterator[str]:
    """Yield the tables of a scaling record."""
    for metric, table in _TABLES.items():
        if found := [row for row in rows if row["metric"] == metric]:
            yield from table(found)
            yield ""


def sending(rows: list[Row]) -> Iterator[str]:
    """Yield a table with a row per task and link and a column per loop."""
    loops = list(dict.fromkeys(row["arm"] for row in rows))
    yield "Seconds of a window over those of DDP without its broadcast of buffers, in turns within one job."
    yield ""
    yield (
        "| task | link | that takes, ms | "
        + " | ".join(_SENDING.get(arm, arm) for arm in loops if arm != "no_buffers")
        + " |"
    )
    yield "|---|---|---|" + "---|" * (len(loops) - 1)
    for task, link in dict.fromkeys((row["task"], row["link"]) for row in rows):
        own = {row["arm"]: row for row in rows if (row["task"], row["link"]) == (task, link)}
        kept = " | ".join(_bounded(own[arm]) for arm in loops if arm != "no_buffers")
        where = "" if link == "local" else f"{link} Mbit/s"
        yield f"| {task} | {where} | {1000 * own['no_buffers']['window_s']:.1f} | {kept} |"


_SENDING = {
    "ddp": "DDP as it is",
    "control": "the same again",
    "fp32": "fp32",
    "fp32_gloo": "fp32, asked by gloo",
    "bf16": "bf16",
    "bf16_gloo": "bf16, asked by gloo",
}


def _efficiency(rows: list[Row]) -> Iterator[str]:
    yield "| task | link | ranks | recipe | batch size | samples/s | efficiency | A/A control | waiting | plan |"
    yield "|---|---|---|---|---|---|---|---|---|---|"
    for row in rows:
        link = row["link"] + (f", {row['mbit']} Mbit/s" if row.get("mbit") else "")
        shared = f" (share {row['shares']}: correctness only)" if row["shares"] else ""
        where = f"| {row['task']} | {link} | {row['ranks']}{shared} | {row['recipe']}"
        figures = f"{row['effective_batch']:.0f} | {row['samples_per_s']:.0f} | {_bounded(row)}"
        figures += f" | {_percent(row, 'resolution')} | {_percent(row, 'waiting_share')}"
        yield f"{where} | {figures} | {row['says'].replace('|', '/')} |"


def _courses(rows: list[Row]) -> Iterator[str]:
    target = rows[0]["target"]
    yield f"Training to a validation loss of {target:g}: medians over seeds. Efficiency is"
    yield "samples per second and rank, relative to one rank with the same recipe (`no_buffers`: with `baseline`), over"
    yield "the whole runs, not only until the target: geometric mean of the pairs with equal seeds."
    yield ""
    yield "| recipe | ranks | link | batch size | reached | samples to target | seconds to target | efficiency |"
    yield "|---|---|---|---|---|---|---|---|"
    for row in rows:
        link = f"{row['mbit']} Mbit/s" if row["mbit"] else ""
        samples, seconds = _plain(row["samples_to_target"], ".0f"), _plain(row["seconds_to_target"], ".1f")
        what = f"| {row['recipe']} | {row['ranks']} | {link} | {row['effective_batch']:.0f}"
        yield f"{what} | {row['reached']} of {row['seeds']} | {samples} | {seconds} | {_bounded(row)} |"


def _windows(rows: list[Row]) -> Iterator[str]:
    rehearses = all("rehearsed_s" in row for row in rows)
    more = " rehearsed, ms | error | peak rehearsed, MiB | of a run | it took, s |" if rehearses else ""
    yield f"| link | stage | micro-batches | reduced | told, ms | measured | error | waiting, told | measured |{more}"
    yield "|---|---|---|---|---|---|---|---|---|" + ("---|---|---|---|---|" if rehearses else "")
    for row in rows:
        how = f"{row['micro_batches']} | {'once' if row['reduces_once'] else 'each'}"
        told, taken, waits, waited = (
            1000 * row[name] for name in ("predicted_s", "measured_s", "predicted_waiting_s", "measured_waiting_s")
        )
        seconds = f"{told:.1f} | {taken:.1f} | {row['error']:+.1%} | {waits:.1f} | {waited:.1f}"
        yield f"| {row['link']} | {row['zero_stage']} | {how} | {seconds} |" + (_rehearsed(row) if rehearses else "")


def _rehearsed(row: Row) -> str:
    held, run = (row[name] / 2**20 for name in ("rehearsed_bytes", "measured_bytes"))
    ran = f" {1000 * row['rehearsed_s']:.1f} | {row['rehearsal_error']:+.1%}"
    return f"{ran} | {held:.2f} | {run:.2f} | {row['rehearsal_s']:.1f} |"


def _weights(rows: list[Row]) -> Iterator[str]:
    yield "| backend | ranks | type | largest difference of a weight after 20 windows, over the largest weight |"
    yield "|---|---|---|---|"
    for row in rows:
        yield f"| {row['backend']} | {row['ranks']} | {row['dtype']} | {row['difference']:.1e} |"


def _in_step(rows: list[Row]) -> Iterator[str]:
    yield "What two ranks keep of one's speed, in turns within one job. In step, each runs by itself and waits for the"
    yield "others once a window; what is kept of that is what sending leaves."
    yield ""
    yield "| task | link | loop | in step, nothing sent | over the link | of what they keep in step |"
    yield "|---|---|---|---|---|---|"
    for loop in dict.fromkeys(row["loop"] for row in rows):
        own = {row["kept"]: row for row in rows if row["loop"] == loop}
        kept = " | ".join(_bounded(own[name]) for name in ("in step", "over the link", "of in step"))
        what = {"ddp": "DDP, k = 1, fp32", "plan": "a plan, k = 16, bf16 sent"}[loop]
        yield f"| {rows[0]['task']} | {rows[0]['mbit']} Mbit/s | {what} | {kept} |"


def _overhead(rows: list[Row]) -> Iterator[str]:
    for row in rows:
        asks = f"asking takes {1e6 * row['ask_s']:.0f} µs, and {1e6 * row['answer_s']:.0f} µs to the answer"
        yield (
            f"- A plan that changes nothing, on {row['ranks']} ranks: {row['mean']:.3f} "
            f"({row['low']:.3f} to {row['high']:.3f}, n={row['n']}) of the plain loop's steps in DDP; "
            f"the A/A control tells {row['resolution']:.1%}. What ranks ask each other once a window: {asks}."
        )


def _faults(rows: list[Row]) -> Iterator[str]:
    for row in rows:
        yield (
            f"- {row['kind']} of one of two ranks to the command's end: {row['median_s']:.2f} s "
            f"(median of {row['tried']}, {row['longest_s']:.2f} at the most); the rank was named in {row['named']}."
        )


def _bounded(row: Row) -> str:
    if row["mean"] is None:
        return ""
    if row["n"] < FEW:
        return ", ".join(f"{pair:.3f}" for pair in row.get("pairs") or (row["mean"],))
    bounds = "" if row["low"] is None else f" ({row['low']:.3f} to {row['high']:.3f}, n={row['n']})"
    return f"{row['mean']:.3f}{bounds}"


def _percent(row: Row, key: str) -> str:
    return _plain(row.get(key), ".1%")


def _plain(value: float | None, form: str) -> str:
    return "" if value is None else f"{value:{form}}"


_TABLES: dict[str, Callable[[list[Row]], Iterator[str]]] = {
    "scaling_efficiency": _efficiency,
    "samples_to_target": _courses,
    "window_prediction": _windows,
    "in_step": _in_step,
    "weight_difference": _weights,
    "loop_overhead_ratio": _overhead,
    "rank_fault": _faults,
}
