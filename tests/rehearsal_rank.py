"""One rank of a job whose plans are rehearsed; what is predicted of them is planted.

    python rehearsal_rank.py RANK RANKS FOLDER CASE...

Writes of each case its plan, whether the user's own is as it was, and what a run of the plan then takes.
"""

from __future__ import annotations

import functools
import gc
import json
import os
import sys
import time
import weakref
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

sys.path.insert(0, str(Path(__file__).parent / "unit" / "planner"))

from call_counts import OutOfReach
from memory_rank import Words, batch_of, loss, settling
from simulated_machine import MIB, Machine, measured
from state_digest import fingerprint
from test_rank_stages import ACCELERATOR, shape, traces_of

import trimtab
from trimtab.core.hardware import Link, LinkCalibration
from trimtab.core.objective import Budget
from trimtab.core.parallelism import StepShape
from trimtab.core.serialization import from_jsonable, to_jsonable
from trimtab.distributed import ddp, dry_run, host_gather, plan_on_ranks, process_group
from trimtab.distributed.dry_run import DryRuns, of_live
from trimtab.distributed.plan_on_ranks import StageMeasurements
from trimtab.measure.gradient_norms import local_shard
from trimtab.plans.plan import Plan
from trimtab.state.peak_memory import peak_growth, storage_bytes

ROWS, SLOW_S = 8, 0.1
SHAPE = StepShape(0.01, 0.02, 0.001, (2**20,) * 8, (1.0,) * 8)
HOOK = ddp.reduce_in_bf16
COPIED = dry_run.copied_together
BACKWARD = ddp.DataParallel.backward


def link(bytes_per_s: float) -> LinkCalibration:
    return LinkCalibration(Link("planted", 1e-6, bytes_per_s, "planted", calibrated=True))


class Noisy(Words):
    """With batch statistics and random numbers, which a rehearsal would move."""

    def __init__(self) -> None:
        super().__init__()
        self.drop, self.statistics = nn.Dropout(0.1), nn.BatchNorm1d(64)

    def forward(self, tokens):
        x = self.drop(self.embedding(tokens))
        x = self.statistics(x.transpose(1, 2)).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Job:
    """A user's loop on this rank, and what became of it."""

    def __init__(self, make=Noisy) -> None:
        torch.manual_seed(0)
        self.model = make()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.loss, self.rehearsals, self.hooked, self.peaks = loss, 0, 0, ()
        self.model.blocks[0].norm.weight.requires_grad = False
        loss(self.model, batch_of(2)).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.model.head.weight.grad = torch.ones_like(self.model.head.weight)
        handle = self.model.head.weight.register_hook(lambda gradient: self._seen())
        self.handle = handle
        self.before = self._look()

    def _seen(self) -> None:
        self.hooked += 1

    def _look(self) -> list:
        grads = [None if p.grad is None else float(p.grad.sum()) for p in self.model.parameters()]
        flags = [(p.requires_grad, id(p), len(p._backward_hooks or ())) for p in self.model.parameters()]
        return [fingerprint(self.model, self.optimizer), grads, flags]

    def rehearsal(self) -> DryRuns:
        found = of_live(self.model, self.optimizer, self.loss, batch_of(ROWS))
        its = found.of

        def of(plan, **how):
            ran = its(plan, **how)
            self.rehearsals += 1
            self.peaks = ran.peaks
            return ran

        found.of = of
        return found

    def planned(self, made, *, dry_runs: bool = True) -> dict:
        dry_run = self.rehearsal if dry_runs else None
        plan = plan_on_ranks.plan_together(lambda: made, torch.device("cpu"), dry_run)
        return {
            "plan": to_jsonable(plan),
            "text": plan.explain(),
            "rehearsals": self.rehearsals,
            "peaks": self.peaks,
            "unchanged": self._look() == self.before and self.hooked == 0,
        }


