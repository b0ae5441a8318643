"""A run that writes down every loss as it comes, is killed, and goes on: the program, and what becomes of it.

    python crashing.py FOLDER LOSSES JSON

Losses are lines of `window loss-in-hex`; what a run says of a window it had been in before must be the same once more.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import trimtab
from trimtab.checkpoint.run_state import Given, ModelState, OptimizerState
from trimtab.decide.accounts import Account
from trimtab.runtime import data_position
from trimtab.runtime.consumed import Consumed
from trimtab.runtime.data_position import DataPosition

ROWS, WINDOWS = 8, 60


class Noisy(Dataset):
    """Rows by index, with chance of their own: 10 batches an epoch, the last one short."""

    def __len__(self):
        return 78

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


def train(folder: Path, losses: Path, options: dict) -> None:
    """Train to the end, from wherever the folder says."""
    torch.set_num_threads(1)
    torch.manual_seed(options.get("seed", 0))
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
        **({"recompute": "every_block"} if options.get("recompute") else {}),
    )
    if rule:  # such short windows would be measured once in a hundred
        Account.is_due = lambda self, sparse=0: not self.is_paused and self.windows % 3 == 0
    keep = {"every_steps": 4, "every_s": None, "also": {"scheduler": scheduler}} | options.get("keep", {})
    loader = DataLoader(Noisy(), batch_size=ROWS, shuffle=True)
    with (
        losses.open("a", buffering=1) as out,
        trimtab.start(
            model,
            optimizer,
            plan,
            total_samples=WINDOWS * ROWS,
            clip_norm=1.0,
            checkpoints=trimtab.Checkpoints(folder, **keep),
        ) as run,
    ):
        done = run.applied_steps
        while done < WINDOWS:
            for window in run.windows(loader):
                run.train_step(window, loss_fn)
                scheduler.step()
                out.write(f"{done} {float(run.loss).hex()}\n")
                done += 1
                if done == options.get("dies_after"):
                    os._exit(9)
                if done == WINDOWS:
                    break
            torch.rand(1)  # an evaluation
        weights = torch.cat([p.detach().flatten() for p in model.parameters()])
        out.write(f"end {float(weights.double().sum()).hex()} {float(model.calls)}\n")


if __name__ == "__main__":
    train(Path(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3]))
    sys.stdout.flush()
    os._exit(0)
