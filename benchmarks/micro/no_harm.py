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

from benchmarks import command
from benchmarks.micro.overhead import Step, alternate
from benchmarks.paper.tasks import load_task
from trimtab.experiments import loop_setup, loops
from trimtab.experiments.task_loops import TaskLoops
from trimtab.plans.plan import Plan
from trimtab.tasks.task import Task

# (task, pairs, pairs with --quick)
CASES = {"digits_resnet": (1200, 60), "cifar10_resnet": (240, 6), "source_gpt": (150, 6), "wikitext2_gpt": (90, 6)}


class _Handed(Iterator[Any]):
    """The batches of a loop, handed over one by one."""

    def __init__(self) -> None:
        self.batch: Any = None

    def __next__(self) -> Any:
        return self.batch


def step_of(own: TaskLoops, plan: Plan | None) -> Step:
    """Return the step of the hand-tuned recipe, alone or with the plan."""
    loop, batches = loop_setup.build(own.recipe("strong"), 0), _Handed()
    steps = loops.plain_steps(loop, batches) if plan is None else loops.planned_steps(loop, batches, plan)

    def step(batch: Any) -> None:
        batches.batch = batch
        next(steps)

    return step


def row_of(name: str, pairs: int) -> dict[str, Any]:
    """Plan a task's hand-tuned recipe, run both and return the row."""
    task: Task = load_task(name)
    own = TaskLoops(task)
    loop = loop_setup.build(own.recipe("strong"), loop_setup.PLANNING_SEED)
    assert loop.reference is not None
    plan = loop_setup.plan_of(loop, loop.reference, total_steps=task.planned_steps)
    print(f"{name}: changes {plan.changes_in_words or 'nothing'}; {pairs} rounds", file=sys.stderr, flush=True)
    batches: Iterator[Any] = own.data.batches(0, task.batch_size)
    made = functools.partial(step_of, own, None), functools.partial(step_of, own, plan)
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
