"""A window that did not fit into memory is run again from where it began, in smaller micro-batches."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from trimtab.core import checks
from trimtab.core.plan import Plan
from trimtab.runtime.out_of_memory import MicroBatchLimit, free_memory
from trimtab.runtime.window import Window
from trimtab.runtime.window_start import WindowStart

POLICIES = ("split", "stop")


def recovers_from(policy: str | None, plan: Plan, num_ranks: int) -> bool:
    """Return whether a run splits a window that memory ran out in.

    By default it does where splitting keeps the maths as far as is known: not where the plan's check refused it. One
    rank of several does not: the others would wait for it.
    """
    if policy is not None:
        checks.one_of("out_of_memory", policy, POLICIES)
    refused = plan.check is not None and not plan.check.splittable
    return num_ranks == 1 and (policy == "split" or (policy is None and not refused))


class Recovery:
    """What a run keeps to begin a window anew. `limit`: the micro-batch that fits."""

    def __init__(self, model: nn.Module, note: Callable[[str, Mapping[str, Any]], None], *, is_on: bool) -> None:
        self.is_on, self.limit = is_on, MicroBatchLimit()
        self._start, self._note = WindowStart(model), note
        self._device = next(model.parameters()).device

    def note_start(self) -> None:
        """A window begins."""
        self._start.note()

    def restore_buffers(self) -> None:
        """Put buffers back as the window found them: it is void."""
        self._start.restore_buffers()

    def micro_batch_of(self, planned: int) -> int:
        """Return rows per micro-batch where a plan has `planned`."""
        return self.limit.of(planned)

    def split(self, window: Window, failure: str) -> None:
        """Halve the micro-batch of a window that was given up, and put back what its forwards changed.

        Raises:
            MemoryLimitError: it was one row.
        """
        before = window.micro_batch
        after = self.limit.shrink(before, failure)
        self._start.restore()
        free_memory(self._device)
        window.split(after)
        self._note("out_of_memory", {"from": before, "to": after, "error": failure})
        warnings.warn(f"out of memory: micro-batch {before} becomes {after} ({failure})", RuntimeWarning, stacklevel=3)

    def passed(self, planned: int) -> None:
        """A window fitted: some time after memory ran out, a larger micro-batch is tried again."""
        before = self.limit.rows
        after = self.limit.passed(planned)
        if after is not None:
            self._note("grown", {"from": before, "to": after})
