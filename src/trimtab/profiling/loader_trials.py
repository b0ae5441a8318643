"""Training steps on batches of the user's DataLoader, of copies with other settings, and without a loader.

Seconds per step are compared, not seconds in `next`: workers compete with a step on the CPU for its cores, and a GPU
computes while the host waits. All copies yield the same samples, because the state of the data is restored before each.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from trimtab.core.units import format_seconds
from trimtab.measure.machine import own_cores
from trimtab.measure.timing import synchronize
from trimtab.planner.loader_settings import WORTH_GAIN, LoaderSettings, next_settings, settings_of, step_counts
from trimtab.plans.profile import Candidate, LoaderTrial, LoaderTrials
from trimtab.profiling.measurement_notes import Notes
from trimtab.profiling.training_loop import TrainingLoop
from trimtab.state.data_state import DataState, draw_and_restore_data, has_known_iteration, rebuilt_loader
from trimtab.state.process_state import ProcessState

# Least seconds of a step lost to the loader: passing a batch from a worker to the training process takes about as long.
LEAST_LOST_S = 1e-3
_FEWEST, _MOST = 2, 8  # Counted steps of a trial.
_TRIALS = 5  # Approximate number of trials that the time limit is divided by.
_HANG_S = 30.0  # Seconds without a batch after which a worker counts as unresponsive; a start by spawn takes a while.
_CODE, _WHAT = "loader.not_tried", "other settings of the DataLoader were not tried"


class _StoppedError(Exception):
    """The time limit of the comparison was reached, or an epoch ended early."""


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
        most = min(len(loader), int(limit_s / (_TRIALS * (drawing_s + step_s))))
        possible = (n for n in range(_FEWEST, _MOST + 1) if sum(step_counts(loader.num_workers, n)) <= most)
        if not (num_steps := max(possible, default=0)):
            fewest = sum(step_counts(loader.num_workers, _FEWEST))
            spent = f"a trial of {fewest} steps takes {format_seconds(fewest * (drawing_s + step_s))}"
            notes.add(_CODE, _WHAT, f"{spent}, too long for the time limit of {format_seconds(limit_s)}")
            return None
        trials = LoaderComparison(
            lambda batch: subject.step(run, batch), loader, subject.device, num_steps, begin + limit_s
        )
        try:
            return trials.compare(drawing_s, notes)
        except _StoppedError as error:
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
        return "worker processes would share a file that the data hold open. Open files in worker_init_fn instead"
    if not loader.num_workers and not _forks():
        return "worker processes would import the main script again, which may train without a guard"
    try:
        is_long = sum(step_counts(loader.num_workers, _FEWEST)) <= len(loader)
        return "" if is_long else f"an epoch has {len(loader)} batches only"
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
        start = time.perf_counter()
        first = self._trial(own, keeps=True)
        trial_s = time.perf_counter() - start
        alone_s = self._mean_s(self._batches)
        self._batches.clear()
        found = LoaderTrials(alone_s, first, 0.0, (), self._num_steps, self._epoch, loader.persistent_workers)
        work_s = drawing_s * max(1, own.num_workers)
        most = max((n for n in range(1, num_cores + 1) if self._fits(n, max(alone_s, work_s / n))), default=0)
        pins = self._device.type == "cuda"
        while (wanted := next_settings(found, drawing_s, most, pins=pins)) is not None:
            what = f"the DataLoader was not tried with num_workers={wanted.num_workers}"
            if (tried := self._attempt(wanted, what, notes)) is None:
                break
            found = replace(found, others=(*found.others, tried))
            if self._deadline_s - time.perf_counter() < 3 * trial_s:  # for a further trial and two repeated ones
                break
        return self._repeated(found, notes)

    def _repeated(self, found: LoaderTrials, notes: Notes) -> LoaderTrials:
        """Measure the fastest settings and the user's again, in this order, if the gain may be worth it."""
        first = found.own
        best = min(found.others, key=lambda each: each.step_s, default=first)
        if first.step_s - best.step_s <= WORTH_GAIN * first.step_s:
            return found
        what = "the fastest settings of the DataLoader are not recommended, because they were not measured again"
        if (best_again := self._attempt(settings_of(best), what, notes)) is None:
            return found
        if (own_again := self._attempt(settings_of(first), what, notes)) is None:
            return found
        return replace(
            found,
            own=replace(first, step_s=(first.step_s + own_again.step_s) / 2),
            best=replace(best, step_s=(best.step_s + best_again.step_s) / 2),
            noise_s=max(abs(first.step_s - own_again.step_s), abs(best.step_s - best_again.step_s)),
        )

    def _fits(self, num_workers: int, step_s: float) -> bool:
        """Return True if an epoch and the time left suffice for a trial with steps of about this many seconds."""
        num = sum(step_counts(num_workers, self._num_steps))
        left_s = self._deadline_s - time.perf_counter()
        return num <= self._epoch and num * step_s * (_TRIALS - 2) <= left_s  # Two trials precede.

    def _attempt(self, settings: LoaderSettings, what: str, notes: Notes) -> LoaderTrial | None:
        """Return a trial; None, with a note, after an error or the deadline."""
        try:
            return self._trial(settings)
        except Exception as error:  # An error in a worker, such as an object that cannot be passed to a process.
            notes.add(_CODE, what, str(error) if isinstance(error, _StoppedError) else error)
            return None

    def _trial(self, settings: LoaderSettings, *, keeps: bool = False) -> LoaderTrial:
        copied = self._copy(settings)
        warm, counted = step_counts(settings.num_workers, self._num_steps)
        try:
            with draw_and_restore_data(self._loader), warnings.catch_warnings():
                # Hides torch's warning about forks in a multi-threaded process; the user's own workers cause the same
                # warning.
                warnings.simplefilter("ignore")
                start = time.perf_counter()
                batches: Any = iter(copied)
                try:
                    batch = next(batches)
                    starts_s = time.perf_counter() - start
                    self._step_before_deadline(batch)
                    for batch in itertools.islice(batches, warm - 1):
                        self._step_before_deadline(batch)
                    step_s = self._mean_s(itertools.islice(batches, counted), keeps=keeps)
                finally:  # An exception refers to the iterator, which would otherwise end at some later collection.
                    if settings.num_workers:
                        batches._shutdown_workers()
                    batches._sampler_iter = None  # Ends a sampler's generator before the data are restored.
        finally:
            self._process.restore()
        return LoaderTrial(*settings, step_s, starts_s)

    def _copy(self, settings: LoaderSettings) -> DataLoader[Any]:
        others: dict[str, Any] = {}
        if settings.num_workers:  # An unresponsive worker must not stop planning.
            others["timeout"] = self._loader.timeout or _HANG_S
            if not self._loader.num_workers:  # torch's own choice would fix the start method of the process.
                others["multiprocessing_context"] = "fork"
        return rebuilt_loader(
            self._loader,
            **settings._asdict(),
            **others,
            persistent_workers=False,
            in_order=self._loader.in_order,
        )

    def _mean_s(self, batches: Iterable[Any], *, keeps: bool = False) -> float:
        """Return the mean seconds of steps on batches; `_StoppedError` after the deadline or without a batch."""
        synchronize(self._device)
        start, number = time.perf_counter(), 0
        for batch in batches:
            self._step_before_deadline(batch)
            number += 1
            if keeps:
                self._batches.append(batch)
        synchronize(self._device)
        if not number:
            raise _StoppedError("an epoch had fewer batches than its length")
        return (time.perf_counter() - start) / number

    def _step_before_deadline(self, batch: Any) -> None:
        """Take a step; `_StoppedError` after the deadline."""
        self._step(batch)
        if time.perf_counter() > self._deadline_s:
            raise _StoppedError("the time limit was reached")
