"""A window: the data of one optimizer step (one or several loader batches), iterated once as micro-batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch

from trimtab.core.errors import LoopError, LossError
from trimtab.training.batch import (
    BatchContents,
    NestedLists,
    contents_of,
    holds_nan,
    to_device,
    versions_of,
    with_new_containers,
)
from trimtab.training.batch_splitting import BY_CONTAINERS, BatchSplitting


class WindowCallbacks(Protocol):
    """Callbacks from a window to the run."""

    def open_window(self, window: Window) -> None:
        """Called before the first micro-batch is yielded."""

    def begin_micro_batch(self, window: Window, rows: int, *, of_next: bool, last: bool) -> None:
        """Called before a micro-batch is yielded.

        Args:
            rows: samples of the micro-batch.
            of_next: True if it is the first micro-batch of a loader batch.
            last: True if it is the window's last micro-batch.

        Raises:
            LoopError: the window is no longer the open window.
        """

    def end_micro_batch(self, window: Window) -> None:
        """Called after the loop's body for a micro-batch. Raises `LoopError` unless the body called `backward`."""


class Window:
    """The batches of one optimizer step; iterating yields micro-batches on the model's device.

    Args:
        loop: the run, which receives the callbacks.
        batches: loader batches; their host copies are kept until the window ends.
        rows: samples of each batch, used as weights.
        micro_batches: samples per micro-batch, for each batch.
        device: device of the micro-batches.
        batching: counts and splits batches.
        samples: total samples; None if unknown, in which case `rows` are equal placeholders.
        may_split: False if the batches cannot be split.
        inner_lists: decides on copying nested lists for the loss; None always copies.

    Attributes:
        rows: total of `rows`.
        num_micro_batches: number of micro-batches, known before the first is yielded.
    """

    def __init__(
        self,
        loop: WindowCallbacks,
        batches: Sequence[Any],
        rows: Sequence[int],
        micro_batches: Sequence[int],
        device: torch.device,
        *,
        batching: BatchSplitting = BY_CONTAINERS,
        samples: int | None = None,
        may_split: bool = True,
        inner_lists: NestedLists | None = None,
    ) -> None:
        self.rows, self.num_batches = sum(rows), len(batches)
        self.samples, self.may_split = samples, may_split
        self._batching, self._inner_lists = batching, inner_lists
        self._contents: tuple[BatchContents | None, ...] = (None,) * len(batches)
        self._versions: tuple[tuple[int, ...], ...] | None = None
        self._loop, self._device = loop, device
        self._batches, self._batch_size = tuple(batches), tuple(rows)
        self._micro_batches = tuple(micro_batches)
        self._used = False
        self._padding, self._num_padding = None, 0
        self.num_micro_batches = self._count()

    def _count(self) -> int:
        count = self._num_padding
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
        contents = tuple(map(contents_of, self._batches))
        self._contents, self._versions = contents, tuple([each.versions() for each in contents])

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
        self._padding, self._num_padding = micro_batch, num
        self.num_micro_batches = self._count()

    @property
    def num_padding(self) -> int:
        """Number of zero-weight micro-batches at the start of the window."""
        return self._num_padding

    def match(self, num: int) -> None:
        """Pad the window to `num` micro-batches, the largest number on any rank."""
        if num > self.num_micro_batches:
            micro_batch, _ = next(self._batching.slices(self._batches[0], self._batch_size[0], self._micro_batches[0]))
            self.pad(micro_batch, num - self.num_micro_batches)

    def is_of(self, loop: WindowCallbacks) -> bool:
        """Return True if `loop` made this window."""
        return loop is self._loop

    def __len__(self) -> int:
        return self.num_micro_batches

    def __iter__(self) -> Iterator[Any]:
        if self._used:
            raise LoopError(
                "window",
                problem="A window was iterated over a second time.",
                hint="Take the next window of run.windows(loader).",
                code="loop.window_used",
            )
        self._loop.open_window(self)
        self._used = True
        left = self.num_micro_batches
        for _ in range(self._num_padding):
            left -= 1
            self._loop.begin_micro_batch(self, 0, of_next=False, last=left == 0)
            yield to_device(with_new_containers(self._padding), self._device)
            self._loop.end_micro_batch(self)
        sizes = zip(self._batch_size, self._micro_batches, strict=True)
        if self._inner_lists is not None:
            self._inner_lists.dropped()
        for batch, contents, (rows, micro_batch) in zip(self._batches, self._contents, sizes, strict=True):
            of_next = True
            for micro, micro_batch_samples in self._batching.slices(batch, rows, micro_batch, is_read=self.may_split):
                left -= 1
                self._loop.begin_micro_batch(self, micro_batch_samples, of_next=of_next, last=left == 0)
                yield self._given(micro, contents if micro is batch else None)
                self._loop.end_micro_batch(self)
                if self._inner_lists is not None:
                    self._inner_lists.returned()
                of_next = False

    def _given(self, micro: Any, contents: BatchContents | None) -> Any:
        """Return the micro-batch on the device, in new containers."""
        given = with_new_containers(micro, self._inner_lists, contents)
        is_there = contents is not None and contents.are_on(self._device)
        return given if is_there else to_device(given, self._device)


def check_call(loop: WindowCallbacks, window: Any, loss_fn: Any) -> None:
    """Raise `LoopError` if `loop` did not make the window, and `LossError` if `loss_fn` is not callable."""
    if not isinstance(window, Window) or not window.is_of(loop):
        raise LoopError(
            "window",
            got="a window of another run" if isinstance(window, Window) else f"a {type(window).__name__}",
            expected="a window of this run",
            hint="Take windows from run.windows(loader), or make one with run.window(batch).",
            code="loop.not_a_window",
        )
    if not callable(loss_fn):
        raise LossError(
            "loss_fn",
            got=f"a {type(loss_fn).__name__}",
            expected="a function loss_fn(model, batch)",
            hint="Pass a function that returns the loss of a batch.",
            code="loss_fn.not_callable",
        )
