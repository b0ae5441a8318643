"""Step times of regret.py: for a single process, and for two ranks over a slow link."""

from __future__ import annotations

import functools
import itertools
import json
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import trimtab
from benchmarks.micro.regret_cases import Case
from trimtab.adaptive_batch.step_time_model import StepTimes
from trimtab.losses import mean_of
from trimtab.plans.plan import Plan
from trimtab.tasks.task import Task


def local_times(case: Case) -> StepTimes:
    """Measure the times in this process with a single thread, as the arms use."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    return _measured(case, case.make().make_model().train())


def rank_times(case: Case, latency_s: float) -> StepTimes:
    """Measure the times on two gloo ranks with a thread each. Reductions are delayed by `latency_s` seconds."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        work = functools.partial(_rank, case=case, latency_s=latency_s, folder=folder)
        ranks = [context.Process(target=work, args=(rank,)) for rank in range(2)]
        for each in ranks:
            each.start()
        for each in ranks:
            each.join()
            if each.exitcode != 0:
                raise SystemExit("a rank failed: no table of times")
        return StepTimes(*json.loads((Path(folder) / "times.json").read_text(encoding="utf-8")))


def _rank(rank: int, case: Case, latency_s: float, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = DistributedDataParallel(case.make().make_model().train())

    def late(_, bucket):  # type: ignore[no-untyped-def]
        if bucket.is_last():
            time.sleep(latency_s)
        reduction = dist.all_reduce(bucket.buffer().div_(2), async_op=True)
        assert reduction is not None
        return reduction.get_future().then(lambda done: done.value()[0])

    model.register_comm_hook(None, late)
    found = _measured(case, model)
    if rank == 0:
        (Path(folder) / "times.json").write_text(json.dumps([found.micro_s, found.fixed_s]), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def _mean_loss(task: Task, model: nn.Module, batch: Any) -> torch.Tensor:
    """Return the mean loss, because counts are not summed over ranks here."""
    return mean_of(task.loss_fn(model, batch))


def _measured(case: Case, model: nn.Module, num_windows: int = 100) -> StepTimes:
    """Return the times from interleaved windows of one and five micro-batches, data loading included."""
    task = case.make()
    batches: Iterator[Any] = task.load_data().batches(0, case.rows)
    optimizer = task.make_optimizer(model, rate=1e-4)  # type: ignore[call-arg]
    seconds: dict[int, list[float]] = {1: [], 5: []}
    with trimtab.start(model, optimizer, Plan.fixed(case.rows)) as run:
        for k in itertools.islice(itertools.cycle(seconds), 2 * num_windows):
            start = time.perf_counter()
            run.train_step(run.window(*itertools.islice(batches, k)), functools.partial(_mean_loss, task))
            seconds[k].append(time.perf_counter() - start)
    one, five = (statistics.median(seconds[k]) for k in (1, 5))
    return StepTimes((five - one) / 4, one - (five - one) / 4)
