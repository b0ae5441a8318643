"""Job of sending.py for a rank under torchrun: a task in several loops, interleaved block by block.

    torchrun ... sending_ranks.py OUT TASK ROUNDS WINDOWS ARM ...

Rank 0 writes the seconds per window of each arm and round to OUT.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import trimtab
from benchmarks.micro import scaling_tasks
from trimtab.distributed.ddp import BUFFERS
from trimtab.distributed.host_gather import RankExchange
from trimtab.distributed.process_group import max_over_ranks, total
from trimtab.experiments import loop_setup, loops
from trimtab.experiments.loops import Loop, StepResult
from trimtab.experiments.task_loops import TaskLoops
from trimtab.plans.plan import Plan
from trimtab.tasks.task import Task

WARM = 10  # warm-up windows of each arm


MakeSteps = Callable[[Loop], Iterator[StepResult]]


def _planned(loop: Loop, dtype: str, *, by_gloo: bool = False) -> Iterator[StepResult]:
    ranks = dist.get_world_size()
    batches = iter(loop.loader)
    rows = loop.batching.read(next(iter(loop.loader))).samples
    plan = Plan.fixed(int(rows or 1), num_ranks=ranks, zero_stage=0, reduce_dtype=dtype)
    with trimtab.start(loop.model, loop.optimizer, plan) as run:
        exchange = run._peers._exchange
        if by_gloo and isinstance(exchange, RankExchange):
            exchange._mesh = None
        for window in run.windows(batches):
            run.train_step(window, loop.loss_fn)
            yield StepResult(0, None)


def _plain(loop: Loop, *, sends_buffers: bool) -> Iterator[StepResult]:
    wrapped = DistributedDataParallel(loop.model, **{BUFFERS: sends_buffers})
    return loops.plain_steps(replace(loop, model=wrapped), iter(loop.loader))


# Steps of each arm. `control` repeats `no_buffers`.
ARMS: dict[str, MakeSteps] = {
    "ddp": partial(_plain, sends_buffers=True),
    "no_buffers": partial(_plain, sends_buffers=False),
    "control": partial(_plain, sends_buffers=False),
    "fp32_gloo": partial(_planned, dtype="fp32", by_gloo=True),
    "fp32": partial(_planned, dtype="fp32"),
    "bf16_gloo": partial(_planned, dtype="bf16", by_gloo=True),
    "bf16": partial(_planned, dtype="bf16"),
}


class _Arm:
    def __init__(self, task: Task, name: str) -> None:
        self._steps = ARMS[name](loop_setup.build(TaskLoops(task).setup, 0, task.name))

    def window_s(self, windows: int) -> float:
        """Return the mean seconds per window over `windows` windows, maximum over ranks."""
        total(0.0)  # synchronises the ranks
        begin = time.perf_counter()
        for _ in range(windows):
            next(self._steps)
        return max_over_ranks((time.perf_counter() - begin) / windows)


def timed(name: str, rounds: int, windows: int, names: list[str]) -> list[dict[str, float]]:
    """Return the seconds per window of each arm, round by round. Every other round reverses the order of arms."""
    task: Task = getattr(scaling_tasks, name)
    task = replace(task, batch_size=task.batch_size * dist.get_world_size())
    arms = {arm: _Arm(task, arm) for arm in names}
    for arm in arms.values():
        arm.window_s(WARM)
    return [{arm: arms[arm].window_s(windows) for arm in names[:: (1, -1)[i % 2]]} for i in range(rounds)]


def main() -> None:
    """Time the arms and write the results."""
    torch.set_num_threads(1)
    out, name, rounds, windows, *names = sys.argv[1:]
    with trimtab.process_group() as here:
        found = timed(name, int(rounds), int(windows), names)
        if here.rank == 0:
            Path(out).write_text(json.dumps(found), encoding="utf-8")
        sys.stdout.flush()
        os._exit(0)  # skips interpreter shutdown, during which gloo threads may raise


if __name__ == "__main__":
    main()
