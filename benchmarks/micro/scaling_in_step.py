"""Speed of two ranks over a link, compared with ranks that only synchronise and send nothing.

Ranks wait for the slowest rank in every window. If the speed of CPU cores fluctuates, this wait alone limits scaling,
even without communication.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

import trimtab
from benchmarks.micro.scaling_tasks import BY_NAME
from trimtab.core.plan import Plan
from trimtab.distributed.host_gather import RankExchange
from trimtab.distributed.process_group import max_over_ranks, total
from trimtab.experiments.baselines.replica import ReplicaLoop
from trimtab.planner.multi_rank_plan import for_one_process
from trimtab.planner.statistics import turns
from trimtab.tasks.task import Task

WINDOW_ROWS = {"ddp": 1, "plan": 16}  # loader batches per window: baseline, and maximum of an adaptive batch size
LAPS, BLOCK_S = 24, 1.0
CPU = torch.device("cpu")
Step = Callable[[], object]


def in_step(name: str) -> list[dict[str, Any]]:
    """Return the seconds per sample of interleaved loops, block by block: alone, in step, and sharing gradients.

    The loops are the plain loop in DDP and a plan that reduces bf16 gradients once per window of sixteen micro-batches.
    "Alone": rank 0 runs and the other ranks sleep. "In step": every rank runs separately and synchronises once per
    window.
    """
    task, ranks = BY_NAME[name], dist.get_world_size()
    with ExitStack() as opened:
        exchange = RankExchange(None)
        opened.callback(exchange.close)
        arms: dict[str, tuple[Step, int, bool]] = {}
        for loop, batches in WINDOW_ROWS.items():
            rows = batches * task.batch_size
            whole = replace(task, batch_size=ranks * rows)
            how = {"num_ranks": ranks, "zero_stage": 0}
            plan = Plan.fixed(rows, task.batch_size, **how, reduce_dtype="fp32" if loop == "ddp" else "bf16")
            single = _planned(whole, for_one_process(plan), opened)
            arms[f"{loop} alone"] = single, rows, True
            arms[f"{loop} in step"] = _said(single, exchange), rows, False
            together = _replicated(whole, opened) if loop == "ddp" else _planned(whole, plan, opened)
            arms[loop] = together, rows, False
        return [_row(task.name, arms, ranks)]


def _row(name: str, arms: dict[str, tuple[Step, int, bool]], ranks: int) -> dict[str, Any]:
    found: dict[str, list[float]] = {arm: [] for arm in arms}
    last: str | None = None
    for lap in range(-1, LAPS):  # the first round is a warm-up
        for arm in turns(list(arms), max(0, lap), 0, last):
            step, rows, is_alone = arms[arm]
            taken = _sample_s(step, rows, is_alone=is_alone)
            last = arm
            if lap >= 0:
                found[arm].append(taken)
    return {"metric": "in_step", "task": name, "ranks": ranks, "sample_s": found}


def _sample_s(step: Step, rows: int, *, is_alone: bool) -> float:
    """Return the seconds per sample of a rank, maximum over ranks, measured over about a second."""
    runs = not is_alone or dist.get_rank() == 0
    total(0.0)
    begin = time.perf_counter()
    if runs:
        step()
    count = max(2, int(BLOCK_S / max_over_ranks(time.perf_counter() - begin)))
    total(0.0)
    begin = time.perf_counter()
    for _ in range(count if runs else 0):
        step()
    return max_over_ranks((time.perf_counter() - begin) / (count * rows))


def _said(step: Step, exchange: RankExchange) -> Step:
    def both() -> None:
        step()
        exchange.ask([0.0])()

    return both


def _planned(whole: Task, plan: Plan, opened: ExitStack) -> Step:
    torch.manual_seed(0)
    model = whole.make_model().train()
    run = opened.enter_context(trimtab.start(model, whole.make_optimizer(model), plan))
    windows = run.windows(_batches(whole))
    return lambda: run.train_step(next(windows), whole.loss_fn)


def _replicated(whole: Task, opened: ExitStack) -> Step:
    torch.manual_seed(0)
    loop, batches = ReplicaLoop(whole, CPU), iter(_batches(whole))
    opened.callback(loop.close)
    return lambda: loop.step(batches)


def _batches(whole: Task) -> Any:
    return trimtab.shard(whole.load_data().batches(0, whole.batch_size))
