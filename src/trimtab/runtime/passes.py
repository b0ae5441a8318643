"""A run's passes over a loader: windows drawn one by one, which is where a run can be kept and gone on with."""

from __future__ import annotations

import itertools
import operator
import warnings
from collections.abc import Generator, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from trimtab.core import checks
from trimtab.core.errors import BatchError, LoopError
from trimtab.core.plan import Plan
from trimtab.core.stop import StopReason
from trimtab.runtime.backend import Backend
from trimtab.runtime.batch_control import BatchControl
from trimtab.runtime.batches import tensors_in
from trimtab.runtime.batching import UNKNOWN, Batching
from trimtab.runtime.consumed import Consumed
from trimtab.runtime.data_position import DataPosition, length_of, require_state_kept
from trimtab.runtime.fixed_batch import FixedBatch
from trimtab.runtime.inner_lists import InnerLists
from trimtab.runtime.joining import Joining, NoRows
from trimtab.runtime.keeping import Keeper
from trimtab.runtime.order import LoopOrder
from trimtab.runtime.peers import Peers
from trimtab.runtime.recorder import Recorder
from trimtab.runtime.recovery import Recovery
from trimtab.runtime.run_view import RunView
from trimtab.runtime.window import Window
from trimtab.runtime.windows import Windows


