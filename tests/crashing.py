"""A run that writes down every loss as it comes, is killed, and goes on: the program, and what becomes of it.

    python crashing.py FOLDER LOSSES JSON

Losses are lines of `window loss-in-hex`; what a run says of a window it had been in before must be the same once more.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset

import trimtab
from trimtab.adaptive_batch.batch_size_decider import BatchSizeDecider
from trimtab.adaptive_batch.gradient_noise_scale import NoiseAverage
from trimtab.adaptive_batch.noise_probes import OverheadBudget
from trimtab.checkpoint import manager
from trimtab.checkpoint.config import Checkpoints
from trimtab.checkpoint.train_state import AdditionalState, ModelState, OptimizerState
from trimtab.losses import Summed
from trimtab.state.random_state import loading_random_state, random_state
from trimtab.techniques.learning_rate import RateFollower
from trimtab.techniques.mixed_precision import MixedPrecision
from trimtab.techniques.muon import Momentum
from trimtab.training import data_position
from trimtab.training.accumulation import WindowWeights
from trimtab.training.data_position import DataPosition
from trimtab.training.nonfinite import NonFinitePolicy
from trimtab.training.out_of_memory import MicroBatchLimit
from trimtab.training.step_recorder import StepRecorder
from trimtab.training.training_progress import TrainingProgress
from trimtab.training.window_snapshot import OutOfMemoryRetry

ROWS, WINDOWS = 8, 60


class Noisy(Dataset):
    """Rows by index, with chance from every global generator: 10 batches an epoch, the last one short."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks

    def __len__(self):
        return 78 * self.ranks

    def __getitem__(self, index):
        x = torch.sin(torch.arange(12) * (index + 1.0)) + 0.1 * torch.randn(12)
        return x, x[:3].sum()[None] + 0.1 * torch.rand(1) + 0.1 * random.random() + 0.1 * float(np.random.rand())


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


class Told:
    """Batches in one order, by a loader that is told where to go on."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self):
        data = Noisy(1)
        while self.at < 10:
            rows = [data[index] for index in range(8 * self.at, 8 * self.at + 8)]
            self.at += 1
            yield [torch.stack(column) for column in zip(*rows, strict=True)]
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


def loss_fn(model, batch):
    return (model(batch[0]) - batch[1]).square().mean()


# What a term of the first window counts, of a loss that counts terms: what all windows are divided by follows from it.
FIRST_TERMS = 4096


def token_loss(run: Any, factor: float) -> Any:
    """Return a loss that counts the rows that are not masked, none in some micro-batches."""

    def loss(model, batch):
        counted = (batch[0][:, :1] > 0) * (FIRST_TERMS if run.num_windows == 0 else 1)
        return Summed(factor * ((model(batch[0]) - batch[1]).square() * counted).sum(), counted.sum())

    return loss


def whole(value):
    """Return all of a tensor that may be in shards."""
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def nothing(*_, **__):
    """Load nothing."""
    return lambda: None


def without_hidden(self, state):
    """Load a model's state_dict alone."""
    return lambda: self._model.load_state_dict(state["own"])


def from_the_start(self, state, loading=TrainingProgress.loading):
    """Load counters whose schedule begins anew."""
    return loading(self, dict(state) | {"scheduled": 0.0})


def without_tokens(self, state, loading=TrainingProgress.loading):
    """Load counters whose tokens begin anew."""
    return loading(self, dict(state) | {"tokens": 0.0})


def without(kind):
    """Load random numbers but for those of one kind."""

    def loading(state, where):
        return loading_random_state(dict(state) | {kind: random_state()[kind]}, where)

    return loading


# Parts of what defines a run, and what leaves each out of what is put back.
FORGOTTEN = {
    "weights": [(ModelState, "loading", nothing)],
    "hidden buffers": [(ModelState, "loading", without_hidden)],
    "optimizer": [(OptimizerState, "loading", nothing)],
    "scheduler": [(AdditionalState, "loading", nothing)],
    "progress": [(TrainingProgress, "loading", from_the_start)],
    "place in the data": [(DataPosition, "_continued", lambda self, loader, saved: iter(loader))],
    "torch's random numbers": [(data_position, "loading_random_state", without("cpu"))],
    "Python's random numbers": [(data_position, "loading_random_state", without("python"))],
    "NumPy's random numbers": [(data_position, "loading_random_state", without("numpy"))],
    "the loader's random numbers": [(data_position, "loading_generators", nothing)],
    "loss scale": [(MixedPrecision, "loading", nothing)],
    "memory limit": [(MicroBatchLimit, "loading", nothing)],
    "Muon's momentum": [(Momentum, "loading", nothing)],
    "noise averages": [(NoiseAverage, "loading", nothing)],
    "decided batch": [(BatchSizeDecider, "_continue_with", nothing)],
    "rate that follows the batch": [(RateFollower, "loading", nothing)],
    "lost windows": [(NonFinitePolicy, "loading", nothing)],
    "fp16 that was left": [(MixedPrecision, "loading", nothing)],
    "tokens": [(TrainingProgress, "loading", without_tokens)],
    "terms a row": [(WindowWeights, "loading", nothing)],
    "a loader's own place": [(Told, "load_state_dict", nothing)],
    "plan": [(Checkpoints, "saved_plan", lambda self: None), (manager, "require_accepted", nothing)],
    "record": [(StepRecorder, "loading", nothing)],
}


@contextlib.contextmanager
def forgetting(part: str | None) -> Iterator[None]:
    """Have a part of what defines a run not put back inside the block."""
    with contextlib.ExitStack() as patched:
        for owner, name, instead in FORGOTTEN.get(part, ()):
            patched.enter_context(mock.patch.object(owner, name, instead))
        yield


