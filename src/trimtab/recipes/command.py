"""Runs one recipe from the command line: trains, and prints the held-out metric as it goes."""

from __future__ import annotations

import argparse
import time

import torch

from trimtab.recipes.loop import MakeLoop
from trimtab.tasks import load_task


def main(make_loop: MakeLoop) -> None:
    """Parse `TASK --steps N --seed S` and train."""
    parser = argparse.ArgumentParser(description="Train one task by one recipe.")
    parser.add_argument("task")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    task = load_task(options.task)
    data = task.load_data()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(options.seed)
    loop = make_loop(task, device)
    batches = data.batches(options.seed, task.batch_rows)
    rows, seconds = 0, 0.0
    for step in range(1, options.steps + 1):
        start = time.perf_counter()
        rows += loop.step(batches)
        seconds += time.perf_counter() - start
        if step % max(1, options.steps // 10) == 0:
            metric = task.metric.evaluate(loop.model, data.held_out)
            print(f"step {step}  {rows} rows  {seconds:.1f} s  {task.metric.name} {metric:.4g}", flush=True)
    loop.close()
