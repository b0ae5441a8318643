"""Training progress: consumed samples, or tokens counted by the loss (math: section 5)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from trimtab.core import validation
from trimtab.core.errors import LossError, ValueGivenError
from trimtab.core.stateful import Load, Stateful, require_keys
from trimtab.losses import Count
from trimtab.measure.timing import AsyncScalar
from trimtab.plans.plan import Plan
from trimtab.training.batch import samples_unknown
from trimtab.training.metadata_exchange import MetadataExchange

_COUNTS = ("rows", "windows", "applied")


class TrainingProgress(Stateful):
    """Counters of samples, tokens, windows and applied steps. Skipped steps count as windows but not as applied steps.

    Token counts on an accelerator are read one window late, except for the first; until then the tokens per sample of
    the last window that was read are used as an estimate.

    Ranks count the samples of all ranks. If the user's loop reduces gradients by hand, ranks do not know each other's
    counts, and the schedule counts loader batches of the largest size so far. Otherwise a rank with fewer samples at
    the end of its data would have another learning rate, and soon other weights.

    Attributes:
        rows: samples consumed.
        windows: windows finished.
        applied: steps applied.
        scheduled: samples counted by the schedule.
        is_scheduled: True if `progress_after` and `advance` have to be called for each window. If not, the samples of
            each window are added to `scheduled`.

    Args:
        plan: supplies the schedule.
        total_samples: planned number of samples, or None.
        total_tokens: planned number of tokens, or None.
        exchange: metadata exchange with the other ranks.

    Raises:
        ValueGivenError: a total is not a number, both are given, or the plan's schedule needs a total and none is
            given.
    """

    def __init__(
        self, plan: Plan, total_samples: int | None, total_tokens: int | None, exchange: MetadataExchange
    ) -> None:
        self._total_samples = None if total_samples is None else validation.integer("total_samples", total_samples)
        self._total_tokens = None if total_tokens is None else validation.integer("total_tokens", total_tokens)
        if self._total_samples is not None and self._total_tokens is not None:
            raise ValueGivenError(
                "total_tokens",
                got="total_samples and total_tokens",
                expected="one of them",
                hint="Pass the total that the schedule counts.",
                code="schedule.two_totals",
            )
        if self._total_samples is self._total_tokens is None and plan.schedule.value != "user":
            raise ValueGivenError(
                "total_samples",
                problem=f"The plan's learning-rate schedule {plan.schedule.value!r} needs the length of the training "
                f"run.",
                hint="Pass total_samples (samples in the whole run) or total_tokens to trimtab.start.",
                code="schedule.total_missing",
            )
        self._by_hand, self._batch_size = exchange.has_peers and exchange.num_ranks == 1, 0
        self.rows = self.applied = self.windows = 0
        self.is_scheduled = self._by_hand or self._total_samples is not None or self._total_tokens is not None
        self.scheduled = self._next = 0.0  # Samples counted by the schedule so far, and of the current window.
        self._tokens = self._per_sample = 0.0
        self._late: tuple[AsyncScalar, int] | None = None

    def require_counted(self, samples: int | None, reason: str) -> None:
        """Raise `BatchError` if the schedule depends on the number of samples, which is unknown."""
        if samples is None and self._total_samples is not None:
            raise samples_unknown("total_samples", reason)

    def progress_after(self, rows: int, tokens: Count | None, num_batches: float, batch_size: int) -> float | None:
        """Return the fraction of training completed after the current window; None without a total.

        Args:
            rows: samples of the window, over all ranks.
            tokens: tokens counted by the loss, or None.
            num_batches: loader batches of the window, mean over ranks.
            batch_size: samples of this rank's largest loader batch.

        Raises:
            LossError: the total is in tokens, and the loss does not count tokens.
        """
        self._batch_size = max(self._batch_size, batch_size)
        self._next = num_batches * self._batch_size if self._by_hand else rows
        if self._total_samples is not None:
            return (self.scheduled + self._next) / self._total_samples
        if self._total_tokens is None:
            return None
        if tokens is None:
            raise LossError(
                "loss",
                problem="The schedule counts tokens (total_tokens), but the loss function returned a mean, which does "
                "not contain the number of tokens.",
                hint="Return trimtab.Summed(loss_sum, count) with the number of tokens as count, or pass "
                "total_samples.",
                code="loss.no_token_count",
            )
        if isinstance(tokens, Tensor) and tokens.is_cuda:
            self._read()
            if self._per_sample == 0:
                self._per_sample = float(tokens) / rows
            return (self._tokens + self._per_sample * rows) / self._total_tokens
        return (self._tokens + float(tokens)) / self._total_tokens

    def advance(self, rows: int, tokens: Count | None) -> None:
        """Advance the schedule by a finished window; needed only if `is_scheduled`.

        Args:
            rows: samples of the window, over all ranks.
            tokens: tokens counted by the loss, or None.
        """
        self.scheduled += self._next
        if self._total_tokens is None or tokens is None:
            return
        if isinstance(tokens, Tensor) and tokens.is_cuda:
            self._read()
            self._late = AsyncScalar(tokens), rows
        else:
            self._tokens += float(tokens)

    def _read(self) -> None:
        if self._late is not None:
            late, rows = self._late
            (tokens,) = late.read()
            self._tokens, self._per_sample, self._late = self._tokens + tokens, tokens / rows, None

    def state_dict(self) -> dict[str, Any]:
        """Return the counters. Synchronises if a token count is still on the device."""
        self._read()
        counts = {"rows": self.rows, "windows": self.windows, "scheduled": self.scheduled, "applied": self.applied}
        return counts | {"tokens": self._tokens, "per_sample": self._per_sample}

    def loading(self, state: Mapping[str, Any]) -> Load:
        """Return a function that restores a `state_dict()`.

        Raises:
            FormatError: a key is missing or unknown.
            ValueGivenError: a value is invalid.
        """
        require_keys("state.consumed", state, ("rows", "windows", "scheduled", "applied", "tokens", "per_sample"))
        rows, windows, applied = (validation.integer(f"state.consumed.{n}", state[n], low=0) for n in _COUNTS)
        scheduled, tokens, per_sample = (
            validation.number(f"state.consumed.{n}", state[n], low=0) for n in ("scheduled", "tokens", "per_sample")
        )

        def load() -> None:
            self.windows, self.scheduled = windows, scheduled
            self.rows, self.applied, self._tokens, self._per_sample, self._late = (
                rows,
                applied,
                tokens,
                per_sample,
                None,
            )

        return load