def sends(bytes_per_s: float) -> plan_on_ranks.BroadcastPlan:
    plan_on_ranks.calibrate = lambda device: link(bytes_per_s)
    return plan_on_ranks.BroadcastPlan(Plan.fixed(ROWS), SHAPE)


def shares(memory: int) -> StageMeasurements:
    """Return what a stage is chosen by: of planted peaks, which are far above those of the model here."""
    plan_on_ranks.calibrate = lambda device: link(1e11)
    given = {"device": ACCELERATOR, "budget": Budget(memory * MIB), "batch_size": ROWS}
    profile = measured(Machine(split_s=0.2), always=True, **given)
    return StageMeasurements(profile, traces_of(profile), shape)


def fast_link() -> dict:
    return Job().planned(sends(1e11))


def unrehearsed() -> dict:
    return Job().planned(sends(2e6), dry_runs=False)


def slow_hook() -> dict:
    def slow(state, bucket):
        time.sleep(SLOW_S)
        return HOOK(state, bucket)

    ddp.reduce_in_bf16 = slow
    return Job().planned(sends(2e6))


def slow_usual() -> dict:
    ddp.reduce_in_bf16 = HOOK

    def backward(self, given):
        if self.bf16 is False:
            time.sleep(3 * SLOW_S)
        BACKWARD(self, given)

    spread = ddp.DataParallel.spread

    def spreads(self, model, optimizer, plan):
        self.bf16 = plan.reduce_dtype.value == "bf16"
        spread(self, model, optimizer, plan)

    ddp.DataParallel.backward, ddp.DataParallel.spread = backward, spreads
    found = Job().planned(sends(2e6))
    ddp.DataParallel.backward, ddp.DataParallel.spread = BACKWARD, spread
    return found


def no_copies() -> dict:
    job = Job()
    if dist.get_rank():
        job.model.blocks[1].computed = job.model.head.weight * 2  # no leaf of a graph: torch cannot copy it
        job.before = job._look()
    return job.planned(sends(2e6))


def all_raise() -> dict:
    job = Job()

    def raises(model, batch):
        raise ValueError("no loss")

    job.loss = raises
    return job.planned(sends(2e6))


def stage(memory: int, make=Noisy) -> dict:
    """Rehearse what a limit leaves, and count what a run of it takes."""
    job = Job(make)
    found = job.planned(shares(memory))
    return found | {"taken": taken(job, found)}


def taken(job: Job, found: dict) -> list[int]:
    plan, peaks = from_jsonable(Plan, found["plan"]), []
    batch = batch_of(ROWS)
    job.handle.remove()  # a run on several ranks refuses gradient hooks
    with trimtab.start(job.model, job.optimizer, plan) as run:
        for index in range(9):
            if index < 2:
                run.train_step(run.window(batch), loss)
                continue
            job.optimizer.zero_grad()
            states = [value for state in job.optimizer.state.values() for value in state.values()]
            held = storage_bytes([local_shard(p) for p in (*job.model.parameters(), *job.model.buffers(), *states)])
            whole = sum(p.numel() * 4 for p in job.model.parameters() if p.requires_grad)
            held += whole if plan.zero_stage.value < 2 else 0
            growth = peak_growth(lambda: run.train_step(run.window(batch), loss))
            peaks.append(held + growth + storage_bytes([batch]))
    return peaks


def no_room() -> dict:
    """Memory runs out once, on one rank alone, in what is rehearsed first."""
    job = Job(Words)
    calls = OutOfReach(number=0)  # which no rehearsal puts back, as it would a list

    def fits(model, batch):
        calls.held.number += bool(dist.get_rank()) and len(batch) == ROWS
        if calls.held.number == 1:
            calls.held.number += 1
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return loss(model, batch)

    job.loss = fits
    return job.planned(shares(10**6))


