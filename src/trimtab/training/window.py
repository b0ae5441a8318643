"""Windows: the data of one optimizer step, iterated once as micro-batches, and the order of calls within a window.

idle -> window open -> (micro-batch begun -> forward seen -> backward done)* -> complete -> [unscaled] -> idle
"""

from __future__ import annotations

import linecache
import operator
import sys
import warnings
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from trimtab.core.errors import BatchError, LoopError
from trimtab.core.stopping_rule import StopReason
from trimtab.losses import Count
from trimtab.plans.plan import Plan
from trimtab.techniques.compiled_call import noting_calls
from trimtab.training.batch import (
    BY_CONTAINERS,
    UNKNOWN,
    BatchSplitting,
    EmptyBatch,
    holds_nan,
    tensors_in,
    to_device,
    versions_of,
    with_new_containers,
)
from trimtab.training.loop_errors import BACKWARD, WindowAttributeError, window_as_batch
from trimtab.training.out_of_memory import MicroBatchLimit

_TORCH, _OWN = str(Path(torch.__file__).parent), str(Path(__file__).parents[1])
_STEPPED = (
    "run.train_step() calls run.step() itself. To call run.step() in the loop, use run.accumulate(window, loss_fn), or "
    "`for micro in window` with run.backward(loss), before run.step()."
)
_FINISH = "Complete the open window with run.step(), or drop it with run.discard()."


