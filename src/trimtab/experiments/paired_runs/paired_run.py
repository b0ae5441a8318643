"""Paired run: arms trained alternately in blocks in a single process, with separate clocks.

All arms share seed, initial weights and data order. They advance in blocks of a second or a few steps, and the
interleaving order changes from round to round (`turns`), so that drift in machine speed slows all arms alike.
Evaluations happen at the same sample counts, outside the clock. A timed-only arm also evaluates, so that it finds the
same caches and heap, and discards the result. Every arm has separate random generators and global modes. An arm that
raises drops out with its error; only an error in the first arm, the reference, ends the paired run.

Arms are built in an order drawn from the seed. The position of an arm in the heap determines how much memory is
returned to the system after a step: with a fixed order, the cost would always hit the same arm and look like an
effect.

Several ranks run the same arms in step: a block begins on all ranks, lasts as long as on the slowest rank, and has the
same number of steps. A failed rank ends the paired run.
"""

from __future__ import annotations

import contextlib
import math
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple, NoReturn

import torch

from trimtab.core.energy_reading import WINDOW_S, MeterFacts, Provenance
from trimtab.core.errors import LoopError, TrimtabError
from trimtab.core.progress import Progress, silent
from trimtab.core.record import End, Evaluation, Event, Header, RunRecord
from trimtab.distributed.coordinator import ALONE, Coordinator
from trimtab.distributed.rank_energy import RankMeter, meter_of_rank
from trimtab.distributed.sharded_loader import shard
from trimtab.energy.energy_meter import EnergyClock
from trimtab.energy.meter_selection import Metering
from trimtab.experiments.baselines.loop import MakeLoop, SteppedLoop
from trimtab.experiments.comparison.comparison_statistics import GIVEN_ROWS
from trimtab.experiments.paired_runs.plan_loops import ON_ANOTHER_RANK, nonfinite_in, settling_steps
from trimtab.measure.timing import synchronize
from trimtab.planner.statistics import turns
from trimtab.profiling.measurement_notes import describe
from trimtab.state.process_state import ProcessState
from trimtab.tasks.placement import prefetch
from trimtab.tasks.task import Task, TaskData

# Energy meter of a paired run: joules per block, summed over ranks.

# Target length of a block, relative to the shortest window of a meter: half of all blocks end shorter than the target.
_AIM = 1.1


class PairedRunMeter:
    """Joules per block; every rank reads its own meter, and readings are summed once per block."""

    def __init__(self, metered: RankMeter, together: Coordinator) -> None:
        self._metered, self._together = metered, together
        self._clock = EnergyClock(metered.meter)

    @property
    def block_s(self) -> float:
        """Target seconds of a block, long enough for a reading."""
        return _AIM * WINDOW_S if self._metered.job.provenance is Provenance.MEASURED else 0.0

    def begin(self) -> None:
        """Begin a block."""
        self._clock = EnergyClock(self._metered.meter)
        self._clock.start()

    def tick(self) -> None:
        """Record the end of a step."""
        self._clock.tick()

    def end(self) -> float | None:
        """Return the joules of the block, or None if unknown. Collective: all ranks must call it."""
        return self._metered.of_all(self._clock.read(), lambda figure: math.fsum(self._together.each(figure))).joules


def race_meter(
    device: torch.device, metering: Metering | None, together: Coordinator
) -> tuple[PairedRunMeter | None, MeterFacts]:
    """Return the meter of a device, or None without one, and its description, equal on all ranks."""
    found = meter_of_rank(device, metering, idle=True)
    return (None if found.job.is_absent else PairedRunMeter(found, together)), found.job


# Length of timed-only arms, and time limit of a quick comparison.

