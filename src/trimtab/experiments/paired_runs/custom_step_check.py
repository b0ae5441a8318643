"""Check that a user's own step function computes the training declared by the task.

A plan trains `loss_fn` with `make_optimizer`, the reference trains with `task.step`. If the two differed, ratios would
compare two trainings instead of two speeds.

The check compares the gradients seen by the optimizer, and the weights reached by both loops from equal gradients.
Weights alone mislead: Adam moves a weight with a gradient of mere rounding (such as an attention's key bias) by the
full learning rate in either direction, and hides a gradient that is four times too large.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from trimtab.core.errors import ValueGivenError
from trimtab.experiments.baselines.loop import MakeLoop, SteppedLoop
from trimtab.experiments.baselines.reference import ReferenceLoop
from trimtab.experiments.paired_runs.paired_run import blame_reference
from trimtab.experiments.paired_runs.plan_loops import PlanLoop
from trimtab.experiments.task_plans import PLANNING_SEED
from trimtab.plans.plan import Plan
from trimtab.state.process_state import ProcessState
from trimtab.tasks.task import Task, TaskData

_STEPS = 2
# Limit of ||difference|| / ||declared|| for gradients and for weight updates; rounding alone stays far below.
_LIMIT = 1e-3
# Gradients below this fraction of the total norm are compared with the fraction, because rounding may dominate them.
_SMALL = 1e-2
# If the step is not deterministic (atomic additions on a GPU), differences up to this multiple of its own noise pass.
_NOISE = 3.0

# A tensor per parameter on the CPU, zero without a gradient.
_Gradients = Sequence[Tensor]


@dataclass(frozen=True)
class _TrainedWeights:
    """All weights at the start and after two steps, and the gradients seen by the optimizer at every step."""

    start: Tensor
    end: Tensor
    gradients: Sequence[_Gradients]


class _Difference(NamedTuple):
    """Relative difference of two loops: of weight updates, and of gradients.

    Weights come first: if weights diverge from equal gradients, the gradients of the next step diverge too.
    """

    weights: float
    gradient: float


def check_step(task: Task, data: TaskData, device: torch.device) -> None:
    """Train two steps with `task.step` and with `loss_fn` under an unchanged plan from the same seed, and compare.

    Raises:
        ValueGivenError: gradients, weights or the number of optimizer steps differ.
        LoopError: the step function raised.
    """
    if task.step is None:
        return
    before = ProcessState.capture()
    try:
        theirs = _reference(task, data, device)
        ours = _trained(_plain_plan, task, data, device, theirs.gradients)
        _check_number(len(theirs.gradients), len(ours.gradients))
        found = _difference(ours, theirs)
        if max(found) <= _LIMIT:
            return
        noise = _difference(_reference(task, data, device, theirs.gradients), theirs)
        for share, own, refusal in zip(found, noise, (_other_weights, _other_gradient), strict=True):
            if share > max(_LIMIT, _NOISE * own):
                raise refusal(share)
    finally:
        before.restore()


def _plain_plan(task: Task, device: torch.device) -> PlanLoop:
    """Return a plan's loop with the precision and clipping declared for the reference."""
    declared = task.reference
    plan = Plan.fixed(task.batch_size, precision=declared.precision, clip_norm=declared.clip_norm)
    return PlanLoop(task, device, plan)


def _reference(task: Task, data: TaskData, device: torch.device, given: Sequence[_Gradients] = ()) -> _TrainedWeights:
    """Train with the step function."""
    try:
        return _trained(ReferenceLoop, task, data, device, given)
    except Exception as error:
        blame_reference(error)


def _trained(
    make: MakeLoop, task: Task, data: TaskData, device: torch.device, given: Sequence[_Gradients]
) -> _TrainedWeights:
    """Train two steps; `given` gradients replace the loop's own."""
    torch.manual_seed(PLANNING_SEED)
    loop = make(task, device)
    seen: list[_Gradients] = []
    watch = _watch(loop, seen, given)
    try:
        start = _weights(loop.model)
        batches = data.batches(PLANNING_SEED, task.batch_size)
        torch.manual_seed(PLANNING_SEED)
        for _ in range(_STEPS):
            loop.step(batches)
        return _TrainedWeights(start, _weights(loop.model), seen)
    finally:
        watch.remove()
        loop.close()


