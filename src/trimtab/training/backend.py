"""Interface between a run and the devices of its model; implemented for several ranks by `trimtab.distributed`."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor, nn

from trimtab.plans.plan import Plan
from trimtab.techniques import gradient_clipping
from trimtab.techniques.mixed_precision import MixedPrecision
from trimtab.training.gradient_sync import GradientSync, data_parallel
from trimtab.training.metadata_exchange import MetadataExchange, SingleProcessExchange
from trimtab.training.used_parameters import ShardedParameterUse


class Backend:
    """Gradient computation and optimizer steps on one or several ranks. By default, gradients are in `Parameter.grad`.

    Attributes:
        exchange: metadata exchange with the other ranks.
        in_step: True if every micro-batch has collectives, so that all ranks need equally many.
        may_retry: True if one rank may repeat a window before reducing its gradient.
        accumulates_alone: True if autograd accumulates in `Parameter.grad`, and no reduction reads it.
        model: the model to call; available after `spread`.
        optimizer: the optimizer to step, whose groups contain all trained parameters; available after `spread`.
    """

    exchange: Any  # A `MetadataExchange`; subclasses use further methods of theirs.
    in_step: bool
    may_retry: bool
    accumulates_alone: bool = False
    model: nn.Module
    optimizer: torch.optim.Optimizer

    def spread(self, model: nn.Module, optimizer: torch.optim.Optimizer, plan: Plan) -> None:
        """Shard a model and its optimizer state in place. On an error, nothing has changed."""
        raise NotImplementedError

    def settle(self) -> None:
        """Run collective preparations; called on every rank before a window is drawn."""

    def begin(self, *, last: bool) -> None:
        """Prepare a micro-batch, before it is yielded."""

    def begin_backward(self, loss: Tensor) -> None:
        """Prepare a backward pass, after the micro-batch's forward and before ranks exchange metadata of the window."""

    def backward(self, loss: Tensor) -> None:
        """Run a micro-batch's backward pass; the window's last backward pass also reduces the gradient."""
        loss.backward()

    def end(self) -> None:
        """Reset after a window was dropped."""

    def multiply(self, factor: float | Tensor) -> None:
        """Multiply the window's gradient by a factor."""
        gradient_clipping.multiply(self.optimizer, factor)

    def finish(self, factor: float | Tensor, clip_norm: float | None, *, wants_norm: bool = False) -> Tensor | None:
        """Multiply the window's gradient by `factor`, then clip; return its norm before, or None if unneeded."""
        if clip_norm is None and not wants_norm and isinstance(factor, float) and factor == 1.0:
            return None
        return gradient_clipping.scale_and_clip(self.optimizer, factor, clip_norm, wants_norm=wants_norm)

    def step(self, precision: MixedPrecision) -> bool:
        """Step the optimizer; return True if it stepped."""
        return precision.step(self.optimizer)

    def stepping(self) -> contextlib.AbstractContextManager[None]:
        """Return a context manager for the optimizer's step, in which the user's parameter groups are in effect."""
        return contextlib.nullcontext()

    def gather(self, error: BaseException | None) -> None:
        """Undo `spread`, keeping trained weights. After an error, skip steps that need other ranks."""
        raise NotImplementedError


def may_retry(backend: Backend, plan: Plan) -> bool:
    """Return True if one rank may repeat a window by itself; False if ranks decide jointly on the batch size."""
    return backend.may_retry and (plan.batch_rule is None or backend.exchange.num_ranks == 1)


class UserBackend(Backend):
    """Backend for a model as the user made it: on one device, or wrapped by the user (DDP, FSDP)."""

    def __init__(self, exchange: MetadataExchange | None = None, *, in_step: bool = False) -> None:
        self.in_step = in_step
        self.exchange = exchange or SingleProcessExchange()
        self.may_retry = self.exchange.num_ranks == 1

    def spread(self, model: nn.Module, optimizer: torch.optim.Optimizer, plan: Plan) -> None:
        """Change nothing; raise if DDP would not reduce all gradients of the model."""
        self.model, self.optimizer = model, optimizer
        self._sync = GradientSync(model, self.exchange) if data_parallel(model) is not None else None
        if self._sync is not None:
            self._sync.require_no_static_graph(plan)
            self._sync.require_all(optimizer, of_user=True)
        used = ShardedParameterUse(model, self.exchange)
        self._used = used if used.is_needed else None
        self.accumulates_alone = self.exchange.num_ranks == 1 and self._sync is None and self._used is None

    def settle(self) -> None:
        if self._sync is not None:
            self._sync.settle(self.optimizer)

    def begin(self, *, last: bool) -> None:
        if self._sync is not None:
            self._sync.begin(last=last)
        if self._used is not None:
            self._used.begin(last=last)

    def begin_backward(self, loss: Tensor) -> None:
        if self._used is not None:
            self._used.begin_backward(loss)

    def backward(self, loss: Tensor) -> None:
        if self._used is None:
            loss.backward()
        else:
            self._used.backward(loss.backward)
        if self._sync is not None:
            self._sync.complete()

    def end(self) -> None:
        if self._sync is not None:
            self._sync.end()
        if self._used is not None:
            self._used.reset()

    def gather(self, error: BaseException | None) -> None:
        if self._used is not None:
            self._used.close()
        if error is not None:
            self.exchange.failed(error)
        self.exchange.close()