class Window:
    """The batches of one optimizer step; iterating yields micro-batches on the model's device.

    Args:
        batches: loader batches; their host copies are kept until the window ends.
        rows: samples of each batch, used as weights.
        micro_batches: samples per micro-batch, for each batch.
        batching: counts and splits batches.
        samples: total samples; None if unknown, in which case `rows` are equal placeholders.
        may_split: False if the batches cannot be split.

    Attributes:
        run: the run that made the window; its `open_window`, `begin_micro_batch` and `end_micro_batch` are called.
        rows: total of `rows`.
        num_micro_batches: number of micro-batches, known before the first is yielded.
        num_padding: number of zero-weight micro-batches at the start of the window.
    """

    def __init__(
        self,
        run: Any,
        batches: Sequence[Any],
        rows: Sequence[int],
        micro_batches: Sequence[int],
        device: torch.device,
        *,
        batching: BatchSplitting = BY_CONTAINERS,
        samples: int | None = None,
        may_split: bool = True,
    ) -> None:
        self.rows, self.num_batches = sum(rows), len(batches)
        self.samples, self.may_split = samples, may_split
        self._batching = batching
        self._versions: tuple[tuple[int, ...], ...] | None = None
        self.run, self._device = run, device
        self._batches, self._batch_size = tuple(batches), tuple(rows)
        self._micro_batches = tuple(micro_batches)
        self._used = False
        self._padding, self.num_padding = None, 0
        self.num_micro_batches = self._count()

    def _count(self) -> int:
        count = self.num_padding
        for rows, micro in zip(self._batch_size, self._micro_batches, strict=True):
            count += -(-rows // micro)
        return count

    @property
    def micro_batch(self) -> int:
        """Samples in the largest micro-batch."""
        return max((min(pair) for pair in zip(self._batch_size, self._micro_batches, strict=True)), default=0)

    @property
    def batch_size(self) -> int:
        """Samples in the largest loader batch."""
        return max(self._batch_size, default=0)

    def holds_nan(self) -> bool:
        """Return True if a batch contains NaN. Infinite values are accepted, as masks contain them. Synchronises."""
        return holds_nan(self._batches)

    @property
    def has_equal_batches(self) -> bool:
        """True if all batches have the same number of samples."""
        return len(set(self._batch_size)) <= 1

    def note_versions(self) -> None:
        """Record the version counters of the batch tensors, to detect in-place changes by the loss."""
        self._versions = tuple(map(versions_of, self._batches))

    @property
    def repeat_refusal(self) -> str:
        """Reason why the window cannot be repeated in smaller micro-batches, or ""."""
        if not self.may_split:
            return "the batch cannot be split"
        if self._versions is not None and self._versions != tuple(map(versions_of, self._batches)):
            return "the loss function changed the batch in place"
        return ""

    def split(self, micro_batch: int) -> None:
        """Restart the window with micro-batches of at most `micro_batch` samples."""
        self._micro_batches = tuple(min(micro_batch, each) for each in self._micro_batches)
        self.num_micro_batches = self._count()
        self._used = False

    def pad(self, micro_batch: Any, num: int) -> None:
        """Prepend `num` zero-weight micro-batches, so that this rank takes part in other ranks' collectives."""
        self._padding, self.num_padding = micro_batch, num
        self.num_micro_batches = self._count()

    def match(self, num: int) -> None:
        """Pad the window to `num` micro-batches, the largest number on any rank."""
        if num > self.num_micro_batches:
            micro_batch, _ = next(self._batching.slices(self._batches[0], self._batch_size[0], self._micro_batches[0]))
            self.pad(micro_batch, num - self.num_micro_batches)

    def __len__(self) -> int:
        return self.num_micro_batches

    def __getitem__(self, index: Any) -> Any:
        raise window_as_batch(f"window[{index!r:.20}] was read")

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            raise window_as_batch(f"window.{name} was read", WindowAttributeError)

    @classmethod
    def __torch_function__(cls, function: Any, *_: Any) -> Any:
        name = getattr(function, "__name__", "a function")
        raise window_as_batch(f"it was passed to torch ({name})")

    def __iter__(self) -> Iterator[Any]:
        if self._used:
            raise LoopError(
                "window",
                problem="A window was iterated over a second time.",
                hint="Take the next window of run.windows(loader).",
                code="loop.window_used",
            )
        self.run.open_window(self)
        self._used = True
        left = self.num_micro_batches
        for _ in range(self.num_padding):
            left -= 1
            self.run.begin_micro_batch(self, 0, of_next=False, last=left == 0)
            yield to_device(with_new_containers(self._padding), self._device)
            self.run.end_micro_batch(self)
        for batch, rows, micro_batch in zip(self._batches, self._batch_size, self._micro_batches, strict=True):
            parts: Iterable[tuple[Any, int]] = ((batch, rows),)
            if rows > micro_batch:
                parts = self._batching.slices(batch, rows, micro_batch, is_read=self.may_split)
            of_next = True
            for micro, samples in parts:
                left -= 1
                self.run.begin_micro_batch(self, samples, of_next=of_next, last=left == 0)
                yield to_device(with_new_containers(micro), self._device)
                self.run.end_micro_batch(self)
                of_next = False


class WindowMaker:
    """Makes the windows of a run.

    Args:
        limit: micro-batch size that fits.
        require_counted: raises `BatchError` if the number of samples is needed; called if it is None.
        adapt: returns the micro-batch for `(samples, planned micro-batch, number of batches)`; None keeps the plan's.
        keep: receives the first batch of a window, its samples and its micro-batch; None without several ranks.
    """

    def __init__(
        self,
        run: Any,
        plan: Plan,
        device: torch.device,
        batching: BatchSplitting,
        limit: MicroBatchLimit,
        require_counted: Callable[[int | None, str], None],
        adapt: Callable[[int, int, int], int] | None,
        keep: Callable[[Any, int, int], None] | None,
    ) -> None:
        self._run, self._plan, self._device, self._batching = run, plan, device, batching
        self._limit, self._require_counted, self._adapt, self._keep = limit, require_counted, adapt, keep
        self._has_warned, self._is_first = False, True
        self._planned: dict[int, int] = {}  # Planned micro-batch by samples of a loader batch.

    def window(self, batches: Sequence[Any]) -> Window:
        """Return a window of the given batches.

        Raises:
            BatchError: the schedule depends on the number of samples, which is unknown.
            LoopError: there is no batch.
        """
        if not batches:
            hint = "Call run.window(batch)."
            raise LoopError(
                "run.window", got="no batch", expected="at least one batch", hint=hint, code="loop.no_batch"
            )
        rows, whole, reason = self._sizes(batches)
        may_split, samples = not reason, None if whole else sum(rows)
        if self._is_first:
            self._is_first = False
            if not whole:
                self._warn_of_other_steps(rows)
        planned = [self._micro_batch_of(each, len(batches)) for each in rows]
        micro_batches = planned if may_split else rows
        if not may_split:
            self._require_counted(samples, reason)
            self._warn_of_whole(any(map(operator.lt, planned, rows)) or (whole and self._plan.splits), reason)
        if self._keep is not None:
            self._keep(batches[0], rows[0], micro_batches[0])
        return Window(
            self._run,
            batches,
            rows,
            micro_batches,
            self._device,
            batching=self._batching,
            samples=samples,
            may_split=may_split,
        )

    def keep(self, batch: Any) -> None:
        """Keep a batch that was trained on before a resume, as the first batch of a window."""
        (rows,), _, reason = self._sizes([batch])
        if self._keep is not None:
            self._keep(batch, rows, rows if reason else self._limit.of(self._plan.micro_batch_of(rows)))

    def _sizes(self, batches: Sequence[Any]) -> tuple[list[int], bool, str]:
        """Return the size of each batch of a window; True for placeholders; and why batches cannot be split, or "".

        If the number of samples of any batch is unknown, every batch gets the size of a full batch, so that batches
        have equal weight, as with `loss / k` in a plain loop.
        """
        readings = [self._batching.read(batch) for batch in batches]
        reason = next((reading.reason for reading in readings if not reading.is_splittable), "")
        check = self._plan.check
        if self._batching.count is None and check is not None and check.code == UNKNOWN:
            return [self._plan.batch_size] * len(batches), True, reason or check.reason
        rows = [reading.samples for reading in readings if reading.samples is not None]
        if len(rows) < len(readings):
            return [self._plan.batch_size] * len(batches), True, reason
        return rows, False, reason

    def _micro_batch_of(self, rows: int, num_batches: int) -> int:
        planned = self._planned.get(rows)
        if planned is None:
            planned = self._planned[rows] = self._plan.micro_batch_of(rows)
        if self._adapt is not None:
            planned = self._adapt(rows, planned, num_batches)
        return planned if self._limit.rows is None else self._limit.of(planned)

    def _warn_of_whole(self, is_planned: bool, reason: str) -> None:
        """Warn once if a batch that the plan would split runs as a single micro-batch."""
        if is_planned and not self._has_warned:
            self._has_warned = True
            text = f"A batch was not split into the micro-batches of the plan, because {reason}."
            hint = "Pass functions as count= and split= to trimtab.start: count(batch) and split(batch, start, stop)."
            warnings.warn(f"{text} {hint}", RuntimeWarning, stacklevel=4)

    def _warn_of_other_steps(self, rows: Sequence[int]) -> None:
        """Warn if the first window's number of samples differs from the accumulated step that was planned."""
        accumulate, planned = self._plan.reference.accumulate, self._plan.batch_size
        if accumulate == 1 or self._adapt is not None:
            return
        step = f"The plan was made for steps of {planned} samples from {accumulate} loader batches"
        if sum(rows) <= planned / accumulate:
            text = f"{step}, but this step has {sum(rows)} samples. Call run.of_batches({accumulate}) before "
            text += "run.windows(loader)."
        elif len(rows) > 1 and max(rows) < int(self._plan.micro_batch.value or 1):
            text = (
                f"{step} in micro-batches of {self._plan.micro_batch.value} samples, but a loader batch has only "
                f"{max(rows)} samples, and micro-batches do not join batches. Let the loader yield {planned} samples."
            )
        else:
            return
        warnings.warn(text, RuntimeWarning, stacklevel=6)


def unshared(batches: Iterator[Any]) -> Iterator[Any]:
    """Yield the batches of one window; `BatchError` if the loader overwrote an earlier batch of the same window."""
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


class WindowIterator(Iterator[Window]):
    """Windows of one epoch. Dropping this object drops the generator, which ends the epoch, as `break` does."""

    def __init__(self, windows: Generator[Window, None, None], length: Callable[[], int]) -> None:
        self._windows, self._length = windows, length

    def __iter__(self) -> WindowIterator:
        return self

    def __next__(self) -> Window:
        return next(self._windows)

    def __len__(self) -> int:
        """Return the number of windows, an estimate if batches per window change; `TypeError` without a length."""
        return self._length()

    def __bool__(self) -> bool:
        return True  # The length may be unknown.

    def close(self) -> None:
        """End the epoch."""
        self._windows.close()


@dataclass(frozen=True)
class AgreedWindow:
    """A window summed over all ranks.

    Args:
        num_batches: loader batches, mean over ranks.
        goes_on: True if any rank has data.
        reason: stop reason of a rank, in effect after this window; None without a stop.
        limit: smallest micro-batch limit of any rank; None without a limit.
        samples: number of samples of all ranks; None if unknown on a rank, in which case `rows` are placeholders.
    """

    rows: int
    terms: Count
    num_batches: float
    goes_on: bool = True
    reason: StopReason | None = None
    limit: int | None = None
    samples: int | None = None


class OpenWindow:
    """State of a run within its window. A call out of order raises before the state changes.

    Attributes:
        window: the open window; None between windows.
        forward: records the forwards of the run's model.
        samples: samples of the current micro-batch; 0 for padding.
        is_last: True if the current micro-batch is the window's last.
        awaits_backward: True from the start of a micro-batch to its backward.
        unscaled: True if the gradients have their final scale.
        in_optimizer: True while the run steps the optimizer.
    """

    unscaled = False

    def __init__(self) -> None:
        self.forward = ForwardRecorder()
        self._has_warned = False
        self.reset()

    def reset(self) -> None:
        """Return to the state between windows."""
        self.window: Window | None = None
        self.samples = 0
        self.is_last = self.awaits_backward = self.unscaled = self.in_optimizer = False

    def still_open(self, verb: str) -> LoopError:
        """Return the error for a call that needs the open window to be finished."""
        problem = "A new window was requested before run.step() for the open window."
        return LoopError(verb, problem=problem, hint=_FINISH, code="loop.window_open")

    def require_stepped(self, verb: str) -> None:
        """Raise `LoopError` if a window is still open at the end of the loader."""
        if self.window is not None:
            problem = "The loader ended while a window was open, without run.step() for its gradients."
            raise LoopError(verb, problem=problem, hint=_FINISH, code="loop.window_open")

    def require_complete(self, verb: str) -> Window:
        """Return the open window, after checking that every micro-batch had its backward."""
        if self.window is None:
            problem = f"{verb}() was called without an open window."
            raise LoopError(verb, problem=problem, hint=_STEPPED, code="loop.no_window")
        if not self.is_last or self.awaits_backward:
            raise LoopError(
                verb,
                problem=f"{verb}() was called before run.backward(loss) for the last micro-batch of the window.",
                hint="Complete the loop over the window, or drop the window with run.discard().",
                code="loop.window_incomplete",
            )
        return self.window

    def out_of_order(self) -> LoopError:
        """Return the error for a call of `run.backward` that does not follow a forward of the current micro-batch."""
        if not self.awaits_backward:
            problem = "run.backward was called without an open micro-batch, or twice for the same micro-batch."
            hint = f"{BACKWARD} run.train_step(window, loss_fn) includes the backward passes."
            return LoopError("run.backward", problem=problem, hint=hint, code="loop.no_micro_batch")
        return LoopError(
            "run.backward",
            problem="run.backward was called before run.model had a forward for this micro-batch.",
            hint="Compute the loss with run.model(...), not with a copy, a submodule or another method of the model.",
            code="loop.forward_missing",
        )

    def optimizer_stepped(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Warn once if the loop itself steps the optimizer; a post hook of the optimizer."""
        if not self.in_optimizer and not self._has_warned:
            self._has_warned = _warn_of_leftover_step(optimizer, is_open=self.window is not None)


class ForwardRecorder:
    """Forward pre-hook that records calls of the watched model, but not of copies such as an EMA.

    Attributes:
        seen: True if the model had a forward for the current micro-batch.
        watched_device: type of the device whose autocast is recorded; "" records nothing.
        cast: autocast dtype of the last forward; None without autocast.
    """

    def __init__(self) -> None:
        self.seen = False
        self.watched_device = ""
        self.cast: torch.dtype | None = None
        self._watched: Callable[[], nn.Module | None] = lambda: None

    def __call__(self, module: nn.Module, args: Any) -> None:
        if module is self._watched():
            self.note()

    def note(self) -> None:
        """Record a forward of the model."""
        self.seen = True
        if self.watched_device:
            is_on = torch.is_autocast_enabled(self.watched_device)
            self.cast = torch.get_autocast_dtype(self.watched_device) if is_on else None

    def __deepcopy__(self, memo: dict[int, Any]) -> ForwardRecorder:
        return self

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return ForwardRecorder, ()

    def watch(self, model: nn.Module) -> Callable[[], None]:
        """Install the hook, or wrap the call of a compiled model; return a function that removes it."""
        if model._compiled_call_impl is not None:
            return noting_calls(model, self.note)
        self._watched = weakref.ref(model)
        try:
            return model.register_forward_pre_hook(self).remove
        except Exception:  # A scripted model or a user-defined class may reject hooks.
            return noting_calls(model, self.note)


def _warn_of_leftover_step(optimizer: torch.optim.Optimizer, *, is_open: bool) -> bool:
    """Warn if the loop stepped the optimizer itself, which steps parameters twice per window; return True if warned.

    Args:
        is_open: True if a window is open, so that the step bypasses the run.
    """
    if not any(p.grad is not None for group in optimizer.param_groups for p in group["params"]):
        return False  # A step without gradients changes nothing.
    frame = _caller()
    if frame is None or frame.f_code.co_filename.startswith(_OWN):
        return False  # Planning times optimizer steps.
    name, number = frame.f_code.co_filename, frame.f_lineno
    where, line = f"{name}:{number}", linecache.getline(name, number).strip()
    if is_open:
        text = f"optimizer.step() at {where} bypasses the run, which then does not clip, unscale or count the step. "
        text += "Call run.step() instead."
    else:
        text = f"optimizer.step() at {where} steps in addition to run.step(), so that each step is applied twice. "
        text += "Remove the call of optimizer.step()."
    warnings.warn(f"{text} The line is: {line}" if line else text, RuntimeWarning, stacklevel=4)
    return True


def _caller() -> FrameType | None:
    """Return the innermost frame outside of torch and this file."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and (frame.f_code.co_filename == __file__ or frame.f_code.co_filename.startswith(_TORCH)):
        frame = frame.f_back
    return frame
