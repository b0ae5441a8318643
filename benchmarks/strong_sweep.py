"""Sweep the peak learning rate of a task's strong recipe (P2): five values, each twice the last, and what they end at.

    python benchmarks/strong_sweep.py --task digits_resnet
    python benchmarks/strong_sweep.py --task source_gpt --seconds 60     # shorter runs, the schedule fitted to them

Every arm trains on the same number of rows, with the same seed, on the CPU, by a plain loop of its own: the recipe's
precision, layout and optimizer, its warm-up, and a linear decay to zero where the recipe's ends at a hundredth.
`--seconds` only sets that number, from a few timed steps.
"""

from __future__ import annotations

import argparse
import sys
import time
from contextlib import nullcontext
from typing import Any, NamedTuple

import command
import torch
from torch import nn

from trimtab.losses import mean_of
from trimtab.tasks import Task, TaskData, load_task
from trimtab.tasks.task import StrongRecipe

FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)
QUICK_SECONDS = 15.0
TIMED_STEPS = 3


class Arm(NamedTuple):
    """One learning rate: the metric at the end, rows trained on, seconds of training."""

    lr: float
    metric: float
    rows: int
    train_s: float


def main() -> None:
    """Sweep and print."""
    args = _arguments()
    task = load_task(args.task)
    strong = task.strong
    if strong is None:
        raise SystemExit(f"{task.name} has no strong recipe to sweep")
    data = task.load_data()
    seconds = args.seconds or (QUICK_SECONDS if args.quick else None)
    num_steps = strong.budget_rows // task.batch_rows
    if seconds is not None:
        num_steps = min(num_steps, max(TIMED_STEPS, int(seconds / _step_s(task, strong, data))))
    arms = []
    for factor in sorted(args.factors):
        arms.append(run_arm(task, strong, data, factor, num_steps, args.seed))
        print(f"lr {arms[-1].lr:g}: {task.metric.name} {arms[-1].metric:.4f}", file=sys.stderr, flush=True)
    command.show("strong_sweep", [_row(task, strong, arm) for arm in arms], _line, as_json=args.json)


def run_arm(task: Task, strong: StrongRecipe, data: TaskData, factor: float, num_steps: int, seed: int) -> Arm:
    """Train with the recipe's learning rate times `factor`."""
    torch.manual_seed(seed)
    model = task.make_model()
    if strong.channels_last:
        model.to(memory_format=torch.channels_last)  # before the optimizer, so that its state gets the same layout
    optimizer = strong.make_optimizer(model)
    for group in optimizer.param_groups:
        group["lr"] *= factor
    peak = optimizer.param_groups[0]["lr"]
    warmup = max(1, round(strong.warmup_fraction * num_steps))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warmup, (num_steps - step) / (num_steps - warmup + 1))
    )
    batches = data.batches(seed, task.batch_rows)
    start = time.perf_counter()
    for _ in range(num_steps):
        _step(task, strong, model, optimizer, next(batches))
        schedule.step()
    train_s = time.perf_counter() - start
    metric = task.metric.evaluate(model, data.held_out)
    return Arm(peak, metric, num_steps * task.batch_rows, train_s)


def _step(
    task: Task,
    strong: StrongRecipe,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: tuple[torch.Tensor, ...],
) -> None:
    if strong.channels_last:
        batch = tuple(
            column.contiguous(memory_format=torch.channels_last) if column.dim() == 4 else column for column in batch
        )
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.bfloat16) if strong.precision == "bf16" else nullcontext():
        loss = task.loss_fn(model, batch)
    mean_of(loss).backward()
    if strong.clip_norm is not None:
        nn.utils.clip_grad_norm_(model.parameters(), strong.clip_norm)
    optimizer.step()


def _step_s(task: Task, strong: StrongRecipe, data: TaskData) -> float:
    """Return seconds per step, after one that is not counted."""
    run_arm(task, strong, data, 1.0, 1, seed=0)
    return run_arm(task, strong, data, 1.0, TIMED_STEPS, seed=0).train_s / TIMED_STEPS


def _row(task: Task, strong: StrongRecipe, arm: Arm) -> dict[str, Any]:
    row = {"metric": "strong_final_metric", "task": task.name, "of": task.metric.name, "precision": strong.precision}
    row |= {"channels_last": strong.channels_last, "lr": arm.lr, "value": arm.metric}
    return row | {"rows": arm.rows, "train_s": arm.train_s, "n": 1}


def _line(row: dict[str, Any]) -> str:
    recipe = f"{row['task']} in {row['precision']}{', channels last' if row['channels_last'] else ''}"
    took = f"after {row['rows']:,} rows, {row['train_s']:.1f} s"
    return f"{recipe}  lr {row['lr']:>10g}  {row['of']} {row['value']:.4f} {took}"


def _arguments() -> argparse.Namespace:
    parser = command.parser(__doc__)
    parser.add_argument("--task", default="digits_resnet", help="a task with a strong recipe (default: %(default)s)")
    parser.add_argument("--seconds", type=float, help="training seconds per arm (default: the recipe's whole budget)")
    parser.add_argument("--factors", type=float, nargs="+", default=FACTORS, help="of the recipe's learning rate")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
