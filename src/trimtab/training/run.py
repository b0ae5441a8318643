"""The training run: a plan applied to a live model and optimizer, and the methods that a loop calls.

    start -> window -> (micro-batch: forward under autocast -> backward)* -> [unscale] -> step -> window ... -> close

Methods called out of this order raise `LoopError` before changing any state. Optional parts are hooks (`hooks.py`).
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from typing import Any, Self

import torch
from torch import Tensor, nn

from trimtab.adaptive_batch.batch_size_policy import NoiseEstimate
from trimtab.core import validation
from trimtab.core.stateful import Load, loading_parts
from trimtab.core.stopping_rule import Stop, StopReason
from trimtab.losses import as_loss, detach_auxiliary, require_loss_function
from trimtab.plans.plan import Plan
from trimtab.settings.clip_norm import resolve_clip, with_own_limit
from trimtab.settings.precision import in_place
from trimtab.settings.schedule import rate_factor, require_rates
from trimtab.techniques import optimizers
from trimtab.techniques.learning_rate import applied_rate, scaled_rates
from trimtab.techniques.mixed_precision import MixedPrecision
from trimtab.techniques.optimizer_in_backward import has_updated, stepping_in
from trimtab.training import loop_errors
from trimtab.training.accumulation import WindowWeights, drop_gradients
from trimtab.training.apply_plan import apply_plan, lay_out, require_free, technique_states
from trimtab.training.backend import Backend, UserBackend, may_retry
from trimtab.training.batch import BY_CONTAINERS, BatchSplitting, EmptyBatch
from trimtab.training.batch_size_controller import BatchSizeController
from trimtab.training.data_position import DataPosition, length_of, require_state_kept
from trimtab.training.early_stopping import EarlyStopping
from trimtab.training.hooks import CheckpointHooks, Hooks, Outcome
from trimtab.training.loop_warnings import (
    EvaluationMode,
    LeftoverGradientChanges,
    UnequalBatches,
    check_first_loss,
    explained,
)
from trimtab.training.nonfinite import Cause, NonFinitePolicy
from trimtab.training.rank_sync import RankSync, RankWeights, UnevenInputs
from trimtab.training.split_conditions import for_model
from trimtab.training.step_recorder import StepRecorder
from trimtab.training.training_progress import TrainingProgress
from trimtab.training.user_hooks import HookChecks
from trimtab.training.wide_gradients import wide_gradients
from trimtab.training.window import AgreedWindow, OpenWindow, Window, WindowIterator, WindowMaker, unshared
from trimtab.training.window_snapshot import OutOfMemoryRetry, recovers_from

LossFn = Callable[[nn.Module, Any], Any]


class Run:
    """A plan applied to a model and optimizer. Made by `trimtab.start`; leaving the `with` block closes it.

    Attributes:
        model: the model as prepared by the plan (wrapped or sharded where the plan requires it).
        plan: the plan in effect; updated if a fallback changes it during training.
        stepped_by: optimizer that steps: the user's, or its sharded replacement, whose groups contain all parameters.
        position: position of the run in its training data.
        recorder: writer of the run's record; None without a record.
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
        plan = with_own_limit(plan, clip_norm)
        self._clip_norm = resolve_clip(plan, clip_norm)
        self._device, self._closed = next(model.parameters()).device, False
        self._precision = MixedPrecision(str(plan.precision.value), self._device)
        self._backend = backend = backend or UserBackend()
        exchange = backend.exchange
        self._consumed = TrainingProgress(plan, total_samples, total_tokens, exchange)
        self._voids = NonFinitePolicy("continue" if on_trial else nonfinite, self.note, is_alone=not exchange.has_peers)
        require_free(model)
        trained = optimizers.with_auxiliary_modules(model, modules)
        self._hook_checks = HookChecks(trained, plan, self._clip_norm, nonfinite, out_of_memory)
        self.plan, self.recorder, self._keeper = for_model(plan, model), recorder, keeper
        self.position = DataPosition(is_kept=keeper is not None)
        self._num_stopped = 0  # Epochs that a stop condition ended or prevented.
        self.loss = torch.tensor(float("nan"))
        self.grad_norm: Tensor | None = None
        self._auxiliary: list[Any] = []
        self._has_auxiliary = self._has_begun = False  # _has_begun: the first window was opened.
        self._is_loss_checked = on_trial  # Planning has checked the loss already.
        self._open, self._stopping, self._unequal = OpenWindow(), EarlyStopping(stop), UnequalBatches(plan)
        self._peers = RankSync(exchange, self.note, in_step=backend.in_step) if exchange.num_ranks > 1 else None
        self._weights = WindowWeights() if self._peers is None else RankWeights(self._peers, plan.batch_size)
        self._joining = None if self._peers is None else UnevenInputs(self._peers, batching)
        # A user's hook would run twice in a retry.
        can_retry = may_retry(backend, plan) and not self._hook_checks.found
        recovers = recovers_from(out_of_memory, plan, model, may_retry=can_retry)
        self._retry = OutOfMemoryRetry(trained, plan, self.note, is_on=recovers, watches=not on_trial)
        may_look = not on_trial and not self._hook_checks.found and plan.zero_stage.value is None
        with contextlib.ExitStack() as undo:
            undo.push(lay_out(model, optimizer, plan))
            backend.spread(model, optimizer, plan)
            undo.push(lambda kind, error, traceback: backend.gather(error))
            self.model, self.stepped_by = backend.model, backend.optimizer
            self._control: BatchSizeController | None = None
            self._num_batches = 1  # Loader batches per window, unless the plan adapts them.
            if plan.batch_rule is not None:
                self._control = BatchSizeController(
                    plan, model, self.stepped_by, exchange, self.note, self._weights, keeper
                )
            note = None if on_trial else self.note
            undo.push(apply_plan(model, self.model, optimizer, plan, self._open.forward, note, make_state=recovers))
            undo.callback(optimizer.register_step_post_hook(self._open.optimizer_stepped).remove)
            self._undo = undo.pop_all()
        self._open.forward.watched_device = "" if on_trial else self._device.type
        self._maker = WindowMaker(
            self,
            self.plan,
            self._device,
            batching,
            self._retry.limit,
            self._consumed.require_counted,
            None if self._control is None else self._control.micro_batch_of,
            None if self._joining is None else self._joining.keep,
        )
        self._hooks = Hooks(
            self._retry,
            wide_gradients(optimizer, plan) if backend.accumulates_alone else None,
            self._control,
            LeftoverGradientChanges(optimizer, self._remove_hook) if may_look else None,
            None if on_trial else EvaluationMode(model, self._remove_hook),
            self._joining,
            self._peers,
            self._stopping if self._stopping.wants_norm else None,
        )

    def _remove_hook(self, hook: Any) -> None:
        self._hooks.remove(hook)

    # The methods of the loop, in the order of their calls.

    def windows(self, loader: Iterable[Any]) -> WindowIterator:
        """Return an iterator over the windows of a loader, one optimizer step each.

        A window has one batch, or several if the plan allows adaptive batch sizes or `of_batches` set their number. The
        iterator ends early if a `Stop` condition is met. In a resumed run, the first call yields the rest of the
        interrupted epoch; `run.passes` is the number of epochs completed before. Leaving the loop by `break`, or
        starting another iteration, completes the epoch; a checkpoint saved while an exception is handled resumes within
        the epoch. `len()` of the iterator is the number of windows left in the epoch, if the loader has a length.

        Raises:
            LoopError: a window was opened and neither stepped nor discarded (checked for the last window too).
        """
        loop_errors.require_loader(loader)
        before, has_ended = self.position.num_drawn_before, self._has_ended()

        def length() -> int:
            if (number := length_of(loader)) is None:
                raise TypeError(f"The number of windows is unknown, because a {type(loader).__name__} has no len().")
            return 0 if has_ended else -(-max(0, number - before) // self.num_batches)

        return WindowIterator(self._pass_over(loader), length)

    def _pass_over(self, loader: Iterable[Any]) -> Generator[Window, None, None]:
        if self._keeper is not None:
            require_state_kept(loader)
        batches = iter(()) if self._has_ended() else self.position.batches(loader)
        number = self.position.number
        try:
            yield from self._windows(batches)
        except GeneratorExit:  # The loop dropped this generator, usually by `break`.
            if not self._has_ended():
                self.position.left(number)
            raise

    def _has_ended(self) -> bool:
        """Return True if a `Stop` condition or an interruption has ended the iteration."""
        if self.stop_reason is StopReason.INTERRUPTED:  # After a signal, the loop may still leave an epoch by `break`.
            return self._num_stopped > 0 or self.position.is_to_stay
        return self.stop_reason is not None

    def _windows(self, batches: Iterator[Any]) -> Iterator[Window]:
        joining = self._joining
        if joining is not None:
            joining.begin_pass()
        while True:
            self._require_idle("run.windows")
            if self._keeper is not None:
                self._keeper.between()
            self._backend.settle()
            with contextlib.nullcontext() if self._control is None else self._control.drawing():
                drawn = [] if self.stop_reason else self._drawn(batches)
            if drawn is None:
                continue
            if joining is not None:
                self._keep_for_padding(self.position.taken_first(), joining)
            if own := [batch for batch in drawn if not isinstance(batch, EmptyBatch)]:
                yield self._maker.window(own)
            elif joining is not None and joining.goes_on(self.stop_reason):
                if not joining.is_able:
                    self._keep_for_padding(self.position.drawn_anew(), joining)
                yield joining.window(self, self._device)
            elif not drawn:
                break
        if self.stop_reason:
            self._num_stopped += 1
        else:
            self.position.over()
        self._open.require_stepped("run.windows")

    def _keep_for_padding(self, batch: Any, joining: UnevenInputs) -> None:
        """Restore the padding batch for uneven inputs from a batch trained on before the resume; None is ignored."""
        if batch is not None:
            self._maker.keep(batch)
            joining.trained(applied=True)

    def _drawn(self, batches: Iterator[Any]) -> list[Any] | None:
        """Return the batches of the next window; None if a signal ended the loader's workers and the run is ending."""
        drawn: list[Any] = []
        try:
            taken = itertools.islice(batches, self.num_batches)
            drawn.extend(taken if self.num_batches == 1 else unshared(taken))
        except RuntimeError:  # The loader's worker processes received the signal too.
            if drawn or self._peers is not None or self._keeper is None or not self._keeper.is_leaving():
                raise
            return None
        return drawn

    def of_batches(self, num_batches: int) -> None:
        """Set the number of loader batches per window; the last window of an epoch may have fewer.

        Raises:
            LoopError: the plan adapts the batch size and sets this number itself, or a window is open.
        """
        num_batches = validation.integer("num_batches", num_batches)
        self._require_idle("run.of_batches")
        if self._control is not None:
            raise loop_errors.batch_size_adaptive(num_batches)
        self._num_batches = num_batches

    def window(self, *batches: Any) -> Window:
        """Make one window of the given batches. Pass `num_batches` batches to follow the plan.

        Raises:
            BatchError: the schedule depends on the number of samples, which is unknown.
            LoopError: the run saves checkpoints, which requires `windows` to track the position in the data.
        """
        if self._keeper is not None:
            raise loop_errors.position_unknown()
        self._require_open()
        return self._maker.window(batches)

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
        if not isinstance(window, Window) or window.run is not self:
            raise loop_errors.not_a_window(window, is_window=isinstance(window, Window))
        if not self._is_loss_checked or not callable(loss_fn):
            require_loss_function(loss_fn)
        if self._open.window is not None:
            raise self._open.still_open("window")
        self._retry.begin(loss_fn)
        if self._retry.is_on:
            window.note_versions()
        # The retry is outside of the `except` block, whose traceback frames keep tensors alive.
        while (failure := self._attempt(window, loss_fn, steps=steps)) is not None:
            self._retry.split(window, failure, once=self._control is not None and self._control.ran_out())

    def _attempt(self, window: Window, loss_fn: LossFn, *, steps: bool) -> str | None:
        """Run a window once; return the allocator's message if memory ran out and it can be repeated, else None."""
        checks = self._hook_checks
        try:
            for micro in window:
                with self.autocast(), contextlib.nullcontext() if checks.is_done else checks.first_forward(self.plan):
                    result = loss_fn(self.model, micro)
                if steps and window.num_micro_batches == 1 and self.plan.step_in_backward.value:
                    self._retry.step_begins(is_scaled=False)  # The backward pass changes parameters.
                with stepping_in(window.num_micro_batches, self.stepped_by) if steps else contextlib.nullcontext():
                    self.backward(result)
            if steps:
                self.step()
        except BaseException as error:
            is_open, in_optimizer = self._open.window is window, self._open.in_optimizer
            is_alone = self._peers is None or not self._peers.has_told
            may_retry = is_alone and not has_updated(self.stepped_by)
            failure = None
            if is_open:
                self._abandon()
                failure = self._retry.failure_of(error, in_optimizer=in_optimizer, may_retry=may_retry)
            if failure is not None and (refusal := window.repeat_refusal):
                error.add_note(f"The step was not repeated with smaller micro-batches, because {refusal}.")
                failure = None
            if failure is None:
                if self._peers is not None:
                    self._peers.failed(error)
                raise
            return failure
        return None

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
        state, hooks, precision = self._open, self._hooks, self._precision
        if not state.awaits_backward or not state.forward.seen:
            raise state.out_of_order()
        loss, count, auxiliary = as_loss(result, is_auxiliary=self._has_auxiliary)
        self._has_auxiliary = auxiliary is not None
        if not self._is_loss_checked:
            check_first_loss(loss, self.plan, state, is_scaled=precision.scales)
            self._is_loss_checked = True
        if self._hook_checks.found and count is not None:
            self._hook_checks.require_mean(state.window)
        rows = state.samples
        if rows:  # Padding micro-batches, which only join other ranks' collectives, have no auxiliary value.
            self._auxiliary.append(None if auxiliary is None else detach_auxiliary(auxiliary))
        # Comes before the weights: computing them may need an exchange between ranks.
        self._backend.begin_backward(loss)
        weighted = self._weights.weigh(loss, count, rows)
        if precision.scales:
            weighted = precision.scaled(weighted)
        if state.is_last and self._peers is not None:
            self._tell(self._peers)
        if state.is_last and self._unequal.is_on and count is None and state.window is not None:
            self._unequal.look(state.window)
        for act in hooks.backward_begins:
            act()
        try:
            self._backend.backward(weighted)
        except RuntimeError as error:
            if (explanation := explained(error)) is None:
                raise
            raise explanation from error
        state.awaits_backward = state.forward.seen = False
        for backward_ends in hooks.backward_ends:
            backward_ends(rows, rows if count is None else count)

    def _tell(self, peers: RankSync) -> None:
        """Send this rank's part of the window to the other ranks, before the gradient is reduced."""
        assert self._open.window is not None
        peers.tell(self._open.window, self._weights, self._retry.limit.rows, self._stopping.asked)

    def unscale(self) -> None:
        """Unscale the window's gradients, so that the loop can inspect or change the gradients before `step`.

        Divides by the loss scale and applies the window's weight. Call it before `step`, at most once per window.

        Raises:
            LoopError: no window is open, its last micro-batch has not run, or `unscale` was called before.
        """
        self._require_open()
        self._open.require_complete("run.unscale")
        if self._open.unscaled:
            raise loop_errors.unscaled_twice()
        self._show_gradient()
        self._open.unscaled = True
        self._precision.unscale(self.stepped_by)
        self._backend.multiply(self._weights.correction)

    def _show_gradient(self) -> None:
        """Call the hooks on the complete gradient, before unscaling or clipping changes it."""
        if not self._open.unscaled:
            for act in self._hooks.gradient_complete:
                act(self._precision.scale_on_device)

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
        state, weights, precision = self._open, self._weights, self._precision
        window = state.window
        if window is None or not state.is_last or state.awaits_backward:
            window = state.require_complete("run.step")
        for act in self._hooks.step_begins:
            act(is_scaled=precision.scales or weights.is_corrected_later)
        if precision.scales and not state.unscaled:
            self.unscale()
        self._show_gradient()
        remaining: float | Tensor = 1.0 if state.unscaled else weights.correction
        wants_norm = self._voids.wants_norm or self._stopping.wants_norm
        self.grad_norm = self._backend.finish(remaining, self._clip_norm, wants_norm=wants_norm)
        # If the optimizer raises and `step` is called again, gradients must not be multiplied twice.
        state.unscaled = True
        self.loss = weights.mean_loss if window.rows else self.loss
        agreed = self._agreed(window)
        factor = self._rate_factor(window, agreed)
        applied = not (self._voids.wants_norm and self._is_void())
        if applied:
            rates = contextlib.nullcontext() if factor == 1.0 else scaled_rates(self.stepped_by, factor)
            with self._backend.stepping(), rates:
                state.in_optimizer = True
                applied = self._backend.step(precision)
        self._finish(Outcome(window, agreed, weights.counted, applied, self.grad_norm), factor)
        return applied

    def _agreed(self, window: Window) -> AgreedWindow:
        """Return the window's samples, terms and batches, summed over all ranks; waits for the other ranks."""
        if self._peers is not None:
            return self._peers.agreed()
        return AgreedWindow(window.rows, self._weights.terms, window.num_batches, samples=window.samples)

    def _rate_factor(self, window: Window, agreed: AgreedWindow) -> float:
        if not self._consumed.is_scheduled and self._control is None:
            return float(self.plan.learning_rate_scale.value or 1.0)
        counted = self._weights.counted
        progress = self._consumed.progress_after(agreed.rows, counted, agreed.num_batches, window.batch_size)
        factor = rate_factor(self.plan, progress)
        return factor if self._control is None else factor * self._control.rate_factor(agreed.num_batches)

    def _is_void(self) -> bool:
        try:
            is_void = self._voids.is_void(self.grad_norm, self.loss, scaled=self._precision.scales)
        except BaseException:  # The policy raises: restore the state from before the window.
            self._retry.restore_skipped()
            self._abandon()
            raise
        if is_void:
            self._precision.renew()
        return is_void

    def _finish(self, outcome: Outcome, factor: float) -> None:
        """Count the window, record it, and call the hooks."""
        window, agreed, applied, consumed = outcome.window, outcome.agreed, outcome.applied, self._consumed
        consumed.rows += agreed.samples or 0
        consumed.windows += 1
        consumed.applied += applied
        if consumed.is_scheduled:
            consumed.advance(agreed.rows, outcome.counted)
        else:
            consumed.scheduled += agreed.rows
        if not applied or not window.rows:
            self._retry.restore_skipped()
        if not applied:
            self._precision.keep_scale(where=self._voids.is_no_overflow(self.loss))
        if self.recorder is not None:
            self.recorder.step(
                samples=agreed.samples,
                terms=agreed.terms,
                loss=self.loss,
                learning_rate=applied_rate(self.stepped_by, factor),
                applied=applied,
                grad_norm=self.grad_norm,
                loss_scale=self.loss_scale,
                num_micro_batches=window.num_micro_batches,
                noise_scale=None if self.noise is None else self.noise.scale,
            )
        self._open.reset()
        self._weights.close()
        if agreed.reason is not None:
            self._stopping.adopt(agreed.reason)
        for act in self._hooks.window_ends:
            act(outcome)
        self._retry.passed(outcome)
        if self._may_skip:
            self._voids.note(self.loss, applied=applied, has_bad_data=window.holds_nan)
        if not applied and self._precision.loss_scale is not None:
            cause = self._voids.outlasts(self._precision.loss_scale, self.loss)
            if cause is not None:
                self._precision.leave_fp16()
                self._note_precision(cause)
        if self.recorder is not None:
            self.recorder.stepped()
        if applied and window.rows:
            self._voids.applied(consumed.windows - 1, self.loss)

    def discard(self) -> None:
        """Drop the open window and its gradients, so that the next window can be opened.

        For loops that catch an error and continue. The window is not counted. Effects of its forward passes (batch
        statistics, random generators) remain. Does nothing if no window is open.
        """
        self._require_open()
        self._abandon()

    def evaluated(self, value: float, name: str = "metric") -> None:
        """Record the result of an evaluation, equal on every rank; it may meet the `Stop` condition."""
        self._require_open()
        value = validation.float_value("run.evaluated", value)
        self._stopping.evaluated(value)
        if self.recorder is not None:
            self.recorder.evaluation(self.consumed_samples, name, value)

    def checkpoint(self) -> None:
        """Save a checkpoint now, between two windows.

        Raises:
            ValueGivenError: the run was started without checkpoints.
            LoopError: a window is open.
            OSError: writing failed.
        """
        self._require_idle("run.checkpoint")
        if self._keeper is None:
            raise loop_errors.no_checkpoints()
        self._keeper.save()

    def interrupt(self) -> None:
        """End the run at a point from which it can be resumed: now, or with several ranks after their next window.

        The current epoch counts as unfinished even if the loop leaves it. With several ranks, every rank must make this
        call and continue iterating: `windows` ends by itself.
        """
        self.position.stays()
        self.ask_to_end()

    def ask_to_end(self) -> None:
        """Interrupt the run because of a signal; unlike after `interrupt`, `break` still completes the epoch."""
        self._stopping.asked = StopReason.INTERRUPTED
        if self._peers is None:
            self._stopping.adopt(StopReason.INTERRUPTED)

    def note(self, name: str, detail: Mapping[str, Any]) -> None:
        """Add an event to the run's record, if there is a record."""
        if self.recorder is not None:
            self.recorder.event(name, detail)

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
        drop_gradients(self.stepped_by)
        self._closed = True
        # Each callback runs even if another raises. The record closes after all that may add events.
        with contextlib.ExitStack() as last:
            last.callback(self._voids.over, error)
            last.callback(self.position.let_go)
            last.callback(self._end_record, error)
            if self._keeper is not None:
                last.callback(self._keeper.close, error)
            self._undo.__exit__(type(error) if error else None, error, None)

    def on_close(self, act: Callable[[], None]) -> None:
        """Call `act` when the run closes."""
        self._undo.callback(act)

    def _end_record(self, error: BaseException | None) -> None:
        if self._control is not None and (overhead := self._control.close()) is not None:
            self.note("account", overhead)
        if self.recorder is not None:
            self.recorder.close(self.stop_reason, error)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self.close(error)

    # Read-only state.

    @property
    def loss_share(self) -> float | Tensor:
        """Weight of this rank's mean loss in the mean over all ranks' samples or tokens; 1.0 in one process.

        The mean over ranks of `weight * mean loss` is the global mean. Available after the window's last micro-batch.
        With several ranks, reading it waits for the other ranks' metadata, as `unscale` and `step` do, but does not
        synchronise with the device.

        Raises:
            LoopError: no window is open, or its last micro-batch has not run.
        """
        self._open.require_complete("run.loss_share")
        return self._weights.share

    @property
    def auxiliary(self) -> tuple[Any, ...]:
        """Auxiliary value of each micro-batch of the last window, for losses that return `(loss, auxiliary)`.

        None for micro-batches without an auxiliary value. Tensors are detached and kept until the next window begins:
        return metrics rather than activations if memory is scarce.
        """
        return tuple(self._auxiliary)

    @property
    def num_batches(self) -> int:
        """Number of loader batches in the next window; 1 unless the plan adapts it or `of_batches` set it."""
        return self._num_batches if self._control is None else self._control.num_batches

    @property
    def passes(self) -> int:
        """Number of completed epochs, including epochs before a resume and epochs that the loop left by `break`.

        Epochs ended or prevented by a stop condition are counted, so that a loop over epochs terminates. Checkpoints do
        not count these epochs, so a resumed run continues with their remaining data.
        """
        return self.position.passes + self._num_stopped

    @property
    def consumed_samples(self) -> int:
        """Number of samples consumed, skipped steps included."""
        return self._consumed.rows

    @property
    def num_windows(self) -> int:
        """Number of finished windows, skipped steps included."""
        return self._consumed.windows

    @property
    def applied_steps(self) -> int:
        """Number of optimizer steps taken."""
        return self._consumed.applied

    @property
    def micro_batch_limit(self) -> int | None:
        """Largest micro-batch in samples that fits on every rank, known after an out-of-memory error; None before."""
        return self._retry.limit.rows

    @property
    def noise(self) -> NoiseEstimate | None:
        """Gradient noise scale over the last windows; None if the batch size is fixed or nothing was measured yet."""
        return None if self._control is None else self._control.noise

    @property
    def stop_reason(self) -> StopReason | None:
        """`Stop` condition that was met; None while the run continues."""
        return self._stopping.reason

    @property
    def loss_scale(self) -> float | None:
        """Current fp16 loss scale; None under any other precision."""
        return self._precision.loss_scale

    # State for checkpoints, in addition to model, optimizer and data position.

    def state_dict(self) -> dict[str, Any]:
        """Return the state of all parts: plain numbers, except the momentum tensors of a plan with Muon."""
        return {name: part.state_dict() for name, part in self._parts()}

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
        yield from (("weights", self._weights), ("memory", self._retry.limit))
        if self._control is not None:
            yield "batch", self._control
        yield from technique_states(self.model, self.stepped_by, self.plan)
        yield "precision", self._precision

    def _note_precision(self, cause: Cause) -> None:
        """Update plan and record if the precision in use differs from the plan."""
        before, after = self.plan.precision.value, self._precision.name
        if before != after:
            self.plan = in_place(self.plan, after, cause.reason)
            self.note("precision", {"from": before, "to": after, "code": cause.code, "reason": cause.reason})

    def report_nonfinite(self, what: str) -> None:
        """Warn, or raise `NonFiniteError`, by the run's policy, because a value (`what`) has become non-finite."""
        self._voids.report(what)

    # Callbacks of the open window.

    def open_window(self, window: Window) -> None:
        """Prepare a window; called by the window before its first micro-batch."""
        self._require_idle("window")
        if not self._has_begun:
            self._hook_checks.begin(self.plan)
            self._has_begun = True
        if self._hook_checks.found:  # The first forward may have registered hooks, which a retry would run twice.
            self._retry.is_on = False
        self._open.window = window
        if self._peers is not None:
            window.match(self._peers.steps(window.num_micro_batches))
        self._retry.may_skip = self._may_skip
        # Gradients are freed here, as in a plain loop, and not after the step: freed last, they cost thousands of page
        # faults per step (docs/LOG.md).
        drop_gradients(self.stepped_by, between_steps=True)
        for act in self._hooks.window_begins:
            act(window)
        self._auxiliary.clear()
        self._weights.open(window.rows, window.num_micro_batches, self.num_batches)

    @property
    def _may_skip(self) -> bool:
        """True if a step may be skipped."""
        return self._precision.scales or self._voids.wants_norm

    def begin_micro_batch(self, window: Window, rows: int, *, of_next: bool, last: bool) -> None:
        """Prepare a micro-batch; called by the window before yielding it."""
        self._require_open()
        state = self._open
        if state.window is not window:
            raise loop_errors.window_ended()
        state.samples, state.is_last, state.awaits_backward, state.forward.seen = rows, last, True, False
        self._backend.begin(last=last)
        for act in self._hooks.micro_batch_begins:
            act(rows, of_next=of_next, last=last)

    def end_micro_batch(self, window: Window) -> None:
        """Check that backward was called; called by the window after the loop's body for each micro-batch."""
        if self._open.window is window and self._open.awaits_backward:
            has_forward = self._open.forward.seen
            self._abandon()
            unpacked = "it was unpacked or converted, or its micro-batch was not passed to run.model"
            raise loop_errors.backward_missing() if has_forward else loop_errors.window_as_batch(unpacked)

    def _abandon(self) -> None:
        if self._open.window is None:
            return
        if self._open.unscaled:
            self._precision.renew()
        drop_gradients(self.stepped_by)
        self._open.reset()
        self._backend.end()
        for act in self._hooks.window_dropped:
            act()

    def _require_idle(self, verb: str) -> None:
        self._require_open()
        if self._open.window is not None:
            raise self._open.still_open(verb)

    def _require_open(self) -> None:
        if self._closed:
            raise loop_errors.run_closed()
