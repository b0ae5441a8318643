"""A task of your own: everything `trimtab` needs to plan, train, compare and report a workload of yours.

trimtab plan examples/my_task.py:task
trimtab compare examples/my_task.py:task --quick
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from trimtab.tasks import DataSource, Metric, Task, TaskData

Batch = tuple[Tensor, Tensor]
ARMS = 3  # of the spiral: the classes


def spiral(rows: int, seed: int) -> Batch:
    """Return points (rows, 2) on the arms of a spiral with some noise, and the arm (rows,) of each."""
    generator = torch.Generator().manual_seed(seed)
    arm = torch.randint(0, ARMS, (rows,), generator=generator)
    radius = torch.rand(rows, generator=generator)
    angle = 5 * radius + 2 * torch.pi * arm / ARMS + 0.1 * torch.randn(rows, generator=generator)
    return torch.stack((radius * angle.cos(), radius * angle.sin()), dim=1), arm


def load_data() -> TaskData:
    """Return what is trained on and, in batches, what is judged by; yours would read files here."""
    columns, held_out = spiral(20_000, seed=0), spiral(2_000, seed=1)
    digest = hashlib.sha256(columns[0].numpy().tobytes()).hexdigest()
    return TaskData(columns, (held_out,), DataSource("a spiral", "made in examples/my_task.py", digest))


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, ARMS))


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def loss_fn(model: nn.Module, batch: Batch) -> Tensor:
    """Return the mean over rows."""
    points, arm = batch
    return F.cross_entropy(model(points), arm)


@torch.no_grad()
def accuracy(model: nn.Module, batches: tuple[Batch, ...]) -> float:
    """Return the share of points whose arm is found, the model's mode left as it was."""
    was_training = model.training
    model.eval()
    hits = [(model(points).argmax(1) == arm).float().mean() for points, arm in batches]
    model.train(was_training)
    return float(torch.stack(hits).mean())


task = Task(
    name="spiral",
    description="points on a spiral, a small network",
    make_model=make_model,
    make_optimizer=make_optimizer,
    loss_fn=loss_fn,
    load_data=load_data,
    metric=Metric("accuracy", higher_is_better=True, evaluate=accuracy),
    targets=(0.7, 0.9, 0.95),  # easiest first
    batch_rows=256,
    budget_rows=400 * 256,
    eval_every_rows=20 * 256,
)
