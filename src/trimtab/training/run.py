"""The training run: a plan applied to a live model and optimizer, and the methods that a loop calls.

    start -> window -> (micro-batch: forward under autocast -> backward)* -> [unscale] -> step -> window ... -> close

Methods called out of this order raise `LoopError` before changing any state.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from trimtab.core.errors import LoopError
from trimtab.core.plan import Plan
from trimtab.core.stateful import Load, loading_parts
from trimtab.core.stopping_rule import Stop
from trimtab.losses import as_loss, detach_auxiliary, require_unscaled
from trimtab.settings import clip_norm as clip_norm_module
from trimtab.settings import optimizers
from trimtab.settings.lr_schedule import applied_rate, rate_factor, require_rates, scaled_rates
from trimtab.settings.muon import Momentum
from trimtab.settings.precision import MixedPrecision, in_place
from trimtab.training.accumulation import WindowWeights
from trimtab.training.apply_plan import apply_plan, lay_out, require_free
from trimtab.training.backend import Backend, UserBackend, may_retry
from trimtab.training.batch import NestedLists
from trimtab.training.batch_size_controller import BatchSizeController, FixedBatchSize, control_of
from trimtab.training.batch_splitting import BY_CONTAINERS, BatchSplitting, for_model
from trimtab.training.call_order import CallOrder
from trimtab.training.checkpoint_hooks import CheckpointHooks, NoCheckpoints
from trimtab.training.data_position import DataPosition
from trimtab.training.early_stopping import EarlyStopping
from trimtab.training.loader_iteration import LoaderIteration
from trimtab.training.loop_warnings import (
    LeftoverGradientChanges,
    LeftoverStep,
    UnequalBatches,
    explain_backward_errors,
    warn_of_own_functions,
)
from trimtab.training.nonfinite import Cause, NonFinitePolicy
from trimtab.training.out_of_memory import OutOfMemoryRetry, recovers_from
from trimtab.training.rank_sync import AgreedWindow, RankShare, RankSync, UnevenInputs, weights_of
from trimtab.training.step_recorder import PendingStep, StepRecorder
from trimtab.training.training_progress import TrainingProgress
from trimtab.training.user_hooks import HookChecks
from trimtab.training.window import Window, check_call

# State of a run for checkpoints, in addition to model, optimizer and data position.


class ResumableRun:
    """Base class of `Run` with its `state_dict` and `load_state_dict`."""

    _consumed: TrainingProgress
    _voids: NonFinitePolicy
    _stopping: EarlyStopping
    _weights: WindowWeights
    _recovery: OutOfMemoryRetry
    _control: BatchSizeController | FixedBatchSize
    _precision: MixedPrecision
    plan: Plan
    model: nn.Module
    _optimizer: torch.optim.Optimizer

    @property
    def stepped_by(self) -> torch.optim.Optimizer:
        """The optimizer that steps: the user's, or its sharded replacement, whose groups contain all parameters."""
        return self._optimizer

    def state_dict(self) -> dict[str, Any]:
        """Return the state of all parts of the run: counters, precision, memory limit, adaptive batch size and more.

        All values are plain numbers, except the momentum tensors of a plan with Muon.
        """
        return {name: part.state_dict() for name, part in self._parts()}

    def report_nonfinite(self, what: str) -> None:
        """Warn or raise, by the run's policy, because a value has become non-finite.

        Args:
            what: description for the message, such as "NaN or infinity in parameter fc.weight".

        Raises:
            NonFiniteError: the policy is "error" or "stop".
        """
        self._voids.report(what)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a `state_dict()`.

        Raises:
            UsageError: the state is invalid, or was saved under another plan or precision; nothing was changed.
        """
        self.loading(state)()

    def loading(self, state: Any) -> Load:
        """Return a function that restores a `state_dict()`; raises as `load_state_dict`."""
        load_parts = loading_parts(dict(self._parts()), state)

        def load() -> None:
            load_parts()
            self._note_precision(Cause("precision.resumed", "the checkpointed run had left it"))

        return load

    def _parts(self) -> Iterator[tuple[str, Any]]:
        yield from (("consumed", self._consumed), ("voids", self._voids), ("stop", self._stopping))
        yield from (("weights", self._weights), ("memory", self._recovery.limit))
        if isinstance(self._control, BatchSizeController):
            yield "batch", self._control
        if self.plan.optimizer.value == "muon":
            yield "muon", Momentum(self.model, self._optimizer)
        yield "precision", self._precision

    def _note_precision(self, cause: Cause) -> None:
        """Update plan and record if the precision in use differs from the plan."""
        before, after = self.plan.precision.value, self._precision.name
        if before != after:
            self.plan = in_place(self.plan, after, cause.reason)
            self.note("precision", {"from": before, "to": after, "code": cause.code, "reason": cause.reason})

    def note(self, name: str, detail: Mapping[str, Any]) -> None:
        """Add an event to the run's record."""
        raise NotImplementedError


