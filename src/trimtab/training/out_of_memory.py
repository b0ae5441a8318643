"""Recognition of out-of-memory errors, and the micro-batch size limit after such an error."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from typing import Any

import torch

from trimtab.core import validation
from trimtab.core.errors import MemoryLimitError
from trimtab.core.stateful import Load, Stateful, checked_state

# Messages of allocators and libraries, compared in lower case.
_SAYINGS = (
    "out of memory",
    "can't allocate memory",
    "not enough memory: you tried to allocate",
    "cublas_status_alloc_failed",
    "cudnn_status_alloc_failed",
    "cusolver_status_alloc_failed",
    "std::bad_alloc",
    "could not create a memory",  # oneDNN.
)
# Number of windows before the next larger micro-batch is tried again; doubled after each failure.
_GROW_AFTER, _LONGEST = 100, 100 * 2**10


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if an error means that device or host memory ran out."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError | MemoryLimitError):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(saying in text for saying in _SAYINGS)


def out_of_memory_in_step(failure: str) -> MemoryLimitError:
    """Return the error for memory that ran out within an optimizer step, which may have updated some parameters."""
    return MemoryLimitError(
        "optimizer.step",
        problem=f"Memory ran out within optimizer.step() ({failure}), so that only some parameters may be updated.",
        hint="Resume from the last checkpoint, and reduce the optimizer's memory with foreach=False or fused=True.",
        code="memory.optimizer_step",
    )


def free_memory(device: torch.device) -> None:
    """Release unreferenced memory to the device."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


class MicroBatchLimit(Stateful):
    """Limit on the samples per micro-batch after memory ran out.

    Attributes:
        rows: the limit; None before memory ran out, and after all sizes fit again.
        grew: True if the limit was enlarged or dropped, and has not fit for a waiting time yet.
    """

    def __init__(self) -> None:
        self.rows: int | None = None
        self._wait, self._good = _GROW_AFTER, 0
        self.grew = False

    def of(self, planned: int) -> int:
        """Return the samples per micro-batch for a planned number."""
        return planned if self.rows is None else min(planned, self.rows)

    def shrink(self, rows: int, failure: str) -> int:
        """Halve the number of samples that did not fit, and use it as limit.

        Raises:
            MemoryLimitError: a single sample did not fit.
        """
        if rows <= 1:
            raise MemoryLimitError(
                "micro-batch",
                problem=f"Memory ran out with a micro-batch of one sample ({failure}).",
                hint="Use a smaller model, shorter samples, bf16 or activation checkpointing.",
                code="memory.one_sample",
            )
        if self.grew:  # The enlarged micro-batch failed again.
            self._wait = min(2 * self._wait, _LONGEST)
        self.rows, self._good, self.grew = -(-rows // 2), 0, False
        return self.rows

    def adopt(self, rows: int | None) -> None:
        """Adopt a lower limit of another rank, since all ranks split their batches equally."""
        if rows is not None and (self.rows is None or rows < self.rows):
            self.rows, self._good, self.grew = rows, 0, False

    def passed(self, planned: int) -> int | None:
        """Count a successful window; return the larger micro-batch to try from now on, or None."""
        if self.rows is None and not self.grew:
            return None
        self._good += 1
        if self._good < self._wait:
            return None
        self._good = 0
        if self.rows is None:  # All sizes have fit for another waiting time: the failure was an exception.
            self._wait, self.grew = _GROW_AFTER, False
            return None
        if self.rows >= planned:  # The planned size has fit for a waiting time.
            self.rows = None
            return None
        self.rows, self.grew = min(2 * self.rows, planned), True
        return self.rows

    def state_dict(self) -> dict[str, Any]:
        return {"rows": self.rows, "wait": self._wait, "good": self._good, "grew": self.grew}

    def loading(self, state: Mapping[str, Any]) -> Load:
        found = checked_state("state.memory", state, integers=("wait", "good"), others=("rows", "grew"))
        rows = None if state["rows"] is None else validation.integer("state.memory.rows", state["rows"])

        def load() -> None:
            self.rows, self.grew = rows, state["grew"] is True
            self._wait, self._good = found["wait"], found["good"]

        return load
