"""The run: a plan applied to a live model and optimizer, and the loop's verbs.

    start -> window -> (micro-batch: forward under autocast -> backward)* -> [unscale] -> step -> window ... -> close

Each verb raises when it is called out of this order, before anything is changed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from trimtab.core import checks
from trimtab.core.errors import LoopError, ValueGivenError
from trimtab.core.plan import Plan
from trimtab.runtime import gradients, optimizers, precision
from trimtab.runtime.accumulation import Count, WindowWeights, as_loss
from trimtab.runtime.applied import apply_plan, require_free
from trimtab.runtime.batches import count_rows, iterate
from trimtab.runtime.order import LoopOrder
from trimtab.runtime.recorder import Recorder
from trimtab.runtime.schedule import rate_factor, scaled_rates
from trimtab.runtime.window import Window, check_call

LossFn = Callable[[nn.Module, Any], Any]


class Run:
    """A started plan. Made by `trimtab.start`; also a context manager.

    Attributes:
        model: the model as the plan prepared it. plan: what is applied.
        loss: mean loss per term of the last window, a detached scalar on the model's device (no synchronisation).
        consumed_rows: samples seen, voided windows too. applied_steps: optimizer steps taken.
        grad_norm: norm of the last window's gradient before clipping, where it was computed, else None.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        plan: Plan,
        *,
        total_samples: int | None = None,
        clip_norm: float | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        optimizers.check_ownership(model, optimizer)
        self._clip_norm = _resolve_clip(plan, clip_norm)
        self._total_samples = _resolve_total(plan, total_samples)
        self._device = next(model.parameters()).device
        self._precision = str(plan.precision.value)
        precision.check_available(self._precision, self._device)
        require_free(model)
        self.model, self.plan = model, plan
        self.loss = torch.tensor(float("nan"))
        self.grad_norm: Tensor | None = None
        self.consumed_rows = self.applied_steps = 0
        self._optimizer = optimizer
        self._recorder = recorder
        self._weights = WindowWeights()
        self._scaler = precision.loss_scaler(self._precision, self._device)
        self._order = LoopOrder()
        self._closed = False
        self._undo = apply_plan(model, optimizer, plan, self._order.forward.watch)

    # The loop's verbs, in the order they are called.

    def windows(self, loader: Iterable[Any]) -> Iterator[Window]:
        """Yield one window per batch of the loader: one optimizer step each.

        Raises:
            LoopError: a window was opened and neither stepped nor discarded; the last one too.
        """
        for batch in iterate("loader", loader):
            self._require_open()
            self._order.require_idle("run.windows")
            yield self.window(batch)
        self._order.require_stepped("run.windows")

    def window(self, batch: Any) -> Window:
        """Return one batch as a window.

        Raises:
            BatchError: rows cannot be counted, or the batch cannot be split.
        """
        self._require_open()
        rows = count_rows(batch)
        return Window(self, batch, rows, self.plan.micro_batch_of(rows), self._device)

    @property
    def loss_scale(self) -> float | None:
        """The fp16 loss scale; None under any other precision."""
        return None if self._scaler is None else self._scaler.get_scale()

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Return the plan's precision as a context for the forward pass."""
        return precision.autocast(self._precision, self._device)

    def backward(self, loss: Tensor, count: Count | None = None) -> None:
        """Weigh, scale and backpropagate one micro-batch: a mean over rows, or `(loss_sum, count)`.

        Raises:
            LossError: not a loss. LoopError: no micro-batch is open, or `run.model` had no forward for it.
        """
        self._backward(loss if count is None else (loss, count))

    def _backward(self, result: Any) -> None:
        self._require_open()
        self._order.require_micro_batch()
        loss, count = as_loss(result)
        weighted = self._weights.weigh(loss, count, self._order.micro_rows)
        (weighted if self._scaler is None else self._scaler.scale(weighted)).backward()
        self._order.backward_done()

    def unscale(self) -> None:
        """Bring the window's gradients to their true size, for a look or a change before `step`; once a window."""
        self._require_open()
        self._order.require_complete("run.unscale")
        if self._order.unscaled:
            raise LoopError("run.unscale", given="a second call", expected="one call per window")
        self._order.unscaled = True
        if self._scaler is not None:
            self._scaler.unscale_(self._optimizer)
        gradients.multiply(self._optimizer, self._weights.correction)

    def step(self) -> bool:
        """Unscale, clip, set the learning rate, step the optimizer, record; returns whether the optimizer stepped.

        It does not step when an fp16 gradient overflowed: the window is voided and the scale lowered. Where the
        optimizer raises, the window stays open and uncounted: step again, or discard it.

        Raises:
            LoopError: the window's last micro-batch was not seen, or there is no window.
        """
        self._require_open()
        window = self._order.require_complete("run.step")
        if self._scaler is not None and not self._order.unscaled:
            self.unscale()
        remaining: float | Tensor = 1.0 if self._order.unscaled else self._weights.correction
        self.grad_norm = gradients.finish(self._optimizer, remaining, self._clip_norm)
        self._order.unscaled = True  # a second try, after an optimizer that raised, must not multiply again
        self.loss = self._weights.mean_loss
        consumed = self.consumed_rows + window.rows
        factor = rate_factor(self.plan, consumed, self._total_samples)
        with scaled_rates(self._optimizer, factor):
            applied = precision.step(self._scaler, self._optimizer)
        self.consumed_rows, self.applied_steps = consumed, self.applied_steps + applied
        self._order.reset()
        self._weights.close()
        if self._recorder is not None:
            rate = factor * self._optimizer.param_groups[0]["lr"]
            terms = self._weights.terms
            self._recorder.step(window.rows, terms, self.loss, rate, applied, self.grad_norm, self.loss_scale)
        return applied

    def discard(self) -> None:
        """Give the open window up: its gradients are dropped, it is not counted, and the next one can be opened.

        For a loop whose body raised and goes on. What forwards changed (batch statistics, random generators) stays.
        Nothing happens when no window is open.
        """
        self._require_open()
        self._abandon()

    def train_step(self, window: Window, loss_fn: LossFn) -> Tensor:
        """Run one whole window; returns its mean loss as a detached scalar on the device.

        An error on the way gives the window up, as `discard` does, and the next one can be trained on. Nothing of it
        is counted, but not all is undone: forwards may have moved buffers (batch statistics) and random generators,
        and an optimizer that raised may have stepped some of its parameters.
        """
        check_call(self, window, loss_fn)
        try:
            for micro in window:
                with self.autocast():
                    result = loss_fn(self.model, micro)
                self._backward(result)
            self.step()
        except BaseException:
            if self._order.window is window:
                self._abandon()
            raise
        return self.loss

    def close(self) -> None:
        """Put model, optimizer and global modes back as they were; weights and state keep what they learned.

        Where the plan retained memory, the C allocator's thresholds stand at the highest they grow to by themselves.
        """
        if self._closed:
            return
        self._abandon()
        self._optimizer.zero_grad(set_to_none=True)
        self._closed = True
        self._undo.close()
        if self._recorder is not None:
            self._recorder.close()

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # State that a resumed run needs beside model, optimizer and the data's position.

    def state_dict(self) -> dict[str, Any]:
        """Return counters and the loss scaler's state."""
        scaler = None if self._scaler is None else self._scaler.state_dict()
        return {"consumed_rows": self.consumed_rows, "applied_steps": self.applied_steps, "scaler": scaler}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict()`.

        Raises:
            ValueGivenError: not such a state, or one saved under a precision that does not fit; nothing was changed.
        """
        if not isinstance(state, Mapping):
            raise ValueGivenError("state", given=f"a {type(state).__name__}", expected="what run.state_dict() returned")
        consumed, applied = (
            checks.integer(f"state.{name}", state.get(name), low=0) for name in ("consumed_rows", "applied_steps")
        )
        precision.load_scaler(self._scaler, state.get("scaler"), self._precision)
        self.consumed_rows, self.applied_steps = consumed, applied

    # What a window reports.

    def open_window(self, window: Window) -> None:
        """Called by the window before its first micro-batch."""
        self._require_open()
        self._order.open(window)
        # As in a plain loop, not after the step: freed last, they cost thousands of page faults a step (docs/LOG.md).
        self._optimizer.zero_grad(set_to_none=True)
        self._weights.open(window.rows, window.num_micro_batches)

    def begin_micro_batch(self, window: Window, rows: int, *, last: bool) -> None:
        """Called by the window before each micro-batch."""
        self._require_open()
        self._order.begin_micro_batch(window, rows, last=last)

    def end_micro_batch(self, window: Window) -> None:
        """Called by the window after the loop's body for each micro-batch."""
        try:
            self._order.end_micro_batch(window)
        except LoopError:
            self._abandon()
            raise

    # Inside.

    def _abandon(self) -> None:
        if self._order.window is None:
            return
        if self._scaler is not None and self._order.unscaled:
            self._scaler = precision.renewed(self._scaler, self._device)
        self._optimizer.zero_grad(set_to_none=True)
        self._order.reset()

    def _require_open(self) -> None:
        if self._closed:
            raise LoopError("run", given="a closed run", expected="an open one", way_out="Call trimtab.start again.")


def _resolve_clip(plan: Plan, clip_norm: float | None) -> float | None:
    planned = plan.clip_norm.value
    if clip_norm is not None:
        checks.number("clip_norm", clip_norm, low=0, open_low=True)
        if planned is not None and planned != clip_norm:
            raise ValueGivenError("clip_norm", given=f"{clip_norm:g}", expected=f"the plan's {planned:g}, or none")
        return clip_norm
    return None if planned is None else float(planned)


def _resolve_total(plan: Plan, total_samples: int | None) -> int | None:
    if total_samples is not None:
        return checks.integer("total_samples", total_samples)
    if plan.schedule.value != "user":
        raise ValueGivenError(
            "total_samples",
            given="nothing",
            expected="the samples this run will train on",
            way_out=f"The plan's schedule {plan.schedule.value} goes by progress: start(..., total_samples=N).",
        )
    return None
