"""Jobs of scaling.py for a rank under torchrun: weights, windows per ZeRO stage, training to a loss, loop overhead.

    torchrun ... scaling_ranks.py weights|windows|courses|agreement|in_step OUT [ARGUMENT ...]

Rank 0 writes the results to OUT.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import trimtab
from benchmarks.micro.regret_cases import held_out_loss
from benchmarks.micro.scaling_in_step import in_step
from benchmarks.micro.scaling_tasks import BY_NAME, GPT
from trimtab.api import FREED, default_rule
from trimtab.core.batch_rule import BatchRule
from trimtab.core.parallelism import Parallelism
from trimtab.core.plan import Plan
from trimtab.core.progress import silent
from trimtab.distributed.bandwidth_test import calibrate
from trimtab.distributed.dry_run import DryRun, DryRuns
from trimtab.distributed.plan_on_ranks import BroadcastPlan, plan_together
from trimtab.distributed.process_group import max_over_ranks, total
from trimtab.distributed.zero_stage_inputs import RankLoop
from trimtab.experiments.baselines.reference import ReferenceLoop
from trimtab.experiments.baselines.replica import ReplicaLoop
from trimtab.experiments.paired_runs.plan_loops import PlanLoop
from trimtab.experiments.scaling.scaling_plans import plan_maker
from trimtab.experiments.task_ranks import rehearsal_of, task_of_rank
from trimtab.planner.communication_cost import window_s
from trimtab.planner.multi_rank_plan import for_one_process, for_replicas
from trimtab.planner.rank_profile import WAYS
from trimtab.state.process_state import ProcessState
from trimtab.tasks.task import Task

CPU = torch.device("cpu")
STEPS = 20  # steps before weights are compared; windows in memory measurements
SETTLED = 10  # warm-up windows before memory measurements
SEVERAL = 3  # micro-batches of longer windows
BLOCKS, BLOCK_S = 7, 0.5
EVERY = 2048  # samples between evaluations
FIXED_K = 16  # micro-batches of a window with a fixed larger batch
BACKENDS: dict[str, dict[str, Any]] = {
    "ddp": {"zero_stage": 0},
    "zero-1": {"zero_stage": 1},
    "zero-2": {"zero_stage": 2},
    "zero-3": {"zero_stage": 3},
    "deepspeed-1": {"zero_stage": 1, "engine": "deepspeed"},
    "deepspeed-2": {"zero_stage": 2, "engine": "deepspeed"},
    "deepspeed-3": {"zero_stage": 3, "engine": "deepspeed"},
}


def _whole(task: Task) -> Task:
    """Return the task with the batch of all ranks."""
    return replace(task, batch_size=task.batch_size * _ranks())


def _ranks() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def _batches(task: Task, seed: int) -> Iterator[Any]:
    return iter(trimtab.shard(task.load_data().batches(seed, task.batch_size)))


def weights() -> list[dict[str, Any]]:
    """Return weight differences between each backend and a single process after windows of several micro-batches."""
    # DeepSpeed stage 3 supports fp32 only. Other backends use float64, so that differences are errors, not rounding.
    rows, found = [], {}
    task = replace(_whole(GPT), batch_size=6 * _ranks())
    for name, how in BACKENDS.items():
        dtype = torch.float32 if how.get("engine") else torch.float64
        plan = Plan.fixed(6, 2, num_ranks=_ranks(), **how)
        found[name] = (dtype, _trained(task, plan, dtype))
    if dist.get_rank():
        return []
    os.environ["WORLD_SIZE"] = "1"
    alone_of = {}
    ranks = _ranks()
    dist.destroy_process_group()
    for dtype in (torch.float64, torch.float32):
        alone_of[dtype] = _trained(task, Plan.fixed(task.batch_size, 2), dtype)
    for name, (dtype, ours) in found.items():
        largest = max(float(each.abs().max()) for each in alone_of[dtype])
        gap = max(float((a - b).abs().max()) for a, b in zip(ours, alone_of[dtype], strict=True)) / largest
        row = {"metric": "weight_difference", "task": GPT.name, "backend": name, "ranks": ranks, "steps": STEPS}
        rows.append(row | {"dtype": str(dtype).removeprefix("torch."), "difference": gap})
    return rows


def _trained(task: Task, plan: Plan, dtype: torch.dtype) -> list[Tensor]:
    torch.manual_seed(0)
    model = task.make_model().to(dtype).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    batches = _batches(task, 0)
    with trimtab.start(model, optimizer, plan, clip_norm=1.0) as run:
        for window in itertools.islice(run.windows(batches), STEPS):
            run.train_step(window, task.loss_fn)
    whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    return [each.detach().double().clone() for each in whole]


def windows(folder: str) -> list[dict[str, Any]]:
    """Return predicted and measured seconds and bytes of windows per stage, with one and several micro-batches."""
    whole, rows = _whole(GPT), []
    share = task_of_rank(whole, _ranks())
    made = _made(share, folder)
    calibration = calibrate(CPU)
    assert made.shape is not None
    for stage, once in WAYS:
        for k in (1, SEVERAL) if once else (SEVERAL,):
            how = Parallelism(_ranks(), stage, reduces_once=once)
            told = window_s(how, calibration.link, made.shape, k, overlap_share=calibration.overlap_share)
            shared = {"reduces_once": once} if stage > 1 else {}
            plan = Plan.fixed(k * share.batch_size, share.batch_size, num_ranks=_ranks(), zero_stage=stage, **shared)
            task = replace(whole, batch_size=k * whole.batch_size)
            ran = DryRuns(partial(_copied, task, k * share.batch_size)).of(plan, counts_memory=True)
            taken, computed = _window_s(task, plan), _window_s(task, for_one_process(plan))
            rows.append(
                {
                    "metric": "window_prediction",
                    "task": GPT.name,
                    "ranks": _ranks(),
                    "zero_stage": stage,
                    "micro_batches": k,
                    "reduces_once": once,
                    "predicted_s": told.total_s,
                    "predicted_waiting_s": told.exposed_s,
                    "measured_s": taken,
                    "measured_waiting_s": taken - computed,
                    "error": told.total_s / taken - 1,
                    "rehearsed_s": ran.window_s,
                    "rehearsal_error": ran.window_s / taken - 1,
                    "rehearsed_bytes": ran.peak_bytes,
                    "rehearsed_largest_bytes": max(ran.peaks),
                    "measured_bytes": _peaks(task, plan, k * share.batch_size),
                    "rehearsal_s": ran.took_s,
                    "link_bytes_per_s": calibration.link.bytes_per_s,
                    "link_latency_s": calibration.link.latency_s,
                    "overlap_share": calibration.overlap_share,
                }
            )
    return rows


def _copied(task: Task, rows: int) -> RankLoop:
    torch.manual_seed(0)
    model = task.make_model().train()
    return model, task.make_optimizer(model), task.loss_fn, next(task.load_data().batches(0, rows))


def _peaks(task: Task, plan: Plan, rows: int) -> int:
    """Return the median peak in bytes of a window, after warm-up windows."""
    loop = _copied(task, rows)
    with trimtab.start(loop[0], loop[1], plan) as run:
        ours = DryRun(run, loop)
        for _ in range(SETTLED):
            run.train_step(run.window(loop[3]), task.loss_fn)
        return statistics.median_high(ours.peak_bytes(0) for _ in range(STEPS))


def _made(share: Task, folder: str) -> BroadcastPlan:
    """Return the plan for a rank's batch with its step time, made on rank 0 and broadcast."""
    from trimtab.core.serialization import from_json, to_json
    from trimtab.distributed.process_group import from_first

    return from_json(
        BroadcastPlan, from_first(lambda: to_json(plan_maker(share, share.load_data(), CPU, Path(folder))()))
    )


