"""A task that trains in milliseconds: a small network with dropout on random points. Also a user's own task file."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from trimtab.core.objective import Reference
from trimtab.tasks import DataSource, Metric, StrongRecipe, Task, TaskData

ROWS, FEATURES, CLASSES = 512, 16, 4
BATCH_SIZE = 32
EVAL_EVERY_SAMPLES = 8 * BATCH_SIZE
BUDGET_SAMPLES = 5 * EVAL_EVERY_SAMPLES


def load_data() -> TaskData:
    generator = torch.Generator().manual_seed(0)
    points = torch.randn(ROWS + 128, FEATURES, generator=generator)
    labels = (points @ torch.randn(FEATURES, CLASSES, generator=generator)).argmax(1)
    train, held_out = slice(0, ROWS), slice(ROWS, None)
    source = DataSource("random points", "made here", "0" * 64)
    return TaskData((points[train], labels[train]), ((points[held_out], labels[held_out]),), source)


def make_model() -> nn.Module:
    layers = [nn.Linear(FEATURES, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, CLASSES)]
    return nn.Sequential(*layers)


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=3e-3)


def strong_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)


def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    points, labels = batch
    return F.cross_entropy(model(points), labels)


def accuracy(model: nn.Module, batches: tuple[tuple[Tensor, Tensor], ...]) -> float:
    model.eval()
    with torch.no_grad():
        hits = [(model(points).argmax(1) == labels).float().mean() for points, labels in batches]
    model.train()
    return float(torch.stack(hits).mean())


task = Task(
    name="tiny",
    description="random points",
    make_model=make_model,
    make_optimizer=make_optimizer,
    loss_fn=loss_fn,
    load_data=load_data,
    metric=Metric("accuracy", True, accuracy),
    targets=(0.3, 0.6),
    batch_size=BATCH_SIZE,
    budget_samples=BUDGET_SAMPLES,
    eval_every_samples=EVAL_EVERY_SAMPLES,
    strong=StrongRecipe(strong_optimizer, "fp32", channels_last=False, budget_samples=BUDGET_SAMPLES, clip_norm=1.0),
    reference=Reference("fp32"),
)
