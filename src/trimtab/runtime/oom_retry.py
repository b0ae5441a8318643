"""Recovery from out-of-memory errors: restores a window's initial state and repeats it in smaller micro-batches."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from trimtab.core import validation
from trimtab.core.errors import MemoryLimitError, ValueGivenError
from trimtab.core.plan import Plan
from trimtab.runtime.out_of_memory import MicroBatchLimit, free_memory, is_out_of_memory, out_of_memory_in_step
from trimtab.runtime.split_conditions import has_batch_statistics, keeps_maths
from trimtab.runtime.window import Window
from trimtab.runtime.window_snapshot import WindowSnapshot

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