def _watch(loop: SteppedLoop, seen: list[_Gradients], given: Iterable[_Gradients]) -> RemovableHandle:
    """Record the gradients seen by the loop's optimizer, and replace them with the `given` gradients."""
    parameters = list(loop.model.parameters())
    waiting = iter(given)

    def note(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if any(map(callable, (*args[1:], *kwargs.values()))):
            return  # With a closure, gradients are computed inside the step.
        if bool(getattr(optimizer, "found_inf", None)):
            return  # A fused step that the loss scaler skips.
        scale = getattr(optimizer, "grad_scale", None)  # The fused step divides by this scale.
        scale = 1.0 if scale is None else float(scale)
        grads = [torch.zeros_like(p) if p.grad is None else p.grad / scale for p in parameters]
        seen.append([grad.detach().cpu() for grad in grads])
        for parameter, grad in zip(parameters, next(waiting, ()), strict=False):
            if parameter.grad is not None:  # The optimizer skips a parameter without gradient, and must still do so.
                parameter.grad = grad.to(parameter.device) * scale

    return loop.optimizer.register_step_pre_hook(note)


def _weights(model: torch.nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten().double().cpu() for p in model.parameters()])


def _difference(ours: _TrainedWeights, theirs: _TrainedWeights) -> _Difference:
    """Return the difference of final weights, and of the worst parameter gradient over all steps."""
    pairs = zip(ours.gradients, theirs.gradients, strict=False)
    gradient = max((_worst(mine, other) for mine, other in pairs), default=0.0)
    moved = float((theirs.end - theirs.start).norm())
    return _Difference(_share(float((ours.end - theirs.end).norm()), moved), gradient)


def _worst(ours: _Gradients, theirs: _Gradients) -> float:
    """Return the largest relative gradient difference over parameters.

    The denominator is the parameter's gradient norm, but at least a fraction of the total norm.
    """
    sizes = [_norm(grad) for grad in ours]
    least = _SMALL * math.hypot(*sizes)
    differences = (_norm(mine - other) for mine, other in zip(ours, theirs, strict=True))
    return max(_share(difference, max(size, least)) for difference, size in zip(differences, sizes, strict=True))


def _norm(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor.to_dense(), dtype=torch.float64))


def _share(difference: float, whole: float) -> float:
    """Return a relative difference; infinite for a zero denominator."""
    if difference == 0:
        return 0.0
    return difference / whole if whole > 0 else math.inf


def _check_number(theirs: int, ours: int) -> None:
    """Raise an error if the step function and the declared loop differ in the number of `optimizer.step` calls."""
    if theirs in (0, ours):  # Without a call, or with a closure, only weights are compared.
        return
    raise ValueGivenError(
        "task.step",
        problem=f"task.step made {theirs} optimizer steps in {_STEPS} batches, but the declared loop makes {ours}.",
        hint="Step the optimizer once per batch, and set Task(batch_size=...) to the samples of one optimizer step.",
        code="step.count_differs",
    )


def _other_gradient(share: float) -> ValueGivenError:
    return ValueGivenError(
        "task.step",
        problem=f"task.step and loss_fn compute different gradients: they differ by {share:.1%} of the gradient's norm "
        f"within {_STEPS} steps from the same seed (limit {_LIMIT:.1%}).",
        hint="Return from loss_fn the loss that task.step minimises, and declare the precision and the "
        "gradient clipping of task.step with Task(reference=Reference(precision=..., clip_norm=...)).",
        code="step.gradient_differs",
    )


def _other_weights(share: float) -> ValueGivenError:
    return ValueGivenError(
        "task.step",
        problem=f"task.step moves the weights differently from loss_fn and make_optimizer: after {_STEPS} steps from "
        f"the same seed the weights differ by {share:.1%} of the distance moved (limit {_LIMIT:.1%}).",
        hint="Make every change of the weights through the optimizer of make_optimizer, including the learning "
        "rate, weight decay and weight averages.",
        code="step.weights_differ",
    )
