"""Paired run: arms that train on equal batches in one process, alternating in blocks of a few steps.

All arms share seed, initial weights and data order. The order of the arms changes from round to round (`turns`), so
that drift in the machine's speed slows all arms alike. Every arm has separate random generators and global modes. An
arm that raises drops out; only an error of the first arm, the baseline, or of its repetition ends the paired run.

Several ranks run the same arms in step: a block begins on all ranks, takes as long as on the slowest rank, and has the
same number of steps. An error on any rank ends the paired run.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from trimtab.core.energy_reading import WINDOW_S, MeterFacts, Provenance
from trimtab.core.errors import TrimtabError, ValueGivenError
from trimtab.core.progress import Progress, silent
from trimtab.distributed.coordinator import ALONE, Coordinator
from trimtab.distributed.rank_energy import RankMeter, meter_of_rank
from trimtab.energy.energy_meter import EnergyClock
from trimtab.energy.meter_selection import Metering
from trimtab.experiments import loop_setup, loops
from trimtab.experiments.loops import DataStream, Loop, StepResult
from trimtab.experiments.result_table import (
    CONTROL,
    CPU_SECONDS,
    ENERGY,
    EVALUATION,
    FLOPS,
    LOSS,
    PEAK,
    SAMPLES,
    SECONDS,
    UNITS,
    Row,
)
from trimtab.experiments.task_loops import Setup
from trimtab.measure.flops import count_flops
from trimtab.measure.gradient_norms import is_sharded, local_shard
from trimtab.measure.timing import synchronize
from trimtab.planner.statistics import turns
from trimtab.profiling.measurement_notes import describe
from trimtab.state.peak_memory import alive_between_steps, peak_bytes, storage_bytes
from trimtab.state.process_state import ProcessState, separate_heaps

# A block takes this many seconds, at least one step and at most a tenth of the steps. The first steps of an arm are not
# timed: they include one-time costs, such as compiled kernels.
_BLOCK_S, _BLOCKS, _MOST_BLOCKS = 0.3, 10, 60
_METERED_BLOCKS = 4  # Blocks must last a second for a measured reading, so a short run has few of them.
_QUEUES = 4  # Length of a block as a multiple of the batches that a loader's workers prepare.
_AIM = 1.1  # Length of a block relative to the shortest window of a meter: half of all blocks end shorter.

Steps = Iterator[StepResult]
MakeSteps = Callable[[Loop, Iterator[Any]], Steps]


@dataclass(frozen=True)
class Arm:
    """A loop in a paired run.

    Args:
        name: name in the result.
        setup: builds the loop for a seed.
        steps: trains the loop on batches, and yields after every optimizer step.
        lead_steps: steps before the timed ones.
        samples: samples to train on; None for those of the first arm.
        hides_memory: True if a sharding backend holds tensors outside of model and optimizer.
    """

    name: str
    setup: Setup
    steps: MakeSteps
    lead_steps: int = 2
    samples: int | None = None
    hides_memory: bool = False

    def again(self) -> Arm:
        """Return the arm as the A/A control."""
        return Arm(CONTROL, self.setup, self.steps, self.lead_steps, self.samples)


@dataclass(frozen=True)
class RunLength:
    """Length of a paired run.

    Args:
        steps: optimizer steps of the first arm; the other arms train on an equal number of samples.
        evaluate_every: optimizer steps between evaluations. All training time then counts, from the first step. None:
            a single evaluation at the end, and the first steps are not timed.
        cap_s: seconds of training after which an arm is stopped.
        baseline_cap_s: the same for the baseline; None for `cap_s`.
    """

    steps: int
    evaluate_every: int | None = None
    cap_s: float = math.inf
    baseline_cap_s: float | None = None

    def cap_of(self, *, is_baseline: bool) -> float:
        """Return the limit on an arm's seconds."""
        return self.baseline_cap_s if is_baseline and self.baseline_cap_s is not None else self.cap_s


