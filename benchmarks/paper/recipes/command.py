"""Command that trains a task by a recipe and prints the validation metric at ten points.

`python -m benchmarks.paper.recipes.command RECIPE TASK [--steps N]`, with reference, strict, paper, strong or muon.
"""

from __future__ import annotations

import argparse
import functools
import sys
import time

import torch

from benchmarks.paper.recipes.paper import PaperLoop
from benchmarks.paper.tasks import load_task
from trimtab.experiments.baselines.loop import MakeLoop
from trimtab.experiments.baselines.reference import ReferenceLoop
from trimtab.experiments.baselines.strong import StrongLoop
from trimtab.experiments.comparison.compare import StrictLoop
from trimtab.measure.timing import synchronize
from trimtab.tasks.placement import device_here, place_data, prefetch

RECIPES: dict[str, MakeLoop] = {
    "reference": ReferenceLoop,
    "strict": StrictLoop,
    "paper": PaperLoop,
    "strong": StrongLoop,
    "muon": functools.partial(StrongLoop, field="muon"),
}


def main() -> None:
    """Parse `RECIPE TASK --steps N --seed S --rows B --judged M` and train."""
    parser = argparse.ArgumentParser(description="Train one task by one recipe.")
    parser.add_argument("recipe", choices=RECIPES)
    parser.add_argument("task")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rows", type=int, help="of a step; the task's own number by default")
    parser.add_argument("--judged", type=int, help="held-out batches to judge by; all of them by default")
    options = parser.parse_args()
    task = load_task(options.task).shortened(batch_size=options.rows, judged_batches=options.judged)
    data = task.load_data()
    device = device_here()
    torch.manual_seed(options.seed)
    loop = RECIPES[options.recipe](task, device)
    held, where = place_data(data, device)
    print(f"data: {data.source.name} ({data.source.origin}); on {where.value}: {where.reason}", file=sys.stderr)
    batches = prefetch(held.batches(options.seed, task.batch_size), device)
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


if __name__ == "__main__":
    main()