def _window_s(task: Task, plan: Plan) -> float:
    """Return the median over blocks of the seconds per window."""
    torch.manual_seed(0)
    model = task.make_model().train()
    with trimtab.start(model, task.make_optimizer(model), plan) as run:
        opened = run.windows(_batches(task, 0))

        def step() -> None:
            run.train_step(next(opened), task.loss_fn)

        return statistics.median(_block_s(step))


def _block_s(step: Callable[[], None]) -> list[float]:
    """Return the seconds per step of each block, maximum over ranks."""
    for _ in range(3):
        step()
    count = max(3, math.ceil(BLOCK_S / _seconds(step, 3)))
    return [_seconds(step, count) for _ in range(BLOCKS)]


def _seconds(step: Callable[[], None], count: int) -> float:
    total(0.0)
    begin = time.perf_counter()
    for _ in range(count):
        step()
    return max_over_ranks((time.perf_counter() - begin) / count)


def courses(folder: str, task: str, recipes: str, seed: str, target: str, most: str) -> list[dict[str, Any]]:
    """Train with each recipe in turn and return the results."""
    whole = _whole(BY_NAME[task])
    return [_course(whole, folder, recipe, int(seed), float(target), int(most)) for recipe in recipes.split(",")]


def _course(whole: Task, folder: str, recipe: str, seed: int, target: float, most: int) -> dict[str, Any]:
    """Train with a recipe and return samples and seconds to a validation loss, without evaluation time.

    The loss is reached at the first of two consecutive evaluations that meet it, interpolated from the previous one.
    """
    outside = ProcessState.capture()
    stepped = _stepped(recipe, whole, folder, seed)
    data, due, rows, seconds = whole.load_data(), EVERY, 0, 0.0
    points: list[tuple[int, float, float]] = []
    met = None
    while rows < most and met is None:
        total(0.0)  # synchronises the ranks
        begin = time.perf_counter()
        while rows < due:
            rows += stepped.step()
        seconds += max_over_ranks(time.perf_counter() - begin)
        due = (rows // EVERY + 1) * EVERY
        loss = torch.tensor(held_out_loss(whole, stepped.model, data))
        if dist.is_initialized():
            dist.broadcast(loss, src=0)  # batch statistics differ between ranks
        points.append((rows, seconds, float(loss)))
        met = _met(points, target)
    found = {"recipe": recipe, "ranks": _ranks(), "seed": seed, "rows": rows, "seconds": seconds}
    found |= {"samples_per_s": rows / seconds, "windows": stepped.windows, "says": stepped.says}
    found |= {"target_rows": None, "target_s": None} if met is None else {"target_rows": met[0], "target_s": met[1]}
    stepped.close()
    outside.restore()
    return found


def _met(points: list[tuple[int, float, float]], target: float) -> tuple[float, float] | None:
    """Return interpolated samples and seconds to the target; None unless the last two evaluations meet it."""
    if len(points) < 2 or points[-1][2] > target or points[-2][2] > target:
        return None
    if len(points) == 2:
        return points[0][0], points[0][1]
    before, first = points[-3], points[-2]
    share = (before[2] - target) / (before[2] - first[2])
    rows, seconds = (before[i] + share * (first[i] - before[i]) for i in (0, 1))
    return rows, seconds


class _Course:
    """Training loop of a recipe that counts its windows."""

    def __init__(self, loop: Any, batches: Iterator[Any], says: str) -> None:
        self._loop, self._batches, self.model, self.says, self.windows = loop, batches, loop.model, says, 0
        self.close = loop.close

    def step(self) -> int:
        """Train on a window and return the samples of all ranks."""
        self.windows += 1
        return int(self._loop.step(self._batches))


def _stepped(recipe: str, whole: Task, folder: str, seed: int) -> _Course:
    batches, several = _batches(whole, seed), _ranks() > 1
    share = replace(whole, batch_size=whole.batch_size // _ranks())
    make = plan_maker(share, share.load_data(), CPU, Path(folder))
    plan = plan_together(make, CPU, lambda: rehearsal_of(share, CPU, silent)) if several else make().plan
    torch.manual_seed(seed)
    if recipe in ("baseline", "no_buffers"):
        plain = partial(ReplicaLoop, sends_buffers=recipe == "baseline") if several else ReferenceLoop
        return _Course(plain(whole, CPU), batches, "")
    if recipe == "plan_batch":
        plan = plan.freed(default_rule(plan), FREED)
    if recipe == "plan_k":
        plan = plan.freed(BatchRule("fixed", k=FIXED_K), FREED)
    says = f"{plan.precision.value}, gradients in {plan.reduce_dtype.value} by buckets of {plan.bucket_bytes.value}"
    return _Course(PlanLoop(whole, CPU, plan), batches, says)


def agreement(pairs: str) -> list[dict[str, Any]]:
    """Return time ratios of a plan without changes to the plain loop in DDP, and the time of the ranks' exchange."""
    whole = _whole(GPT)
    share = task_of_rank(whole, _ranks())
    torch.manual_seed(0)
    model = whole.make_model().train()
    plain, batches = ReplicaLoop(whole, CPU), _batches(whole, 0)
    ours = _batches(whole, 0)
    ratios, controls = [], []
    plan = for_replicas(Plan.fixed(share.batch_size), _ranks())
    with trimtab.start(model, whole.make_optimizer(model), plan) as run:
        opened = run.windows(ours)

        def step() -> None:
            run.train_step(next(opened), whole.loss_fn)

        def theirs() -> None:
            plain.step(batches)

        for _ in range(5):
            step(), theirs()
        for pair in range(int(pairs)):
            order = (theirs, step, theirs) if pair % 2 else (step, theirs, theirs)
            taken = {}
            for i, each in enumerate(order):
                taken[i] = (each, _seconds(each, 1))
            own = [s for each, s in taken.values() if each is step]
            plains = [s for each, s in taken.values() if each is theirs]
            ratios.append(own[0] / plains[0])
            controls.append(plains[1] / plains[0])
        exchange = run._peers._exchange
        asks = []
        for _ in range(200):
            total(0.0)
            begin = time.perf_counter()
            wait = exchange.ask([0.0] * 9)
            put_s = time.perf_counter() - begin
            wait()
            asks.append((put_s, time.perf_counter() - begin))
    plain.close()
    said = {"metric": "loop_overhead_ratio", "task": GPT.name, "ranks": _ranks()}
    return [
        said
        | {"pairs": ratios, "control_pairs": controls}
        | {"ask_s": statistics.median(a for a, _ in asks), "answer_s": statistics.median(b for _, b in asks)}
    ]


JOBS: dict[str, Callable[..., list[dict[str, Any]]]] = {
    "weights": weights,
    "windows": windows,
    "courses": courses,
    "agreement": agreement,
    "in_step": in_step,
}


def main() -> None:
    """Run the named job."""
    torch.set_num_threads(1)
    what, out, *arguments = sys.argv[1:]
    with trimtab.process_group() as here:
        found = JOBS[what](*arguments)
        if here.rank == 0:
            Path(out).write_text(json.dumps(found), encoding="utf-8")
        sys.stdout.flush()
        os._exit(0)  # skips interpreter shutdown, during which gloo threads may raise


if __name__ == "__main__":
    main()
