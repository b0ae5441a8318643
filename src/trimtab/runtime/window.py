"""A window: the data of one optimizer step, iterated once as micro-batches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import torch

from trimtab.core.errors import LoopError, LossError
from trimtab.runtime.batches import slices, to_device


class Loop(Protocol):
    """What a window tells its run."""

    def open_window(self, window: Window) -> None:
        """The first micro-batch is about to be yielded."""

    def begin_micro_batch(self, window: Window, rows: int, *, last: bool) -> None:
        """A micro-batch of `rows` rows is about to be yielded; raises where the window is no longer the open one."""

    def end_micro_batch(self, window: Window) -> None:
        """The loop's body for the last micro-batch has run; raises unless it called backward."""


class Window:
    """Micro-batches on the model's device, in order. `rows` and `num_micro_batches` are known before the first."""

    def __init__(self, loop: Loop, batch: Any, rows: int, micro_batch: int, device: torch.device) -> None:
        self.rows = rows
        self.num_micro_batches = -(-rows // micro_batch)
        self._loop = loop
        self._batch = batch
        self._micro_batch = micro_batch
        self._device = device
        self._used = False

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
        for index, (micro, rows) in enumerate(slices(self._batch, self.rows, self._micro_batch)):
            self._loop.begin_micro_batch(self, rows, last=index == self.num_micro_batches - 1)
            yield to_device(micro, self._device)
            self._loop.end_micro_batch(self)


def check_call(loop: Loop, window: Any, loss_fn: Any) -> None:
    """Raise `LoopError` unless this run made the window, and `LossError` unless the loss can be called."""
    if not isinstance(window, Window) or not window.is_of(loop):
        given = "a window of another run" if isinstance(window, Window) else f"a {type(window).__name__}"
        expected = "one that run.windows(loader) or run.window(batch) made"
        raise LoopError("window", given=given, expected=expected)
    if not callable(loss_fn):
        raise LossError("loss_fn", given=f"a {type(loss_fn).__name__}", expected="loss_fn(model, batch)")
