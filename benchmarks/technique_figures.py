"""Generated figures of the technique pages, for `make figures`."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.figure_words import difference, ratio, speed
from benchmarks.records import Record, evaluated, every, is_evaluated, newest, timed_on_gpus

Row = dict[str, Any]
PLAIN_RATE = 1e-4  # learning rate of the tasks' baselines


def blocks(root: Path) -> dict[str, dict[str, list[str]]]:
    """Return the generated lines by page and block name."""
    races = every(root, "compare")
    steps, walk, compiled = (newest(root, name) for name in ("prediction", "frontier_walk", "frontier_compiled"))
    sweeps = [newest(root, f"strong_sweep-{task}") for task in ("source_gpt", "wikitext2_gpt")]
    return {
        "kernels.md": {"changes": list(_changes(root)), "compiling": list(_compiling(compiled))},
        "precision.md": {"races": list(_races([*races, *timed_on_gpus(root)])), "steps": list(_precisions(steps))},
        "micro_batch.md": {"limits": list(_limits(walk)), "steps": list(_splits(steps))},
        "learning_rate.md": {"races": list(_freed(races)), "rates": list(_rates(sweeps, races))},
        "optimizer.md": {"regularised": list(_regularised(root)), "races": list(_raced(root))},
    }


# docs/kernels.md


_ALONE = (("cifar-ablate", "memory_layout"), ("wikitext-ablate", "allocator"), ("wikitext-ablate", "fused_optimizer"))


def _changes(root: Path) -> Iterator[str]:
    yield "| change | task, machine | throughput (95%, or each pair) | n | record |"
    yield "|---|---|---|---|---|"
    for name, change in _ALONE:
        found = evaluated(root, name)
        for row in found.of("throughput_ratio", change=change):
            if row["setting"] in ("alone", "in the plan"):
                yield _worth(f"{change.replace('_', ' ')}, {row['setting']}", row, found)
    raced = [evaluated(root, name) for name in ("cifar-recipes", "wikitext-recipes")]
    for found in (*raced, *timed_on_gpus(root)):
        row = found.one("throughput_ratio", arm="equivalent_plan", against="reference")
        yield _worth(f"the plan: {_changed(found, 'equivalent_plan')}", row, found)


def _worth(change: str, row: Row, found: Record) -> str:
    return f"| {change} | {row['task']}, {found.machine} | {ratio(row)} | {row['n']} | {found.link} |"


def _compiling(found: Record) -> Iterator[str]:
    yield f"| model | time over the eager model's (95%), {found.machine} | n |"
    yield "|---|---|---|"
    for row in found.of("frontier", share=1.0):
        took = f"{row['over_none']:.3f} ({row['low']:.3f} to {row['high']:.3f})"
        yield f"| {row['model']}, {row['precision']} | {took} | {row['n']} |"
    yield ""
    yield f"{found.link}, rows of 100%."


# docs/precision.md


def _races(races: Iterable[Record]) -> Iterator[str]:
    yield "| task, record | changes of the plan | throughput | pairs | peak | final metric | pairs |"
    yield "|---|---|---|---|---|---|---|"
    for found in races:
        arms = {"arm": "equivalent_plan", "against": "reference"}
        gained, held = found.one("throughput_ratio", **arms), found.of("peak_memory_ratio", **arms)
        ends = found.of("final_metric_difference", **arms)
        ended = f"{difference(ends[0])} | {ends[0]['n']}" if ends else "not trained to the end | "
        figures = f"{ratio(gained)} | {gained['n']} | {ratio(held[0]) if held else 'not valid'} | {ended}"
        yield f"| {found.link} | {_changed(found, 'equivalent_plan')} | {figures} |"


def _precisions(found: Record) -> Iterator[str]:
    yield "| model, rows, optimizer | fp32 | bf16 |"
    yield "|---|---|---|"
    for fp32 in _largest(_whole(found, "fp32")):
        for bf16 in _whole(found, "bf16"):
            if _step_of(bf16) == _step_of(fp32):
                yield f"| {_step(fp32)} | {_took(fp32)} | {_took(bf16)} |"
    yield ""
    yield f"{found.link}, {found.machine}."


# docs/micro_batch.md


def _limits(found: Record) -> Iterator[str]:
    """Yield a table of plans under decreasing memory limits, with a row per different plan."""
    yield "| limit, MiB | peak of the run, MiB | seconds a step | the plan changes |"
    yield "|---|---|---|---|"
    rows, before = found.of("budget", model="gpt_tied", feasible=True), ""
    for row in rows:
        if row["changes"] != before:
            sizes = f"{row['budget_bytes'] / 2**20:.1f} | {row['measured_bytes'] / 2**20:.1f}"
            yield f"| {sizes} | {row['measured_s']:.3f} | {row['changes']} |"
        before = row["changes"]
    yield ""
    yield f"{found.link}, {found.machine}; one run of each."


def _splits(found: Record) -> Iterator[str]:
    yield "| model, rows, optimizer | whole | in four |"
    yield "|---|---|---|"
    for whole in _whole(found, "fp32"):
        for split in _whole(found, "fp32", num_micro_batches=4):
            if _step_of(split) == _step_of(whole):
                yield f"| {_step(whole)} | {_took(whole)} | {_took(split)} |"
    yield ""
    yield f"{found.link}, {found.machine}."


def _whole(found: Record, precision: str, num_micro_batches: int = 1) -> list[Row]:
    """Return the prediction rows without recomputation and without loss chunks."""
    step = {"precision": precision, "num_micro_batches": num_micro_batches}
    return found.of("prediction", schedule="none", loss_chunk=None, **step)


def _largest(rows: list[Row]) -> list[Row]:
    """Return the rows with the largest batch size of each model."""
    most = {
        model: max(row["batch"] for row in rows if row["model"] == model) for model in (row["model"] for row in rows)
    }
    return [row for row in rows if row["batch"] == most[row["model"]]]


def _step_of(row: Row) -> tuple[str, int, str]:
    return row["model"], row["batch"], row["optimizer"]


def _step(row: Row) -> str:
    return ", ".join(map(str, _step_of(row)))


def _took(row: Row) -> str:
    return f"{row['measured_bytes'] / 2**20:.1f} MiB, {row['measured_s']:.3f} s"


# docs/learning_rate.md


def _freed(races: Iterable[Record]) -> Iterator[str]:
    over = "speed, search included | median time | speed, search excluded | over the tuned recipe, search excluded"
    yield f"| record | rate found | target | {over} | final metric | samples |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for found in races:
        charged = _hardest(found)
        uncharged, tuned = (
            found.one(
                "time_to_target_ratio", arm="tuned_plan", against=against, target=charged["target"], charged=False
            )
            for against in ("reference", "strong")
        )
        head = f"| {found.link} | {_scale(found):g} times | {charged['target']:g} | {speed(charged)}"
        seconds = f"{charged['median_s']:.0f} s against {charged['median_against_s']:.0f} s"
        ended = difference(found.one("final_metric_difference", arm="tuned_plan", against="reference"))
        rows = charged["arm_samples"] / charged["against_samples"]
        known = speed(tuned).partition(":")[0]  # drops the reason of a missing measurement
        yield f"{head} | {seconds} | {speed(uncharged)} | {known} | {ended} | {rows:.0%} |"


def _hardest(found: Record) -> Row:
    """Return the hardest target that every run of the tuned plan and of the baseline reached, search time included."""
    rungs = found.of("time_to_target_ratio", arm="tuned_plan", against="reference", charged=True)
    return [row for row in rungs if row["reached"] == row["reached_against"] == row["n"]][-1]


def _scale(found: Record) -> float:
    """Return the learning-rate factor of the range test."""
    return float(_changed(found, "tuned_plan").rpartition("learning rate scale ")[2])


def _rates(sweeps: Iterable[Record], races: Iterable[Record]) -> Iterator[str]:
    yield "| task | range test | best of the sweep | second best | record |"
    yield "|---|---|---|---|---|"
    for sweep in sweeps:
        best, second = (f"{row['lr']:g}: {row['value']:.4g}" for row in sorted(sweep.rows, key=_value)[:2])
        task = sweep.rows[0]["task"]
        rates = [PLAIN_RATE * _scale(found) for found in races if found.rows[0]["task"] == task]
        yield f"| {task} | {', '.join(f'{rate:g}' for rate in rates)} | {best} | {second} | {sweep.link} |"


def _value(row: Row) -> float:
    return float(row["value"])


def _changed(found: Record, arm: str) -> str:
    """Return the changes of an arm's plan as text."""
    return str(found.one("planning_s", arm=arm)["changes"])


# docs/optimizer.md


def _regularised(root: Path) -> Iterator[str]:
    """Yield a table of the effect of dropout and weight decay after many epochs."""
    found = evaluated(root, "text-ablate-regularised")
    yield "| change | set in | improvement of the final bits per byte in percent (95% interval) | n |"
    yield "|---|---|---|---|"
    for row in found.of("final_metric_difference"):
        change = row.get("change", "")
        if "other" not in row and (change or (row["arm"], row["against"]) == ("plan", "reference")):
            where = row["setting"] if change else "together"
            yield f"| {change.replace('_', ' ') or 'both'} | {where} | {difference(row)} | {row['n']} |"
    yield ""
    yield f"{found.link}, {found.machine}."


_OPTIONS = ("digits-options", "text-options", "wikitext-dropout", "wikitext-muon")


def _raced(root: Path) -> Iterator[str]:
    """Yield a table of the verdicts of short paired trainings."""
    yield "| record | alternative | verdict | result of the short paired trainings |"
    yield "|---|---|---|---|"
    for name in filter(functools.partial(is_evaluated, root), _OPTIONS):
        found = evaluated(root, name)
        for row in found.of("raced_setting"):
            yield f"| {found.link} | {row['alternative']} | {row['status']} | {row['reason']} |"
