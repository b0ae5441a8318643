"""Iteration over a loader: draws windows and marks the points where a run can be checkpointed and resumed."""

from __future__ import annotations

import itertools
import operator
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import Any, Self

import torch
from torch import Tensor

from trimtab.adaptive_batch.batch_size_policy import NoiseEstimate
from trimtab.core import validation
from trimtab.core.errors import BatchError, LoopError
from trimtab.core.plan import Plan
from trimtab.core.stopping_rule import StopReason
from trimtab.settings.precision import MixedPrecision
from trimtab.training.accumulation import WindowWeights
from trimtab.training.backend import Backend
from trimtab.training.batch import NestedLists, tensors_in
from trimtab.training.batch_size_controller import BatchSizeController, FixedBatchSize
from trimtab.training.batch_splitting import UNKNOWN, BatchSplitting
from trimtab.training.call_order import CallOrder
from trimtab.training.checkpoint_hooks import CheckpointHooks
from trimtab.training.data_position import DataPosition, length_of, require_state_kept
from trimtab.training.early_stopping import EarlyStopping
from trimtab.training.out_of_memory import OutOfMemoryRetry
from trimtab.training.rank_sync import EmptyBatch, RankSync, UnevenInputs
from trimtab.training.step_recorder import StepRecorder
from trimtab.training.training_progress import TrainingProgress
from trimtab.training.window import Window

# Iterator over a loader's windows, with a length if the loader has one.


class WindowIterator(Iterator[Window]):
    """Windows of one epoch.

    Args:
        windows: yields the windows. Dropping this object drops the generator, which ends the epoch, as `break` does.
        length: returns the number of windows; raises `TypeError` if the loader has no length.
    """

    def __init__(self, windows: Generator[Window, None, None], length: Callable[[], int]) -> None:
        self._windows, self._length = windows, length

    def __iter__(self) -> WindowIterator:
        return self

    def __next__(self) -> Window:
        return next(self._windows)

    def __len__(self) -> int:
        """Return the number of windows; an estimate if the number of batches per window changes.

        Raises:
            TypeError: the loader has no length.
        """
        return self._length()

    def __bool__(self) -> bool:
        return True  # The length may be unknown.

    def close(self) -> None:
        """End the epoch."""
        self._windows.close()


# Read-only state of a run (counters, noise, stop reason) and its context manager.


