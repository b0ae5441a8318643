"""A run that writes down every loss as it comes, is killed, and goes on: the program, and what becomes of it.

    python crashing.py FOLDER LOSSES JSON

Losses are lines of `window loss-in-hex`; what a run says of a window it had been in before must be the same once more.
"""

from __future__ import annotations

import json
import math
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset

import trimtab
from trimtab.checkpoint.run_state import Given, ModelState, OptimizerState
from trimtab.decide.accounts import Account
from trimtab.runtime import data_position
from trimtab.runtime.consumed import Consumed
from trimtab.runtime.data_position import DataPosition
from trimtab.runtime.recovery import Recovery

ROWS, WINDOWS = 8, 60


class Noisy(Dataset):
    """Rows by index, with chance of their own: 10 batches an epoch, the last one short."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks

    def __len__(self):
        return 78 * self.ranks

    def __getitem__(self, index):
        x = torch.sin(torch.arange(12) * (index + 1.0)) + 0.1 * torch.randn(12)
        return x, x[:3].sum()[None] + 0.1 * torch.rand(1)


class Net(nn.Module):
    """Batch statistics, dropout, and a buffer that is in no state_dict and changes."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(12, 12), nn.BatchNorm1d(12), nn.Tanh(), nn.Dropout(0.2)) for _ in range(3)
        )
        self.head = nn.Linear(12, 1)
        self.register_buffer("calls", torch.zeros(()), persistent=False)

    def forward(self, x):
        if self.training:
            self.calls += 1
        for block in self.blocks:
            x = x + block(x)
        return self.head(x) * (1 + 0.001 * self.calls)


def loss_fn(model, batch):
    return (model(batch[0]) - batch[1]).square().mean()


def whole(value):
    """Return all of a tensor that may be in shards."""
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def nothing(*_, **__):
    """Load nothing."""
    return lambda: None


def without_hidden(self, state):
    """Load a model's state_dict alone."""
    return lambda: self._model.load_state_dict(state["own"])


def from_the_start(self, state, loading=Consumed.loading):
    """Load counters whose schedule begins anew."""
    return loading(self, dict(state) | {"scheduled": 0.0})


# Parts of what defines a run, and what leaves each out of what is put back.
FORGOTTEN = {
    "weights": [(ModelState, "loading", nothing)],
    "hidden buffers": [(ModelState, "loading", without_hidden)],
    "optimizer": [(OptimizerState, "loading", nothing)],
    "scheduler": [(Given, "loading", nothing)],
    "progress": [(Consumed, "loading", from_the_start)],
    "place in the data": [(DataPosition, "_continued", lambda self, loader, saved: iter(loader))],
    "random numbers": [(data_position, "loading_random_state", nothing)],
}


def killing(folder: Path, verb: str) -> None:
    """Have a run killed at the end of the first time that it recovers so, and at no later one."""
    does, marker = getattr(Recovery, verb), folder.with_name(f"killed-in-{verb}")

    def and_die(self: Recovery, *given: Any, **named: Any) -> None:
        does(self, *given, **named)
        if not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    setattr(Recovery, verb, and_die)


def faulty(run: Any, faults: Mapping[str, Any]) -> Any:
    """Return the loss, which is no number in some windows, and for which memory runs out from one window on."""

    def loss(model, batch):
        if len(batch[0]) > 2 and run.num_windows >= faults.get("out_of_memory_from", math.inf):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        found = loss_fn(model, batch)
        return found * math.nan if run.num_windows in faults.get("no_number", ()) else found

    return loss


def train(folder: Path, losses: Path, options: dict) -> None:
    """Train to the end, from wherever the folder says."""
    torch.set_num_threads(1)
    rank, ranks = options.get("rank", 0), options.get("ranks", 1)
    if ranks > 1:
        dist.init_process_group("gloo", init_method=f"file://{options['meet']}", rank=rank, world_size=ranks)
    torch.manual_seed(options.get("seed", 0) + rank)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 7, gamma=0.8)
    rule = options.get("rule")
    for owner, name, instead in FORGOTTEN.get(options.get("forgets"), ()):
        setattr(owner, name, instead)
    plan = trimtab.Plan.fixed(
        ROWS,
        options.get("micro_batch", ROWS),
        precision=options.get("precision", "fp32"),
        schedule="user" if rule else "warmup_cosine",
        batch_rule=trimtab.BatchRule(**rule) if rule else None,
        num_ranks=ranks,
        **({"recompute": "every_block"} if options.get("recompute") else {}),
        **({"zero_stage": options.get("stage", 0)} if ranks > 1 else {}),
    )
    if rule:  # such short windows would be measured once in a hundred
        Account.is_due = lambda self, sparse=0: not self.is_paused and self.windows % 3 == 0
    keep = {"every_steps": 4, "every_s": None, "also": {"scheduler": scheduler}} | options.get("keep", {})
    faults = options.get("faults", {})
    for verb in faults.get("killed_in", ()):
        killing(folder, verb)
    how = {"nonfinite": "skip", "out_of_memory": "split"} if faults else {}
    order = torch.Generator().manual_seed(7) if ranks > 1 else None  # the same on all
    loader = trimtab.shard(DataLoader(Noisy(ranks), batch_size=ROWS * ranks, shuffle=True, generator=order))
    with (
        losses.open("a", buffering=1) as out,
        trimtab.start(
            model,
            optimizer,
            plan,
            total_samples=WINDOWS * ROWS * ranks,
            clip_norm=1.0,
            checkpoints=trimtab.Checkpoints(folder, **keep),
            **how,
        ) as run,
    ):
        done, loss = run.num_windows, faulty(run, faults)
        while done < WINDOWS:
            for window in run.windows(loader):
                run.train_step(window, loss)
                scheduler.step()
                out.write(f"{done} {float(run.loss).hex()}\n")
                done += 1
                if done == options.get("dies_after"):
                    os._exit(9)
                if done == WINDOWS:
                    break
            torch.rand(1)  # an evaluation
        weights = torch.cat([whole(p.detach()).flatten() for p in model.parameters()])
        out.write(f"end {float(weights.double().sum()).hex()} {float(model.calls)}\n")


if __name__ == "__main__":
    train(Path(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3]))
    sys.stdout.flush()
    os._exit(0)
