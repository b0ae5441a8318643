"""A window that did not fit into memory is run again from where it began, in smaller micro-batches."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from trimtab.core import checks
from trimtab.core.errors import MemoryLimitError, ValueGivenError
from trimtab.core.plan import Plan
from trimtab.runtime.out_of_memory import MicroBatchLimit, free_memory, is_out_of_memory, out_of_memory_in_step
from trimtab.runtime.splitting import has_batch_statistics, keeps_maths
from trimtab.runtime.window import Window
from trimtab.runtime.window_start import WindowStart

POLICIES = ("split", "stop")
# Added to an error that passes.
_HINT = (
    "In one process, or with zero_stage=0, trimtab.start(..., out_of_memory='split') runs the window again in smaller "
    "micro-batches, as long as the other ranks do not count on this one."
)
_UNHELD = "The window is not run again in smaller micro-batches: its forwards changed what cannot be restored ({})."
_STATISTICS = " Batch statistics are then those of micro-batches, and training another one."
_OTHERWISE = "; its gradient is another one by that"
_UNPROVED = "; that keeps the gradient where each row's loss depends on that row alone: a plan would have proved it"


def recovers_from(policy: str | None, plan: Plan, model: nn.Module, *, may_retry: bool) -> bool:
    """Return whether a run splits a window that memory ran out in.

    By default it does where splitting keeps the maths as far as is known.

    Args:
        may_retry: whether this rank can begin a window anew while others are in it.

    Raises:
        ValueGivenError: "split" where that cannot be, or no such policy.
    """
    if policy is None:
        return may_retry and keeps_maths(plan, model)
    checks.one_of("out_of_memory", policy, POLICIES)
    if policy == "split" and not may_retry:
        raise ValueGivenError(
            "out_of_memory",
            given="split, on ranks that exchange more than a gradient in a window",
            expected="stop",
            way_out="Where one rank begins anew the others would wait for it: plan a smaller micro-batch, or have the "
            "plan share the model (zero_stage=0).",
        )
    return policy == "split"


class Recovery:
    """What a run keeps to begin a window anew. `limit`: the micro-batch that fits."""

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
        self._start, self._note = WindowStart(model, watches=watches), note
        self._device = next(model.parameters()).device
        self._rows_before: int | None = None
        self._has_warned = False
        self._is_noted = False  # whether there is a window's start to go back to
        self._began = time.perf_counter()
        self._spent_s, self._saved, self._windows = 0.0, 0, 0

    def begin(self, loss_fn: Callable[..., Any], *, noted: bool) -> None:
        """Begin a window that may be run again; `noted`: its start is taken whenever it is opened."""
        self._rows_before = self.limit.rows
        self._start.loss_fn = loss_fn
        if self.is_on and not noted:
            self.note_start()

    def note_start(self) -> None:
        """Take what a window begins with."""
        start = time.perf_counter()
        self._is_noted = False
        self._start.note()
        self._is_noted = True
        self._windows += 1
        self._spent_s += time.perf_counter() - start

    def backwards_done(self) -> None:
        """Look what a watched window's forwards changed, before the optimizer changes anything."""
        self._start.learn()

    def restore_skipped(self) -> None:
        """Restore what the forwards of a window changed that is skipped, but random generators."""
        self._start.restore_skipped()
        if self._start.unheld and not self._has_warned:
            self._has_warned = True
            text = f"a step was skipped, and what its forwards changed could not be restored: {self._unheld}"
            warnings.warn(text, RuntimeWarning, stacklevel=4)
        self._saved += 1

    @property
    def _unheld(self) -> str:
        return ", ".join(self._start.unheld[:3])

    def micro_batch_of(self, planned: int) -> int:
        """Return rows per micro-batch where a plan has `planned`."""
        return self.limit.of(planned)

    def failure_of(self, error: BaseException, *, in_optimizer: bool, may_retry: bool = True) -> str | None:
        """Return what the allocator said where a window that was given up can be run again; None for any other error.

        Args:
            may_retry: whether no other rank counts on it by now.

        Raises:
            MemoryLimitError: memory ran out inside the optimizer's step.
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
        """Halve the micro-batch of a window that was given up, and put back what its forwards changed.

        Args:
            once: windows to come need less than this one.

        Raises:
            MemoryLimitError: it was one row; the next window is tried as this one was.
        """
        before = window.micro_batch
        self._start.restore()
        limit = MicroBatchLimit() if once else self.limit
        try:
            after = limit.shrink(before, failure)
        except MemoryLimitError:
            self.limit.rows = self._rows_before
            raise
        free_memory(self._device)
        window.split(after)
        self._saved += 1
        self._note("out_of_memory", {"from": before, "to": after, "error": failure})
        warnings.warn(
            f"out of memory: micro-batch {before} becomes {after} ({failure}){self._assumed}",
            RuntimeWarning,
            stacklevel=3,
        )

    def account(self) -> dict[str, Any] | None:
        """Return what it cost, as a share of the run's seconds (the host's), and windows it saved; None if unused."""
        if not self._windows:
            return None
        price = self._spent_s / (time.perf_counter() - self._began)
        return {"technique": "window start", "price": price, "windows": self._windows, "saved": self._saved}

    def passed(self, plan: Plan) -> None:
        """A window fitted: some time after memory ran out, a larger micro-batch is tried again."""
        if self.limit.is_idle:
            return
        before = self.limit.rows
        after = self.limit.passed(plan.micro_batch_of(plan.batch_rows))
        if after is not None:
            self._note("grown", {"from": before, "to": after})