class RunView:
    """Base class of `Run` with its read-only properties. Leaving the `with` block closes the run."""

    _auxiliary: list[Any]
    _consumed: TrainingProgress
    _control: BatchSizeController | FixedBatchSize
    _order: CallOrder
    _precision: MixedPrecision
    _recovery: OutOfMemoryRetry
    _stopping: EarlyStopping
    _weights: WindowWeights

    @property
    def loss_share(self) -> float | Tensor:
        """Weight of this rank's mean loss in the mean over all ranks' samples or tokens.

        The mean over ranks of `weight * mean loss` is the global mean.

        1.0 in one process. Available after the window's last micro-batch. With several ranks, reading it waits for the
        other ranks' metadata, as `unscale` and `step` do, but does not synchronise with the device.

        Raises:
            LoopError: no window is open, or its last micro-batch has not run.
        """
        self._order.require_complete("run.loss_share")
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
        return self._control.num_batches

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
        return self._recovery.limit.rows

    @property
    def noise(self) -> NoiseEstimate | None:
        """Gradient noise scale over the last windows; None if the batch size is fixed or nothing was measured yet."""
        return self._control.noise

    @property
    def stop_reason(self) -> StopReason | None:
        """`Stop` condition that was met; None while the run continues."""
        return self._stopping.reason

    @property
    def loss_scale(self) -> float | None:
        """Current fp16 loss scale; None under any other precision."""
        return self._precision.loss_scale

    def close(self, error: BaseException | None = None) -> None:
        """Close the run; `error` is the exception that ended it, or None."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self.close(error)


class LoaderIteration(RunView):
    """Base class of `Run` that draws windows from a loader."""

    _backend: Backend
    _batching: BatchSplitting
    _consumed: TrainingProgress
    _control: BatchSizeController | FixedBatchSize
    _device: torch.device
    _joining: UnevenInputs
    _inner_lists: NestedLists | None
    _keeper: CheckpointHooks
    _order: CallOrder
    _peers: RankSync
    _recorder: StepRecorder | None
    _position: DataPosition
    _recovery: OutOfMemoryRetry
    _num_stopped = 0  # Epochs that a stop condition ended or prevented.
    _warned_whole = False
    _is_first_window = True
    plan: Plan

    @property
    def passes(self) -> int:
        """Number of completed epochs, including epochs before a resume and epochs that the loop left by `break`.

        Epochs ended or prevented by a stop condition are counted, so that a loop over epochs terminates. Checkpoints do
        not count these epochs, so a resumed run continues with their remaining data.
        """
        return self._position.passes + self._num_stopped

    @property
    def position(self) -> DataPosition:
        """Position of the run in its training data."""
        return self._position

    @property
    def recorder(self) -> StepRecorder | None:
        """Writer of the run's record; None without a record."""
        return self._recorder

    def evaluated(self, value: float, name: str = "metric") -> None:
        """Record the result of an evaluation, equal on every rank; it may meet the `Stop` condition."""
        self._require_open()
        value = validation.float_value("run.evaluated", value)
        self._stopping.evaluated(value)
        if self._recorder is not None:
            self._recorder.evaluation(self.consumed_samples, name, value)

    def checkpoint(self) -> None:
        """Save a checkpoint now, between two windows.

        Raises:
            ValueGivenError: the run was started without checkpoints.
            LoopError: a window is open.
            OSError: writing failed.
        """
        self._require_open()
        self._order.require_idle("run.checkpoint")
        self._keeper.save()

    def interrupt(self) -> None:
        """End the run at a point from which it can be resumed: now, or with several ranks after their next window.

        The current epoch counts as unfinished even if the loop leaves it. With several ranks, every rank must make this
        call and continue iterating: `windows` ends by itself.
        """
        self._position.stays()
        self.ask_to_end()

    def ask_to_end(self) -> None:
        """Interrupt the run because of a signal.

        Unlike after `interrupt`, leaving the loop by `break` still completes the epoch.
        """
        self._stopping.asked = StopReason.INTERRUPTED
        if self._peers.num_ranks == 1:
            self._stopping.adopt(StopReason.INTERRUPTED)

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
        before, has_ended = self._position.num_drawn_before, self._has_ended()

        def length() -> int:
            if (number := length_of(loader)) is None:
                raise TypeError(f"The number of windows is unknown, because a {type(loader).__name__} has no len().")
            return 0 if has_ended else -(-max(0, number - before) // self.num_batches)

        return WindowIterator(self._pass_over(loader), length)

    def _pass_over(self, loader: Iterable[Any]) -> Generator[Window, None, None]:
        if self._keeper.keeps:
            require_state_kept(loader)
        batches = iter(()) if self._has_ended() else self._position.batches(loader)
        number = self._position.number
        try:
            yield from self._windows(batches)
        except GeneratorExit:  # The loop dropped this generator, usually by `break`.
            if not self._has_ended():
                self._position.left(number)
            raise

    def _has_ended(self) -> bool:
        """Return True if a `Stop` condition or an interruption has ended the iteration."""
        if self.stop_reason is StopReason.INTERRUPTED:  # After a signal, the loop may still leave an epoch by `break`.
            return self._num_stopped > 0 or self._position.is_to_stay
        return self.stop_reason is not None

    def _windows(self, batches: Iterator[Any]) -> Iterator[Window]:
        self._joining.begin_pass()
        while True:
            self._require_open()
            self._order.require_idle("run.windows")
            self._keeper.between()
            self._backend.settle()
            with self._control.drawing():
                drawn = [] if self.stop_reason else self._drawn(batches)
            if drawn is None:
                continue
            self._trained_before(self._position.taken_first())
            if own := [batch for batch in drawn if not isinstance(batch, EmptyBatch)]:
                yield self._window(*own)
            elif self._joining.goes_on(self.stop_reason):
                if not self._joining.is_able:
                    self._trained_before(self._position.drawn_anew())
                yield self._joining.window(self, self._device)
            elif not drawn:
                break
        if self.stop_reason:
            self._num_stopped += 1
        else:
            self._position.over()
        self._order.require_stepped("run.windows")

    def _drawn(self, batches: Iterator[Any]) -> list[Any] | None:
        """Return the batches of the next window; None if a signal ended the loader's workers and the run is ending."""
        drawn: list[Any] = []
        try:
            taken = itertools.islice(batches, self.num_batches)
            drawn.extend(taken if self.num_batches == 1 else _unshared(taken))
        except RuntimeError:  # The loader's worker processes received the signal too.
            if drawn or self._peers.num_ranks > 1 or not self._keeper.is_leaving():
                raise
            return None
        return drawn

    def of_batches(self, num_batches: int) -> None:
        """Set the number of loader batches per window; the last window of an epoch may have fewer.

        Raises:
            LoopError: the plan adapts the batch size and sets this number itself, or a window is open.
        """
        num_batches = validation.integer("num_batches", num_batches)
        self._require_open()
        self._order.require_idle("run.of_batches")
        if isinstance(self._control, BatchSizeController):
            raise LoopError(
                "run.of_batches",
                problem=f"run.of_batches({num_batches}) was called, but the plan adapts the number of batches per "
                f"step.",
                hint='Remove the call, or make the plan without adapt="batch".',
                code="loop.batch_adaptive",
            )
        self._control = FixedBatchSize(num_batches)

    def window(self, *batches: Any) -> Window:
        """Make one window of the given batches. Pass `num_batches` batches to follow the plan.

        Raises:
            BatchError: the schedule depends on the number of samples, which is unknown.
            LoopError: the run saves checkpoints, which requires `windows` to track the position in the data.
        """
        if self._keeper.keeps:
            raise LoopError(
                "run.window",
                problem="run.window(batch) does not track the data position, which a run with checkpoints saves.",
                hint="Iterate over run.windows(loader), or start the run without checkpoints.",
                code="loop.position_unknown",
            )
        return self._window(*batches)

    def _window(self, *batches: Any) -> Window:
        self._require_open()
        if not batches:
            hint = "Call run.window(batch)."
            raise LoopError(
                "run.window", got="no batch", expected="at least one batch", hint=hint, code="loop.no_batch"
            )
        rows, whole, reason = self._sizes(batches)
        may_split, samples = not reason, None if whole else sum(rows)
        self._warn_of_other_steps(rows, is_counted=not whole)
        planned = [self._micro_batch_of(each, len(batches)) for each in rows]
        micro_batches = planned if may_split else rows
        if not may_split:
            self._consumed.require_counted(samples, reason)
            self._warn_of_whole(any(map(operator.lt, planned, rows)) or (whole and self.plan.splits), reason)
        self._joining.keep(batches[0], rows[0], micro_batches[0])
        return Window(
            self,
            batches,
            rows,
            micro_batches,
            self._device,
            batching=self._batching,
            samples=samples,
            may_split=may_split,
            inner_lists=self._inner_lists,
        )

    def _sizes(self, batches: Sequence[Any]) -> tuple[list[int], bool, str]:
        """Return the size of each batch of a window.

        If the number of samples of any batch is unknown, every batch gets the size of a full batch, so that batches
        have equal weight, as with `loss / k` in a plain loop.

        Returns:
            The sizes; True if they are equal placeholders for unknown sizes; the reason why the batches cannot be
            split, or "".
        """
        readings = [self._batching.read(batch) for batch in batches]
        reason = next((reading.reason for reading in readings if not reading.is_splittable), "")
        check = self.plan.check
        if self._batching.count is None and check is not None and check.code == UNKNOWN:
            return [self.plan.batch_size] * len(batches), True, reason or check.reason
        rows = [reading.samples for reading in readings if reading.samples is not None]
        if len(rows) < len(readings):
            return [self.plan.batch_size] * len(batches), True, reason
        return rows, False, reason

    def _warn_of_whole(self, is_planned: bool, reason: str) -> None:
        """Warn once if a batch that the plan would split runs as a single micro-batch."""
        if is_planned and not self._warned_whole:
            self._warned_whole = True
            text = f"A batch was not split into the micro-batches of the plan, because {reason}."
            hint = "Pass functions as count= and split= to trimtab.start: count(batch) and split(batch, start, stop)."
            warnings.warn(f"{text} {hint}", RuntimeWarning, stacklevel=4)

    def _warn_of_other_steps(self, rows: Sequence[int], *, is_counted: bool) -> None:
        """Warn in the first window if its number of samples differs from the accumulated step that was planned."""
        is_first, self._is_first_window = self._is_first_window, False
        accumulate, planned = self.plan.reference.accumulate, self.plan.batch_size
        if not is_first or not is_counted or accumulate == 1 or isinstance(self._control, BatchSizeController):
            return
        step = f"The plan was made for steps of {planned} samples from {accumulate} loader batches"
        if sum(rows) <= planned / accumulate:
            text = f"{step}, but this step has {sum(rows)} samples. Call run.of_batches({accumulate}) before "
            text += "run.windows(loader)."
        elif len(rows) > 1 and max(rows) < int(self.plan.micro_batch.value or 1):
            text = (
                f"{step} in micro-batches of {self.plan.micro_batch.value} samples, but a loader batch has only "
                f"{max(rows)} samples, and micro-batches do not join batches. Let the loader yield {planned} samples."
            )
        else:
            return
        warnings.warn(text, RuntimeWarning, stacklevel=6)

    def _micro_batch_of(self, rows: int, num_batches: int) -> int:
        planned = self.plan.micro_batch_of(rows)
        return self._recovery.micro_batch_of(self._control.micro_batch_of(rows, planned, num_batches))

    def _trained_before(self, batch: Any) -> None:
        """Restore the padding batch for uneven inputs from a batch trained on before the resume; None is ignored."""
        if batch is not None and self._peers.num_ranks > 1:
            (rows,), _, reason = self._sizes([batch])
            micro_batch = rows if reason else self._recovery.micro_batch_of(self.plan.micro_batch_of(rows))
            self._joining.keep(batch, rows, micro_batch)
            self._joining.stepped(applied=True)

    def _require_open(self) -> None:
        """Raise `LoopError` if the run is closed."""
        raise NotImplementedError

    def open_window(self, window: Window) -> None:
        """Called by the window before its first micro-batch."""
        raise NotImplementedError

    def begin_micro_batch(self, window: Window, rows: int, *, of_next: bool, last: bool) -> None:
        """Called by the window before each micro-batch."""
        raise NotImplementedError

    def end_micro_batch(self, window: Window) -> None:
        """Called by the window after the loop's body for each micro-batch."""
        raise NotImplementedError


def _unshared(batches: Iterator[Any]) -> Iterator[Any]:
    """Yield the batches of one window, checking that the loader does not reuse their memory.

    Raises:
        BatchError: the loader overwrote the tensors of an earlier batch of the same window.
    """
    seen: list[tuple[Tensor, int]] = []
    for batch in batches:
        held = [] if isinstance(batch, EmptyBatch) else [*filter(_is_written_noted, tensors_in(batch))]
        again = {each.data_ptr() for each in held}
        if any(each.data_ptr() in again and each._version != version for each, version in seen):
            raise BatchError(
                "batch",
                problem="The loader overwrote the tensors of a batch when it drew the next batch of the same step.",
                hint="Let the loader yield new tensors or copies, because a step of several batches needs all of them.",
                code="batch.overwritten",
            )
        seen += [(each, each._version) for each in held]
        yield batch


def _is_written_noted(tensor: Tensor) -> bool:
    """Return True if a tensor has strided memory and a version counter."""
    return tensor.layout is torch.strided and not tensor.is_inference()
