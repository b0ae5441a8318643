"""Small training loops for unit tests: what most of them build, and the two ways in which they train it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

import trimtab
from trimtab.plans.plan import Plan


def sgd(model: nn.Module, lr: float = 0.1, **options: Any) -> torch.optim.Optimizer:
    """An SGD optimizer of all parameters of a model."""
    return torch.optim.SGD(model.parameters(), lr=lr, **options)


def linear_loop(inputs: int = 3, outputs: int = 1, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A seeded linear model and its SGD optimizer, which takes the options."""
    torch.manual_seed(0)
    model = nn.Linear(inputs, outputs)
    return model, sgd(model, **options)


def labelled_batches(
    count: int = 4, rows: int = 8, features: int = 4, classes: int = 3, seed: int = 1
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Seeded batches of features and class labels, the same in every call."""
    generator = torch.Generator().manual_seed(seed)
    shape = rows, features
    return [
        (torch.randn(shape, generator=generator), torch.randint(0, classes, (rows,), generator=generator))
        for _ in range(count)
    ]


def square_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    """The mean square of the outputs of a model."""
    return model(batch).square().mean()


def class_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    """The mean cross-entropy of a batch of features and class labels."""
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def train(run: trimtab.Run, batches: Iterable[Any], loss_fn: Callable[..., Any]) -> None:
    """Train one window after the other on all batches."""
    for window in run.windows(batches):
        run.train_step(window, loss_fn)


def trained(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    plan: Plan,
    batches: Iterable[Any],
    loss_fn: Callable[..., Any],
    **options: Any,
) -> trimtab.Run:
    """Start a run, train it on all batches, and return it closed."""
    with trimtab.start(model, optimizer, plan, **options) as run:
        train(run, batches, loss_fn)
    return run


def train_plainly(
    model: nn.Module, optimizer: torch.optim.Optimizer, batches: Iterable[Any], loss_fn: Callable[..., Any]
) -> None:
    """Train a loop without trimtab, one step a batch."""
    for batch in batches:
        optimizer.zero_grad()
        loss_fn(model, batch).backward()
        optimizer.step()


def same_weights(one: nn.Module, other: nn.Module) -> bool:
    """Whether all parameters of two models are equal to the bit."""
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))
