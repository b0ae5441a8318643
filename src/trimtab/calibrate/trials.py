"""Trials: candidates of a stage, run interleaved in blocks, forward and backward in turn (ABC CBA).

A block is a few whole optimizer steps of one candidate through the run that would train. Blocks are paired by index,
so that a machine whose speed drifts moves all candidates alike.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from trimtab.calibrate.subject import Subject
from trimtab.core.profile import Candidate, Trial
from trimtab.core.units import format_seconds
from trimtab.decide.search import Stage
from trimtab.measure.memory import peak_bytes
from trimtab.measure.snapshot import Snapshot
from trimtab.measure.timing import time_call

_BLOCK_S = 0.15
_FAR_SLOWER = 2.5
_STAGE_S = 2.5  # of one candidate's blocks, where more than the asked number fit


@dataclass
class _Arm:
    candidate: Candidate
    control: bool = False
    first_s: float = math.inf
    peak_bytes: int | None = None
    error: str | None = None
    block_s: list[float] = field(default_factory=list)


def run_stage(subject: Subject, stage: Stage, num_blocks: int, progress: Callable[[str], None]) -> tuple[Trial, ...]:
    """Return the trials of a stage; what cannot run is a trial with its error. Leaves no trace."""
    arms = [_Arm(candidate) for candidate in stage.candidates]
    if stage.control:
        arms.append(_Arm(stage.candidates[0], control=True))
    with Snapshot(subject.model, subject.optimizer) as snapshot:
        for arm in arms:
            if arm.control:  # the incumbent again: it has run, or failed, already
                arm.first_s, arm.error = arms[0].first_s, arms[0].error
                continue
            progress(f"{stage.name}: {arm.candidate.describe()}")
            _warm_up(subject, arm, measure_memory=stage.name != "optimizer")
            snapshot.restore()
        incumbent_s = arms[0].first_s
        # A budget may need a setting however slow it is; only where nothing but speed is asked is one dropped early.
        slowest = math.inf if stage.name in ("micro_batch", "verify") else _FAR_SLOWER * incumbent_s
        running = [arm for arm in arms if arm.error is None and arm.first_s <= slowest]
        steps = max(1, round(_BLOCK_S / max(incumbent_s, 1e-6))) if math.isfinite(incumbent_s) else 1
        blocks = _affordable_blocks(num_blocks, steps * incumbent_s)
        for block in range(blocks):
            progress(f"{stage.name}: block {block + 1} of {blocks}")
            for arm in running if block % 2 == 0 else reversed(running):
                arm.block_s.append(_time_block(subject, stage, arm.candidate, steps))
                snapshot.restore()
    return tuple(_trial(stage, arm, incumbent_s) for arm in arms)


def _affordable_blocks(num_blocks: int, block_s: float) -> int:
    """Return more blocks where blocks are short: a single disturbed one then weighs less."""
    return num_blocks if block_s <= 0 else max(num_blocks, min(3 * num_blocks, round(_STAGE_S / block_s)))


def _warm_up(subject: Subject, arm: _Arm, *, measure_memory: bool) -> None:
    """Run two steps, then one under the memory count; a failure becomes the arm's error."""
    try:
        with subject.start(arm.candidate) as run:

            def step() -> None:
                run.train_step(run.window(subject.batch), subject.loss_fn)

            time_call(step, subject.device)
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


def _time_block(subject: Subject, stage: Stage, candidate: Candidate, steps: int) -> float:
    with subject.start(candidate) as run:
        if stage.name == "optimizer":
            return _time_optimizer(subject, steps)

        def step() -> None:
            run.train_step(run.window(subject.batch), subject.loss_fn)

        if steps > 1:
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
