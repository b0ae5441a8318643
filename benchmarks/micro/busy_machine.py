"""Plans and peaks beside busy processes, compared with those of an idle machine.

`python -m benchmarks.micro.busy_machine [--quick] [--json] [--tasks NAME ...] [--runs N]` plans each task (source_gpt
with 2 samples per step) in fresh processes, first alone and then beside as many busy processes as `--busy` states. A
`same_plan` row has the number of plans beside busy processes with the settings of the idle plan (the most frequent one
of those made alone), and the median planning times. A `peak_ratio` row has the largest deviation of a peak (FLOP/s or
bytes/s of `trimtab doctor`) beside busy processes from the median of those measured alone, and the number of runs in
which every peak was within 30 %.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch

import trimtab
from benchmarks import command
from benchmarks.paper.tasks import load_task
from trimtab.measure.machine import device_spec
from trimtab.settings import SETTINGS

TASKS = {"digits_resnet": None, "source_gpt": 2}  # Batch sizes; None for the task's own.
STEPS = 10_000  # Steps of the planned run.
IDLE_RUNS, BUSY_RUNS, BUSY_PROCESSES = 3, 10, 2
PEAK_TOLERANCE = 0.3
_BUSY = "import numpy as np\na = np.ones((256, 256))\nwhile True: a = a @ a / 256"


def plan_once(name: str) -> dict[str, Any]:
    """Plan a task and return its settings and planning time."""
    task = load_task(name).shortened(batch_size=TASKS.get(name))
    batch = next(task.load_data().batches(0, task.batch_size))
    model = task.make_model().train()
    begin = time.perf_counter()
    given = (model, task.make_optimizer(model), task.loss_fn, batch)
    plan = trimtab.plan(*given, reference=task.reference, total_steps=STEPS)
    settings = {each: str(choice.value) for each in SETTINGS if (choice := getattr(plan, each)).changed}
    found = {"seconds": time.perf_counter() - begin, "settings": settings, "verified": plan.verified}
    return found | {"timing_noise": plan.timing_noise}


def peaks_once() -> dict[str, Any]:
    """Measure the peaks of this machine and return them by name."""
    device = device_spec(torch.device("cpu"))
    return {**device.peak_flops, "memory": device.bandwidth_bytes_s or 0.0}


def _fresh(*arguments: str) -> dict[str, Any]:
    """Return what a fresh process measures."""
    command_line = [sys.executable, "-m", "benchmarks.micro.busy_machine", *arguments]
    done = subprocess.run(command_line, capture_output=True, text=True, check=True, env=_environment())
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def _environment() -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(os.cpu_count() or 1))}


@contextlib.contextmanager
def busy_processes(number: int) -> Iterator[None]:
    """Run processes that each compute on one core until the context ends."""
    single = _environment() | {f"{name}_NUM_THREADS": "1" for name in ("OMP", "OPENBLAS", "MKL")}
    running = [subprocess.Popen([sys.executable, "-c", _BUSY], env=single) for _ in range(number)]
    try:
        time.sleep(1.0)
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


def plan_row(name: str, idle_runs: int, runs: int, busy: int) -> dict[str, Any]:
    """Return the row of a task's plans."""
    alone = [_noted(name, "alone", _fresh("--plan", name)) for _ in range(idle_runs)]
    with busy_processes(busy):
        beside = [_noted(name, "busy", _fresh("--plan", name)) for _ in range(runs)]
    counts = collections.Counter(_key(each) for each in alone)
    usual = counts.most_common(1)[0][0]
    same = sum(_key(each) == usual for each in beside)
    seconds = [statistics.median(each["seconds"] for each in some) for some in (alone, beside)]
    row = {"metric": "same_plan", "task": name, "same": same, "n": runs, "busy": busy, "settings": json.loads(usual)}
    row |= {"others": [each["settings"] for each in beside if _key(each) != usual]}
    return row | {"idle_same": counts[usual], "idle_n": idle_runs, "idle_s": seconds[0], "busy_s": seconds[1]}


def _key(found: dict[str, Any]) -> str:
    return json.dumps(found["settings"], sort_keys=True)


def _noted(name: str, when: str, found: dict[str, Any]) -> dict[str, Any]:
    speed = "" if found["verified"] is None else "{:.2f} to {:.2f}x".format(*found["verified"])
    noise = "" if found["timing_noise"] is None else f"noise {100 * found['timing_noise']:.1f}%"
    print(name, when, f"{found['seconds']:.0f} s", found["settings"], speed, noise, file=sys.stderr, flush=True)
    return found


def peak_row(idle_runs: int, runs: int, busy: int) -> dict[str, Any]:
    """Return the row of the peaks."""
    alone = [_fresh("--peaks") for _ in range(idle_runs)]
    with busy_processes(busy):
        beside = [_fresh("--peaks") for _ in range(runs)]
    usual = {key: statistics.median(each[key] for each in alone) for key in alone[0]}
    deviations = [max(abs(each[key] / usual[key] - 1) for key in usual) for each in beside]
    within = sum(deviation <= PEAK_TOLERANCE for deviation in deviations)
    return {"metric": "peak_ratio", "within": within, "n": runs, "busy": busy, "largest": max(deviations)}


def main() -> None:
    """Plan and measure, alone and beside busy processes, and print the rows."""
    parser = command.parser(__doc__)
    parser.add_argument("--tasks", nargs="+", default=list(TASKS))
    parser.add_argument("--runs", type=int, default=BUSY_RUNS, help="plans beside busy processes")
    parser.add_argument("--busy", type=int, default=BUSY_PROCESSES, help="busy processes")
    parser.add_argument("--plan", help=argparse.SUPPRESS)
    parser.add_argument("--peaks", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.plan or options.peaks:
        print(json.dumps(plan_once(options.plan) if options.plan else peaks_once()))
        return
    runs, idle_runs = (2, 1) if options.quick else (options.runs, IDLE_RUNS)
    rows = [peak_row(idle_runs, runs, options.busy)]
    rows += [plan_row(name, idle_runs, runs, options.busy) for name in options.tasks[: 1 if options.quick else None]]
    command.show("busy_machine", rows, _line, as_json=options.json)


def _line(row: dict[str, Any]) -> str:
    beside = f"beside {row['busy']} busy processes"
    if row["metric"] == "peak_ratio":
        deviation = f"largest deviation {100 * row['largest']:.0f}%"
        return f"peaks: within {PEAK_TOLERANCE:.0%} of idle in {row['within']} of {row['n']} runs {beside}, {deviation}"
    seconds = f"planning {row['busy_s']:.0f} s, alone {row['idle_s']:.0f} s"
    return f"{row['task']}: the idle plan in {row['same']} of {row['n']} plans {beside}; {seconds}"


if __name__ == "__main__":
    main()
