"""What a run asks of the devices that its model is spread over; other layers spread it over several."""

from __future__ import annotations

import contextlib
from typing import Protocol

import torch
from torch import Tensor, nn

from trimtab.core.plan import Plan
from trimtab.runtime import gradients
from trimtab.runtime.exchange import Alone, Exchange
from trimtab.runtime.gradient_sync import GradientSync
from trimtab.runtime.precision import MixedPrecision
from trimtab.runtime.used_parameters import ShardedUse


class Backend(Protocol):
    """Between a run and the ranks it is one of.

    Attributes:
        exchange: with the other ranks. in_step: whether every micro-batch waits for them, so that all have as many.
        may_retry: whether one rank may begin a window anew, as long as it has not reduced its gradient.
        model: to be called. optimizer: to be stepped; its groups have every parameter that is. Both once it is spread.
    """

    exchange: Exchange
    in_step: bool
    may_retry: bool
    model: nn.Module
    optimizer: torch.optim.Optimizer

    def spread(self, model: nn.Module, optimizer: torch.optim.Optimizer, plan: Plan) -> None:
        """Spread a model and its optimizer's state, in place. Raises before anything is changed, or undoes it."""

    def settle(self) -> None:
        """A window is about to be drawn, on every rank: what all of them have to do at once is done here."""

    def begin(self, *, last: bool) -> None:
        """A micro-batch is about to be handed out."""

    def begin_backward(self, loss: Tensor) -> None:
        """A micro-batch's forward has run; ranks have not yet exchanged metadata of the window."""

    def backward(self, loss: Tensor) -> None:
        """Have a micro-batch's backward, which reduces the window's gradient in its last one."""

    def end(self) -> None:
        """The window was given up."""

    def multiply(self, factor: float | Tensor) -> None:
        """Multiply the window's gradient."""

    def finish(self, factor: float | Tensor, clip_norm: float | None, *, wants_norm: bool = False) -> Tensor | None:
        """Multiply the window's gradient and clip it; returns its norm between the two, where it is wanted."""

    def step(self, precision: MixedPrecision) -> bool:
        """Step the optimizer; returns whether it stepped."""

    def stepping(self) -> contextlib.AbstractContextManager[None]:
        """Return what the optimizer's step is to be inside of: what steps goes by the user's groups."""

    def gather(self, error: BaseException | None) -> None:
        """Undo `spread`, with what was trained; after an error only what needs no other rank."""


def may_retry(backend: Backend, plan: Plan) -> bool:
    """Return whether one rank may begin a window anew.

    Not where ranks decide of the batch: what one of them does in another way the others would have to be told.
    """
    return backend.may_retry and (plan.batch_rule is None or backend.exchange.num_ranks == 1)


class Torch:
    """What backends share whose gradients are the parameters' own."""

    optimizer: torch.optim.Optimizer

    def settle(self) -> None:
        """Do nothing."""

    def begin_backward(self, loss: Tensor) -> None:
        """Do nothing."""

    def backward(self, loss: Tensor) -> None:
        """Have a micro-batch's backward."""
        loss.backward()

    def multiply(self, factor: float | Tensor) -> None:
        """Multiply the window's gradient."""
        gradients.multiply(self.optimizer, factor)

    def finish(self, factor: float | Tensor, clip_norm: float | None, *, wants_norm: bool = False) -> Tensor | None:
        """Multiply the window's gradient and clip it; returns its norm between the two, where it is wanted."""
        return gradients.finish(self.optimizer, factor, clip_norm, wants_norm=wants_norm)

    def step(self, precision: MixedPrecision) -> bool:
        """Step the optimizer; returns whether it stepped."""
        return precision.step(self.optimizer)

    def stepping(self) -> contextlib.AbstractContextManager[None]:
        """Return nothing more: the user's optimizer steps by its own groups."""
        return contextlib.nullcontext()


class Given(Torch):
    """A model as the loop made it: on one device, or wrapped by the loop itself."""

    def __init__(self, exchange: Exchange | None = None, *, in_step: bool = False) -> None:
        self.in_step = in_step
        self.exchange = exchange or Alone()
        self.may_retry = self.exchange.num_ranks == 1

    def spread(self, model: nn.Module, optimizer: torch.optim.Optimizer, plan: Plan) -> None:
        """Change nothing; raises where a model in DDP would not be reduced as a whole."""
        self.model, self.optimizer, self._sync = model, optimizer, GradientSync(model, self.exchange)
        self._sync.require_no_static_graph(plan)
        self._sync.require_all(optimizer, of_user=True)
        self._used = ShardedUse(model, self.exchange)

    def settle(self) -> None:
        """Have buckets laid out anew."""
        self._sync.settle(self.optimizer)

    def begin(self, *, last: bool) -> None:
        """Keep it from being reduced, unless it is the last."""
        self._sync.begin(last=last)
        self._used.begin(last=last)

    def begin_backward(self, loss: Tensor) -> None:
        """In the first windows of a sharded model, require that ranks used the same layers."""
        self._used.begin_backward(loss)

    def backward(self, loss: Tensor) -> None:
        """Run a micro-batch's backward; after a window's last every gradient is reduced."""
        self._used.backward(lambda: super(Given, self).backward(loss))
        self._sync.complete()

    def end(self) -> None:
        """Reduce again."""
        self._sync.end()
        self._used.reset()

    def gather(self, error: BaseException | None) -> None:
        """Change nothing of model and optimizer."""
        self._used.close()
        if error is not None:
            self.exchange.failed(error)
        self.exchange.close()