LossFn = Callable[[nn.Module, Any], Any]


class Run(LoaderIteration, ResumableRun):
    """A plan applied to a model and optimizer. Made by `trimtab.start`; also a context manager.

    Attributes:
        model: the model as prepared by the plan (wrapped or sharded where the plan requires it).
        plan: the plan in effect; updated if a fallback changes it during training.
        loss: mean loss of the last window, a detached scalar on the model's device (no synchronisation).
        grad_norm: gradient norm of the last window before clipping; None if it was not computed.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        plan: Plan,
        *,
        total_samples: int | None = None,
        total_tokens: int | None = None,
        clip_norm: float | None = None,
        nonfinite: str | None = None,
        out_of_memory: str | None = None,
        stop: Stop | None = None,
        backend: Backend | None = None,
        recorder: StepRecorder | None = None,
        keeper: CheckpointHooks | None = None,
        modules: tuple[nn.Module, ...] = (),
        batching: BatchSplitting = BY_CONTAINERS,
        on_trial: bool = False,
    ) -> None:
        optimizers.check_ownership(model, optimizer, modules)
        require_rates(plan, optimizer)
        plan = clip_norm_module.with_own_limit(plan, clip_norm)
        self._clip_norm = clip_norm_module.resolve_clip(plan, clip_norm)
        self._device, self._closed = next(model.parameters()).device, False
        self._precision = MixedPrecision(str(plan.precision.value), self._device)
        self._backend = backend = backend or UserBackend()
        exchange = backend.exchange
        self._consumed = TrainingProgress(plan, total_samples, total_tokens, exchange)
        self._voids = NonFinitePolicy("continue" if on_trial else nonfinite, self.note, is_alone=not exchange.has_peers)
        require_free(model)
        trained = optimizers.with_auxiliary_modules(model, modules)
        self._hooks = HookChecks(trained, plan, self._clip_norm, nonfinite, out_of_memory)
        self.plan, self._recorder = for_model(plan, model), recorder
        self._keeper = keeper or NoCheckpoints()
        self._position = DataPosition(is_kept=self._keeper.keeps)
        self.loss = torch.tensor(float("nan"))
        self.grad_norm: Tensor | None = None
        self._peers = RankSync(exchange, self.note, in_step=backend.in_step)
        self._batching, self._unequal = batching, UnequalBatches(plan)
        # Trials reuse one batch, so a loss always gets full copies there.
        self._inner_lists = None if on_trial else NestedLists()
        self._weights, self._joining = weights_of(self._peers, plan), UnevenInputs(self._peers, batching)
        self._order, self._stopping = CallOrder(), EarlyStopping(stop)
        may_look = not on_trial and not self._hooks.found and plan.zero_stage.value is None
        self._gradients = LeftoverGradientChanges(optimizer, is_on=may_look)
        self._auxiliary: list[Any] = []
        self._has_auxiliary = False
        self._is_loss_checked = on_trial  # Planning has checked the loss already.
        can_retry = may_retry(backend, plan) and not self._hooks.found  # A user's hook would run twice in a retry.
        recovers = recovers_from(out_of_memory, plan, model, may_retry=can_retry)
        self._recovery = OutOfMemoryRetry(trained, plan, self.note, is_on=recovers, watches=not on_trial)
        with contextlib.ExitStack() as undo:
            undo.push(lay_out(model, optimizer, plan))
            backend.spread(model, optimizer, plan)
            undo.push(lambda kind, error, traceback: backend.gather(error))
            self.model, self._optimizer = backend.model, backend.optimizer
            self._control = control_of(plan, model, self._optimizer, exchange, self.note, self._keeper)
            note = None if on_trial else self.note
            undo.push(apply_plan(model, self.model, optimizer, plan, self._order.forward, note, make_state=recovers))
            undo.callback(LeftoverStep(self._order).watch(optimizer))
            self._undo = undo.pop_all()

    # The methods of the loop, in the order of their calls.

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Return the autocast context of the plan's precision for the forward pass."""
        return self._precision.autocast()

    def backward(self, result: Any) -> None:
        """Weight, scale and backpropagate the loss of one micro-batch.

        Args:
            result: return value of the loss function: a scalar mean, `Summed`, or `(loss, auxiliary)`.

        Raises:
            LossError: `result` is not a loss, or was scaled by a `GradScaler` already.
            LoopError: no micro-batch is open, or `run.model` was not called for this micro-batch.
        """
        self._require_open()
        self._order.require_micro_batch()
        loss, count, auxiliary = as_loss(result, is_auxiliary=self._has_auxiliary)
        self._has_auxiliary = auxiliary is not None
        if not self._is_loss_checked:
            require_unscaled(loss)
            if self._precision.scales and self.plan.proof is None:
                warn_of_own_functions(loss)
            self._is_loss_checked = True
        rows = self._order.micro_batch_samples
        self._hooks.require_mean(self._order.window, count)
        if rows:  # Padding micro-batches, which only join other ranks' collectives, have no auxiliary value.
            self._auxiliary.append(None if auxiliary is None else detach_auxiliary(auxiliary))
        # Comes before the weights: computing them may need an exchange between ranks.
        self._backend.begin_backward(loss)
        weighted = self._precision.scaled(self._weights.weigh(loss, count, rows))
        if self._order.is_last:
            self._tell()
        self._control.backward_begins()
        self._gradients.backward_begins()
        with explain_backward_errors():
            self._backend.backward(weighted)
        self._gradients.backward_done()
        self._order.backward_done()
        self._control.backward_done(rows, rows if count is None else count)

    def _tell(self) -> None:
        """Send this rank's part of the window to the other ranks, before the gradient is reduced."""
        window, weights, limit = self._order.window, self._weights, self._recovery.limit.rows
        assert window is not None
        stop, samples = self._stopping.asked, window.samples
        share = RankShare(window.rows, window.num_batches, weights.terms, weights.is_sum, limit, stop, samples)
        self._peers.tell(share)
        if not weights.is_sum:
            self._unequal.look(window)

    def unscale(self) -> None:
        """Unscale the window's gradients, so that the loop can inspect or change the gradients before `step`.

        Divides by the loss scale and applies the window's weight. Call it before `step`, at most once per window.

        Raises:
            LoopError: no window is open, its last micro-batch has not run, or `unscale` was called before.
        """
        self._require_open()
        self._order.require_complete("run.unscale")
        if self._order.unscaled:
            raise LoopError(
                "run.unscale",
                got="a second call",
                expected="one call per step",
                hint="Call run.unscale() once, after the step's last run.backward(loss).",
                code="loop.unscaled_twice",
            )
        self._measure()
        self._gradients.end()
        self._order.unscaled = True
        self._precision.unscale(self._optimizer)
        self._backend.multiply(self._weights.correction)

    def _measure(self) -> None:
        """Pass the complete gradient to the noise monitor, before unscaling or clipping changes it."""
        if not self._order.unscaled:
            self._control.stepping(self._weights, self._precision.scale_on_device)

    def step(self) -> bool:
        """Finish the window: unscale, clip, set the learning rate, step the optimizer, record.

        The step is skipped if an fp16 gradient overflowed, or if the gradient is non-finite and the run's policy is to
        skip. A skipped step leaves parameters and buffers as they were before the window. If the optimizer raises, the
        window stays open: call `step` again or `discard`.

        Returns:
            True if the optimizer stepped.

        Raises:
            LoopError: no window is open, or its last micro-batch has not run.
            NonFiniteError: the gradient is non-finite and the run's policy is to raise; parameters are unchanged.
        """
        self._require_open()
        window = self._order.require_complete("run.step")
        self._gradients.step_begins(is_scaled=self._precision.scales)
        self._recovery.backwards_done()
        if self._precision.scales and not self._order.unscaled:
            self.unscale()
        self._measure()
        remaining: float | Tensor = 1.0 if self._order.unscaled else self._weights.correction
        wants_norm = self._voids.wants_norm or self._stopping.wants_norm
        self.grad_norm = self._backend.finish(remaining, self._clip_norm, wants_norm=wants_norm)
        # If the optimizer raises and `step` is called again, gradients must not be multiplied twice.
        self._order.unscaled = True
        self.loss = self._weights.mean_loss if window.rows else self.loss
        factor = self._rate_factor(window)
        applied = not self._is_void()
        if applied:
            with self._backend.stepping(), scaled_rates(self._optimizer, factor):
                self._order.in_optimizer = True
                applied = self._backend.step(self._precision)
        self._stepped(window, factor, applied)
        return applied

    def _is_void(self) -> bool:
        try:
            is_void = self._voids.is_void(self.grad_norm, self.loss, scaled=self._precision.scales)
        except BaseException:  # The policy raises: restore the state from before the window.
            self._recovery.restore_skipped()
            self._abandon()
            raise
        if is_void:
            self._precision.renew()
        return is_void

    def _rate_factor(self, window: Window) -> float:
        agreed, counted = self._peers.agreed(), self._weights.counted
        progress = self._consumed.progress_after(agreed.rows, counted, agreed.num_batches, window.batch_size)
        return rate_factor(self.plan, progress) * self._control.rate_factor(agreed.num_batches)

    def _stepped(self, window: Window, factor: float, applied: bool) -> None:
        """Count the window, record it, and update all monitors and controllers."""
        agreed = self._peers.agreed()
        self._consumed.add(agreed.rows, self._weights.counted, applied=applied, samples=agreed.samples)
        if not applied or not window.rows:
            self._recovery.restore_skipped()
        if not applied:
            self._precision.keep_scale(where=self._voids.is_no_overflow(self.loss))
        if self._recorder is not None:
            self._recorder.step(self._record_of(agreed, window.num_micro_batches, factor, applied))
        self._order.reset()
        self._weights.close()
        self._control.stepped(window.num_batches, agreed.num_batches, applied=applied)
        self._recovery.limit.adopt(agreed.limit)
        self._stopping.adopt(agreed.reason)
        self._joining.stepped(applied=applied)
        self._peers.over(stepped=True)
        if applied:
            self._stopping.stepped(self.grad_norm)
            self._recovery.passed(self.plan)
        if self._may_void:
            self._voids.note(self.loss, applied=applied, has_bad_data=window.holds_nan)
        if not applied and self._precision.loss_scale is not None:
            cause = self._voids.outlasts(self._precision.loss_scale, self.loss)
            if cause is not None:
                self._precision.leave_fp16()
                self._note_precision(cause)
        if self._recorder is not None:
            self._recorder.stepped()
        if applied and window.rows:
            self._voids.applied(self._consumed.windows - 1, self.loss)

    def _record_of(self, agreed: AgreedWindow, k: int, factor: float, applied: bool) -> PendingStep:
        rate = applied_rate(self._optimizer, factor)
        noise = None if self.noise is None else self.noise.scale
        return PendingStep(
            agreed.samples, k, agreed.terms, self.loss, rate, applied, self.grad_norm, self.loss_scale, noise
        )

    def discard(self) -> None:
        """Drop the open window and its gradients, so that the next window can be opened.

        For loops that catch an error and continue. The window is not counted. Effects of its forward passes (batch
        statistics, random generators) remain. Does nothing if no window is open.
        """
        self._require_open()
        self._abandon()

    def train_step(self, window: Window, loss_fn: LossFn) -> Tensor:
        """Train on one window: all micro-batches, then `step`.

        If memory runs out in a forward or backward pass, the window is repeated in micro-batches of half the size, if
        the batch can be split and the state from before the window can be restored. After any other error the window is
        dropped as by `discard`: forward passes may have changed buffers and random generators, and an optimizer that
        raised may have updated some of the parameters.

        Returns:
            Mean loss of the window, a detached scalar on the device.

        Raises:
            MemoryLimitError: a single sample does not fit, or memory ran out inside the optimizer step.
        """
        self._train(window, loss_fn, steps=True)
        return self.loss

    def accumulate(self, window: Window, loss_fn: LossFn) -> Tensor:
        """Run all micro-batches of a window without `step`; return the window's mean loss, detached."""
        self._train(window, loss_fn, steps=False)
        return self._weights.mean_loss

    def _train(self, window: Window, loss_fn: LossFn, *, steps: bool) -> None:
        check_call(self, window, loss_fn)
        self._order.require_idle("window")
        self._recovery.begin(loss_fn, noted=self._may_void)
        if self._recovery.is_on:
            window.note_versions()
        # The retry is outside of the `except` block, whose traceback frames keep tensors alive.
        while (failure := self._attempt(window, loss_fn, steps=steps)) is not None:
            self._recovery.split(window, failure, once=self._control.ran_out())

    def _attempt(self, window: Window, loss_fn: LossFn, *, steps: bool) -> str | None:
        """Run a window once.

        Returns:
            The allocator's message if memory ran out and the window can be repeated, else None.
        """
        try:
            for micro in window:
                with self.autocast(), self._hooks.first_forward(self.plan):
                    result = loss_fn(self.model, micro)
                self.backward(result)
            if steps:
                self.step()
        except BaseException as error:
            is_open, in_optimizer = self._order.window is window, self._order.in_optimizer
            where = {"in_optimizer": in_optimizer, "may_retry": not self._peers.count_on_this}
            if is_open:
                self._abandon()
            failure = self._recovery.failure_of(error, **where) if is_open else None
            if failure is not None and (refusal := window.repeat_refusal):
                error.add_note(f"The step was not repeated with smaller micro-batches, because {refusal}.")
                failure = None
            if failure is None:
                self._peers.failed(error)
                raise
            return failure
        return None

    def note(self, name: str, detail: Mapping[str, Any]) -> None:
        """Add an event to the run's record, if there is a record."""
        if self._recorder is not None:
            self._recorder.event(name, detail)

    def close(self, error: BaseException | None = None) -> None:
        """Restore the user's model, optimizer and global flags; trained weights and optimizer state are kept.

        If the plan changed the C allocator's thresholds (mallopt), they are left at the largest values that glibc's own
        adjustment reaches.

        Args:
            error: the exception that ended the run, for the record.
        """
        if self._closed:
            return
        self._abandon()
        optimizers.drop_gradients(self._optimizer)
        self._closed = True
        # Each callback runs even if another raises. The record closes after all that may add events.
        with contextlib.ExitStack() as last:
            last.callback(self._voids.over, error)
            last.callback(self._position.let_go)
            last.callback(self._end_record, error)
            last.callback(self._keeper.close, error)
            self._undo.__exit__(type(error) if error else None, error, None)

    def _end_record(self, error: BaseException | None) -> None:
        for each in (self._recovery.account(), self._control.close()):
            if each is not None:
                self.note("account", each)
        if self._recorder is not None:
            self._recorder.close(self.stop_reason, error)

    # The `Loop` protocol, called by the open window.

    def open_window(self, window: Window) -> None:
        """Prepare a window; called by the window before its first micro-batch."""
        self._require_open()
        self._recovery.is_on &= not self._hooks.begin(self.plan)
        self._order.open(window)
        window.match(self._peers.steps(window.num_micro_batches))
        if self._may_void or not window.rows:
            self._recovery.note_start()
        self._control.opened(window)
        # Gradients are freed here, as in a plain loop, and not after the step: freed last, they cost thousands of page
        # faults per step (docs/LOG.md).
        optimizers.drop_gradients(self._optimizer, between_steps=True)
        self._gradients.begin()
        self._auxiliary.clear()
        self._weights.open(window.rows, window.num_micro_batches, self._control.num_batches)

    @property
    def _may_void(self) -> bool:
        return self._precision.scales or self._voids.wants_norm

    def begin_micro_batch(self, window: Window, rows: int, *, of_next: bool, last: bool) -> None:
        """Prepare a micro-batch; called by the window before yielding it."""
        self._require_open()
        self._order.begin_micro_batch(window, rows, last=last)
        self._backend.begin(last=last)
        self._control.begun(rows, of_next=of_next, last=last)

    def end_micro_batch(self, window: Window) -> None:
        """Check that backward was called; called by the window after the loop's body for each micro-batch."""
        try:
            self._order.end_micro_batch(window)
        except LoopError:
            self._abandon()
            raise

    # Internal methods.

    def _abandon(self) -> None:
        if self._order.window is None:
            return
        if self._order.unscaled:
            self._precision.renew()
        optimizers.drop_gradients(self._optimizer)
        self._gradients.end()
        self._order.reset()
        self._peers.over()
        self._backend.end()
        self._control.dropped()

    def _require_open(self) -> None:
        if self._closed:
            raise LoopError(
                "run",
                problem="The run is closed.",
                hint="Call trimtab.start again to train further.",
                code="run.closed",
            )
