"""Training steps on batches of the user's DataLoader, of copies with other settings, and without a loader.

Seconds per step are compared, not seconds in `next`: workers compete with a step on the CPU for its cores, and a GPU
computes while the host waits. All copies yield the same samples, because the state of the data is restored before each.
"""

from __future__ import annotations

import itertools
import math
import multiprocessing
import os
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from trimtab.core.units import format_seconds
from trimtab.measure.machine import own_cores
from trimtab.measure.timing import synchronize
from trimtab.planner.loader_settings import LoaderSettings, next_settings, settings_of
from trimtab.plans.profile import Candidate, LoaderTrial, LoaderTrials
from trimtab.profiling.measurement_notes import Notes
from trimtab.profiling.training_loop import TrainingLoop
from trimtab.state.data_state import DataState, draw_and_restore_data, has_known_iteration, rebuilt_loader
from trimtab.state.process_state import ProcessState

# Least seconds of a step lost to the loader: passing a batch from a worker to the training process takes about as long.
LEAST_LOST_S = 1e-3
_FEWEST, _MOST = 2, 8  # Counted steps of a trial.
_TRIALS = 5  # Approximate number of trials that the time limit is divided by.
_CODE, _WHAT = "loader.not_tried", "other settings of the DataLoader were not tried"


class _OutOfTimeError(Exception):
    """The time limit of the comparison was reached."""


def compare_loaders(
    subject: TrainingLoop, candidate: Candidate, loader: Any, drawing_s: float, limit_s: float, notes: Notes
) -> LoaderTrials | None:
    """Return the comparison of DataLoader settings in a candidate's training steps; None, with a note, if impossible.

    Loop, loader, data and random generators are restored. No copy has more workers than this process has CPU cores.

    Args:
        candidate: settings of the training step.
        drawing_s: seconds per batch of the user's loader alone.
        limit_s: approximate limit on the seconds of the comparison.
    """
    if reason := _refusal(loader):
        notes.add(_CODE, _WHAT, reason)
        return None
    with subject.state(), subject.start(candidate) as run:
        begin = time.perf_counter()
        for _ in range(2):  # The first step includes one-time costs.
            synchronize(subject.device)
            start = time.perf_counter()
            subject.step(run)
            synchronize(subject.device)
        step_s = time.perf_counter() - start
        num_steps = min(_MOST, int(limit_s / (_TRIALS * (drawing_s + step_s))))
        if num_steps < _FEWEST:
            spent = f"a step takes {format_seconds(drawing_s + step_s)}"
            notes.add(_CODE, _WHAT, f"{spent}, too long for the time limit of {format_seconds(limit_s)}")
            return None
        trials = LoaderComparison(
            lambda batch: subject.step(run, batch), loader, subject.device, num_steps, begin + limit_s
        )
        try:
            return trials.compare(drawing_s, notes)
        except _OutOfTimeError as error:
            notes.add(_CODE, _WHAT, str(error))
            return None


def _refusal(loader: Any) -> str:
    """Return the reason why no equivalent copy of a loader can be made, or ""."""
    if not has_known_iteration(loader):
        return f"the batches of a {type(loader).__name__} are not determined by the attributes of a DataLoader"
    if isinstance(loader.dataset, IterableDataset):
        return "every worker would yield all samples of an iterable dataset, unless its __iter__ divides them"
    state = DataState(loader)
    if state.one_shot:
        return f"{state.one_shot} cannot be copied"
    if state.has_files and not loader.num_workers:
        return "the data hold an open file, whose position worker processes would share"
    if not loader.num_workers and not _forks():
        return "worker processes would import the main script again, which may train without a guard"
    try:
        return "" if len(loader) > _FEWEST else f"an epoch has {len(loader)} batches only"
    except TypeError:
        return "the number of batches in an epoch is unknown"


def _forks() -> bool:
    """Return True if processes are started by a fork; asks without fixing the start method, as its default would."""
    return (multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]) == "fork"