class Passes(RunView):
    """How a run draws its windows."""

    _backend: Backend
    _batching: Batching
    _consumed: Consumed
    _control: BatchControl | FixedBatch
    _device: torch.device
    _joining: Joining
    _inner_lists: InnerLists | None
    _keeper: Keeper
    _order: LoopOrder
    _peers: Peers
    _recorder: Recorder | None
    _position: DataPosition
    _recovery: Recovery
    _num_stopped = 0  # passes that a stop condition ended, or let nobody begin
    _warned_whole = False
    _is_first_window = True
    plan: Plan

    @property
    def passes(self) -> int:
        """Passes over the loader that are over, before the run was gone on with too; those that the loop left are.

        A loop over passes ends where the run is stopped, so those that are asked for then are counted; a checkpoint
        counts none of them, and a run that goes on from it sees what was left.
        """
        return self._position.passes + self._num_stopped

    @property
    def position(self) -> DataPosition:
        """Where the run is in its data."""
        return self._position

    @property
    def recorder(self) -> Recorder | None:
        """What writes the run's record, if it has one."""
        return self._recorder

    def evaluated(self, value: float, name: str = "metric") -> None:
        """Record the result of an evaluation, which may meet the `Stop` condition. The same on every rank."""
        self._require_open()
        value = checks.figure("run.evaluated", value)
        self._stopping.evaluated(value)
        if self._recorder is not None:
            self._recorder.evaluation(self.consumed_rows, name, value)

    def checkpoint(self) -> None:
        """Save the run as it is between two windows, whether that is due or not.

        Raises:
            ValueGivenError: it was started without checkpoints. LoopError: a window is open. OSError: it failed.
        """
        self._require_open()
        self._order.require_idle("run.checkpoint")
        self._keeper.save()

    def interrupt(self) -> None:
        """Have the run end where it can be gone on with: here, or of several ranks after their next window.

        A pass that the loop leaves for it is not over. Of several ranks all call it, and go on drawing: `windows` ends.
        """
        self._position.stays()
        self.ask_to_end()

    def ask_to_end(self) -> None:
        """Interrupt the run for a signal, which is no reason to leave a pass: where the loop does, it has its own."""
        self._stopping.asked = StopReason.INTERRUPTED
        if self._peers.num_ranks == 1:
            self._stopping.adopt(StopReason.INTERRUPTED)

    def windows(self, loader: Iterable[Any]) -> Windows:
        """Return an iterator over windows of the loader's batches, one optimizer step each.

        A window has one batch, or several if the plan allows adaptive batch sizes or `of_batches` set their number.

        Ends early where a `Stop` condition is met. Of a run that is gone on with, the first call yields what was left
        of the pass that was under way; `run.passes` says how many were over before it. A pass that the loop leaves, by
        `break` or as it begins another, is over; by an error it is for a checkpoint that is saved as that is handled
        under way yet.

        Its length is the number of windows left in the epoch, if the loader has a length.

        Raises:
            LoopError: a window was opened and neither stepped nor discarded; the last one too.
        """
        before, has_ended = self._position.num_drawn_before, self._has_ended()

        def length() -> int:
            if (number := length_of(loader)) is None:
                raise TypeError(f"a {type(loader).__name__} has no length")
            return 0 if has_ended else -(-max(0, number - before) // self.num_batches)

        return Windows(self._pass_over(loader), length)

    def _pass_over(self, loader: Iterable[Any]) -> Generator[Window, None, None]:
        if self._keeper.keeps:
            require_state_kept(loader)
        batches = iter(()) if self._has_ended() else self._position.batches(loader)
        number = self._position.number
        try:
            yield from self._windows(batches)
        except GeneratorExit:  # the loop dropped this generator, which it does at once where nobody else holds it
            if not self._has_ended():
                self._position.left(number)
            raise

    def _has_ended(self) -> bool:
        """Return whether a `Stop` condition ends the pass, or an interruption has: it is not over then."""
        if self.stop_reason is StopReason.INTERRUPTED:  # a signal is no reason to leave a pass: the loop has its own
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
            if own := [batch for batch in drawn if not isinstance(batch, NoRows)]:
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
        """Return the batches of the next window; None where a signal ended what draws them, and the run is left."""
        drawn: list[Any] = []
        try:
            taken = itertools.islice(batches, self.num_batches)
            drawn.extend(taken if self.num_batches == 1 else _unshared(taken))
        except RuntimeError:  # of a loader whose workers were sent the signal too
            if drawn or self._peers.num_ranks > 1 or not self._keeper.is_leaving():
                raise
            return None
        return drawn

    def of_batches(self, num_batches: int) -> None:
        """Have each window of `windows` be of so many loader batches; the last of a pass of those that are left.

        Raises:
            LoopError: the plan freed the batch, so that it says how many; or a window is open.
        """
        num_batches = checks.integer("num_batches", num_batches)
        self._require_open()
        self._order.require_idle("run.of_batches")
        if isinstance(self._control, BatchControl):
            given, expected = "a plan that freed the batch", "one that leaves it, or windows of what it says"
            raise LoopError("run.of_batches", given=given, expected=expected)
        self._control = FixedBatch(num_batches)

    def window(self, *batches: Any) -> Window:
        """Return one batch as a window, or several as one: as many as `num_batches` says, to follow the plan.

        Raises:
            BatchError: the schedule goes by samples, and their number is unknown. LoopError: the run is kept, and would
                not know its place in batches that it was not asked for.
        """
        if self._keeper.keeps:
            given, expected = "a run with checkpoints", "run.windows(loader), which knows its place in the data"
            raise LoopError("run.window", given=given, expected=expected)
        return self._window(*batches)

    def _window(self, *batches: Any) -> Window:
        self._require_open()
        if not batches:
            raise LoopError("run.window", given="no batch", expected="at least one")
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
        """Return sizes of the batches of a window, whether these are units for an unknown number, and why unsplit.

        If the samples of one batch are unknown, every batch of the window has the weight of a full one, as with
        `loss / k` in a plain loop.
        """
        readings = [self._batching.read(batch) for batch in batches]
        reason = next((reading.reason for reading in readings if not reading.is_splittable), "")
        check = self.plan.check
        if self._batching.count is None and check is not None and check.code == UNKNOWN:
            return [self.plan.batch_rows] * len(batches), True, reason or check.reason
        rows = [reading.samples for reading in readings if reading.samples is not None]
        if len(rows) < len(readings):
            return [self.plan.batch_rows] * len(batches), True, reason
        return rows, False, reason

    def _warn_of_whole(self, is_planned: bool, reason: str) -> None:
        """Warn once if a batch trains whole that the plan would split."""
        if is_planned and not self._warned_whole:
            self._warned_whole = True
            text = f"A batch trains whole, without the micro-batches of the plan: {reason}."
            warnings.warn(f"{text} Pass count= and split= to trimtab.start.", RuntimeWarning, stacklevel=4)

    def _warn_of_other_steps(self, rows: Sequence[int], *, is_counted: bool) -> None:
        """Warn, in the first window, if the steps of a loop that accumulates are not those that were planned."""
        is_first, self._is_first_window = self._is_first_window, False
        accumulate, planned = self.plan.reference.accumulate, self.plan.batch_rows
        if not is_first or not is_counted or accumulate == 1 or isinstance(self._control, BatchControl):
            return
        step = f"The plan is for steps of {planned} samples, {accumulate} batches of the loader each"
        if sum(rows) <= planned / accumulate:
            text = f"{step}; this step has {sum(rows)}. Call run.of_batches({accumulate}) before run.windows(loader)"
        elif len(rows) > 1 and max(rows) < self.plan.micro_batch.value:
            micro = f"its micro-batch of {self.plan.micro_batch.value} samples is larger than a batch, {max(rows)}"
            text = (
                f"{step}; {micro}, so that every batch trains alone. Let the loader yield {planned} samples at a time"
            )
        else:
            return
        warnings.warn(f"{text}.", RuntimeWarning, stacklevel=6)

    def _micro_batch_of(self, rows: int, num_batches: int) -> int:
        planned = self.plan.micro_batch_of(rows)
        return self._recovery.micro_batch_of(self._control.micro_batch_of(rows, planned, num_batches))

    def _trained_before(self, batch: Any) -> None:
        """Take a batch, where there is one, for that of a window that was stepped before the run was gone on with."""
        if batch is not None and self._peers.num_ranks > 1:
            (rows,), _, reason = self._sizes([batch])
            micro_batch = rows if reason else self._recovery.micro_batch_of(self.plan.micro_batch_of(rows))
            self._joining.keep(batch, rows, micro_batch)
            self._joining.stepped(applied=True)

    def _require_open(self) -> None:
        """Raise where the run is closed."""
        raise NotImplementedError


def _unshared(batches: Iterator[Any]) -> Iterator[Any]:
    """Yield batches of one window, of which none may be written over as the next is drawn.

    Raises:
        BatchError: one was: its loader yields the same tensors again, with other rows in them.
    """
    seen: list[tuple[Tensor, int]] = []
    for batch in batches:
        held = [] if isinstance(batch, NoRows) else [*filter(_is_written_noted, tensors_in(batch))]
        again = {each.data_ptr() for each in held}
        if any(each.data_ptr() in again and each._version != version for each, version in seen):
            raise BatchError(
                "batch",
                given="a batch whose tensors the loader wrote over as it drew the next of the same window",
                expected="tensors of its own in each of them",
                way_out="Have the loader yield a copy: a window of several batches holds them all.",
            )
        seen += [(each, each._version) for each in held]
        yield batch


def _is_written_noted(tensor: Tensor) -> bool:
    """Return whether a tensor has memory of its own, and a count of what was written there."""
    return tensor.layout is torch.strided and not tensor.is_inference()