class BlockMeter:
    """Joules per block. Every rank reads its meter, and readings are summed once per block."""

    def __init__(self, metered: RankMeter, together: Coordinator) -> None:
        self._metered, self._together = metered, together
        self._clock = EnergyClock(metered.meter)

    @property
    def block_s(self) -> float:
        """Least seconds of a block, long enough for a reading."""
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


def block_meter(
    device: torch.device, metering: Metering | None, together: Coordinator
) -> tuple[BlockMeter | None, MeterFacts]:
    """Return the meter of a device, or None without one, and its description, equal on all ranks."""
    found = meter_of_rank(device, metering, idle=True)
    return (None if found.job.is_absent else BlockMeter(found, together)), found.job


def measure_step(arm: Arm, *, is_baseline: bool, failures: dict[str, str], together: Coordinator = ALONE) -> list[Row]:
    """Return the peak memory and the FLOP of a step of an arm, after the steps that create optimizer state.

    Several ranks measure in step: the peak is the largest over ranks, FLOP are of this rank.
    """
    outside = ProcessState.capture()
    stream = steps = None
    rows = []
    try:
        loop = arm.setup(0)
        together.draw_apart(0)
        stream = DataStream(loop.loader, 0)
        steps = arm.steps(loop, stream)
        for _ in range(arm.lead_steps):
            next(steps)
        loop.optimizer.zero_grad(set_to_none=True)  # Gradients alive before the count would be missing from it.
        live = lambda: map(local_shard, alive_between_steps(loop.model, loop.optimizer))  # noqa: E731
        found = peak_bytes(lambda: next(steps), loop.device, live)
        if together.num_ranks > 1 and loop.device.type == "cpu" and not is_sharded(loop.model):
            # DistributedDataParallel keeps its gradient buckets allocated between steps.
            found += storage_bytes(p for p in loop.model.parameters() if p.requires_grad)
        if not arm.hides_memory:
            rows.append(Row(arm.name, -1, -1, PEAK, max(together.each(float(found))), UNITS[PEAK]))
        taken = list[StepResult]()
        flops = together.attempt(lambda: count_flops(lambda: taken.append(next(steps))))
        if flops and taken:
            rows.append(Row(arm.name, -1, -1, FLOPS, flops / taken[0].samples, UNITS[FLOPS]))
    except Exception as error:
        _leave(arm.name, error, failures, together, ends=is_baseline)
    finally:
        _close(steps, stream)
        steps = stream = loop = None  # type: ignore[assignment]
        outside.restore()
        gc.collect()
    return rows


def _leave(name: str, error: Exception, failures: dict[str, str], together: Coordinator, *, ends: bool) -> None:
    """Record the failure of an arm; raise if it ends the comparison, as every failure on several ranks does."""
    cause = together.ended(error) if together.num_ranks > 1 else error
    if ends or together.num_ranks > 1:
        raise loop_setup.step_failed(name, cause) if isinstance(cause, Exception) else cause from error
    failures[name] = error.reason if isinstance(error, TrimtabError) else describe(error)


def _close(steps: Steps | None, stream: DataStream | None) -> None:
    if steps is not None:
        steps.close()  # type: ignore[attr-defined]  # A generator; closing it leaves the run's `with` block.
    if stream is not None:
        stream.close()