def _num_cores() -> int:
    """Return the CPU cores of this process, or its part of the cores of a machine that ranks share."""
    return max(1, len(own_cores()) // int(os.environ.get("LOCAL_WORLD_SIZE") or 1))


class LoaderComparison:
    """Timed training steps on copies of a loader.

    Args:
        step: takes a training step on a batch.
        loader: the user's loader, with a known iteration and length.
        num_steps: steps to count for each copy.
        deadline_s: end of the comparison, by `time.perf_counter`.
    """

    def __init__(
        self,
        step: Callable[[Any], object],
        loader: DataLoader[Any],
        device: torch.device,
        num_steps: int,
        deadline_s: float,
    ) -> None:
        self._step, self._loader, self._device = step, loader, device
        self._num_steps, self._deadline_s, self._epoch = num_steps, deadline_s, len(loader)
        # Captured within the run, so that restoring keeps the candidate's fp32 modes.
        self._process = ProcessState.capture(wakes_cuda=False)
        self._batches: list[Any] = []

    def compare(self, drawing_s: float, notes: Notes) -> LoaderTrials:
        """Try settings until the loader's cost is removed, or the time is over."""
        loader, num_cores = self._loader, _num_cores()
        own = LoaderSettings(loader.num_workers, loader.prefetch_factor, bool(loader.pin_memory))
        first = self._trial(own, keeps=True)
        alone_s = self._mean_s(iter(self._batches), len(self._batches))
        self._batches.clear()
        found = LoaderTrials(alone_s, first, 0.0, (), self._num_steps, self._epoch, loader.persistent_workers)
        most = max((n for n in range(1, num_cores + 1) if sum(self._counts(n)) <= self._epoch), default=0)
        pins = self._device.type == "cuda"
        while (wanted := next_settings(found, drawing_s, most, pins=pins)) is not None:
            try:
                found = replace(found, others=(*found.others, self._trial(wanted)))
            except _OutOfTimeError:
                break
            except Exception as error:  # An error in a worker, such as an object that cannot be passed to a process.
                notes.add(_CODE, f"the DataLoader was not tried with num_workers={wanted.num_workers}", error)
                break
        if not found.others:
            return found
        again = self._trial(settings_of(first), is_last=True)
        mean = replace(first, step_s=(first.step_s + again.step_s) / 2)
        return replace(found, own=mean, noise_s=abs(first.step_s - again.step_s))

    def _counts(self, num_workers: int) -> tuple[int, int]:
        """Return the numbers of warm-up steps and of counted steps.

        Workers finish their first batches together, so batches arrive in groups, a batch from each worker: the first
        group is not counted, and of the others, whole groups are.
        """
        group = max(1, num_workers)
        return group, math.ceil(self._num_steps / group) * group

    def _trial(self, settings: LoaderSettings, *, keeps: bool = False, is_last: bool = False) -> LoaderTrial:
        copied, batches = self._copy(settings), None
        warm, counted = self._counts(settings.num_workers)
        try:
            with draw_and_restore_data(self._loader), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # Of forks in a process with threads; the user's loader warns as well.
                start = time.perf_counter()
                batches = iter(copied)
                batch = next(batches)
                starts_s = time.perf_counter() - start
                self._step(batch)
                for batch in itertools.islice(batches, warm - 1):
                    self._step(batch)
                step_s = self._mean_s(batches, counted, keeps=keeps, is_timed=not is_last)
        finally:
            if settings.num_workers and batches is not None:
                # An exception refers to the iterator, whose workers would otherwise end at some later collection.
                batches._shutdown_workers()  # type: ignore[attr-defined]
            self._process.restore()
        return LoaderTrial(*settings, step_s, starts_s)

    def _copy(self, settings: LoaderSettings) -> DataLoader[Any]:
        others: dict[str, Any] = {}
        if settings.num_workers:  # An unresponsive worker must not stop planning.
            left_s = max(1.0, self._deadline_s - time.perf_counter())
            others["timeout"] = min(self._loader.timeout or left_s, left_s)
            if not self._loader.num_workers:  # torch's own choice would fix the start method of the process.
                others["multiprocessing_context"] = "fork"
        return rebuilt_loader(
            self._loader,
            **settings._asdict(),
            **others,
            persistent_workers=False,
            in_order=self._loader.in_order,
        )

    def _mean_s(self, batches: Iterator[Any], number: int, *, keeps: bool = False, is_timed: bool = True) -> float:
        """Return the mean seconds of steps on the next batches; `_OutOfTimeError` after the deadline."""
        synchronize(self._device)
        start = time.perf_counter()
        for batch in itertools.islice(batches, number):
            self._step(batch)
            if keeps:
                self._batches.append(batch)
            if is_timed and time.perf_counter() > self._deadline_s:
                raise _OutOfTimeError("the time limit was reached")
        synchronize(self._device)
        return (time.perf_counter() - start) / number
