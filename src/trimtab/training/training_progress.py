"""Training progress: consumed samples, or tokens counted by the loss (math: section 5)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from trimtab.core import validation
from trimtab.core.errors import LossError, ValueGivenError
from trimtab.core.stateful import Load, Stateful, checked_state
from trimtab.losses import Count
from trimtab.measure.timing import AsyncScalar
from trimtab.plans.plan import Plan
from trimtab.training.batch import samples_unknown
from trimtab.training.metadata_exchange import MetadataExchange

_COUNTS = ("rows", "windows", "applied")
_NUMBERS = ("scheduled", "tokens", "per_sample")


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
        tokens: tokens counted.
        per_sample: tokens per sample of the last window that was read.
        is_scheduled: True if `progress_after` and `advance` have to be called for each window. If not, the samples of
            each window are added to `scheduled`.

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
        self.scheduled = self.tokens = self.per_sample = 0.0
        self._next = 0.0  # Samples of the current window, as counted by the schedule.
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
        if not isinstance(tokens, Tensor) or not tokens.is_cuda:
            return (self.tokens + float(tokens)) / self._total_tokens
        self._read()
        if self.per_sample == 0:
            self.per_sample = float(tokens) / rows
        return (self.tokens + self.per_sample * rows) / self._total_tokens

    def advance(self, rows: int, tokens: Count | None) -> None:
        """Advance the schedule by a finished window of `rows` samples over all ranks; needed only if `is_scheduled`."""
        self.scheduled += self._next
        if self._total_tokens is None or tokens is None:
            return
        if isinstance(tokens, Tensor) and tokens.is_cuda:
            self._read()
            self._late = AsyncScalar(tokens), rows
        else:
            self.tokens += float(tokens)

    def _read(self) -> None:
        if self._late is not None:
            (late, rows), self._late = self._late, None
            (tokens,) = late.read()
            self.tokens, self.per_sample = self.tokens + tokens, tokens / rows

    def state_dict(self) -> dict[str, Any]:
        """Return the counters. Synchronises if a token count is still on the device."""
        self._read()
        return {name: getattr(self, name) for name in (*_COUNTS, *_NUMBERS)}

    def loading(self, state: Mapping[str, Any]) -> Load:
        found = checked_state("state.consumed", state, integers=_COUNTS, numbers=_NUMBERS)
        return lambda: vars(self).update(found, _late=None)
