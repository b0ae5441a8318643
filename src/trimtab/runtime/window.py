"""A window: the data of one optimizer step, a loader batch or several, iterated once as micro-batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch

from trimtab.core.errors import LoopError, LossError
from trimtab.runtime.batches import Contents, contents_of, fresh, holds_nan, to_device, versions_of
from trimtab.runtime.batching import BY_CONTAINERS, Batching
from trimtab.runtime.inner_lists import InnerLists


class Loop(Protocol):
    """What a window tells its run."""

    def open_window(self, window: Window) -> None:
        """The first micro-batch is about to be yielded."""

    def begin_micro_batch(self, window: Window, rows: int, *, of_next: bool, last: bool) -> None:
        """A micro-batch of `rows` rows is about to be yielded, the first of the next loader batch or another of it.

        Raises where the window is no longer the open one.
        """

    def end_micro_batch(self, window: Window) -> None:
        """The loop's body for the last micro-batch has run; raises unless it called backward."""


class Window:
    """Micro-batches on the model's device, in order. `rows` and `num_micro_batches` are known before the first.

    Args:
        batches: the loader's batches it is made of; their host copies are kept until it is over.
        rows: of each batch, by which it is weighted. micro_batches: rows per micro-batch, of each.
        batching: how batches are split. samples: of all batches; None if unknown, and `rows` are then equal units.
        may_split: whether smaller micro-batches can be made. inner_lists: whether a loss gets copies of lists in long
            lists; None: it does.

    Attributes:
        num_micro_batches: k.
    """

    def __init__(
        self,
        loop: Loop,
        batches: Sequence[Any],
        rows: Sequence[int],
        micro_batches: Sequence[int],
        device: torch.device,
        *,
        batching: Batching = BY_CONTAINERS,
        samples: int | None = None,
        may_split: bool = True,
        inner_lists: InnerLists | None = None,
    ) -> None:
        self.rows, self.num_batches = sum(rows), len(batches)
        self.samples, self.may_split = samples, may_split
        self._batching, self._inner_lists = batching, inner_lists
        self._contents: tuple[Contents | None, ...] = (None,) * len(batches)
        self._versions: tuple[tuple[int, ...], ...] | None = None
        self._loop, self._device = loop, device
        self._batches, self._batch_rows = tuple(batches), tuple(rows)
        self._micro_batches = tuple(micro_batches)
        self._used = False
        self._padding, self._num_padding = None, 0
        self.num_micro_batches = self._count()

    def _count(self) -> int:
        count = self._num_padding
        for rows, micro in zip(self._batch_rows, self._micro_batches, strict=True):
            count += -(-rows // micro)
        return count

    @property
    def micro_batch(self) -> int:
        """Rows of the largest micro-batch."""
        return max((min(pair) for pair in zip(self._batch_rows, self._micro_batches, strict=True)), default=0)

    @property
    def batch_rows(self) -> int:
        """Rows of the largest loader batch."""
        return max(self._batch_rows, default=0)

    def holds_nan(self) -> bool:
        """Return whether a value of its batches is no number; waits for the device. A mask may well be infinite."""
        return holds_nan(self._batches)

    @property
    def has_equal_batches(self) -> bool:
        """Whether its batches have the same number of samples."""
        return len(set(self._batch_rows)) <= 1

    def note_versions(self) -> None:
        """Note the versions of its tensors, to see whether the loss changes them in place."""
        contents = tuple(map(contents_of, self._batches))
        self._contents, self._versions = contents, tuple([each.versions() for each in contents])

    @property
    def repeat_refusal(self) -> str:
        """Reason why the window cannot be run again in smaller micro-batches, or ""."""
        if not self.may_split:
            return "its batch cannot be split"
        if self._versions is not None and self._versions != tuple(map(versions_of, self._batches)):
            return "the loss changed its batch in place"
        return ""

    def split(self, micro_batch: int) -> None:
        """Begin anew, in micro-batches of at most so many rows."""
        self._micro_batches = tuple(min(micro_batch, each) for each in self._micro_batches)
        self.num_micro_batches = self._count()
        self._used = False

    def pad(self, micro_batch: Any, num: int) -> None:
        """Begin with `num` more micro-batches that count as no rows: for the collectives in them, other ranks' too."""
        self._padding, self._num_padding = micro_batch, num
        self.num_micro_batches = self._count()

    @property
    def num_padding(self) -> int:
        """Micro-batches that count as no rows; the first ones."""
        return self._num_padding

    def match(self, num: int) -> None:
        """Have as many micro-batches as every rank has."""
        if num > self.num_micro_batches:
            micro_batch, _ = next(self._batching.slices(self._batches[0], self._batch_rows[0], self._micro_batches[0]))
            self.pad(micro_batch, num - self.num_micro_batches)

    def is_of(self, loop: Loop) -> bool:
        """Return whether this run made the window."""
        return loop is self._loop

    def __len__(self) -> int:
        return self.num_micro_batches

    def __iter__(self) -> Iterator[Any]:
        if self._used:
            raise LoopError("window", given="a second pass over a window", expected="one pass; take the next window")
        self._loop.open_window(self)
        self._used = True
        left = self.num_micro_batches
        for _ in range(self._num_padding):
            left -= 1
            self._loop.begin_micro_batch(self, 0, of_next=False, last=left == 0)
            yield to_device(fresh(self._padding), self._device)
            self._loop.end_micro_batch(self)
        sizes = zip(self._batch_rows, self._micro_batches, strict=True)
        if self._inner_lists is not None:
            self._inner_lists.dropped()
        for batch, contents, (rows, micro_batch) in zip(self._batches, self._contents, sizes, strict=True):
            of_next = True
            for micro, micro_rows in self._batching.slices(batch, rows, micro_batch, is_read=self.may_split):
                left -= 1
                self._loop.begin_micro_batch(self, micro_rows, of_next=of_next, last=left == 0)
                yield self._given(micro, contents if micro is batch else None)
                self._loop.end_micro_batch(self)
                if self._inner_lists is not None:
                    self._inner_lists.returned()
                of_next = False

    def _given(self, micro: Any, contents: Contents | None) -> Any:
        """Return new containers of a micro-batch, on the device."""
        given = fresh(micro, self._inner_lists, contents)
        is_there = contents is not None and contents.are_on(self._device)
        return given if is_there else to_device(given, self._device)


def check_call(loop: Loop, window: Any, loss_fn: Any) -> None:
    """Raise `LoopError` unless this run made the window, and `LossError` unless the loss can be called."""
    if not isinstance(window, Window) or not window.is_of(loop):
        given = "a window of another run" if isinstance(window, Window) else f"a {type(window).__name__}"
        expected = "one that run.windows(loader) or run.window(batch) made"
        raise LoopError("window", given=given, expected=expected)
    if not callable(loss_fn):
        raise LossError("loss_fn", given=f"a {type(loss_fn).__name__}", expected="loss_fn(model, batch)")
