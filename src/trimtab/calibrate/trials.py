"""Trials: candidates of a stage, run interleaved in blocks, forward and backward in turn (ABC CBA).

A block is a few whole optimizer steps of one candidate through the run that would train. Blocks are paired by index,
so that a machine whose speed drifts moves all candidates alike. Where a step takes a large part of a second planning
must not take minutes: what is known from an earlier stage is not measured again, and a candidate that lost every one
of its first blocks is not run further.
"""

from __future__ import annotations

import contextlib
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from trimtab.calibrate.subject import Subject
from trimtab.core.profile import Candidate, Trial
from trimtab.core.units import format_seconds
from trimtab.decide.search import MIN_BLOCKS, Stage
from trimtab.decide.statistics import Interval, is_gain, paired_ratios, ratio_interval
from trimtab.measure.memory import peak_bytes
from trimtab.measure.snapshot import Snapshot
from trimtab.measure.timing import time_call
from trimtab.runtime.modes import retained_memory

_BLOCK_S = 0.15
_FAR_SLOWER = 2.5
_STAGE_S = 2.5  # of one candidate's blocks, where more than the asked number fit
_MOST = 3  # times the asked number of blocks, at the most
_WORTH_A_LOOK = 1.05
_SLOW_S = 0.3  # a first step this long is not repeated to learn its time: what starts up once is small beside it


@dataclass
class _Arm:
    candidate: Candidate
    control: bool = False
    first_s: float = math.inf
    peak_bytes: int | None = None
    error: str | None = None
    block_s: list[float] = field(default_factory=list)


def run_stage(
    subject: Subject,
    stage: Stage,
    num_blocks: int,
    progress: Callable[[str], None],
    known: Sequence[Trial] = (),
) -> tuple[Trial, ...]:
    """Return the trials of a stage; what cannot run is a trial with its error. Leaves no trace.

    Args:
        known: trials of earlier stages.
    """
    arms = [_Arm(candidate) for candidate in stage.candidates]
    if stage.control:
        arms.append(_Arm(stage.candidates[0], control=True))
    with _shared_allocator(stage), Snapshot(subject.model, subject.optimizer) as snapshot:
        for arm in arms:
            if arm.control:  # the incumbent again: it has run, or failed, already
                arm.first_s, arm.error = arms[0].first_s, arms[0].error
            elif not _recall(arm, stage, known):
                progress(f"{stage.name}: {arm.candidate.describe()}")
                _warm_up(subject, arm, measure_memory=stage.name != "optimizer")
                snapshot.restore()
        incumbent_s = arms[0].first_s
        # A budget may need a setting however slow it is; only where nothing but speed is asked is one dropped early.
        slowest = math.inf if stage.name in ("micro_batch", "verify") else _FAR_SLOWER * incumbent_s
        running = [arm for arm in arms if arm.error is None and arm.first_s <= slowest]
        steps = max(1, round(_BLOCK_S / max(incumbent_s, 1e-6))) if math.isfinite(incumbent_s) else 1
        _run_blocks(subject, stage, arms, running, steps, num_blocks, snapshot, progress)
    return tuple(_trial(stage, arm, incumbent_s) for arm in arms)


def _run_blocks(
    subject: Subject,
    stage: Stage,
    arms: Sequence[_Arm],
    running: Sequence[_Arm],
    steps: int,
    num_blocks: int,
    snapshot: Snapshot,
    progress: Callable[[str], None],
) -> None:
    """Fill the arms' blocks: as many as asked for, fewer of a sure loser, more while a likely gain is in the noise."""
    incumbent_s = arms[0].first_s
    enough = _affordable_blocks(num_blocks, steps * incumbent_s)
    for block in range(max(enough, _MOST * num_blocks)):
        if block >= enough and not (stage.control and _is_promising(arms, running)):
            break
        progress(f"{stage.name}: block {block + 1} of {max(enough, block + 1)}")
        for arm in running if block % 2 == 0 else reversed(running):
            _run_block(subject, stage, arm, steps)
            snapshot.restore()
        running = [arm for arm in running if arm.error is None]
        if block + 1 == MIN_BLOCKS:
            if stage.name != "verify":
                running = [arm for arm in running if arm.control or not _is_behind(arm, arms[0])]
            if incumbent_s >= _SLOW_S and _is_decided(arms, running):
                break


def _recall(arm: _Arm, stage: Stage, known: Sequence[Trial]) -> bool:
    """Take a candidate's step time and peak from an earlier stage; returns whether there were any."""
    whole = [t for t in known if t.candidate == arm.candidate and t.stage != "optimizer" and not t.control]
    found = next((t for t in reversed(whole) if t.step_s), None)
    if found is None or (found.peak_bytes is None and stage.name != "optimizer"):
        return False
    arm.first_s, arm.peak_bytes = found.step_s or math.inf, found.peak_bytes
    return True


