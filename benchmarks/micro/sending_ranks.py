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
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import trimtab
from benchmarks.micro import scaling_tasks
from trimtab.distributed.host_gather import RankExchange
from trimtab.distributed.process_group import max_over_ranks, total
from trimtab.experiments.baselines.replica import ReplicaLoop
from trimtab.experiments.paired_runs.plan_loops import PlanLoop
from trimtab.plans.plan import Plan
from trimtab.tasks.task import Task

CPU = torch.device("cpu")
WARM = 10  # warm-up windows of each arm


def _plan(task: Task, dtype: str, *, by_gloo: bool = False) -> Callable[[], Any]:
    ranks = dist.get_world_size()
    plan = Plan.fixed(task.batch_size // ranks, num_ranks=ranks, zero_stage=0, reduce_dtype=dtype)

    def make() -> PlanLoop:
        loop = PlanLoop(task, CPU, plan)
        exchange = loop._run._peers._exchange
        if by_gloo and isinstance(exchange, RankExchange):
            exchange._mesh = None
        return loop

    return make


def _arms(task: Task) -> dict[str, Callable[[], Any]]:
    """Return a constructor per arm. `control` repeats `no_buffers`."""
    return {
        "ddp": lambda: ReplicaLoop(task, CPU),
        "no_buffers": lambda: ReplicaLoop(task, CPU, sends_buffers=False),
        "control": lambda: ReplicaLoop(task, CPU, sends_buffers=False),
        "fp32_gloo": _plan(task, "fp32", by_gloo=True),
        "fp32": _plan(task, "fp32"),
        "bf16_gloo": _plan(task, "bf16", by_gloo=True),
        "bf16": _plan(task, "bf16"),
    }


class _Arm:
    def __init__(self, make: Callable[[], Any], batches: Iterator[Any]) -> None:
        torch.manual_seed(0)
        self._loop, self._batches = make(), batches

    def window_s(self, windows: int) -> float:
        """Return the mean seconds per window over `windows` windows, maximum over ranks."""
        total(0.0)  # synchronises the ranks
        begin = time.perf_counter()
        for _ in range(windows):
            self._loop.step(self._batches)
        return max_over_ranks((time.perf_counter() - begin) / windows)


def timed(name: str, rounds: int, windows: int, names: list[str]) -> list[dict[str, float]]:
    """Return the seconds per window of each arm, round by round. Every other round reverses the order of arms."""
    task: Task = getattr(scaling_tasks, name)
    task = replace(task, batch_size=task.batch_size * dist.get_world_size())
    data, made = task.load_data(), _arms(task)
    arms = {arm: _Arm(made[arm], iter(trimtab.shard(data.batches(0, task.batch_size)))) for arm in names}
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
