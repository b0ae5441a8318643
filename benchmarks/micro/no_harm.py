"""Do-no-harm test: steps of the hand-tuned recipe interleaved with steps of the plan for the recipe.

`python -m benchmarks.micro.no_harm [--quick] [--json] [--tasks NAME ...]` plans each task's hand-tuned recipe, as
`trimtab compare` does, and prints `do_no_harm_ratio` rows: throughput of the plan relative to the recipe, in paired
steps in a single process, with the recipe repeated as control. An allocator change of the plan affects all arms.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from typing import Any

import torch

from benchmarks import command
from benchmarks.micro.overhead import Step, alternate
from benchmarks.paper.tasks import load_task
from trimtab.experiments.baselines.strong import StrongLoop
from trimtab.experiments.paired_runs.plan_loops import TunedRecipePlanLoop
from trimtab.experiments.task_plans import make_plans
from trimtab.plans.plan import Plan
from trimtab.tasks.task import Task

# (task, pairs, pairs with --quick)
CASES = {"digits_resnet": (1200, 60), "cifar10_resnet": (240, 6), "source_gpt": (150, 6), "wikitext2_gpt": (90, 6)}
CPU = torch.device("cpu")


def recipes_step(task: Task) -> Step:
    """Return the step of the hand-tuned recipe."""
    torch.manual_seed(0)
    loop = StrongLoop(task, CPU)
    return lambda batch: _one(loop, batch)


def plans_step(task: Task, plan: Plan) -> Step:
    """Return the step of the recipe under the plan."""
    torch.manual_seed(0)
    loop = TunedRecipePlanLoop(task, CPU, plan)
    return lambda batch: _one(loop, batch)


def _one(loop: StrongLoop, batch: Any) -> None:
    loop.step(iter([batch]))


def row_of(name: str, pairs: int) -> dict[str, Any]:
    """Plan a task's hand-tuned recipe, run both and return the row."""
    task = load_task(name)
    data = task.load_data()
    plan = make_plans(task, data, CPU, adapt=(), strong=True, progress=lambda text: None).plans["strong"]
    print(f"{name}: changes {plan.changes_in_words or 'nothing'}; {pairs} rounds", file=sys.stderr, flush=True)
    batches: Iterator[Any] = data.batches(0, task.batch_size)
    made = functools.partial(recipes_step, task), functools.partial(plans_step, task, plan)
    ours, control = alternate(*made, batches, pairs)
    row = {"metric": "do_no_harm_ratio", "task": name, "changes": plan.changes_in_words or "nothing"}
    row |= {"planning_s": plan.planning_s, "mean": 1 / ours.mean, "low": 1 / ours.high, "high": 1 / ours.low}
    if plan.measured and plan.baseline and plan.measured.peak_bytes and plan.baseline.peak_bytes:
        row["peak_ratio"] = plan.measured.peak_bytes / plan.baseline.peak_bytes  # peaks measured in trials
    return row | {"n": ours.n, "control_low": 1 / control.high, "control_high": 1 / control.low}


def main() -> None:
    """Plan and run all tasks and print the rows."""
    parser = command.parser(__doc__)
    parser.add_argument("--tasks", nargs="+", choices=list(CASES), default=list(CASES))
    options = parser.parse_args()
    names = options.tasks[:1] if options.quick else options.tasks
    command.show("no_harm", [row_of(name, CASES[name][options.quick]) for name in names], _line, as_json=options.json)


def _line(row: dict[str, Any]) -> str:
    ratio = f"{row['mean']:.4f} (95% {row['low']:.4f} to {row['high']:.4f}, n={row['n']})"
    control = f"control {row['control_low']:.4f} to {row['control_high']:.4f}"
    return f"{row['task']:<16} {ratio}  {control}  changes {row['changes']}"


if __name__ == "__main__":
    main()