# Minimum steps and reference seconds of a short arm, so that fast steps also fill more than one block.
_FEW_STEPS, _FEW_S = 60, 6.0
# The same on a GPU, where device time is expensive; seconds are counted by the arm's own step.
_DEAR_STEPS, _DEAR_S = 24, 5.0
_QUICK_STEPS, _QUICK_S = 4, 3.5
# Minimum seconds of the control in a full run: the control sets the resolution, and needs rounds for that.
_CONTROL_S = 60.0
# A quick comparison ends at about this time, with fewer pairs if planning took long.
_QUICK_END_S = 110.0


class RunLengths(NamedTuple):
    """Samples of a timed-only arm and of the control, which is longer in a full run."""

    few: int
    control: int


def short_arm_lengths(task: Task, step_s: float, *, quick: bool, brief: bool, dear: bool = False) -> RunLengths:
    """Return the samples of short arms, at most the task's budget.

    Args:
        task: the task to train.
        step_s: seconds per step of the reference, or of the arm itself if `dear`.
        quick: True for a quick comparison.
        brief: True if all arms of the paired run are short.
        dear: True if device time is expensive (a GPU).
    """
    usual = (_DEAR_STEPS, _DEAR_S) if dear else (_FEW_STEPS, _FEW_S)
    steps, seconds = (_QUICK_STEPS, _QUICK_S) if quick else usual
    few, control = (
        min(task.budget_samples, max(steps, math.ceil(s / step_s)) * task.batch_size)
        for s in (seconds, seconds if brief else max(seconds, _CONTROL_S))
    )
    return RunLengths(few, control)


def seeds_in_time(num: int, *, quick: bool, begun: float, together: Coordinator = ALONE) -> Iterator[int]:
    """Yield the seeds of `num` paired runs; a quick comparison stops when no further run fits, after at least one.

    Args:
        num: number of paired runs.
        quick: True for a quick comparison.
        begun: start of the comparison, from `time.perf_counter`.
        together: the ranks of the job.
    """
    race_s = 0.0
    for seed in range(num):
        race_begun = time.perf_counter()
        if quick and seed and together.each(race_begun - begun + race_s)[0] > _QUICK_END_S:
            return
        yield seed
        race_s = time.perf_counter() - race_begun


# Errors that end a comparison: a failed reference, or a failure of a single rank.


def blame_reference(error: BaseException) -> NoReturn:
    """Raise the error that ends a comparison after a failure of the reference.

    Raises:
        TrimtabError: the original error, if of this type.
        LoopError: otherwise, raised from the original error.
    """
    if isinstance(error, TrimtabError):
        raise error
    raise LoopError(
        "baseline loop",
        problem=f"The task's baseline loop raised {describe(error).rstrip('.')}.",
        hint="Correct the task; a comparison needs a baseline that trains.",
        code="baseline.failed",
    ) from error


def end_with(error: Exception, together: Coordinator, *, is_reference: bool) -> NoReturn:
    """Raise the cause of an arm's error: the error itself, or the failure of another rank.

    Raises:
        RankError: another rank ended.
        LoopError: the reference failed; see `blame_reference`.
    """
    reason = together.ended(error)
    if is_reference:
        blame_reference(reason)
    if reason is error:
        raise error
    raise reason from error


_BLOCK_S = 1.0
# The first step of a block finds caches and heap left by another arm, and must not dominate when steps are long.
_BLOCK_STEPS = 8


@dataclass(frozen=True)
class TimedBlock:
    """An arm's samples, wall-clock seconds and process CPU seconds in a round.

    With several ranks, wall-clock seconds are the slowest rank's and CPU seconds the sum. `energy_j` is the energy of
    all
    ranks in joules, or None if not measured or the block is too short for the meter.
    """

    rows: int
    seconds: float
    cpu_s: float
    energy_j: float | None = None


@dataclass(frozen=True)
class PairedArm:
    """An arm of a paired run.

    Args:
        name: reference, self, strict, paper, strong, muon, equivalent_plan, tuned_plan, strong_plan.
        make: builds the training loop.
        budget_samples: samples to train on.
        is_timed_only: True to time a few steps after settling, without recorded evaluations.
        detail: extra fields for the record's header.
    """

    name: str
    make: MakeLoop
    budget_samples: int
    is_timed_only: bool = False
    detail: dict[str, Any] = field(default_factory=dict)


