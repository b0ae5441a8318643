"""The plain loops, written out by hand, and what is compared: each step's gradients and loss, and the weights.

Tolerances are on the largest difference in a tensor, relative to its largest element. Splitting a batch only changes
the order of summation: a few units of rounding, 1e-16 in float64 and 1e-7 in float32, grown over a few steps.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

import trimtab
from trimtab.losses import Summed
from trimtab.plans.plan import Plan

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-6}
Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    """A training run to be made twice: `build` makes the same model and optimizer every time."""

    model: Callable[[], nn.Module]
    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer]
    loss_fn: Callable[[nn.Module, Any], Any]
    batches: Any
    dtype: torch.dtype = torch.float64
    prepare: Callable[[nn.Module], None] = lambda model: None

    def build(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Return model and optimizer from seed 0, with the random generator at seed 1 for what follows."""
        torch.manual_seed(0)
        model = self.model().to(self.dtype)
        self.prepare(model)
        optimizer = self.optimizer(list(model.parameters()))
        torch.manual_seed(1)
        return model, optimizer

    def having(self, **values: Any) -> Case:
        """Return the case with other fields."""
        return replace(self, **values)


@dataclass
class Trained:
    """What a run did: gradients as the optimizer's step saw them, losses, and the weights at the end."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    gradients: list[Tensors] = field(default_factory=list)
    losses: list[Tensor] = field(default_factory=list)
    norms: list[Tensor | None] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.optimizer.register_step_pre_hook(self._note)

    def _note(self, *_: Any) -> None:
        named = self.model.named_parameters()
        self.gradients.append({name: p.grad.clone() for name, p in named if p.grad is not None})

    @property
    def weights(self) -> Tensors:
        """Parameters and buffers, detached."""
        return {name: value.detach() for name, value in self.model.state_dict(keep_vars=True).items()}


def mean_of(result: Any) -> Tensor:
    """Return the mean loss of a `Summed` or a mean."""
    if not isinstance(result, Summed):
        return result
    return result.loss_sum / (float(result.count) or 1.0)


def train_plain(case: Case, clip_norm: float | None = None, scheduler: Any = None) -> Trained:
    """Train on whole batches: zero_grad, loss, backward, clip, step, schedule."""
    model, optimizer = case.build()
    done = Trained(model, optimizer)
    schedule = scheduler(optimizer) if scheduler else None
    for batch in case.batches:
        optimizer.zero_grad()
        loss = mean_of(case.loss_fn(model, batch))
        loss.backward()
        if clip_norm is not None:
            done.norms.append(nn.utils.clip_grad_norm_(model.parameters(), clip_norm))
        optimizer.step()
        if schedule is not None:
            schedule.step()
        done.losses.append(loss.detach())
    return done


def train_plain_split(case: Case, micro_batch: int, dtype: torch.dtype | None = None, scaler: Any = None) -> Trained:
    """Train by the same split of each batch (a tensor pair): mean losses weighted by rows, under autocast if asked."""
    model, optimizer = case.build()
    done = Trained(model, optimizer)
    scaler = scaler or torch.amp.GradScaler("cpu", enabled=False)
    for batch in case.batches:
        optimizer.zero_grad()
        rows = len(batch[0])
        total = torch.zeros((), dtype=case.dtype)
        for piece in zip(*(part.split(micro_batch) for part in batch), strict=True):
            with torch.autocast("cpu", dtype) if dtype else contextlib.nullcontext():
                loss = case.loss_fn(model, piece)
            loss = loss * (len(piece[0]) / rows)
            scaler.scale(loss).backward()
            total = total + loss.detach()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        done.losses.append(total)
    return done


def train_ours(case: Case, plan: Plan, scheduler: Any = None, **start: Any) -> Trained:
    """Train through a run, by `train_step`."""
    model, optimizer = case.build()
    done = Trained(model, optimizer)
    schedule = scheduler(optimizer) if scheduler else None
    with trimtab.start(model, optimizer, plan, **start) as run:
        for window in run.windows(case.batches):
            before = run.applied_steps
            done.losses.append(run.train_step(window, case.loss_fn))
            if schedule is not None and run.applied_steps > before:
                schedule.step()
            if run.grad_norm is not None:
                done.norms.append(run.grad_norm)
    return done


def assert_same_training(ours: Trained, plain: Trained, tolerance: float) -> None:
    """Raise AssertionError unless gradients, losses, norms and weights agree; tolerance 0 is bit for bit."""
    assert len(ours.gradients) == len(plain.gradients) > 0
    for step, (left, right) in enumerate(zip(ours.gradients, plain.gradients, strict=True)):
        assert_close(left, right, tolerance, f"gradient of step {step}")
    for name in ("losses", "norms"):
        pairs = [{str(i): t for i, t in enumerate(getattr(side, name))} for side in (ours, plain)]
        assert_close(*pairs, tolerance, name)
    assert_close(ours.weights, plain.weights, tolerance, "weights")


def assert_close(ours: Tensors, plain: Tensors, tolerance: float, what: str) -> None:
    """Raise AssertionError unless every tensor agrees and is finite."""
    assert ours.keys() == plain.keys(), what
    for name, left, right in triples(ours, plain):
        assert bool(torch.isfinite(right).all()), f"{what} {name}: not finite"
        error = float((left.double() - right.double()).abs().max())
        limit = tolerance * float(right.double().abs().max())
        assert error <= limit, f"{what} {name}: differs by {error:.3g}, limit {limit:.3g}"


def triples(ours: Tensors, plain: Tensors) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield (name, ours, plain) of each tensor that holds anything."""
    yield from ((name, value, plain[name]) for name, value in ours.items() if value.numel())
