"""Sweep of the peak learning rate of a task's hand-tuned recipe (P2): five values, doubling, with the final metric.

    python -m benchmarks.paper.strong_sweep --task digits_resnet
    python -m benchmarks.paper.strong_sweep --task source_gpt --seconds 60     # shorter runs with a shorter schedule

Every arm trains on the same number of samples with the same seed on the CPU, in a plain loop with the recipe's
precision, memory format, optimizer and warm-up. The decay is linear to zero, while the recipe's decay ends at 1%.
`--seconds` sets the number of samples from a few timed steps.
"""

from __future__ import annotations

import argparse
import sys
import time
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import nn

from benchmarks import command
from benchmarks.paper.tasks import load_task
from trimtab.losses import mean_of
from trimtab.tasks import Task, TaskData
from trimtab.tasks.task import StrongRecipe

FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)
QUICK_SECONDS = 15.0
TIMED_STEPS = 3


class Arm(NamedTuple):
    """Result of a learning rate: final metric, samples and seconds of training."""

    lr: float
    metric: float
    rows: int
    train_s: float


def main() -> None:
    """Run the sweep and print the results."""
    args = _arguments()
    task = load_task(args.task)
    strong = task.strong
    if strong is None:
        raise SystemExit(f"{task.name} has no strong recipe to sweep")
    data = task.load_data()
    seconds = args.seconds or (QUICK_SECONDS if args.quick else None)
    num_steps = strong.budget_samples // task.batch_size
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
    batches = data.batches(seed, task.batch_size)
    start = time.perf_counter()
    for _ in range(num_steps):
        _step(task, strong, model, optimizer, next(batches))
        schedule.step()
    train_s = time.perf_counter() - start
    metric = task.metric.evaluate(model, data.held_out)
    return Arm(peak, metric, num_steps * task.batch_size, train_s)


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
    """Return the seconds per step, after a warm-up step."""
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
