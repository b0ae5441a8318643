"""Trials: candidates of a search phase, run in interleaved blocks, in a random order per round (`drawn_turns`).

A block is a few whole optimizer steps of a candidate, through the run that would train. Blocks are short and many, and
paired by index, so that a drift in the machine's speed and bursts of load affect all candidates alike. Every
block starts from the same state, with the optimizer's moments present. To keep planning short with slow steps, known
results of earlier phases are not measured again, and a candidate that lost all of its first blocks is dropped.

In a phase that may replace the incumbent, the first blocks may only drop candidates, and a verdict needs all blocks,
or an equal candidate would win by optional stopping. If a likely gain is within the noise then, the number of blocks
doubles, at most `_DOUBLINGS` times; a simulation tests that equal candidates seldom win (docs/math.md, section 8). A
phase that only orders candidates ends when the order is known. Over the time budget, a final still gets more blocks if
they cost less than a tenth of the time that the gain would save in the run.
"""

from __future__ import annotations

import contextlib
import functools
import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch

from trimtab.core.choice import Note, is_by_compiler, is_recorded
from trimtab.core.energy_reading import WINDOW_S
from trimtab.core.units import format_seconds
from trimtab.energy.energy_meter import EnergyClock, GivenWatts, Meter
from trimtab.measure.timing import is_timed_by_processor, synchronize, time_call, time_settled
from trimtab.planner.search import BLOCK_S, SearchPhase
from trimtab.planner.statistics import MIN_PAIRS_FOR_VERDICT, drawn_turns, is_gain, paired_ratios, rank_interval
from trimtab.planner.trial_statistics import MIN_BLOCKS, still_open
from trimtab.plans.profile import ALONE, RAN_OUT, SLICED, Candidate, Trial, is_final
from trimtab.profiling.cuda_graph_proof import replay_refusal
from trimtab.profiling.measurement_notes import Notes, describe
from trimtab.profiling.smoke_test import CrashTest, SpeedTest
from trimtab.profiling.training_loop import TrainingLoop
from trimtab.state.loop_state import LoopState
from trimtab.state.peak_memory import peak_bytes, unused_bytes
from trimtab.techniques.compiled_call import start_compiler
from trimtab.techniques.cuda_graphs import steps_to_launch
from trimtab.techniques.mixed_precision import retained_memory
from trimtab.training.out_of_memory import is_out_of_memory
from trimtab.training.run import Run

_MOST_SCALES = 20  # fp16 halves its loss scale after each overflow, here from 65536 to 0.125.
_MODES = ("modes", SLICED)
_OTHER_KERNELS = (*_MODES, "head")  # Search phases whose candidates use kernels that have not run yet.
_FAR_SLOWER = 2.5
_STAGE_S = 2.5  # Seconds of a candidate's blocks, if more than the requested number fit.
_MOST = 4  # Limit on the blocks that fit into `_STAGE_S`, as a multiple of the requested number.
_DOUBLINGS = 2  # Times that the number of blocks may double for a likely gain within the noise.
_WORTH_A_LOOK = 1.05
_PRICE = 0.1  # Fraction of the saved time of the run that additional blocks may take over the time budget.
_SLOW_S = 0.3  # On a CPU, one-time costs are small compared with such a long first step.


class UntrainableCandidate(Exception):
    """A candidate running without training."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.failure = Note(code, text)


def step_until_applied(run: Run, subject: TrainingLoop) -> None:
    """Step until the optimizer has stepped: once, or in fp16 until a loss scale is found.

    `UntrainableCandidate` if the loss is NaN or infinite, or gradients overflow at every scale.
    """
    for _ in range(_MOST_SCALES):
        if run.applied_steps > 0:
            return
        subject.step(run)
        require_finite(run)
    if run.applied_steps == 0:
        text = f"gradients overflow at all of the {_MOST_SCALES} loss scales tried"
        raise UntrainableCandidate("trial.gradients_overflow", text)


def require_finite(run: Run) -> None:
    if not bool(torch.isfinite(run.loss)):
        raise UntrainableCandidate("trial.loss_nonfinite", "the loss is NaN or infinite")


@dataclass
class _TrialArm:
    candidate: Candidate
    control: bool = False
    first_s: float = math.inf
    peak_bytes: int | None = None
    error: Note | None = None
    compile_s: float | None = None
    unused_bytes: int | None = None
    uncounted: Exception | None = None  # Reason for an unknown peak.
    watts: list[float] = field(default_factory=list)
    block_s: list[float] = field(default_factory=list)

    def fail(self, error: Exception) -> None:
        """Record a failure of any kind: the user's model, the device, or most likely memory that runs out."""
        if isinstance(error, UntrainableCandidate):
            self.error = error.failure
        else:
            self.error = Note(RAN_OUT if is_out_of_memory(error) else "trial.failed", describe(error))
        self.block_s = []


