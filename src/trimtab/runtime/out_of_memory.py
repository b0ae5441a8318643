"""Memory that ran out: how it is told from other errors, and the micro-batch that fits since then."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from typing import Any

import torch

from trimtab.core import checks
from trimtab.core.errors import MemoryLimitError
from trimtab.core.state_parts import Load, Part, require_keys

# As allocators and libraries put it; compared in lower case.
_SAYINGS = (
    "out of memory",
    "can't allocate memory",
    "not enough memory: you tried to allocate",
    "cublas_status_alloc_failed",
    "cudnn_status_alloc_failed",
    "cusolver_status_alloc_failed",
    "std::bad_alloc",
    "could not create a memory",  # oneDNN
)
# Windows after which the next larger micro-batch is tried again; twice as many after each time that failed.
_GROW_AFTER, _LONGEST = 100, 100 * 2**10


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that memory ran out, on the device or on the host."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError | MemoryLimitError):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(saying in text for saying in _SAYINGS)


def out_of_memory_in_step(failure: str) -> MemoryLimitError:
    """Return the error of an optimizer's step that memory ran out in: it may have moved a part of the weights."""
    return MemoryLimitError(
        "optimizer.step",
        given=f"out of memory in the middle of it ({failure}): some parameters may have moved and others not",
        expected="memory for a whole step",
        way_out="Go on from the last checkpoint, with foreach=False or fused=True, which need less beside the state.",
    )


def free_memory(device: torch.device) -> None:
    """Give up what nothing refers to any more."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


class MicroBatchLimit(Part):
    """The most rows of a micro-batch since memory ran out; None while it never did, or since all fits again."""

    def __init__(self) -> None:
        self.rows: int | None = None
        self._wait, self._good = _GROW_AFTER, 0
        self._grew = False

    @property
    def is_idle(self) -> bool:
        """Whether memory never ran out, or not for long."""
        return self.rows is None and not self._grew

    def of(self, planned: int) -> int:
        """Return rows per micro-batch where a plan has `planned`."""
        return planned if self.rows is None else min(planned, self.rows)

    def shrink(self, rows: int, failure: str) -> int:
        """Return half of the rows that did not fit, and keep to it.

        Raises:
            MemoryLimitError: it was one row.
        """
        if rows <= 1:
            raise MemoryLimitError(
                "micro-batch",
                given=f"one row, which does not fit ({failure})",
                expected="memory for the forward and backward of one row",
                way_out="A smaller model or shorter rows, bf16, or activation checkpointing.",
            )
        if self._grew:  # the larger one, again
            self._wait = min(2 * self._wait, _LONGEST)
        self.rows, self._good, self._grew = -(-rows // 2), 0, False
        return self.rows

    def adopt(self, rows: int | None) -> None:
        """Keep to what fits on another rank: all cut their batches alike."""
        if rows is not None and (self.rows is None or rows < self.rows):
            self.rows, self._good, self._grew = rows, 0, False

    def passed(self, planned: int) -> int | None:
        """A window fitted; returns the larger micro-batch that is tried from the next one on, or None."""
        if self.is_idle:
            return None
        self._good += 1
        if self._good < self._wait:
            return None
        self._good = 0
        if self.rows is None:  # for twice as long as that: what did not fit was an exception
            self._wait, self._grew = _GROW_AFTER, False
            return None
        if self.rows >= planned:  # for as long as that: it fits
            self.rows = None
            return None
        self.rows, self._grew = min(2 * self.rows, planned), True
        return self.rows

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs."""
        return {"rows": self.rows, "wait": self._wait, "good": self._good, "grew": self._grew}

    def loading(self, state: Mapping[str, Any]) -> Load:
        """Return what continues from `state_dict()`; raises `FormatError` or `ValueGivenError` where it is none."""
        require_keys("state.memory", state, ("rows", "wait", "good", "grew"))
        rows = None if state["rows"] is None else checks.integer("state.memory.rows", state["rows"])
        wait = checks.integer("state.memory.wait", state["wait"])
        good, grew = checks.integer("state.memory.good", state["good"], low=0), state["grew"] is True

        def load() -> None:
            self.rows, self._wait, self._good, self._grew = rows, wait, good, grew

        return load