def _is_behind(arm: _Arm, incumbent: _Arm) -> bool:
    """Return whether a rival lost every block so far: an equal one does so in 1 of 8 stages, and it would not win."""
    if arm is incumbent or not incumbent.block_s:
        return False
    return all(ours > theirs for ours, theirs in zip(arm.block_s, incumbent.block_s, strict=True))


def _affordable_blocks(num_blocks: int, block_s: float) -> int:
    """Return more blocks where blocks are short: a single disturbed one then weighs less."""
    return num_blocks if block_s <= 0 else max(num_blocks, min(_MOST * num_blocks, round(_STAGE_S / block_s)))


def _warm_up(subject: Subject, arm: _Arm, *, measure_memory: bool) -> None:
    """Run a step, one more where it was short, then one under the memory count; a failure becomes the arm's error."""
    try:
        with subject.start(arm.candidate) as run:

            def step() -> None:
                run.train_step(run.window(subject.batch), subject.loss_fn)

            arm.first_s = time_call(step, subject.device)
            if arm.first_s < _SLOW_S:
                arm.first_s = time_call(step, subject.device)
            if not bool(torch.isfinite(run.loss)):
                arm.error = "its loss is not finite"
            if measure_memory and arm.error is None:
                arm.peak_bytes = peak_bytes(step, subject.device, subject.live_tensors)
    except Exception as error:  # the user's model or the device may fail in any way; the reason is kept
        arm.error = _describe(error)


def _describe(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    text = lines[0] if lines else type(error).__name__
    if isinstance(error, torch.OutOfMemoryError) or "out of memory" in text or "can't allocate memory" in text:
        return "out of memory"
    return f"{type(error).__name__}: {text[:200]}"


def _is_decided(arms: Sequence[_Arm], running: Sequence[_Arm]) -> bool:
    """Return whether more blocks could change nothing: each rival left is clearly faster, or none is left."""
    if not arms[0].block_s or all(arm.control for arm in arms[1:]):
        return False
    return all(is_gain(ratio, resolved) for ratio, resolved in _ratios(arms[0], running))


def _is_promising(arms: Sequence[_Arm], running: Sequence[_Arm]) -> bool:
    """Return whether a rival looks faster by what would be worth having, and is not yet clear of the noise."""
    return any(r.mean > _WORTH_A_LOOK and not is_gain(r, resolved) for r, resolved in _ratios(arms[0], running))


def _ratios(incumbent: _Arm, running: Sequence[_Arm]) -> list[tuple[Interval, Interval | None]]:
    """Return (speed over the incumbent, the control's) of each rival still running."""
    if not incumbent.block_s:
        return []
    control = next((arm for arm in running if arm.control), None)
    resolved = ratio_interval(paired_ratios(control.block_s, incumbent.block_s)) if control else None
    rivals = [arm for arm in running if arm is not incumbent and not arm.control]
    return [(ratio_interval(paired_ratios(arm.block_s, incumbent.block_s)), resolved) for arm in rivals]


@contextlib.contextmanager
def _shared_allocator(stage: Stage) -> Iterator[None]:
    """Retain memory across the blocks of a stage all of whose candidates do, as one run would."""
    if any(candidate.allocator != "retain" for candidate in stage.candidates):
        yield
        return
    let_go = retained_memory.hold()
    try:
        yield
    finally:
        let_go()


def _run_block(subject: Subject, stage: Stage, arm: _Arm, steps: int) -> None:
    """Add one block; what ran once may still fail later, memory that grows short above all."""
    try:
        arm.block_s.append(_time_block(subject, stage, arm.candidate, steps))
    except Exception as error:
        arm.error, arm.block_s = _describe(error), []


def _time_block(subject: Subject, stage: Stage, candidate: Candidate, steps: int) -> float:
    with subject.start(candidate) as run:
        if stage.name == "optimizer":
            return _time_optimizer(subject, steps)

        def step() -> None:
            run.train_step(run.window(subject.batch), subject.loss_fn)

        mixed = len({each.allocator for each in stage.candidates}) > 1
        if steps > 1 or (mixed and candidate.allocator == "retain"):  # asks again for what another block handed back
            step()
        if subject.device.type == "cuda":  # a synchronisation after every step would be counted into it
            return time_call(step, subject.device, steps)
        return statistics.median(time_call(step, subject.device) for _ in range(steps))


def _time_optimizer(subject: Subject, steps: int) -> float:
    for parameter in subject.model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.full_like(parameter, 1e-3)
    subject.optimizer.step()
    return time_call(subject.optimizer.step, subject.device, max(3, steps))


def _trial(stage: Stage, arm: _Arm, incumbent_s: float) -> Trial:
    blocks = tuple(arm.block_s)
    error = arm.error
    if error is None and not blocks:
        error = f"stopped after warm-up: {format_seconds(arm.first_s)} per step against {format_seconds(incumbent_s)}"
    return Trial(stage.name, arm.candidate, blocks, arm.peak_bytes, error, arm.control)
