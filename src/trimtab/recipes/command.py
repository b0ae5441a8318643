"""Command line of the recipes: trains a task and prints the validation metric at ten points."""

from __future__ import annotations

import argparse
import sys
import time

import torch

from trimtab.measure.timing import synchronize
from trimtab.recipes.loop import MakeLoop
from trimtab.tasks import load_task
from trimtab.tasks.placement import ahead, device_here, placed


def main(make_loop: MakeLoop) -> None:
    """Parse `TASK --steps N --seed S --rows B --judged M` and train.

    Args:
        make_loop: Class or function that builds the loop from a task and a device.
    """
    parser = argparse.ArgumentParser(description="Train one task by one recipe.")
    parser.add_argument("task")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rows", type=int, help="of a step; the task's own number by default")
    parser.add_argument("--judged", type=int, help="held-out batches to judge by; all of them by default")
    options = parser.parse_args()
    task = load_task(options.task).shortened(batch_rows=options.rows, judged_batches=options.judged)
    data = task.load_data()
    device = device_here()
    torch.manual_seed(options.seed)
    loop = make_loop(task, device)
    held, where = placed(data, device)
    print(f"data: {data.source.name} ({data.source.origin}); on {where.value}: {where.reason}", file=sys.stderr)
    batches = ahead(held.batches(options.seed, task.batch_rows), device)
    rows, seconds = 0, 0.0
    for step in range(1, options.steps + 1):
        synchronize(device)
        start = time.perf_counter()
        rows += loop.step(batches)
        synchronize(device)
        seconds += time.perf_counter() - start
        if step % max(1, options.steps // 10) == 0:
            metric = task.metric.evaluate(loop.model, data.held_out)
            print(f"step {step}  {rows} rows  {seconds:.1f} s  {task.metric.name} {metric:.4g}", flush=True)
    loop.close()