class Runs(torch.autograd.Function):
    """Passes what it gets; its backward runs out of memory."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


class Deep(Words):
    """Of many buckets; memory runs out in a copy's fourth backward, on each rank at another layer, or at the same."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.deep, self.calls, self.at = nn.ModuleList(nn.Linear(64, 64) for _ in range(8)), 0, at

    def forward(self, tokens):
        x, self.calls = self.embedding(tokens), self.calls + 1
        for index, block in enumerate(self.deep):
            x = torch.tanh(block(x))
            if self.calls == 5 and index == self.at:
                x = Runs.apply(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def all_run_out(one: int, other: int) -> dict:
    """Memory runs out in a backward of every rank; what is sent is in buckets of one layer."""
    job = Job(lambda: Deep(other if dist.get_rank() else one))
    own = ddp._bucket_mib
    ddp._bucket_mib = lambda plan: 0.01
    try:
        return job.planned(sends(2e6))
    finally:
        ddp._bucket_mib = own


def one_at_once(*, fails: bool = False) -> dict:
    """Return how many copies were there at the most, with the one being made, and how many are after it."""
    job, copies, alive = Job(Words), [], []

    def seen(model, optimizer):
        found = COPIED(model, optimizer)
        copies.append(weakref.ref(found[0]))
        alive.append(sum(each() is not None for each in copies))
        return found

    def raises(model, batch):
        raise ValueError("no loss")

    job.loss = raises if fails else loss
    dry_run.copied_together = seen
    gc.disable()
    try:
        plan = Plan.fixed(ROWS, num_ranks=2, zero_stage=0, reduce_dtype="bf16")
        ran = [job.rehearsal().of(plan, counts_memory=True) for _ in range(2 if fails else 1)]
    finally:
        gc.enable()
        dry_run.copied_together = COPIED
    left = sum(each() is not None for each in copies)
    return {"most": max(alive), "made": len(alive), "left": left, "refusal": ran[-1].refusal, "code": ran[-1].code}


def one_raises() -> dict:
    job, calls = Job(), []

    def raises(model, batch):
        calls.append(1)
        if dist.get_rank() and len(calls) == 3:
            raise ValueError("no loss here")
        return loss(model, batch)

    job.loss = raises
    return job.planned(sends(2e6))


def one_dies() -> dict:
    job, calls = Job(), []

    def dies(model, batch):
        calls.append(1)
        if dist.get_rank() and len(calls) == 3:
            os._exit(0)
        return loss(model, batch)

    job.loss = dies
    return job.planned(sends(2e6))


CASES = {
    "fast_link": fast_link,
    "unrehearsed": unrehearsed,
    "slow_hook": slow_hook,
    "slow_usual": slow_usual,
    "no_copies": no_copies,
    "all_raise": all_raise,
    "replicas": functools.partial(stage, 10**6),
    "shards": functools.partial(stage, 150),
    "no_room": no_room,
    "all_run_out_alike": functools.partial(all_run_out, 3, 3),
    "all_run_out": functools.partial(all_run_out, 6, 0),
    "one_at_once": one_at_once,
    "one_at_once_fails": functools.partial(one_at_once, fails=True),
    "one_raises": one_raises,
    "one_dies": one_dies,
}


if __name__ == "__main__":
    rank, ranks, folder, *names = sys.argv[1:]
    torch.set_num_threads(1)
    host_gather._ANSWER_S, dry_run._BLOCK_S, dry_run._PAIRS = 1.0, 0.05, 6
    process_group.TIMEOUT_S = 12.0
    dist.all_gather_into_tensor = settling(dist.all_gather_into_tensor)
    dist.reduce_scatter_tensor = settling(dist.reduce_scatter_tensor)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=int(rank), world_size=int(ranks))
    found = {}
    for name in names:
        begin = time.perf_counter()
        try:
            found[name] = CASES[name]()
        except Exception as error:
            found[name] = {"error": f"{type(error).__name__}: {error}"}
            found[name] |= {each: getattr(error, each, None) for each in ("code", "ranks", "got")}
        found[name]["seconds"] = time.perf_counter() - begin
    Path(folder, f"rank-{rank}.json").write_text(json.dumps(found), encoding="utf-8")
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may outlive the interpreter
