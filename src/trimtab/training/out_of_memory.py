"""Recovery from out-of-memory errors: restores a window's initial state and repeats it in smaller micro-batches."""

from __future__ import annotations

import gc
import time
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from trimtab.core import validation
from trimtab.core.errors import MemoryLimitError, ValueGivenError
from trimtab.core.plan import Plan
from trimtab.core.stateful import Load, Stateful, require_keys
from trimtab.state.window_snapshot import WindowSnapshot
from trimtab.training.batch_splitting import has_batch_statistics, keeps_maths
from trimtab.training.window import Window

# Recognition of out-of-memory errors, and the micro-batch size limit after such an error.

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
    """Limit on the samples per micro-batch after memory ran out; None before, and after all sizes fit again."""

    def __init__(self) -> None:
        self.rows: int | None = None
        self._wait, self._good = _GROW_AFTER, 0
        self._grew = False

    @property
    def is_idle(self) -> bool:
        """True if memory never ran out, or not for a long time."""
        return self.rows is None and not self._grew

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
        if self._grew:  # The enlarged micro-batch failed again.
            self._wait = min(2 * self._wait, _LONGEST)
        self.rows, self._good, self._grew = -(-rows // 2), 0, False
        return self.rows

    def adopt(self, rows: int | None) -> None:
        """Adopt a lower limit of another rank, since all ranks split their batches equally."""
        if rows is not None and (self.rows is None or rows < self.rows):
            self.rows, self._good, self._grew = rows, 0, False

    def passed(self, planned: int) -> int | None:
        """Count a successful window; return the larger micro-batch to try from now on, or None."""
        if self.is_idle:
            return None
        self._good += 1
        if self._good < self._wait:
            return None
        self._good = 0
        if self.rows is None:  # All sizes have fit for another waiting time: the failure was an exception.
            self._wait, self._grew = _GROW_AFTER, False
            return None
        if self.rows >= planned:  # The planned size has fit for a waiting time.
            self.rows = None
            return None
        self.rows, self._grew = min(2 * self.rows, planned), True
        return self.rows

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the limit."""
        return {"rows": self.rows, "wait": self._wait, "good": self._good, "grew": self._grew}

    def loading(self, state: Mapping[str, Any]) -> Load:
        """Return a function that restores a `state_dict()`.

        Raises:
            FormatError: a key is missing or unknown.
            ValueGivenError: a value is invalid.
        """
        require_keys("state.memory", state, ("rows", "wait", "good", "grew"))
        rows = None if state["rows"] is None else validation.integer("state.memory.rows", state["rows"])
        wait = validation.integer("state.memory.wait", state["wait"])
        good, grew = validation.integer("state.memory.good", state["good"], low=0), state["grew"] is True

        def load() -> None:
            self.rows, self._wait, self._good, self._grew = rows, wait, good, grew

        return load


POLICIES = ("split", "stop")
# Added to errors that are not handled.
_HINT = (
    "In one process, or with zero_stage=0, trimtab.start(..., out_of_memory='split') repeats such a step with smaller "
    "micro-batches, unless other ranks wait for this rank."
)
_UNHELD = (
    "The step was not repeated with smaller micro-batches, because its forwards changed state that cannot be "
    "restored: {}."
)
_STATISTICS = " Batch statistics are then computed per micro-batch, which changes training."
_OTHERWISE = " This changes the gradient, because the loss or the model computes over the whole batch."
_UNPROVED = (
    " The gradient stays the same only if the loss of a sample does not depend on other samples, which "
    "trimtab.plan(...) checks."
)


def recovers_from(policy: str | None, plan: Plan, model: nn.Module, *, may_retry: bool) -> bool:
    """Return True if a run splits a window after an out-of-memory error.

    The default is to split if, as far as is known, splitting keeps the numerics.

    Args:
        policy: "split", "stop" or None for the default.
        may_retry: True if this rank can repeat a window while other ranks are in it.

    Raises:
        ValueGivenError: "split" is impossible here, or the policy is unknown.
    """
    if policy is None:
        return may_retry and keeps_maths(plan, model)
    validation.one_of("out_of_memory", policy, POLICIES)
    if policy == "split" and not may_retry:
        raise ValueGivenError(
            "out_of_memory",
            problem='out_of_memory="split" is not possible here, because ranks communicate within a step and would '
            "wait for a rank that repeats the step.",
            got="split",
            hint='Use out_of_memory="stop" with a smaller micro-batch, or a plan with zero_stage=0.',
            code="out_of_memory.ranks_communicate",
        )
    return policy == "split"


class OutOfMemoryRetry:
    """State needed to repeat a window.

    Attributes:
        is_on: True if windows are repeated.
        limit: the micro-batch size that fits.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        note: Callable[[str, Mapping[str, Any]], None],
        *,
        is_on: bool,
        watches: bool = True,
    ) -> None:
        self._assumed = _OTHERWISE if not keeps_maths(plan, model) else _UNPROVED if plan.check is None else ""
        self._has_statistics = has_batch_statistics(model)
        self.is_on, self.limit = is_on, MicroBatchLimit()
        self._start, self._note = WindowSnapshot(model, watches=watches), note
        self._device = next(model.parameters()).device
        self._samples_before: int | None = None
        self._has_warned = False
        self._is_noted = False  # True if a window's initial state is available.
        self._began = time.perf_counter()
        self._spent_s, self._saved, self._windows = 0.0, 0, 0

    def begin(self, loss_fn: Callable[..., Any], *, noted: bool) -> None:
        """Begin a window.

        Args:
            loss_fn: the loss, whose state is restored too.
            noted: True if `note_start` is called anyway as the window opens.
        """
        self._samples_before = self.limit.rows
        self._start.loss_fn = loss_fn
        if self.is_on and not noted:
            self.note_start()

    def note_start(self) -> None:
        """Save the state from before the window."""
        start = time.perf_counter()
        self._is_noted = False
        self._start.note()
        self._is_noted = True
        self._windows += 1
        self._spent_s += time.perf_counter() - start

    def backwards_done(self) -> None:
        """Record the changes made by a watched window's forwards, before the optimizer changes anything."""
        self._start.learn()

    def restore_skipped(self) -> None:
        """After a skipped step, restore everything that its forwards changed, except random generators."""
        self._start.restore_skipped()
        if self._start.unheld and not self._has_warned:
            self._has_warned = True
            text = f"A step was skipped, but state that its forwards changed could not be restored: {self._unheld}."
            warnings.warn(text, RuntimeWarning, stacklevel=4)
        self._saved += 1

    @property
    def _unheld(self) -> str:
        return ", ".join(self._start.unheld[:3])

    def micro_batch_of(self, planned: int) -> int:
        """Return the samples per micro-batch for a planned number."""
        return self.limit.of(planned)

    def failure_of(self, error: BaseException, *, in_optimizer: bool, may_retry: bool = True) -> str | None:
        """Return the allocator's message if the dropped window can be repeated; None otherwise.

        Args:
            error: the exception that ended the window.
            in_optimizer: True if it was raised within the optimizer's step.
            may_retry: True if no other rank depends on this window yet.

        Raises:
            MemoryLimitError: memory ran out within the optimizer's step.
        """
        if not is_out_of_memory(error):
            return None
        failure = str(error).partition("\n")[0][:200]
        if in_optimizer:
            raise out_of_memory_in_step(failure) from error
        if not self.is_on or not may_retry:
            error.add_note(_HINT + (_STATISTICS if self._has_statistics else ""))
            return None
        if not self._is_noted:
            return None
        self._start.learn()
        if self._start.unheld:
            error.add_note(_UNHELD.format(self._unheld))
            return None
        return failure

    def split(self, window: Window, failure: str, *, once: bool) -> None:
        """Halve the micro-batch of a dropped window, and restore the state from before the window.

        Args:
            window: the window to repeat.
            failure: the allocator's message.
            once: True if later windows need less memory, so that the limit applies to this window only.

        Raises:
            MemoryLimitError: a single sample did not fit.
        """
        before = window.micro_batch
        self._start.restore()
        limit = MicroBatchLimit() if once else self.limit
        try:
            after = limit.shrink(before, failure)
        except MemoryLimitError:
            self.limit.rows = self._samples_before
            raise
        free_memory(self._device)
        window.split(after)
        self._saved += 1
        self._note("out_of_memory", {"from": before, "to": after, "error": failure})
        warnings.warn(
            f"Out of memory ({failure}): the step is repeated, with the micro-batch reduced from {before} to {after} "
            f"samples.{self._assumed}",
            RuntimeWarning,
            stacklevel=3,
        )

    def account(self) -> dict[str, Any] | None:
        """Return the overhead as a fraction of the run's host time, and the number of windows saved; None if unused."""
        if not self._windows:
            return None
        price = self._spent_s / (time.perf_counter() - self._began)
        return {"technique": "window start", "price": price, "windows": self._windows, "saved": self._saved}

    def passed(self, plan: Plan) -> None:
        """Count a successful window; after some time, try a larger micro-batch again."""
        if self.limit.is_idle:
            return
        before = self.limit.rows
        after = self.limit.passed(plan.micro_batch_of(plan.batch_size))
        if after is not None:
            self._note("grown", {"from": before, "to": after})