@dataclass(frozen=True)
class TrialPower:
    """Power measurement of trials; `is_asked` if energy is weighted or limited, else only finals get a window."""

    meter: Meter
    is_asked: bool

    def num_windows(self, stage: SearchPhase, *, over_time_budget: bool = False) -> int:
        """Return the number of windows per arm; a final that weights energy gets enough for a verdict."""
        decides = is_final(stage.name)
        if stage.name == ALONE or not (self.is_asked or (decides and not over_time_budget)):
            return 0
        return MIN_PAIRS_FOR_VERDICT if self.is_asked and decides else 1

    def read(self, subject: TrainingLoop, arms: Sequence[_TrialArm], start: LoopState, num_windows: int) -> None:
        """Add the watts of every arm, in alternating order; an arm with a failure or without a reading gets none."""
        for lap in range(num_windows):
            for arm in [arm for arm in arms if arm.error is None][:: 1 if lap % 2 == 0 else -1]:
                start.restore()
                try:
                    watts = self._watts(subject, arm)
                    arm.watts.append(math.nan if watts is None else watts)
                except Exception as error:
                    arm.fail(error)
        for arm in arms:
            if arm.error is not None or any(map(math.isnan, arm.watts)):
                arm.watts.clear()

    def _watts(self, subject: TrainingLoop, arm: _TrialArm) -> float | None:
        if isinstance(self.meter, GivenWatts):
            return self.meter.watts
        with subject.start(arm.candidate) as run:
            for _ in range(steps_to_launch(arm.candidate.compiled) or 1):
                subject.step(run)
            synchronize(subject.device)
            clock = EnergyClock(self.meter)
            clock.start()
            steps = max(1, math.ceil(WINDOW_S / max(arm.first_s, 1e-6)))
            while clock.seconds < WINDOW_S:
                for _ in range(steps):
                    subject.step(run)
                    clock.tick()
                synchronize(subject.device)
                steps = max(1, steps // 8)
            return clock.read().watts


@dataclass(frozen=True)
class _Blocks:
    """Configuration of the timing blocks of a search phase; a block is a few consecutive steps of a candidate.

    Args:
        steps: timed steps per block.
        step_s: seconds of the incumbent's step, from its warm-up.
        patient, run_s: see `run_stage`.
        start: state at the start of every block.
    """

    subject: TrainingLoop
    stage: SearchPhase
    steps: int
    step_s: float
    num_blocks: int
    patient: bool
    start: LoopState
    progress: Callable[[str], None]
    run_s: float = 0.0

    @property
    def enough(self) -> int:
        """Number of blocks to run; more of short blocks, which a single disturbance affects more."""
        if self.stage.is_brief:
            return min(self.num_blocks, MIN_BLOCKS)
        block_s = (self.steps + 1) * self.step_s  # A step before the timed ones.
        affordable = 0 if block_s <= 0 else min(self.most, round(_STAGE_S / block_s))
        return max(self.num_blocks, affordable)

    @property
    def most(self) -> int:
        """Largest number of blocks before a first verdict, or while an order is open."""
        return _MOST * self.num_blocks if self.patient or self.stage.orders else self.num_blocks

    def are_worth(self, blocks: int, gain: float, num_arms: int) -> bool:
        """Return True if a likely gain is worth a number of blocks: if there is time, or the gain pays for them."""
        blocks_s = blocks * num_arms * (self.steps + 1) * self.step_s
        return self.patient or blocks_s <= _PRICE * (1 - 1 / gain) * self.run_s

    def steps_of(self, arm: _TrialArm) -> int:
        if not math.isfinite(arm.first_s) or arm.first_s <= _FAR_SLOWER * self.step_s:
            return self.steps
        return max(1, round(self.steps * self.step_s / arm.first_s))


def run_stage(
    subject: TrainingLoop,
    stage: SearchPhase,
    num_blocks: int,
    progress: Callable[[str], None],
    known: Sequence[Trial] = (),
    *,
    patient: bool = True,
    guard: CrashTest | None = None,
    power: TrialPower | None = None,
    run_s: float = 0.0,
    notes: Notes | None = None,
) -> tuple[Trial, ...]:
    """Return the trials of a search phase; a failed candidate has a trial with the error. State is restored.

    Args:
        patient: True to run more than `num_blocks` blocks, if blocks are short or a likely gain is within the noise;
            only in phases that may replace the incumbent.
        run_s: seconds of the planned run, which may pay for more blocks; 0 if unknown.
    """
    arms = [_TrialArm(candidate) for candidate in stage.candidates]
    if stage.control:
        arms.append(_TrialArm(stage.candidates[0], control=True))
    with contextlib.ExitStack() as stack:
        if all(candidate.allocator == "retain" for candidate in stage.candidates):
            stack.callback(retained_memory.hold())  # Across blocks too, as a single run would.
        snapshot = stack.enter_context(subject.state())
        tests: list[Callable[[Candidate], Note | None]] = []
        for arm in arms:
            if arm.control:  # The incumbent's second run: it has run, or failed, already.
                arm.first_s, arm.error = arms[0].first_s, arms[0].error
            elif not _recall(arm, stage, known):
                progress(f"{stage.name}: {arm.candidate.describe()}")
                if stage.name in _OTHER_KERNELS and arm is not arms[0]:
                    tests = tests or _smoke_tests(subject, stage, arms[0].first_s, guard)
                    arm.error = next(filter(None, (test(arm.candidate) for test in tests)), None)
                if arm.error is None:
                    snapshot.restore()  # The smoke test may have left state in the loss, in the incumbent's precision.
                    slowest, measures = _slowest(stage, arms[0].first_s), stage.name != ALONE
                    _warm_up(subject, arm, measure_memory=measures, slowest=slowest, paces=arm is arms[0])
                if notes is not None and arm.uncounted is not None:
                    what = f"the peak memory of {arm.candidate.describe()} was not measured"
                    notes.add("memory.not_counted", what, arm.uncounted)
                snapshot.restore()
                tried = arms[: arms.index(arm) + 1]
                if stage.is_known([each.peak_bytes for each in tried]):
                    arms = tried
                    break
        step_s = arms[0].first_s
        running = [arm for arm in arms if arm.error is None and arm.first_s <= _slowest(stage, step_s)]
        steps = max(1, round(BLOCK_S / max(step_s, 1e-6))) if math.isfinite(step_s) else 1
        start = _with_optimizer_state(subject, running, snapshot)
        wanted = num_blocks if stage.accepts else MIN_BLOCKS
        _run_blocks(_Blocks(subject, stage, steps, step_s, wanted, patient, start, progress, run_s), arms, running)
        if power is not None and (windows := power.num_windows(stage, over_time_budget=not patient)):
            progress(f"{stage.name}: measuring power")
            power.read(subject, [arm for arm in arms if arm.error is None and arm.block_s], start, windows)
    return tuple(_trial(stage, arm, step_s) for arm in arms)


def _smoke_tests(
    subject: TrainingLoop, stage: SearchPhase, step_s: float, guard: CrashTest | None
) -> list[Callable[[Candidate], Note | None]]:
    """Return the tests of other kernels: for crashes, and in phases of modes for hopeless speed."""
    tests: list[Callable[[Candidate], Note | None]] = [(guard or CrashTest(subject, stage.candidates[0])).refusal]
    if stage.name in _MODES:
        tests.append(SpeedTest(subject, stage.candidates[0], step_s).refusal)
    return tests


def _slowest(stage: SearchPhase, step_s: float) -> float:
    """Return the largest time per step of a candidate with blocks."""
    return _FAR_SLOWER * step_s if stage.name in _MODES else math.inf


def _with_optimizer_state(subject: TrainingLoop, arms: Sequence[_TrialArm], before: LoopState) -> LoopState:
    """Return a state with optimizer state, after a step of the first arm that can take one; else the state before.

    A block without optimizer state would pay for creating it, within its only timed step if it has just one.
    """
    for arm in arms:
        before.restore()
        try:
            with subject.start(arm.candidate) as run:
                step_until_applied(run, subject)
            highest = max((arm.peak_bytes for arm in arms if arm.peak_bytes is not None), default=None)
            return subject.state(peak_bytes=highest)  # Peak memory is not measured in blocks.
        except Exception:  # The warm-up succeeded; if this fails, the first block will fail too and record the error.
            continue
    return before


def _run_blocks(blocks: _Blocks, arms: Sequence[_TrialArm], running: Sequence[_TrialArm]) -> None:
    stage = blocks.stage
    done, last, doublings = 0, blocks.enough, 0
    draw, before = random.Random(0), None
    while done < last:
        blocks.progress(f"{stage.name}: block {done + 1} of {last}")
        for arm in drawn_turns(running, done, draw, before):
            blocks.start.restore()
            try:  # An arm that ran before may still fail.
                arm.block_s.append(_time_block(blocks.subject, stage, arm.candidate, blocks.steps_of(arm)))
            except Exception as error:
                arm.fail(error)
            before = arm
        running = [arm for arm in running if arm.error is None]
        done += 1
        if stage.drops and (done == MIN_BLOCKS or (stage.orders and done > MIN_BLOCKS)):
            running = still_open(running, arms[0], orders=stage.orders)
            if (stage.orders or blocks.step_s >= _SLOW_S) and _is_over(stage, arms, running):
                break
        if done == last and stage.control and doublings < _DOUBLINGS:
            gain = _promised(arms, running)
            if gain is not None and blocks.are_worth(last, gain, len(running)):
                last, doublings = 2 * last, doublings + 1


def _recall(arm: _TrialArm, stage: SearchPhase, known: Sequence[Trial]) -> bool:
    """Copy a candidate's step time and peak from an earlier phase; returns False without an earlier trial."""
    whole = [t for t in known if t.candidate == arm.candidate and t.is_whole and not t.control]
    found = next((t for t in reversed(whole) if t.step_s), None)
    if found is None or (found.peak_bytes is None and stage.name != ALONE):
        return False
    arm.first_s, arm.peak_bytes = found.step_s or math.inf, found.peak_bytes
    return True


def _warm_up(subject: TrainingLoop, arm: _TrialArm, *, measure_memory: bool, slowest: float, paces: bool) -> None:
    """Run a step, a second step if needed, then a step with memory measurement; a failure becomes the arm's error.

    The first step may include one-time costs, such as compiled or autotuned kernels. A second step is therefore run
    if the first would drop the candidate (above `slowest`) or is short and sets the block length (`paces`), and
    always on CUDA.
    """
    try:
        with subject.start(arm.candidate) as run:
            step = functools.partial(subject.step, run)
            if is_by_compiler(arm.candidate.compiled):
                start_compiler(subject.device)  # Otherwise the start would count as a part of the first compilation.
            begin = time.perf_counter()
            arm.first_s = once_s = time_call(step, subject.device)
            step_until_applied(run, subject)
            compiled = arm.candidate.compiled
            # CUDA graphs are captured in further steps.
            first = [once_s, *(time_call(step, subject.device) for _ in range(steps_to_launch(compiled) - 1))]
            wall_s = time.perf_counter() - begin
            is_rough = once_s > slowest or (paces and once_s < _SLOW_S)
            if is_rough or compiled or subject.device.type == "cuda":
                arm.first_s = timer(arm.candidate)(step, subject.device)
            if compiled:
                # Compilers run in processes of their own, whose time is no processor time of this one.
                first_s = wall_s if is_timed_by_processor() else sum(first)
                arm.compile_s = max(0.0, first_s - len(first) * arm.first_s)
            require_finite(run)
            if is_recorded(compiled) and (refusal := replay_refusal(subject, arm.candidate)) is not None:
                raise UntrainableCandidate("trial.graphs_refused", refusal)
            if measure_memory:
                _count_peak(run, subject, arm)
    except Exception as error:
        arm.fail(error)


def _count_peak(run: Run, subject: TrainingLoop, arm: _TrialArm) -> None:
    try:
        subject.optimizer.zero_grad(set_to_none=True)  # Gradients alive before the measurement would not be counted.
        # The step with the highest memory use is over two batches if windows may span several.
        batches = [subject.batch] * (2 if subject.adapts_batch_size else 1)
        counted = peak_bytes(lambda: subject.step(run, *batches), subject.device, subject.live_tensors)
    except Exception as error:
        if is_out_of_memory(error):
            raise
        subject.step(run)  # If the step itself fails, so does the trial.
        arm.uncounted = error
        return
    arm.peak_bytes = counted + subject.start_bytes
    # In memory of CUDA graphs, tensors cannot be distinguished from unused space.
    arm.unused_bytes = None if is_recorded(arm.candidate.compiled) else unused_bytes(subject.device)


def _is_over(stage: SearchPhase, arms: Sequence[_TrialArm], running: Sequence[_TrialArm]) -> bool:
    """Return True with rivals, if more blocks could not change the outcome for the remaining arms."""
    left = [arm for arm in running if not arm.control]
    had_rivals = any(not arm.control and (arm.block_s or stage.accepts) for arm in arms[1:])
    return had_rivals and (len(left) < 2 if stage.orders else left == [arms[0]])


def _promised(arms: Sequence[_TrialArm], running: Sequence[_TrialArm]) -> float | None:
    """Return the largest speed-up of a rival that is worth having but still within the noise; otherwise None."""
    incumbent, control = arms[0], next((arm for arm in running if arm.control), None)
    # Without a control or incumbent, no number of blocks resolves a difference.
    if control is None or not incumbent.block_s:
        return None
    resolved = rank_interval(paired_ratios(control.block_s, incumbent.block_s))
    rivals = [arm for arm in running if arm is not incumbent and not arm.control]
    ratios = [rank_interval(paired_ratios(arm.block_s, incumbent.block_s)) for arm in rivals]
    open_ones = [ratio.mean for ratio in ratios if ratio.mean > _WORTH_A_LOOK and not is_gain(ratio, resolved)]
    return max(open_ones, default=None)


def _time_block(subject: TrainingLoop, stage: SearchPhase, candidate: Candidate, steps: int) -> float:
    with subject.start(candidate) as run:
        if stage.name == ALONE:
            for parameter in subject.trained.parameters():
                if parameter.requires_grad:
                    parameter.grad = torch.full_like(parameter, 1e-3)
            subject.optimizer.step()
            return time_call(subject.optimizer.step, subject.device, max(3, steps))
        # An arm that keeps freed memory must first request the memory that another block returned, and fp16 must first
        # find its loss scale. If only those arms were warmed up, the first step would decide in their favour.
        is_mixed = len({each.allocator for each in stage.candidates}) > 1
        needs_lead = is_mixed or any(each.precision == "fp16" for each in stage.candidates)
        if steps > 1 or subject.device.type == "cuda" or needs_lead:
            step_until_applied(run, subject)
        # Every run captures CUDA graphs again.
        for _ in range(max(steps_to_launch(each.compiled) for each in stage.candidates)):
            subject.step(run)
        step = functools.partial(subject.step, run)
        if subject.device.type == "cuda":  # A synchronisation after every step would be included in the time.
            return time_call(step, subject.device, steps)
        return statistics.median(timer(candidate)(step, subject.device) for _ in range(steps))


def timer(candidate: Candidate) -> Callable[[Callable[[], object], torch.device], float]:
    """Return the timing function for steps: with kept freed memory, a step in which the heap grew does not count."""
    return time_settled if candidate.allocator == "retain" else time_call


def _trial(stage: SearchPhase, arm: _TrialArm, incumbent_s: float) -> Trial:
    blocks = tuple(arm.block_s)
    error = arm.error
    if error is None and not blocks:
        taken, best = format_seconds(arm.first_s), format_seconds(incumbent_s)
        text = f"too slow in the warm-up: {taken} per step; the best candidate so far takes {best}"
        error = Note("trial.too_slow", text)
    found = Trial(stage.name, arm.candidate, blocks, arm.peak_bytes, control=arm.control)
    if error is not None:
        found = replace(found, error=error.text, code=error.code)
    return replace(found, compile_s=arm.compile_s, unused_bytes=arm.unused_bytes, watts=tuple(arm.watts))