class _RunningArm:
    """An arm in a paired run, with separate random generators and global modes."""

    def __init__(self, arm: Arm, seed: int, together: Coordinator, meter: BlockMeter | None) -> None:
        self.arm, self.seed, self._together, self._meter = arm, seed, together, meter
        self.loop = arm.setup(seed)
        together.draw_apart(seed)
        self.stream = DataStream(self.loop.loader, seed)
        self.steps = arm.steps(self.loop, self.stream)
        self.samples, self.num_steps = 0.0, 0  # Mean samples of a rank.
        self.per_step = 0.0  # Expected samples of a step, before the first step.
        self.train_s = 0.0
        self.is_over = False
        self.state = ProcessState.capture()

    def take(self, limit: float) -> dict[str, float]:
        """Train until a number of samples is reached; return the measured values by metric."""
        self.state.restore()
        taken: list[StepResult] = []
        synchronize(self.loop.device)
        self._together.each(0.0)  # All ranks begin the block together.
        if self._meter is not None:
            self._meter.begin()
        start, start_cpu = time.perf_counter(), time.process_time()
        own, most = 0, self._steps_until(limit)
        while len(taken) < most if most is not None else self.samples + own < limit:
            step = next(self.steps)
            taken.append(step)
            own += step.samples
            if self._meter is not None:
                self._meter.tick()
        synchronize(self.loop.device)
        aside_s = self.stream.take_aside_s()  # Takes processor time too.
        seconds, cpu_s = time.perf_counter() - start - aside_s, time.process_time() - start_cpu - aside_s
        joules = None if self._meter is None else self._meter.end()
        self.state = ProcessState.capture()
        self.num_steps += len(taken)
        if not taken:
            return {}
        found = {
            SECONDS: max(self._together.each(seconds)),
            CPU_SECONDS: math.fsum(self._together.each(cpu_s)),
            SAMPLES: math.fsum(self._together.each(own)),
        }
        self.samples += found[SAMPLES] / self._together.num_ranks
        self.train_s += found[SECONDS]
        return found | ({} if joules is None else {ENERGY: joules}) | self._loss_of(taken)

    def _steps_until(self, limit: float) -> int | None:
        """Return the steps until a number of samples, equal on all ranks; None in one process, which counts samples.

        The parts of a batch may differ by a sample, and ranks with different numbers of steps would wait forever.
        """
        if self._together.num_ranks == 1:
            return None
        per_step = self.samples / self.num_steps if self.num_steps else self.per_step
        return max(0, math.ceil((limit - self.samples) / (per_step or max(1.0, limit)) - 1e-9))

    def _loss_of(self, taken: Sequence[StepResult]) -> dict[str, float]:
        """Return the mean loss of steps, read after the clock has stopped; {} if a step returned none.

        Raises:
            FloatingPointError: the last loss or a parameter is not finite, on any rank.
        """
        known = [step.loss for step in taken if step.loss is not None]
        last = float(known[-1]) if known else None
        said = loops.nonfinite_in(self.loop, last)
        if any(self._together.each(float(bool(said)))):
            raise FloatingPointError(f"after {self.num_steps} steps, {said or 'another rank is not finite'}")
        if len(known) < len(taken):
            return {}
        return {LOSS: float(torch.stack([torch.as_tensor(each).detach().float() for each in known]).mean())}

    def evaluated(self) -> dict[str, float]:
        """Return the values of the loop's evaluation by name; of rank 0. Collective: all ranks must call it."""
        if self.loop.evaluate is None:
            return {}
        self.state.restore()
        values = {name: self._together.each(value)[0] for name, value in loops.evaluated(self.loop).items()}
        self.state = ProcessState.capture()
        if any(not math.isfinite(value) for value in values.values()):
            raise FloatingPointError(f"after {self.num_steps} steps, the evaluation is not finite")
        return values

    def close(self) -> None:
        """Undo the plan, and end the loader's workers."""
        _close(self.steps, self.stream)


