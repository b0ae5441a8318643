"""Draws a few batches to time the data wait and to see the variation in batch sizes.

The state of the data is restored, and one-shot data are not drawn from.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import numpy
from torch import Tensor
from torch.utils.data import DataLoader

from trimtab.core.errors import TrimtabError, ValueGivenError
from trimtab.profiling.measurement_notes import Notes
from trimtab.profiling.padding import PaddingCounter
from trimtab.profiling.training_loop import TrainingLoop, have_same_values
from trimtab.state.data_state import DataState, draw_and_restore_data
from trimtab.state.process_state import ProcessState
from trimtab.training.batch import iterate, tensors_in

_BATCHES, _DRAWING_S = 8, 2.0  # Most batches to time, and the seconds after which no further batch is drawn.
_EMPTY = object()
_CHANGED = (
    "Planning with data= may change the first epoch: two epochs began with different batches, although the state of "
    "data was restored. Either each epoch seeds its own generator, or data keeps state that planning cannot find"
)


class SampledBatches(NamedTuple):
    """Result of drawing a few batches.

    Attributes:
        seconds: seconds per batch; None with fewer than two batches.
        longest: elements of the largest batch, relative to the example batch.
        batch: last batch with an equal number of samples, for proofs; or None.
        padding: count of the padding in all drawn batches; None if nothing was drawn.
    """

    seconds: float | None = None
    longest: float | None = None
    batch: Any = None
    padding: PaddingCounter | None = None


def draw_some(subject: TrainingLoop, data: Iterable[Any], notes: Notes) -> SampledBatches:
    """Draw a few consecutive batches and restore the data. Iterators and other one-shot data are skipped.

    The first batch is drawn before the clock starts, because opening files and starting workers takes time.
    """
    reason: str | Exception = one_shot(data)
    if not reason:
        try:
            return _drawn(subject, data, notes)
        except TrimtabError:
            raise
        # An error of the loader, dataset or collate function; the training loop will raise it too.
        except Exception as error:
            reason = error
    notes.add("data.not_drawn", "the data loading time was not measured", reason)
    return SampledBatches()


def loader_of(loader_or_batch: Any) -> Iterable[Any] | None:
    """Return a loader that was passed in place of a batch; None for a batch.

    A loader is a torch DataLoader, or an object that can be iterated again and is no container: no tensor, array,
    mapping, sequence, dataclass, or object with keys (such as a batch of graphs).
    """
    if isinstance(loader_or_batch, DataLoader):
        return loader_or_batch
    containers = (Tensor, numpy.ndarray, Mapping, Sequence, Iterator)
    if isinstance(loader_or_batch, containers) or not hasattr(loader_or_batch, "__iter__"):
        return None
    is_batch = is_dataclass(loader_or_batch) or hasattr(loader_or_batch, "keys")
    return None if is_batch else loader_or_batch


def first_batch(loader: Iterable[Any]) -> Any:
    """Return the first batch of a loader; the next epoch yields the batch again.

    `ValueGivenError` if the loader contains an iterator, or is empty.
    """
    if reason := one_shot(loader):
        raise ValueGivenError(
            "loader_or_batch",
            got=reason,
            expected="a loader that can be iterated again from the start",
            hint="Pass a batch instead of the loader.",
            code="data.one_shot",
        )
    process = ProcessState.capture(wakes_cuda=False)
    try:
        with draw_and_restore_data(loader) as lent:
            found = next(iterate("loader_or_batch", lent), _EMPTY)
    finally:
        process.restore()
    if found is _EMPTY:
        raise ValueGivenError(
            "loader_or_batch", got="a loader without batches", expected="at least one batch", code="data.empty"
        )
    return found


def one_shot(data: Any) -> str:
    """Return the reason why drawing from the data would consume batches of the first epoch; "" if it would not."""
    if isinstance(data, Iterator):
        return "data is an iterator, and batches drawn from it cannot be put back"
    state = DataState(data)
    return f"data contains {state.one_shot}, and drawn items cannot be put back" if state.one_shot else ""


def require_restorable(data: Any) -> None:
    """Raise `ValueGivenError` for data that contain an iterator: short trainings would silently consume them.

    Iterators are accepted, because they are documented to advance.
    """
    if not isinstance(data, Iterator) and (reason := one_shot(data)):
        raise ValueGivenError(
            "data",
            got=reason,
            expected="data that can be iterated again from the start",
            problem=f"adapt=... trains on some batches of data and would consume them: {reason}.",
            hint="Pass data whose dataset creates its iterators in __iter__, or pass iter(data) if planning may "
            "consume its first batches.",
            code="data.one_shot",
        )


def _drawn(subject: TrainingLoop, data: Iterable[Any], notes: Notes) -> SampledBatches:
    process = ProcessState.capture(wakes_cuda=False)
    first = None
    # Workers draw in their own copies of the dataset.
    if not isinstance(data, list | tuple) and not getattr(data, "num_workers", 0):
        with draw_and_restore_data(data) as lent:
            first = next(iterate("data", lent), None)
        process.restore()
    with draw_and_restore_data(data) as lent:
        batches = islice(iterate("data", lent), 1 + _BATCHES)
        last = next(batches, None)
        if first is not None and not _are_equal(first, last):
            notes.record("data.not_repeatable", _CHANGED)
            warnings.warn(f"{_CHANGED}. Call trimtab.plan without data=.", RuntimeWarning, stacklevel=2)
        del first
        padding, elements, seconds = PaddingCounter(), list[int](), 0.0
        while last is not None:
            elements.append(_elements(last))
            add = partial(padding.add, last)
            notes.attempt("padding.not_counted", "the padding of a batch was not counted", add, None)
            if seconds > _DRAWING_S:
                break
            begin = time.perf_counter()  # Waiting for a loader's workers takes no processor time here.
            drawn = next(batches, None)
            if drawn is None:
                break
            seconds, last = seconds + time.perf_counter() - begin, drawn
        del batches  # Ends a sampler's generator before the data are restored.
    num, example = len(elements) - 1, _elements(subject.batch)
    longest = max(elements, default=0) / example if example else None
    is_alike = last is not None and not subject.unknown
    if is_alike:  # In the number of samples and in whether the batch can be split.
        is_alike = subject.batching.read(last) == subject.batching.read(subject.batch)
    return SampledBatches(seconds / num if num > 0 else None, longest, last if is_alike else None, padding)


def _elements(batch: Any) -> int:
    return sum(tensor.numel() for tensor in tensors_in(batch))


def _are_equal(ours: Any, theirs: Any) -> bool:
    pairs = list(tensors_in(ours)), list(tensors_in(theirs))
    return len(pairs[0]) == len(pairs[1]) and all(map(have_same_values, *pairs))


def waiting_s(drawing_s: float, phases: Mapping[str, float], data: Any) -> float:
    """Return the seconds per step of waiting for data; loader workers overlap with the step."""
    num_workers = getattr(data, "num_workers", 0)
    at_once = isinstance(num_workers, int) and num_workers > 0
    return max(0.0, drawing_s - sum(phases.values())) if at_once else drawing_s
