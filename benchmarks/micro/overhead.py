"""Loop overhead: steps of trimtab's loop interleaved with an equivalent hand-written loop, in a single process.

`python -m benchmarks.micro.overhead [--quick] [--json]` prints `loop_overhead_ratio` rows: seconds of trimtab's loop
relative to the hand-written loop (1.01 is 1% slower), with the resolution of the A/A control, the hand-written loop
repeated.
"""

from __future__ import annotations

import functools
import itertools
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

import trimtab
from benchmarks import command
from benchmarks.paper.tasks import load_task
from trimtab.losses import mean_of
from trimtab.planner.statistics import Interval, ratio_interval, resolution
from trimtab.plans.plan import Plan
from trimtab.tasks.task import Task

Step = Callable[[Any], None]
# (task, micro-batches per step, pairs, pairs with --quick)
CASES = (("digits_resnet", 1, 1200, 120), ("source_gpt", 1, 204, 12), ("source_gpt", 4, 204, 12))
# An arm inherits caches and heap from its predecessor, so every arm follows every other equally often.
ORDERS = tuple(itertools.permutations(range(3)))


def plain_step(task: Task, num_micro_batches: int) -> Step:
    """Return the step of the hand-written loop, with the same model, split and weights."""
    torch.manual_seed(0)
    model = task.make_model().train()
    optimizer = task.make_optimizer(model)

    def step(batch: Any) -> None:
        optimizer.zero_grad(set_to_none=True)
        columns = [column.chunk(num_micro_batches) for column in batch]
        rows = len(batch[0])
        for micro in zip(*columns, strict=True):
            result = task.loss_fn(model, micro)
            loss = mean_of(result)
            (loss * (len(micro[0]) / rows) if num_micro_batches > 1 else loss).backward()
        optimizer.step()

    return step


def trimtab_step(task: Task, num_micro_batches: int) -> Step:
    """Return the step of trimtab's loop with a fixed plan."""
    torch.manual_seed(0)
    model = task.make_model().train()
    plan = Plan.fixed(task.batch_size, micro_batch=task.batch_size // num_micro_batches)
    run = trimtab.start(model, task.make_optimizer(model), plan)

    def step(batch: Any) -> None:
        run.train_step(run.window(batch), task.loss_fn)

    return step


def alternate(
    theirs_of: Callable[[], Step], ours_of: Callable[[], Step], batches: Iterator[Any], pairs: int
) -> tuple[Interval, Interval]:
    """Return the ratios (ours / theirs, control / theirs), from rounds of a step each in all six orders."""
    arms = [theirs_of(), ours_of(), theirs_of()]
    seconds: list[list[float]] = [[], [], []]
    for index in range(pairs + 3):
        batch = next(batches)
        for arm in ORDERS[index % len(ORDERS)]:
            start = time.perf_counter()
            arms[arm](batch)
            if index >= 3:
                seconds[arm].append(time.perf_counter() - start)
    theirs, ours, control = seconds
    return (
        ratio_interval([a / b for a, b in zip(ours, theirs, strict=True)]),
        ratio_interval([a / b for a, b in zip(control, theirs, strict=True)]),
    )


def main() -> None:
    """Measure all cases and print the overhead."""
    options = command.parser(__doc__).parse_args()
    rows = [row_of(name, k, quick if options.quick else full) for name, k, full, quick in CASES]
    command.show("overhead", rows, _line, as_json=options.json)


def row_of(name: str, num_micro_batches: int, pairs: int) -> dict[str, Any]:
    """Return the row of a case."""
    print(f"{name}, {num_micro_batches} micro-batches, {pairs} rounds", file=sys.stderr)
    task = load_task(name)
    made = (
        functools.partial(plain_step, task, num_micro_batches),
        functools.partial(trimtab_step, task, num_micro_batches),
    )
    ours, control = alternate(*made, task.load_data().batches(0, task.batch_size), pairs)
    row = {"metric": "loop_overhead_ratio", "task": name, "num_micro_batches": num_micro_batches}
    row |= {"mean": ours.mean, "low": ours.low, "high": ours.high, "n": ours.n}
    return row | {"resolution": resolution(control), "control_half_width": (control.high - control.low) / 2}


def _line(row: dict[str, Any]) -> str:
    bar = 1.01 + row["control_half_width"]
    verdict = "within" if row["high"] <= bar else "over"
    return (
        f"{row['task']:<16} k={row['num_micro_batches']}  {row['mean']:.4f} "
        f"(95% {row['low']:.4f} to {row['high']:.4f}, n={row['n']})  {verdict} 1% + A/A half-width {bar:.4f}"
    )


if __name__ == "__main__":
    main()
