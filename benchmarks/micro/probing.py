"""Measuring time of planning compared with its limit for runs of known length.

`python -m benchmarks.micro.probing [--quick] [--json] [--tasks NAME ...]` prints `probing_s` rows for several run
lengths, each in a fresh process: seconds of measuring, seconds of the final comparison, which always runs (`final_s`),
and the limit (`allowed_s`): 1% of the run or 20 seconds, 5% for runs of minutes.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
import time
from typing import Any

import trimtab
from benchmarks import command
from benchmarks.paper.tasks import load_task
from trimtab.planner.search import allowed_s
from trimtab.plans.profile import FINAL

TASKS = ("digits_resnet", "source_gpt", "wikitext2_gpt", "cifar10_resnet")
STEPS = (1_000, 10_000)


def once(name: str, steps: int) -> dict[str, Any]:
    """Measure the loop of a task for a run of `steps` steps."""
    task = load_task(name)
    batch = next(task.load_data().batches(0, task.batch_size))
    model = task.make_model().train()
    begun: list[float] = []

    def progress(line: str) -> None:
        if line.startswith(FINAL) and not begun:
            begun.append(time.perf_counter())

    given = {"reference": task.reference, "total_steps": steps, "progress": progress}
    found = trimtab.profile(model, task.make_optimizer(model), task.loss_fn, batch, **given)
    final_s = time.perf_counter() - begun[0] if begun else 0.0
    run_s = found.run_s or 0.0
    row = {"metric": "probing_s", "task": name, "steps": steps, "run_s": run_s, "seconds": found.profiling_s}
    return row | {"final_s": final_s, "allowed_s": allowed_s(run_s), "over_time_budget": found.over_time_budget}


def main() -> None:
    """Measure and print the times."""
    parser = command.parser(__doc__)
    parser.add_argument("--tasks", nargs="+", default=list(TASKS))
    parser.add_argument("--once", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.once:
        print(json.dumps(once(options.tasks[0], options.once)))
        return
    rows = []
    for name, steps in itertools.product(options.tasks[:1] if options.quick else options.tasks, STEPS):
        command_line = [sys.executable, "-m", "benchmarks.micro.probing", "--once", str(steps), "--tasks", name]
        done = subprocess.run(command_line, capture_output=True, text=True, check=True)
        rows.append(json.loads(done.stdout))
        print(_line(rows[-1]), file=sys.stderr, flush=True)
    command.show("probing", rows, _line, as_json=options.json)


def _line(row: dict[str, Any]) -> str:
    took = f"{row['seconds']:.1f} s, of which the final {row['final_s']:.1f}"
    run = f"a run of {row['steps']} steps, {row['run_s']:.0f} s"
    return f"{row['task']:<16} {run}: {took}; {row['allowed_s']:.0f} s allowed"


if __name__ == "__main__":
    main()