class RunningArm:
    """An arm in progress, with a separate clock."""

    def __init__(
        self,
        entry: PairedArm,
        task: Task,
        data: TaskData,
        seed: int,
        device: torch.device,
        together: Coordinator = ALONE,
        meter: PairedRunMeter | None = None,
    ) -> None:
        self._meter = meter
        block_s = _BLOCK_S if meter is None else max(_BLOCK_S, meter.block_s)
        self.entry, self._task, self._data, self._device = entry, task, data, device
        self._seed, self._together, self._pace = seed, together, together.pace(_BLOCK_STEPS, block_s)
        torch.manual_seed(seed)
        self._batches: Iterator[Any] = prefetch(shard(data.batches(seed, task.batch_size)), device)
        self._state = ProcessState.capture()
        self.rows = 0
        self.train_s = 0.0
        self.blocks: list[TimedBlock] = []
        self.evaluations: list[Evaluation] = []
        self.end, self.error = "", ""
        self._loop: SteppedLoop | None = None

    def enter(self) -> None:
        """Build the loop."""
        torch.manual_seed(self._seed)
        with self._together.entering():
            self._loop = self.entry.make(self._task, self._device)
        self._together.draw_apart(self._seed)
        self._state = ProcessState.capture()

    @property
    def loop(self) -> SteppedLoop:
        """The loop, after `enter`."""
        assert self._loop is not None
        return self._loop

    def fail(self, error: Exception) -> None:
        """Drop out of the paired run with an error."""
        self.end, self.error = "error", describe(error)

    def close(self) -> None:
        """Undo the changes of the loop."""
        if self._loop is not None:
            self._loop.close()

    def run_block(self, cap_s: float) -> None:
        """Train for a second and a few steps, or to the next evaluation, and evaluate if due."""
        self._state.restore()
        due = (self.rows // self._task.eval_every_samples + 1) * self._task.eval_every_samples
        stop = min(due, self.entry.budget_samples)
        rows = steps = 0
        # A short run has too few steps to exclude its first block, so it settles before the clock starts.
        if self.entry.is_timed_only and not self.blocks:
            for _ in range(settling_steps(self.loop)):
                self.loop.step(self._batches)
        synchronize(self._device)
        self._together.each(0.0)  # All ranks begin the block together.
        if self._meter is not None:
            self._meter.begin()
        start, cpu_start = time.perf_counter(), time.process_time()
        while self.rows + rows < stop and self._pace.goes_on(steps, time.perf_counter() - start):
            rows += self.loop.step(self._batches)
            steps += 1
            if self._meter is not None:
                self._meter.tick()
        synchronize(self._device)
        seconds, cpu_s = time.perf_counter() - start, time.process_time() - cpu_start
        energy_j = None if self._meter is None else self._meter.end()
        block = TimedBlock(rows, max(self._together.each(seconds)), math.fsum(self._together.each(cpu_s)), energy_j)
        self._pace.ended(steps, block.seconds)
        self.rows, self.train_s = self.rows + rows, self.train_s + block.seconds
        self.blocks.append(block)
        if self.rows >= (due if self.entry.is_timed_only else stop):
            self._evaluate()
        self._finish_if_due(cap_s)
        self._leave_if_nonfinite()
        self._state = ProcessState.capture()

    def _evaluate(self) -> None:
        metric = self._task.metric
        # All ranks evaluate, because a sharded model needs all of them. Where batch statistics differ, rank 0's value
        # counts.
        own = metric.figure(metric.evaluate(self.loop.model, self._data.held_out))
        value = metric.check(self._together.each(own)[0])
        if not self.entry.is_timed_only:
            self.evaluations.append(Evaluation(self.rows, self.train_s, {metric.name: value}))

    def _finish_if_due(self, cap_s: float) -> None:
        if self.evaluations and not math.isfinite(next(iter(self.evaluations[-1].metrics.values()))):
            self.end = "diverged"  # Also at the end of the budget: time saved by a diverged run is no gain.
        elif self.rows >= self.entry.budget_samples:
            self.end = "budget"
        elif self.train_s >= cap_s:
            self.end = "cap"

    def _leave_if_nonfinite(self) -> None:
        """End the arm if its loss or parameters are non-finite, whatever the held-out metric.

        NaN logits still have an accuracy, and steps on NaN take the usual time.
        """
        found = nonfinite_in(self.loop)
        if any(self._together.each(float(bool(found)))):
            self.end, self.error = "diverged", found or ON_ANOTHER_RANK

    def record(self, seed: int, environment: dict[str, str]) -> RunRecord:
        """Return the record of the arm."""
        detail = self.entry.detail | {GIVEN_ROWS: self.entry.budget_samples}
        header = Header(self.entry.name, seed, None, environment, detail)
        events = tuple(Event("block", i, asdict(block)) for i, block in enumerate(self.blocks))
        why = {"error": self.error} if self.error else {}
        end = End(self.end, {"rows": self.rows, "train_s": self.train_s} | why)
        return RunRecord(header, (), tuple(self.evaluations), events, end)


def race(
    entries: Sequence[PairedArm],
    task: Task,
    data: TaskData,
    seed: int,
    device: torch.device,
    *,
    cap_s: float = math.inf,
    reference_cap_s: float | None = None,
    environment: dict[str, str] | None = None,
    progress: Progress = silent,
    together: Coordinator = ALONE,
    meter: PairedRunMeter | None = None,
) -> list[RunRecord]:
    """Run the arms for a seed, and return a record per arm in order.

    Args:
        entries: the arms, with the reference first.
        task: the task to train.
        data: data of the task.
        seed: seed of weights, data order and interleaving.
        device: device of the runs.
        cap_s: training seconds after which an arm is stopped (censored).
        reference_cap_s: time cap of the first arm; None for `cap_s`.
        environment: machine and versions, recorded in the headers.
        progress: receives progress messages.
        together: the ranks of the job.
        meter: energy meter, or None.

    Raises:
        LoopError: the first arm's loop raised, chained to the original error. Errors of other arms end only that arm.
        RankError: another rank ended.
    """
    outside, is_over = ProcessState.capture(), False
    caps = (cap_s, cap_s if reference_cap_s is None else reference_cap_s)
    racers: list[RunningArm] = []
    try:
        for entry in entries:
            outside.restore()
            racers.append(RunningArm(entry, task, data, seed, device, together, meter))
        for racer in random.Random(seed).sample(racers, len(racers)):
            outside.restore()
            with _leaving(racer, last=racers[0], together=together):
                racer.enter()
        lap, before = 0, None
        while running := [racer for racer in racers if not racer.end]:
            for racer in turns(running, lap, seed, before):
                with _leaving(racer, last=racers[0], together=together):
                    racer.run_block(caps[racer is racers[0]])
                before = racer
            lap += 1
            progress(_standing(racers), min(1.0, racers[0].rows / entries[0].budget_samples))
        is_over = True
        return [racer.record(seed, environment or {}) for racer in racers]
    finally:
        # After an error, other ranks would wait in collectives.
        for racer in racers if is_over or together.num_ranks == 1 else ():
            racer.close()
        outside.restore()


@contextlib.contextmanager
def _leaving(racer: RunningArm, last: RunningArm, together: Coordinator) -> Iterator[None]:
    """Drop an arm that raises; re-raise for the reference (`last`)."""
    try:
        yield
    except Exception as error:
        if racer is last or not together.may_leave(error):
            end_with(error, together, is_reference=racer is last)
        racer.fail(error)


def _standing(racers: Sequence[RunningArm]) -> str:
    return "  ".join(f"{racer.entry.name} {racer.rows} rows {racer.train_s:.0f} s" for racer in racers)
