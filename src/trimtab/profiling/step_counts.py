"""Counts of a plain step: FLOP, terms of the loss, softmaxes. A count is left out if the instrument fails."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

import torch

from trimtab.core.errors import LossError, TrimtabError
from trimtab.measure.fake_tensors import EagerDispatchMode
from trimtab.measure.flops import count_flops
from trimtab.profiling.measurement_notes import Notes, loss_failed
from trimtab.profiling.training_loop import TrainingLoop
from trimtab.training.out_of_memory import is_out_of_memory

_SMALLEST = 16  # minimum size of two equal dimensions to count as attention scores
_REFUSED = "torch's FLOP counter does not support an operator of the model, or a shape of its inputs"


class SoftmaxDetector(EagerDispatchMode):
    """Dispatch mode that records softmaxes.

    Attributes:
        kept_bytes: Total bytes of softmaxes over square scores.
        logits: Shape (N, V) of the largest log-softmax, or None.
    """

    def __init__(self) -> None:
        super().__init__()
        self.kept_bytes = 0
        self.logits: tuple[int, int] | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._softmax.default and _is_square(result.shape):
            self.kept_bytes += result.nbytes
        if func is torch.ops.aten._log_softmax.default and result.numel() > math.prod(self.logits or (0,)):
            self.logits = result.numel() // result.shape[-1], result.shape[-1]
        return result


def _is_square(shape: torch.Size) -> bool:
    return len(shape) >= 3 and shape[-1] == shape[-2] >= _SMALLEST


class StepCounts(NamedTuple):
    """Counts of the forward and backward of the example batch, in the loop's precision.

    Attributes:
        flops: counted FLOP; None if not counted.
        terms: number of terms of the loss; the number of samples if the loss was not seen.
        kind: "rows" or "tokens".
        seen: softmaxes of the forward; empty if not watched.
    """

    flops: float | None
    terms: float
    kind: str
    seen: SoftmaxDetector


def count_step(subject: TrainingLoop, precision: str, notes: Notes) -> StepCounts:
    """Count a step. An instrument that fails on this loop is left out, with a note. State is restored.

    Raises:
        LossError: the plain forward or backward fails without any instrument.
    """
    terms: list[Any] = []  # Counts of all completed forwards.
    flop_error: Exception | str | None = None
    watch_error: Exception | None = None
    for watches, counts in ((True, True), (False, True), (True, False), (False, False)):
        try:
            flops, seen = _run(subject, precision, terms, watches=watches, counts=counts)
        except Exception as error:
            if is_out_of_memory(error):
                notes.add("flops.not_counted", "FLOP were not counted", error)
                return StepCounts(None, *_terms(subject, terms), SoftmaxDetector())
            if not (watches or counts):
                _raise_of_loss(error)
            flop_error, watch_error = flop_error or error, watch_error or error
            continue
        if counts and flops is None:
            flop_error = flop_error or _REFUSED
            continue
        if not counts:
            notes.add("flops.not_counted", "FLOP were not counted", flop_error or _REFUSED)
        if not watches:
            notes.add("attention.not_watched", "the sizes of softmaxes were not recorded", watch_error or _REFUSED)
        return StepCounts(flops, *_terms(subject, terms), seen)
    raise AssertionError("the last attempt uses no instrument, and returns or raises")


def require_plain_step(subject: TrainingLoop, precision: str) -> None:
    """Run the forward and backward of the example batch without instruments. State is restored.

    Raises:
        LossError: the step fails for another reason than memory.
    """
    try:
        _run(subject, precision, [], watches=False, counts=False)
    except Exception as error:
        if not is_out_of_memory(error):
            _raise_of_loss(error)


def is_of_loss(error: Exception) -> bool:
    """Return True if an error was made by `TrainingLoop.loss` from an exception of the user's code."""
    return isinstance(error, LossError) and isinstance(error.__cause__, Exception)


def _raise_of_loss(error: Exception) -> NoReturn:
    """Raise the typed error for a failed forward or backward, with the user's exception as its cause."""
    if isinstance(error, TrimtabError) and not is_of_loss(error):
        raise error  # The result was refused, because it is not a loss.
    cause = error.__cause__ if is_of_loss(error) else error
    assert isinstance(cause, Exception)
    raise loss_failed(cause) from cause


def _run(
    subject: TrainingLoop, precision: str, terms: list[Any], *, watches: bool, counts: bool
) -> tuple[float | None, SoftmaxDetector]:
    """Run forward and backward; returns FLOP and softmaxes, and appends the loss's count to `terms`."""
    seen = SoftmaxDetector()

    def forward_backward() -> None:
        with seen if watches else contextlib.nullcontext():
            loss, count = subject.loss(precision=precision)
        terms.append(count)
        loss.backward()

    with subject.state():
        if counts:
            return count_flops(forward_backward), seen
        forward_backward()
    return None, seen


def _terms(subject: TrainingLoop, terms: Sequence[Any]) -> tuple[float, str]:
    """Return the number and kind of the loss's terms, from the counts of its forwards."""
    count = terms[-1] if terms else None
    return (float(subject.rows), "rows") if count is None else (float(count), "tokens")
