"""Counting and splitting of batches, by their containers or by user functions."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from trimtab.core.errors import BatchError, ValueGivenError
from trimtab.core.plan import Effect, Plan
from trimtab.training import sample_count as of_batch
from trimtab.training.batch import not_splittable, part
from trimtab.training.sample_count import SampleCount

# Conditions under which a batch may be split without a request by the user.


class UnprovedSplitWarning(UserWarning):
    """A plan set by hand splits the batch without a check that this keeps the gradient."""


def warn_of_unproved_split(plan: Plan) -> None:
    """Warn if a plan splits the batch without a check that proves equivalence (stack level of the caller's caller).

    No warning if the user's own loop accumulates gradients over the same split.
    """
    if not plan.splits or plan.proves_splitting:
        return
    if plan.check is not None and plan.splits_as_the_loop:
        return
    split = f"The plan splits a batch of {plan.batch_size} samples into micro-batches of {plan.micro_batch.value}"
    if plan.check is None:
        text = (
            f"{split}, but no check proves that this keeps the gradient. A loss or layer that computes over the whole "
            "batch (contrastive loss, batch statistics, mean over tokens) trains differently on micro-batches. Make "
            "the plan with trimtab.plan(...), which checks the split."
        )
    else:
        text = (
            f"{split}, although splitting changes training: {plan.check.reason}. Use a micro-batch of the whole batch."
        )
    warnings.warn(text, UnprovedSplitWarning, stacklevel=3)


def keeps_maths(plan: Plan, model: nn.Module) -> bool:
    """Return True if, as far as is known, splitting a batch keeps the numerics.

    False if the plan's check found a difference, or if the model has batch statistics.
    """
    refused = plan.check is not None and not plan.check.splittable
    return not refused and not has_batch_statistics(model)


def has_batch_statistics(model: nn.Module) -> bool:
    """Return True if a module of the model normalises over the batch."""
    return any(map(normalises_by_batch, model.modules()))


def normalises_by_batch(module: nn.Module) -> bool:
    """Return True if a module normalises over the batch in training mode."""
    return isinstance(module, nn.modules.batchnorm._BatchNorm)


def for_model(plan: Plan, model: nn.Module) -> Plan:
    """Return a plan adjusted to a model: an unproved split of batch statistics is marked as a change of training."""
    if not plan.splits or plan.check is not None or keeps_maths(plan, model):
        return plan
    split = plan.micro_batch
    reason = f"{split.reason}; batch statistics are computed per micro-batch"
    return replace(plan, micro_batch=replace(split, effect=Effect.TRAINING, reason=reason))


Count = Callable[[Any], int]
Split = Callable[[Any, int, int], Any]
UNKNOWN = "batch.samples_unknown"
_WAY_OUT = "Pass count=function to trimtab.plan and trimtab.start; count(batch) returns the number of samples."


@dataclass(frozen=True)
class BatchSplitting:
    """Counts the samples of a batch and splits it.

    Args:
        count: `count(batch)` -> number of samples; None reads it from the containers (`samples.read`).
        split: `split(batch, start, stop)` -> batch of the samples from `start` to `stop`; None slices the containers.

    Raises:
        ValueGivenError: an argument is not callable.
    """

    count: Count | None = None
    split: Split | None = None

    def __post_init__(self) -> None:
        for name, expected in (("count", "count(batch) -> samples"), ("split", "split(batch, start, stop) -> batch")):
            value = getattr(self, name)
            if value is not None and not callable(value):
                given = f"a {type(value).__name__}"
                raise ValueGivenError(name, got=given, expected=f"a function {expected}", code=f"{name}.not_callable")

    def read(self, batch: Any) -> SampleCount:
        """Return the number of samples of a batch and whether the batch can be split.

        Raises:
            BatchError: the batch has no samples, or `count` raised or returned something else than a positive int.
        """
        reading = of_batch.read_sample_count(batch)
        if self.count is not None:
            samples = self._counted(self.count, batch)
            if reading.samples != samples:
                found = "unclear" if reading.samples is None else reading.samples
                reason = f"count(batch) returned {samples}, but the number found in its tensors is {found}"
                reading = SampleCount(
                    samples, reason=f"{reason}; split=function is needed", code="samples.count_differs"
                )
        if reading.samples == 0:
            raise BatchError(
                "batch",
                got="a batch of 0 samples",
                expected="at least one sample",
                hint="Skip empty batches in the loader, because a mean over no samples is NaN.",
                code="batch.no_samples",
            )
        if self.split is not None and reading.samples is not None:
            return SampleCount(reading.samples, is_splittable=True)
        return reading

    def require(self, batch: Any, field: str = "batch") -> int:
        """Return the number of samples of a batch.

        Raises:
            BatchError: the number is unknown (code "batch.samples_unknown"), or `read` raises.
        """
        reading = self.read(batch)
        if reading.samples is None:
            raise samples_unknown(field, reading.reason)
        return reading.samples

    def slices(self, batch: Any, samples: int, micro_batch: int, *, is_read: bool = False) -> Iterator[tuple[Any, int]]:
        """Yield (micro-batch, number of samples) in order; the last may be smaller. Tensors are views.

        Args:
            is_read: True if `read` found that the batch can be split.

        Raises:
            BatchError: the batch cannot be split, or `split` returned an unexpected number of samples.
        """
        if samples <= micro_batch:
            yield batch, samples
            return
        if self.split is None and not is_read:
            _require_splittable(batch, samples)
        for start in range(0, samples, micro_batch):
            stop = min(start + micro_batch, samples)
            found = part(batch, slice(start, stop), samples) if self.split is None else self._split(batch, start, stop)
            yield found, stop - start

    def part(self, batch: Any, start: int, stop: int, samples: int) -> Any:
        """Return the samples from `start` to `stop` of a batch of `samples` samples.

        Raises:
            BatchError: the batch cannot be split, or `split` returned an unexpected number of samples.
        """
        if self.split is None:
            _require_splittable(batch, samples)
            return part(batch, slice(start, stop), samples)
        return self._split(batch, start, stop)

    def _split(self, batch: Any, start: int, stop: int) -> Any:
        assert self.split is not None
        try:
            found = self.split(batch, start, stop)
        except Exception as error:
            raise _failed("split", f"split(batch, {start}, {stop})", error) from error
        if self.count is not None and (size := self._counted(self.count, found)) != stop - start:
            raise BatchError(
                "split",
                problem=f"split(batch, {start}, {stop}) returned {size} samples (by count) instead of {stop - start}.",
                hint="Return the samples with indices start to stop - 1 as a batch.",
                code="batch.split_invalid",
            )
        return found

    def _counted(self, count: Count, batch: Any) -> int:
        try:
            found = count(batch)
        except Exception as error:
            raise _failed("count", "count(batch)", error) from error
        if isinstance(found, bool) or not isinstance(found, int) or found < 1:
            given = f"{found!r:.80} from count(batch)"
            expected = "a positive int, the number of samples of the batch"
            hint = "Return len(batch), or the length of one of its tensors."
            raise BatchError("count", got=given, expected=expected, hint=hint, code="batch.count_invalid")
        return found


BY_CONTAINERS = BatchSplitting()


def samples_unknown(field: str, reason: str) -> BatchError:
    """Return the error for a batch whose number of samples is needed but unknown."""
    given = f"a batch with an unknown number of samples ({reason})"
    expected = "the same number of samples in every tensor and list"
    return BatchError(field, got=given, expected=expected, hint=_WAY_OUT, code=UNKNOWN)


def of_same_size(longest: Any, example: Any, batching: BatchSplitting = BY_CONTAINERS) -> Any:
    """Return `longest`, a batch with the longest sequences, after checking its number of samples.

    Raises:
        ValueGivenError: `longest` and `example` differ in their number of samples.
    """
    samples, expected = batching.read(longest).samples, batching.read(example).samples
    if None not in (samples, expected) and samples != expected:
        raise ValueGivenError(
            "longest_batch",
            got=f"{samples} samples",
            expected=f"{expected} samples, the size of example_batch",
            hint="If the loader's batches vary in size, pass the largest batch as example_batch, without "
            "longest_batch.",
            code="longest_batch.size",
        )
    return longest


def _require_splittable(batch: Any, samples: int) -> None:
    """Raise `BatchError` if the containers of a batch do not show which parts belong to which sample."""
    if of_batch.quick_samples(batch) == samples:
        return
    reading = of_batch.read_sample_count(batch)
    if reading.samples != samples or not reading.is_splittable:
        raise not_splittable(reading.reason or f"its tensors have {reading.samples} samples, not {samples}")


def _failed(field: str, call: str, error: Exception) -> BatchError:
    return BatchError(
        field,
        problem=f"The function passed as {field}= failed: {call} raised {type(error).__name__}: {error}.",
        hint=f"Pass a {field} function that accepts every batch of the loader.",
        code=f"batch.{field}_failed",
    )
