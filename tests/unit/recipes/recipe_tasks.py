"""Small tasks for the recipes: a network with dropout, a transformer with token losses, a residual network."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from trimtab.core.objective import Reference
from trimtab.losses import Summed, mean_of
from trimtab.tasks import DataSource, Metric, StrongRecipe, Task, TaskData
from trimtab.tasks.models.gpt import GPT, GPTShape
from trimtab.tasks.models.resnet import ResNet

CPU = torch.device("cpu")
ROWS = 8


def mlp(dropout: float = 0.2) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(dropout), nn.Linear(16, 3))


def gpt(dropout: float = 0.0, num_layers: int = 5) -> nn.Module:
    shape = GPTShape(vocab_size=20, context=8, num_layers=num_layers, num_heads=2, width=8, dropout=dropout)
    return GPT(shape)


def resnet() -> nn.Module:  # 16 wide: fewer corrupt the heap in channels_last (uxlfoundation/oneDNN#6035)
    return ResNet(width=16, depths=(2, 1, 2), in_channels=1, num_classes=3)


def cross_entropy(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    inputs, labels = batch
    return F.cross_entropy(model(inputs), labels)


def token_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Summed:
    tokens, labels = batch
    loss_sum = F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten(), reduction="sum")
    return Summed(loss_sum, labels.numel())


def columns(kind: str, rows: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    if kind == "gpt":
        tokens = torch.randint(20, (rows, 8), generator=generator)
        return tokens, tokens.roll(1, 1)
    inputs = torch.randn((rows, 6) if kind == "mlp" else (rows, 1, 8, 8), generator=generator)
    return inputs, torch.randint(3, (rows,), generator=generator)


def sgd(rate: float = 0.1) -> Callable[[nn.Module], torch.optim.Optimizer]:
    return lambda model: torch.optim.SGD(model.parameters(), lr=rate)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def make_task(kind: str = "mlp", make_model: Callable[[], nn.Module] | None = None, **changes: Any) -> Task:
    """Return a task of 256 rows in batches of 8; its held-out metric is of no interest."""
    data = columns(kind, 256)
    defaults: dict[str, Any] = {
        "make_optimizer": adamw,
        "loss_fn": token_loss if kind == "gpt" else cross_entropy,
        "load_data": lambda: TaskData(data, (data,), DataSource("random", "made here", "0")),
        "strong": StrongRecipe(sgd(), "fp32", channels_last=kind == "resnet", budget_samples=800, clip_norm=0.5),
        "reference": Reference("fp32"),
    }
    return Task(
        name=kind,
        description="",
        make_model=make_model or {"mlp": mlp, "gpt": gpt, "resnet": resnet}[kind],
        metric=Metric("loss", False, lambda model, batches: 0.0),
        targets=(),
        batch_size=ROWS,
        budget_samples=3200,
        eval_every_samples=800,
        **(defaults | changes),
    )


def batches(task: Task, seed: int = 0) -> Iterator[tuple[Tensor, ...]]:
    return task.load_data().batches(seed, task.batch_size)


def weights(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten().clone() for p in model.parameters()])


def gradient(task: Task, model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    """Return the gradient of the mean loss of a batch."""
    model.zero_grad()
    result = task.loss_fn(model, batch)
    mean_of(result).backward()
    return torch.cat(
        [torch.zeros_like(p).flatten() if p.grad is None else p.grad.flatten() for p in model.parameters()]
    )
