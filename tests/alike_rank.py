"""One of two ranks that differ in a single thing; run by test_ranks_that_differ.py.

    python alike_rank.py RANK RANKS FOLDER WRAP/WHAT ...

WRAP is how the model is spread ("ddp", "own", "zero-2"), WHAT differs on the last rank. Each rank writes, of each job,
the type, code and text of the error that it ends with.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Subset, TensorDataset

import trimtab
from trimtab.core.errors import TrimtabError
from trimtab.distributed.process_group import limited_to

STAGES = {"ddp": {"zero_stage": 0}, "zero-1": {"zero_stage": 1}, "zero-2": {"zero_stage": 2}}


def loss(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    return (model(batch[0]) - batch[1]).square().mean()


def train(ranks: int, wrap: str, what: str, is_other: bool) -> None:
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(4, 6 + (what == "shapes" and is_other)), nn.Tanh(), nn.LazyLinear(1))
    inner(torch.zeros(1, 4))
    if what == "frozen" and is_other:
        inner[0].bias.requires_grad_(False)
    model = inner if wrap in STAGES else DistributedDataParallel(inner)
    if what == "weights" and is_other:
        with torch.no_grad():
            inner[0].weight[0, 0] += 2**-20
    kind = torch.optim.Adam if what == "class" and is_other else torch.optim.AdamW
    options = {"lr": 0.02 if what == "lr" and is_other else 0.01, "betas": (0.9, 0.99), "weight_decay": 0.1}
    options |= {"betas": (0.8, 0.99)} if what == "betas" and is_other else {}
    options |= {"weight_decay": 0.2} if what == "weight decay" and is_other else {}
    options["lr"] = torch.tensor(options["lr"]) if what == "tensor lr" else options["lr"]
    parameters = list(model.parameters())
    groups = [parameters[:1], parameters[1:]] if what == "groups" and is_other else [parameters]
    optimizer = kind([{"params": each} for each in groups], **options)
    if what == "state":
        loss(inner, (torch.full((2, 4), 1.0 + is_other), torch.zeros(2, 1))).backward()
        with torch.no_grad():
            before = [p.clone() for p in inner.parameters()]
            optimizer.step()
            for parameter, value in zip(inner.parameters(), before, strict=True):
                parameter.copy_(value)
        optimizer.zero_grad()
    values = {"num_ranks": ranks, **STAGES[wrap]} if wrap in STAGES else {}
    micro = 2 if what == "plan" and is_other else 4
    clip = {"clip_norm": 1.0} if what == "clip" and is_other else {}
    rows = torch.arange(64.0).reshape(16, 4) + (what == "values" and is_other)
    data = TensorDataset(rows, rows.sum(1, keepdim=True))
    if what in ("samples", "subset"):
        data = Subset(data, [0, *range(1 + is_other, 15 + (is_other and what == "subset"))])
    loader = DataLoader(data, batch_size=8)
    loader = loader if what == "unsharded" else trimtab.shard(loader)
    with trimtab.start(model, optimizer, trimtab.Plan.fixed(4, micro, **values), **clip) as run:
        for window in run.windows(loader):
            run.train_step(window, loss)


def job(rank: int, ranks: int, meet: Path, wrap: str, what: str) -> dict:
    dist.init_process_group("gloo", init_method=f"file://{meet}", rank=rank, world_size=ranks)
    found = {"error": "", "code": "", "said": ""}
    with warnings.catch_warnings(record=True) as warned, limited_to(20.0):
        warnings.simplefilter("always")
        try:
            train(ranks, wrap, what, is_other=rank == ranks - 1)
        except TrimtabError as error:
            found = {"error": type(error).__name__, "code": error.code, "said": str(error)}
    dist.barrier()
    dist.destroy_process_group()
    return found | {"warned": [str(each.message) for each in warned if issubclass(each.category, RuntimeWarning)]}


def main(rank: int, ranks: int, folder: Path, *jobs: str) -> None:
    torch.set_num_threads(1)
    found = {name: job(rank, ranks, folder / name.replace("/", "-"), *name.split("/")) for name in jobs}
    (folder / f"rank-{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), *sys.argv[4:])
    os._exit(0)  # gloo's threads may outlive the interpreter, and end it with an error