def killing(folder: Path, verb: str) -> None:
    """Have a run killed at the end of the first time that it recovers so, and at no later one."""
    does, marker = getattr(OutOfMemoryRetry, verb), folder.with_name(f"killed-in-{verb}")

    def and_die(self: OutOfMemoryRetry, *given: Any, **named: Any) -> None:
        does(self, *given, **named)
        if not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    setattr(OutOfMemoryRetry, verb, and_die)


def faulty(run: Any, faults: Mapping[str, Any], factor: float = 1.0) -> Any:
    """Return the loss, which is no number in some windows, and for which memory runs out in some, or from one on."""

    def loss(model, batch):
        is_short = run.num_windows >= faults.get("out_of_memory_from", math.inf)
        if len(batch[0]) > 2 and (is_short or run.num_windows in faults.get("out_of_memory_in", ())):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        found = factor * loss_fn(model, batch)
        return found * math.nan if run.num_windows in faults.get("no_number", ()) else found

    return loss


def plan_of(options: Mapping[str, Any]) -> trimtab.Plan:
    """Return the plan of a run's options."""
    rule, ranks = options.get("rule"), options.get("ranks", 1)
    return trimtab.Plan.fixed(
        ROWS,
        options.get("micro_batch", ROWS),
        precision=options.get("precision", "fp32"),
        schedule="user" if rule else "warmup_cosine",
        batch_rule=trimtab.BatchRule(**rule) if rule else None,
        num_ranks=ranks,
        **({"recompute": "every_block"} if options.get("recompute") else {}),
        **({"zero_stage": options.get("stage", 0)} if ranks > 1 else {}),
        **options.get("plan", {}),
    )


def loader_of(options: Mapping[str, Any]) -> Any:
    """Return a rank's loader."""
    if options.get("told"):
        return Told()
    ranks, order = options.get("ranks", 1), torch.Generator().manual_seed(7)  # the same on all ranks
    return trimtab.shard(DataLoader(Noisy(ranks), batch_size=ROWS * ranks, shuffle=True, generator=order))


def total_of(options: Mapping[str, Any]) -> dict[str, int]:
    """Return how long a run is, for its schedule: its first window has half of the terms, where they are counted."""
    ranks = options.get("ranks", 1)
    return (
        {"total_tokens": FIRST_TERMS * ROWS * ranks}
        if options.get("tokens")
        else {"total_samples": WINDOWS * ROWS * ranks}
    )


def seed(options: Mapping[str, Any]) -> None:
    """Seed every global generator."""
    number = options.get("seed", 0) + options.get("rank", 0)
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)


def noise_of(run: Any, options: Mapping[str, Any]) -> str:
    """Return what a run knows of its noise, where it is to say so."""
    if not options.get("says_noise"):
        return ""
    return f" {None if run.noise is None else float(run.noise.scale).hex()}"


def is_due_often(self: OverheadBudget, sparse: int = 0) -> bool:
    """Return whether a window is measured: by itself one in a hundred of such short ones would be."""
    return not self.is_paused and self.windows % 3 == 0


def train(folder: Path, losses: Path, options: dict) -> None:
    """Train to the end, from wherever the folder says."""
    with contextlib.ExitStack() as inside:
        inside.enter_context(forgetting(options.get("forgets")))
        if "rule" in options:
            inside.enter_context(mock.patch.object(OverheadBudget, "is_due", is_due_often))
        if options.get("record"):
            path = folder.with_name("record.jsonl")
            writer = trimtab.RecordWriter(path, trimtab.Header("crashing"), continues=path.exists())
            options = options | {"record": inside.enter_context(writer)}
        out = inside.enter_context(losses.open("a", buffering=1))
        _train(folder, lambda text: out.write(text + "\n"), options)


def _train(folder: Path, say: Callable[[str], Any], options: Mapping[str, Any]) -> None:
    seed(options)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 7, gamma=0.8)
    keep = {"every_steps": 4, "every_s": None, "also": {"scheduler": scheduler}} | options.get("keep", {})
    checkpoints, faults = trimtab.Checkpoints(folder, **keep), options.get("faults", {})
    for verb in faults.get("killed_in", ()):
        killing(folder, verb)
    how = {"nonfinite": "skip", "out_of_memory": "split"} if faults else {}
    loader, factor = loader_of(options), options.get("factor", 1.0)
    with trimtab.start(
        model,
        optimizer,
        checkpoints.saved_plan() or plan_of(options),
        **total_of(options),
        clip_norm=1.0,
        checkpoints=checkpoints,
        record=options.get("record"),
        **how,
    ) as run:
        done, loss = run.num_windows, faulty(run, faults, factor)
        loss = token_loss(run, factor) if options.get("tokens") else loss
        while done < WINDOWS:
            for window in run.windows(loader):
                run.train_step(window, loss)
                scheduler.step()
                say(f"{done} {float(run.loss).hex()}{noise_of(run, options)}")
                done += 1
                if done == options.get("dies_after"):
                    sys.exit(9)
                if done == WINDOWS or done % options.get("leaves_after", WINDOWS) == 0:
                    break
            torch.rand(1)  # an evaluation
            if options.get("saves_between"):
                run.checkpoint()
        weights = torch.cat([whole(p.detach()).flatten() for p in model.parameters()])
        say(f"end {float(weights.double().sum()).hex()} {float(model.calls)}{noise_of(run, options)}")


def main(folder: Path, losses: Path, options: dict) -> None:
    """Train, as a process of its own."""
    torch.set_num_threads(1)
    if (ranks := options.get("ranks", 1)) > 1:
        meet = f"file://{options['meet']}"
        dist.init_process_group("gloo", init_method=meet, rank=options["rank"], world_size=ranks)
    train(folder, losses, options)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3]))
    sys.stdout.flush()
    os._exit(0)
