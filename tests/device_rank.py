"""One rank of a job on some devices: what it asks, times and shares; run by test_ranks_cuda.py and, over gloo, here.

    python device_rank.py RANK RANKS FOLDER DEVICE

With one rank the backends themselves are driven, as a loop of one process has none. Each rank writes what it found.
"""

from __future__ import annotations

import copy
import importlib
import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from backend_rank import group_of
from torch import nn

from trimtab.distributed import bandwidth_test
from trimtab.distributed.backend_selection import _BACKENDS
from trimtab.distributed.bandwidth_test import calibrate
from trimtab.distributed.host_gather import RankExchange
from trimtab.distributed.process_group import backends, max_over_ranks, total
from trimtab.measure.gradient_norms import is_shard
from trimtab.plans.plan import Plan

ROWS, WIDTH, STEPS = 4, 16, 3


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3))
        self.register_buffer("gain", torch.ones(()))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            rows = block(rows) * self.gain
        return rows


def asked(device: torch.device, rank: int) -> dict:
    """Return what ranks tell each other on the host while a device is busy with a reduction."""
    exchange = RankExchange(None)
    busy = torch.ones(2**20, device=device)
    work = dist.all_reduce(busy, async_op=True)
    gathered = exchange.share([rank + 1.0, 7.0])
    work.wait()
    summed = float(exchange.sum(torch.tensor(rank + 1.0, device=device)))
    exchange.close()
    return {"gathered": gathered, "summed": summed, "reduced": float(busy[0])}


def figures(rank: int) -> dict:
    """Return what is reduced of figures, and by what the group talks."""
    return {"total": total(rank + 1.0), "slowest": max_over_ranks(rank + 1.0), "backends": backends()}


def trained(stage: int, device: torch.device, rank: int, ranks: int) -> float:
    """Return how far weights are from those of one process after some windows of two micro-batches by a backend."""
    torch.manual_seed(0)
    alone = Net().double().to(device)
    model = copy.deepcopy(alone)
    whole, optimizer = (torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (alone, model))
    generator = torch.Generator().manual_seed(1)
    batches = torch.randn(STEPS, 2, ranks, ROWS, WIDTH, generator=generator, dtype=torch.float64).to(device)
    module, name = _BACKENDS[stage]
    backend = getattr(importlib.import_module(module), name)()
    backend.spread(model, optimizer, Plan.fixed(2 * ROWS, ROWS, num_ranks=max(2, ranks), zero_stage=stage))
    for window in batches:
        backend.optimizer.zero_grad()
        for index, micro in enumerate(window):
            backend.begin(last=index == 1)
            backend.backward(backend.model(micro[rank]).square().mean() / 2)
        backend.optimizer.step()
        backend.end()
        whole.zero_grad()
        alone(window.flatten(0, 2)).square().mean().backward()
        whole.step()
    found = [p.full_tensor() if is_shard(p) else p for p in model.parameters()]
    apart = max(float((a - b).abs().max()) for a, b in zip(found, alone.parameters(), strict=True))
    backend.gather(None)
    return apart


def main(rank: int, ranks: int, folder: Path, kind: str) -> None:
    torch.set_num_threads(1)
    where = {"rank": rank, "world_size": ranks}
    dist.init_process_group(group_of(kind, rank), init_method=f"file://{folder}/meet", **where)
    device = torch.device(kind, rank) if kind == "cuda" else torch.device("cpu")
    found = {"asked": asked(device, rank), "figures": figures(rank)}
    if ranks > 1:
        link = calibrate(device)
        found["link"] = [link.link.name, link.overlap_share, link.link.latency_s]
    found["overlap"] = bandwidth_test._overlap(device, 2**18)  # of one rank there is no link, but its device's work
    found["apart"] = [trained(stage, device, rank, ranks) for stage in _BACKENDS]
    dist.barrier()
    dist.destroy_process_group()
    # as a loop's own script often joins: a group that has no way for what lies on the host
    dist.init_process_group("nccl" if kind == "cuda" else "gloo", init_method=f"file://{folder}/again", **where)
    found["again"] = figures(rank)
    dist.destroy_process_group()
    (folder / f"rank-{rank}.json").write_text(json.dumps(found))


def check(found: list[dict], name: str) -> None:
    """Raise where ranks did not find what they should.

    Args:
        found: of each rank. name: of what they send by.
    """
    ranks = len(found)
    numbers = [rank + 1.0 for rank in range(ranks)]
    for each in found:
        asked = {"gathered": [[number, 7.0] for number in numbers], "summed": sum(numbers), "reduced": float(ranks)}
        assert each["asked"] == asked
        for figures in (each["figures"], each["again"]):
            assert (figures["total"], figures["slowest"]) == (sum(numbers), max(numbers))
            assert name in figures["backends"].values()
        assert 0 <= each["overlap"] <= 1
        assert max(each["apart"]) <= 1e-12, each["apart"]
        if ranks > 1:
            assert each["link"] == found[0]["link"]
            assert each["link"][0] == f"{name} of {ranks} ranks"
            assert 0 <= each["link"][1] <= 1


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4])
    os._exit(0)  # gloo's threads may outlive the interpreter, and end it with an error
