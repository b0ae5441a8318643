"""One rank of a job whose peak memory is counted at each ZeRO stage; run by test_rank_peaks.py.

    python memory_rank.py RANK RANKS FOLDER [DEVICE]

Writes the peaks of windows of each case, by its name.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from backend_rank import group_of
from torch import Tensor, nn

import trimtab
from trimtab.core.parallelism import Parallelism
from trimtab.distributed.rank_memory import trace_rank
from trimtab.measure.gradient_norms import local_shard
from trimtab.plans.plan import Plan
from trimtab.state.peak_memory import peak_growth, storage_bytes

# On a device beside what its libraries take, some 10 MiB.
IS_LARGE = torch.cuda.is_available()
ROWS, WIDTH, WORDS, LENGTH, WARM, WINDOWS = (4, 1024, 16384, 256, 2, 5) if IS_LARGE else (4, 64, 2048, 64, 2, 5)
SETTLED_S = 0.01
CASES = {
    f"{stage}-{k}-{'once' if once else 'each'}": (stage, k, once)
    for stage, k, once in [*((stage, k, True) for stage in range(4) for k in (1, 3)), (2, 3, False), (3, 3, False)]
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.blocks = nn.Embedding(WORDS, WIDTH), nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def loss(model: nn.Module, tokens: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


def batch_of(rows: int) -> Tensor:
    return torch.randint(0, WORDS, (rows, LENGTH), generator=torch.Generator().manual_seed(0))


def settling(collective):
    """Return a collective that leaves gloo's threads the time to let go of what they sent."""

    def settled(*args, **kwargs):
        work = collective(*args, **kwargs)
        time.sleep(SETTLED_S)
        return work

    return settled


def told_on(device: str, stage: int, k: int = 1, *, once: bool = True, ranks: int = 2, loss_fn=loss, **more) -> int:
    """Return the peak that a rank is told to have."""
    model = Words().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    sizes, seen = (ROWS // 2, ROWS), {"num_micro_batches": k, "counts_scratch": device == "cpu"}
    batches = tuple(batch_of(rows).to(device) for rows in sizes)
    how = Parallelism(ranks, stage, reduces_once=once, **more)
    return trace_rank(model, optimizer, loss_fn, batches, sizes, how, **seen).peak_bytes(ROWS)


def peak_on(device: str, step) -> int:
    """Return the most bytes that a step holds on a device, with all that is there."""
    torch.cuda.reset_peak_memory_stats(device)
    step()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device)


def counted(stage: int, k: int, once: bool, ranks: int, device: str = "cpu") -> list[int]:
    """Return the peaks of some windows."""
    model = Words().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    shared = {"zero_stage": stage} | ({"reduces_once": once} if stage > 1 else {})
    plan, peaks = Plan.fixed(k * ROWS, ROWS, num_ranks=ranks, **shared), []
    with trimtab.start(model, optimizer, plan) as run:
        for index, window in enumerate(run.windows([batch_of(k * ROWS)] * (WARM + WINDOWS))):
            if index < WARM:
                run.train_step(window, loss)
                continue
            model.zero_grad(set_to_none=True)  # what is freed in a count has to be in it
            if device != "cpu":
                peaks.append(peak_on(device, lambda window=window: run.train_step(window, loss)))
                continue
            states = [value for state in optimizer.state.values() for value in state.values()]
            held = storage_bytes([local_shard(each) for each in (*model.parameters(), *states)])
            held += sum(p.numel() * 4 for p in model.parameters()) if stage < 2 else 0  # DDP's buckets
            growth = peak_growth(lambda window=window: run.train_step(window, loss))
            peaks.append(held + growth + storage_bytes([batch_of(ROWS)]))
    return peaks


if __name__ == "__main__":
    rank, ranks, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    device = sys.argv[4] if sys.argv[4:] else "cpu"
    torch.set_num_threads(1)
    if device == "cpu":
        dist.all_gather_into_tensor = settling(dist.all_gather_into_tensor)
        dist.reduce_scatter_tensor = settling(dist.reduce_scatter_tensor)
    dist.init_process_group(group_of(device, rank), init_method=f"file://{folder}/meet", rank=rank, world_size=ranks)
    found = {name: counted(stage, k, once, ranks, device) for name, (stage, k, once) in CASES.items()}
    Path(folder, f"peaks{rank}.json").write_text(json.dumps(found), encoding="utf-8")
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may outlive the interpreter
