"""What a run has consumed, and how far that is: in samples, or in the tokens its loss counts (math: section 5)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from trimtab.core import checks
from trimtab.core.errors import LossError, ValueGivenError
from trimtab.core.plan import Plan
from trimtab.core.state_parts import Load, Part, require_keys
from trimtab.losses import Count
from trimtab.measure.late import Late
from trimtab.runtime.batching import samples_unknown
from trimtab.runtime.exchange import Exchange

_COUNTS = ("rows", "windows", "applied")


class Consumed(Part):
    """Rows, and tokens where the schedule goes by them; void windows count too, `applied` steps do not count those.

    Counts on an accelerator are read a window late, but for the first; until then a window is taken to hold as many a
    row as the last one that was read.

    Ranks count what all of them have. Where they reduce gradients by hand none knows of the others', and the schedule
    goes by loader batches, as if each had as many rows as the largest so far: a rank whose loader ends in fewer rows
    than another's would have a rate of its own, and soon weights of its own.

    Args:
        exchange: with the other ranks.

    Raises:
        ValueGivenError: a total is not a number, both are given, or the plan's schedule needs one and has none.
    """

    def __init__(self, plan: Plan, total_samples: int | None, total_tokens: int | None, exchange: Exchange) -> None:
        self._total_samples = None if total_samples is None else checks.integer("total_samples", total_samples)
        self._total_tokens = None if total_tokens is None else checks.integer("total_tokens", total_tokens)
        if self._total_samples is not None and self._total_tokens is not None:
            raise ValueGivenError("total_tokens", given="both totals", expected="total_samples or total_tokens")
        if self._total_samples is self._total_tokens is None and plan.schedule.value != "user":
            raise ValueGivenError(
                "total_samples",
                given="nothing",
                expected="the samples this run will train on",
                way_out=f"The plan's schedule {plan.schedule.value} goes by progress: start(..., total_samples=N).",
            )
        self._by_hand, self._batch_rows = exchange.has_peers and exchange.num_ranks == 1, 0
        self.rows = self.applied = self.windows = 0
        self._scheduled = self._next = 0.0  # rows that the schedule knows of, and those of the window that is over
        self._tokens = self._per_row = 0.0
        self._late: tuple[Late, int] | None = None

    def require_counted(self, samples: int | None, reason: str) -> None:
        """Raise `BatchError` if the schedule goes by samples and their number is unknown."""
        if samples is None and self._total_samples is not None:
            raise samples_unknown("total_samples", reason)

    def progress_after(self, rows: int, tokens: Count | None, num_batches: float, batch_rows: int) -> float | None:
        """Return consumed over planned *after* a window, which is `add`ed next; None where no total was given.

        Args:
            num_batches: of the loader, the mean over ranks. batch_rows: of the largest of its own.

        Raises:
            LossError: the total is in tokens, and the loss counts none.
        """
        self._batch_rows = max(self._batch_rows, batch_rows)
        self._next = num_batches * self._batch_rows if self._by_hand else rows
        if self._total_samples is not None:
            return (self._scheduled + self._next) / self._total_samples
        if self._total_tokens is None:
            return None
        if tokens is None:
            raise LossError(
                "loss",
                given="a mean, with total_tokens",
                expected="trimtab.Summed(loss_sum, count), which counts tokens",
            )
        if isinstance(tokens, Tensor) and tokens.is_cuda:
            self._read()
            if self._per_row == 0:
                self._per_row = float(tokens) / rows
            return (self._tokens + self._per_row * rows) / self._total_tokens
        return (self._tokens + float(tokens)) / self._total_tokens

    def add(self, rows: int, tokens: Count | None, *, applied: bool, samples: int | None = None) -> None:
        """A window is over.

        Args:
            rows: by which it is weighted. samples: that are counted; None if unknown.
        """
        self.rows += samples or 0
        self.windows += 1
        self._scheduled += self._next
        self.applied += applied
        if self._total_tokens is None or tokens is None:
            return
        if isinstance(tokens, Tensor) and tokens.is_cuda:
            self._read()
            self._late = Late(tokens), rows
        else:
            self._tokens += float(tokens)

    def _read(self) -> None:
        if self._late is not None:
            late, rows = self._late
            (tokens,) = late.read()
            self._tokens, self._per_row, self._late = self._tokens + tokens, tokens / rows, None

    def state_dict(self) -> dict[str, Any]:
        """Return the counters."""
        self._read()
        counts = {"rows": self.rows, "windows": self.windows, "scheduled": self._scheduled, "applied": self.applied}
        return counts | {"tokens": self._tokens, "per_row": self._per_row}

    def loading(self, state: Mapping[str, Any]) -> Load:
        """Return what continues from `state_dict()`; raises `FormatError` or `ValueGivenError` where it is none."""
        require_keys("state.consumed", state, ("rows", "windows", "scheduled", "applied", "tokens", "per_row"))
        rows, windows, applied = (checks.integer(f"state.consumed.{n}", state[n], low=0) for n in _COUNTS)
        scheduled, tokens, per_row = (
            checks.number(f"state.consumed.{n}", state[n], low=0) for n in ("scheduled", "tokens", "per_row")
        )

        def load() -> None:
            self.windows, self._scheduled = windows, scheduled
            self.rows, self.applied, self._tokens, self._per_row, self._late = rows, applied, tokens, per_row, None

        return load
