"""Command that trains a task by a recipe and prints the validation metric at ten points.

`python -m benchmarks.paper.recipes.command RECIPE TASK [--steps N]`, with reference, strict, paper, strong or muon.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import replace

from benchmarks.paper.recipes.paper import paper
from benchmarks.paper.tasks import load_task
from trimtab.experiments import loop_setup, loops
from trimtab.experiments.loops import DataStream
from trimtab.experiments.task_loops import TaskLoops
from trimtab.measure.timing import synchronize

RECIPES = ("reference", "strict", "paper", "strong", "muon")


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
    own = TaskLoops(replace(task, baselines={"paper": paper}))
    plain = options.recipe in ("reference", "strict")
    loop = loop_setup.build(own.setup if plain else own.recipe(options.recipe), options.seed, task.name)
    print(f"data: {own.data.source.name} ({own.data.source.origin}) {own.placement}", file=sys.stderr)
    stream = DataStream(loop.loader, options.seed)
    steps = (loops.strict_steps if options.recipe == "strict" else loops.plain_steps)(loop, stream)
    rows, seconds = 0, 0.0
    for step in range(1, options.steps + 1):
        synchronize(loop.device)
        start = time.perf_counter()
        rows += next(steps).samples
        synchronize(loop.device)
        seconds += time.perf_counter() - start
        if step % max(1, options.steps // 10) == 0:
            metric = task.metric.evaluate(loop.model, own.data.held_out)
            print(f"step {step}  {rows} rows  {seconds:.1f} s  {task.metric.name} {metric:.4g}", flush=True)


if __name__ == "__main__":
    main()
