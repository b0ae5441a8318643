"""Whether a user's own step function does the maths that the task declares.

A plan trains `loss_fn` with `make_optimizer`; the reference trains by `task.step`. Were the two different maths, each
ratio between them would compare two trainings, not two speeds.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trimtab.core.errors import ValueGivenError
from trimtab.core.plan import Plan
from trimtab.experiments.failures import blame_reference
from trimtab.experiments.loops import PlanLoop
from trimtab.experiments.planning import PLANNING_SEED
from trimtab.measure.process_state import ProcessState
from trimtab.recipes.loop import MakeLoop
from trimtab.recipes.reference import ReferenceLoop
from trimtab.tasks.task import Task, TaskData

_STEPS = 2
# Largest ||difference of weights|| / ||what they moved by||; rounding alone stays far below.
_LIMIT = 1e-3
# Where the step differs from itself (atomic additions on a GPU), how often that much is still the same maths.
_NOISE = 3.0


def check_step(task: Task, data: TaskData, device: torch.device) -> None:
    """Train two steps by `task.step` and by `loss_fn` through a plan that changes nothing, from one seed.

    Raises:
        ValueGivenError: the weights differ. LoopError: the step function raised.
    """
    if task.step is None:
        return
    before = ProcessState.capture()
    try:
        start, ours = _trained(_plain_plan, task, data, device)
        moved, theirs = _reference(task, data, device, start)
        difference = _share(ours - theirs, moved)
        if difference <= _LIMIT:
            return
        _, again = _reference(task, data, device, start)
        if difference > _NOISE * _share(again - theirs, moved):
            raise _different(difference)
    finally:
        before.restore()


def _plain_plan(task: Task, device: torch.device) -> PlanLoop:
    """Return the loop of a plan that does what the task declares of its reference."""
    declared = task.reference
    plan = Plan.fixed(task.batch_rows, precision=declared.precision, clip_norm=declared.clip_norm)
    return PlanLoop(task, device, plan)


def _reference(task: Task, data: TaskData, device: torch.device, start: Tensor) -> tuple[float, Tensor]:
    """Return (how far the weights moved, where to), trained by the step function."""
    try:
        _, end = _trained(ReferenceLoop, task, data, device)
    except Exception as error:
        blame_reference(error)
    return float((end - start).norm()), end


def _trained(make: MakeLoop, task: Task, data: TaskData, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return all weights at the start and after two steps."""
    torch.manual_seed(PLANNING_SEED)
    loop = make(task, device)
    try:
        start = _weights(loop.model)
        batches = data.batches(PLANNING_SEED, task.batch_rows)
        torch.manual_seed(PLANNING_SEED)
        for _ in range(_STEPS):
            loop.step(batches)
        return start, _weights(loop.model)
    finally:
        loop.close()


def _weights(model: torch.nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten().double().cpu() for p in model.parameters()])


def _share(difference: Tensor, moved: float) -> float:
    """Return ||difference|| over what the weights moved by; infinite where they moved in one of the two only."""
    size = float(difference.norm())
    if size == 0:
        return 0.0
    return size / moved if moved > 0 else float("inf")


def _different(share: float) -> ValueGivenError:
    return ValueGivenError(
        "task.step",
        given=f"a step whose weights, after {_STEPS} steps from one seed, are {share:.1%} of their way from where "
        "loss_fn and make_optimizer lead",
        expected=f"the same maths (at most {_LIMIT:.1%})",
        way_out="Make loss_fn return the loss that the step takes, and declare its precision and clipping: "
        "Task(reference=Reference(precision=..., clip_norm=...)), that is reference.clip_norm.",
    )