class PairedRun:
    """A paired run of arms for a seed.

    Args:
        arms: the arms, the baseline first.
        seed: seed of weights, data order and interleaving.
        length: length of the run.
        failures: errors of arms that failed, by name; extended by this run.
        progress: called with a line of text and the completed fraction of the run.
        together: the ranks of the job.
        meter: energy meter, or None.

    Attributes:
        rows: the measured values.
    """

    def __init__(
        self,
        arms: Sequence[Arm],
        seed: int,
        length: RunLength,
        *,
        failures: dict[str, str],
        progress: Progress = silent,
        together: Coordinator = ALONE,
        meter: BlockMeter | None = None,
    ) -> None:
        self._arms, self._seed, self._length, self._failures = arms, seed, length, failures
        self._progress, self._together, self._meter = progress, together, meter
        self._running: list[_RunningArm] = []
        self._evaluated_at: dict[str, float] = {}
        self.rows: list[Row] = []

    @separate_heaps()
    def run(self) -> list[Row]:
        """Train all arms, and return the measured values.

        Raises:
            LoopError: the baseline raised, chained to the original error.
            RankError: another rank ended.
        """
        outside = ProcessState.capture()
        is_over = False
        try:
            for arm in self._arms:
                outside.restore()
                made = self._guarded(arm, partial(_RunningArm, arm, self._seed, self._together, self._meter))
                if made is not None:
                    self._running.append(made)
                    _require_apart(made, self._running[:-1])
            self._train()
            is_over = True
        finally:
            with contextlib.ExitStack() as closing:
                closing.callback(gc.collect)  # A run refers to itself, and would hold its model until a collection.
                closing.callback(outside.restore)
                closing.callback(self._running.clear)
                # After an error, other ranks would wait in collectives.
                for each in self._running if is_over or self._together.num_ranks == 1 else ():
                    closing.callback(each.close)
        return self.rows

    def _guarded(self, arm: Arm, function: Callable[[], Any]) -> Any:
        """Return the result of a function. On an error, raise for the baseline; else record it and return None."""
        try:
            return function()
        except Exception as error:
            if isinstance(error, ValueGivenError) and error.code == "setup.shares_objects":
                raise
            is_baseline = arm.name in (self._arms[0].name, CONTROL)
            _leave(self._arms[0].name if is_baseline else arm.name, error, self._failures, self._together,
                   ends=is_baseline)  # fmt: skip
            return None

    def _train(self) -> None:
        length, first = self._length, self._running[0]
        is_whole = length.evaluate_every is not None
        per_step, step_s = self._begin(is_whole=is_whole)
        begin = 0.0 if is_whole else float(first.samples)
        ends = {each.arm.name: self._end_of(each.arm, begin, per_step) for each in self._running}
        block = per_step * self._steps_of_block(step_s)
        every = None if length.evaluate_every is None else length.evaluate_every * per_step
        limit, last = float(first.samples), None
        for number in itertools.count(1):
            self._evaluate_due(every, ends, number - 1)
            running = [each for each in self._running if each.arm.name not in self._failures and not each.is_over]
            if not running:
                break
            due = math.inf if every is None else (limit // every + 1) * every
            limit = min(limit + block, due, max(ends.values()))
            for each in turns(running, number, self._seed, last):
                self._guarded(each.arm, partial(self._take, each, min(limit, ends[each.arm.name]), number))
                each.is_over = self._is_over(each, ends)
                last = each
            self._progress(f"paired run {self._seed + 1}", min(1.0, first.samples / ends[first.arm.name]))
        if not is_whole:
            for each in self._running:
                if each.arm.name not in self._failures:
                    self._guarded(each.arm, partial(self._evaluate, each, -1))

    def _end_of(self, arm: Arm, begin: float, per_step: float) -> float:
        """Return the number of samples at which an arm ends."""
        wanted = begin + self._length.steps * per_step
        return wanted if arm.samples is None else min(wanted, begin + arm.samples)

    def _is_over(self, each: _RunningArm, ends: Mapping[str, float]) -> bool:
        cap_s = self._length.cap_of(is_baseline=each is self._running[0])
        return each.samples >= ends[each.arm.name] or each.train_s >= cap_s

    def _begin(self, *, is_whole: bool) -> tuple[float, float]:
        """Take the first steps of all arms, as round 0; return samples and seconds per step of the baseline.

        They are timed only if all training time counts, and consist of a single step then.
        """
        first = self._running[0]
        seconds, per_step, steps = math.inf, 1.0, 1 if is_whole else max(each.arm.lead_steps for each in self._running)
        values = list[dict[str, float]]()
        for _ in range(steps):
            before = first.samples
            values.append(self._guarded(first.arm, partial(first.take, before + 1)))
            per_step, seconds = max(per_step, float(first.samples - before)), min(seconds, values[-1][SECONDS])
        samples = math.fsum(each[SAMPLES] for each in values)
        losses = {LOSS: statistics.fmean(each[LOSS] for each in values)} if all(LOSS in each for each in values) else {}
        self._note(first, 0, values[0] if is_whole else losses | {SAMPLES: samples})
        for each in self._running[1:]:
            each.per_step = per_step
            if each.arm.name not in self._failures:
                limit = first.samples if each.arm.samples is None else min(first.samples, each.arm.samples)
                self._guarded(each.arm, partial(self._take, each, limit, 0, is_timed=is_whole))
        if not is_whole:
            for each in self._running:
                each.train_s = 0.0
        return per_step, max(self._together.each(seconds))

    def _take(self, each: _RunningArm, limit: float, number: int, *, is_timed: bool = True) -> None:
        values = each.take(limit)
        untimed = () if is_timed else (SECONDS, CPU_SECONDS, ENERGY)
        self._note(each, number, {metric: value for metric, value in values.items() if metric not in untimed})

    def _note(self, each: _RunningArm, number: int, values: Mapping[str, float]) -> None:
        self.rows += [
            Row(each.arm.name, self._seed, number, name, value, UNITS[name]) for name, value in values.items()
        ]

    def _evaluate_due(self, every: float | None, ends: Mapping[str, float], number: int) -> None:
        """Evaluate the arms that have just reached a multiple of `every` samples, or their end."""
        for each in self._running if every is not None else ():
            name, before = each.arm.name, self._evaluated_at.get(each.arm.name, 0.0)
            is_due = each.samples // every > before // every or each.samples >= ends[name] > before
            if is_due and name not in self._failures:
                self._guarded(each.arm, partial(self._evaluate, each, number))
                self._evaluated_at[name] = float(each.samples)

    def _evaluate(self, each: _RunningArm, number: int) -> None:
        for name, value in each.evaluated().items():
            self.rows.append(Row(each.arm.name, self._seed, number, f"{EVALUATION}{name}", value, ""))

    def _steps_of_block(self, step_s: float) -> int:
        """Return the steps of a block: about `_BLOCK_S`, at least `_BLOCKS` and at most `_MOST_BLOCKS` blocks per run.

        While an arm waits, the workers of the loader fill the queues. A block therefore takes several times the number
        of queued batches, or the time to load a batch would not be measured.
        """
        steps = self._length.steps
        metered_s = 0.0 if self._meter is None else self._meter.block_s
        wanted = max(math.ceil(max(_BLOCK_S, metered_s) / max(step_s, 1e-9)), math.ceil(steps / _MOST_BLOCKS))
        queued = max(_queued_batches(each.loop) for each in self._running)
        most = steps // (_METERED_BLOCKS if metered_s else _BLOCKS)
        return max(1, min(most, wanted), min(steps // 3, math.ceil(_QUEUES * queued)))


def _queued_batches(loop: Loop) -> float:
    """Return the number of optimizer steps with batches that loader workers may have prepared."""
    workers = getattr(loop.loader, "num_workers", 0)
    factor = getattr(loop.loader, "prefetch_factor", None)
    return workers * (factor or 2) / loop.accumulate if isinstance(workers, int) else 0.0


def _require_apart(made: _RunningArm, running: Sequence[_RunningArm]) -> None:
    """Raise if two arms have the same model, optimizer or stateful loader, because `setup` must build new objects."""
    draws_itself = any(getattr(made.loop.loader, name, None) for name in ("generator", "persistent_workers"))
    for name in ("model", "optimizer", *(("loader",) if draws_itself else ())):
        if any(getattr(made.loop, name) is getattr(other.loop, name) for other in running):
            raise ValueGivenError(
                "setup",
                got=f"the same {name} from two calls",
                expected=f"a new {name} from each call of setup(seed)",
                hint=f"Build the {name} within the function.",
                code="setup.shares_objects",
            )
