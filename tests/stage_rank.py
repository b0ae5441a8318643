"""One rank of a job that plans with no limit, with one that no stage meets and with one that shards meet; then trains.

    python stage_rank.py RANK RANKS FOLDER [DEVICE]

Each rank writes its plans, what it was refused and how often it traced; rank 0 also how far the weights are from one
process's after all steps.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import brief
import rank_cases
import torch
import torch.distributed as dist
from backend_rank import compared, group_of, train
from memory_rank import settling
from rank_cases import ROWS, Case, Tokens, batches_of, optimizer_of

import trimtab
from trimtab.core.errors import TrimtabError
from trimtab.core.parallelism import Parallelism
from trimtab.core.serialization import to_jsonable
from trimtab.distributed import dry_run, plan_on_ranks
from trimtab.distributed.rank_memory import trace_rank
from trimtab.planner.zero_stage import GLOO_ONCE
from trimtab.plans.plan import Plan

DEVICE = sys.argv[4] if sys.argv[4:] else "cpu"
brief.shorten()  # the limit decides here, and not what is faster
if DEVICE == "cpu":  # where what is sent waits far longer than it takes (`settling`)
    dry_run._BLOCK_S, dry_run._PAIRS = 0.02, 6
# So that what a rank may shard is most of what it holds; on a device, beside what its libraries take.
rank_cases.WIDTH, rank_cases.DEPTH = (96, 6) if DEVICE == "cpu" else (2048, 6)


@dataclass(frozen=True)
class Planned(Case):
    """A case by a plan that was made; of one process, as it is."""

    made: Plan | None = None

    def plan(self, ranks: int) -> Plan:
        return self.made if ranks > 1 else super().plan(ranks)


def told(case: Case, stage: int, ranks: int, rows: int) -> int:
    """Return what a rank is told to hold in windows of one micro-batch."""
    model, (batch, *_) = Tokens(case.dtype).to(DEVICE), batches_of(case)
    pair = tuple(tuple(part[:n].to(DEVICE) for part in batch) for n in (2, 4))
    loop = (model, optimizer_of(model, case.optimizer), case.loss, pair, (2, 4))
    return trace_rank(*loop, Parallelism(ranks, stage), counts_scratch=DEVICE == "cpu").peak_bytes(rows)


def limit_of(case: Case, rank: int, ranks: int) -> int:
    """Return bytes that a rank meets at stage 3 with all its rows, and at stages 0 and 1 not with a single one.

    At stage 3 with what gloo may hold on top.
    """
    found = [0]
    if rank == 0:
        sharded, held = told(case, 3, ranks, ROWS // ranks), min(told(case, stage, ranks, 1) for stage in (0, 1))
        assert 1.05 * (1 + GLOO_ONCE) * sharded < held
        found = [int(0.98 * held)]
    dist.broadcast_object_list(found)
    return found[0]


class Counted:
    """A function that traces a loop, and how often it was called; the same trace of the same loop is made once."""

    def __init__(self, name: str) -> None:
        self._function, self.calls = getattr(plan_on_ranks, name), 0
        self._found: dict[str, object] = {}
        setattr(plan_on_ranks, name, self)

    def __call__(self, model, optimizer, loss_fn, batch, *how, **named):
        self.calls += 1
        key = repr((how, named))  # the model and the shapes of the batch are the same in all plans
        if key not in self._found:
            self._found[key] = self._function(model, optimizer, loss_fn, batch, *how, **named)
        return self._found[key]


def planned(case: Case, limit: int | None) -> Plan:
    batch = next(iter(trimtab.shard(batches_of(case))))
    at_once = dist.all_gather_into_tensor, dist.reduce_scatter_tensor
    # What is rehearsed is held against the limit: gloo's threads are left the time to let go of what they sent.
    dist.all_gather_into_tensor, dist.reduce_scatter_tensor = map(settling, at_once)
    try:
        return planned_at_once(case, limit, batch)
    finally:
        dist.all_gather_into_tensor, dist.reduce_scatter_tensor = at_once


def planned_at_once(case: Case, limit: int | None, batch) -> Plan:
    model = Tokens(case.dtype).to(DEVICE)
    how = {"budget": trimtab.Budget(limit), "num_blocks": 3}
    return trimtab.plan(model, optimizer_of(model, case.optimizer), case.loss, batch, **how)


def main(rank: int, ranks: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(group_of(DEVICE, rank), init_method=f"file://{folder}/meet", rank=rank, world_size=ranks)
    case = Planned({}, is_mean=True, optimizer="sgd")
    limit = limit_of(case, rank, ranks)
    counted = [Counted(name) for name in ("trace_here", "trace_ways")]
    said, plans = {"limit": limit}, {}
    for name, given in (("none", None), ("impossible", 1000), ("shards", limit)):
        before = sum(each.calls for each in counted)
        try:
            plans[name] = planned(case, given)
            found = {"plan": to_jsonable(plans[name]), "text": plans[name].explain()}
        except TrimtabError as error:
            found = {"error": type(error).__name__, "code": error.code, "said": str(error)}
        said[name] = found | {"traces": sum(each.calls for each in counted) - before}
    torch.manual_seed(rank)
    case = Planned({}, is_mean=True, optimizer="sgd", made=plans["shards"])
    ours = train(case, ranks=ranks, windows=trimtab.shard(batches_of(case)), device=DEVICE)
    dist.barrier()
    dist.destroy_process_group()
    if rank == 0:
        torch.manual_seed(0)
        alone = Planned({}, is_mean=True, optimizer="sgd")
        said["trained"] = compared(ours, train(alone, ranks=1, windows=batches_of(alone), device=DEVICE))
    (folder / f"rank-{rank}.json").write_text(json.dumps(said))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
    os._exit(0)  # gloo's threads may outlive the interpreter, and end it with an error
