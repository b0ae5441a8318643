"""Check of a user's training step against `loss_fn`: both must compute the same gradients and move weights alike.

A plan trains with `loss_fn`, the baseline with `step`. If the two differ, a comparison would measure two trainings.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from trimtab.core.errors import ValueGivenError
from trimtab.core.objective import Reference
from trimtab.experiments import loop_setup
from trimtab.experiments.loops import DataStream, Loop, plain_steps
from trimtab.experiments.task_loops import Setup
from trimtab.profiling.random_masks import dropout_off
from trimtab.state.process_state import ProcessState

_STEPS = 2
# Limit of ||difference|| / ||declared|| for gradients and for weight updates; rounding alone stays far below.
_LIMIT = {"fp32": 1e-3, "tf32": 5e-3, "bf16": 4e-2, "fp16": 5e-3}
# Gradients below this fraction of the total norm are compared with the fraction, because rounding may dominate them.
_SMALL = 1e-2
# If the step is not deterministic (atomic additions on a GPU), differences up to this multiple of its own noise pass.
_NOISE = 3.0

_Gradients = Sequence[Tensor]  # A tensor per parameter on the CPU, zero without a gradient.


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


def check_step(setup: Setup, reference: Reference, name: str = "setup") -> None:
    """Train two steps with the user's step, and two with `loss_fn` from the same seed, and compare.

    Raises:
        ValueGivenError: gradients, weights or the number of optimizer steps differ.
        LoopError: the user's step raised.
    """
    if loop_setup.build(setup, loop_setup.PLANNING_SEED, name).step is None:
        return
    before, limit = ProcessState.capture(), _LIMIT[reference.precision]
    try:
        found, noise = _compared(setup, reference, name, limit, is_quiet=False)
        if max(found) > limit:
            # A step that splits its batch draws other dropout masks than loss_fn.
            quiet, _ = _compared(setup, reference, name, limit, is_quiet=True)
            found = found if max(quiet) > limit else quiet
        for share, own, refusal in zip(found, noise, (_other_weights, _other_gradient), strict=True):
            if share > max(limit, _NOISE * own):
                raise refusal(share, limit)
    finally:
        before.restore()


def _compared(
    setup: Setup, reference: Reference, name: str, limit: float, *, is_quiet: bool
) -> tuple[_Difference, _Difference]:
    """Return the difference of step and loss_fn, and that of two runs of the step; with `is_quiet` without dropout."""
    theirs = _trained(setup, name, lambda loop: loop, (), is_quiet=is_quiet)

    def by_loss(loop: Loop) -> Loop:
        return replace(loop, step=None, reference=reference)

    ours = _trained(setup, name, by_loss, theirs.gradients, is_quiet=is_quiet)
    _check_number(len(theirs.gradients), len(ours.gradients))
    found = _difference(ours, theirs)
    if max(found) <= limit or is_quiet:
        return found, found
    again = _trained(setup, name, lambda loop: loop, theirs.gradients, is_quiet=is_quiet)
    return found, _difference(again, theirs)


def _trained(
    setup: Setup,
    name: str,
    changed: Callable[[Loop], Loop],
    given: Sequence[_Gradients],
    *,
    is_quiet: bool,
) -> _TrainedWeights:
    """Train two steps; `given` gradients replace the loop's own."""
    seed = loop_setup.PLANNING_SEED
    loop = changed(loop_setup.build(setup, seed, name))
    seen: list[_Gradients] = []
    watch = _watch(loop, seen, given)
    stream = DataStream(loop.loader, seed)
    steps = plain_steps(loop, stream)
    try:
        start = _weights(loop.model)
        torch.manual_seed(seed)
        with dropout_off(loop.model) if is_quiet else contextlib.nullcontext():
            for _ in range(_STEPS):
                next(steps)
        return _TrainedWeights(start, _weights(loop.model), seen)
    except Exception as error:
        raise loop_setup.step_failed(name, error) from error
    finally:
        watch.remove()
        steps.close()  # type: ignore[attr-defined]  # A generator.
        stream.close()


def _watch(loop: Loop, seen: list[_Gradients], given: Iterable[_Gradients]) -> RemovableHandle:
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
        "step",
        problem=f"The step made {theirs} optimizer steps in {_STEPS} windows of batches, but the declared loop makes "
        f"{ours}.",
        hint="Step the optimizer once per accumulate batches of the loader, and set accumulate.",
        code="step.count_differs",
    )


def _other_gradient(share: float, limit: float) -> ValueGivenError:
    return ValueGivenError(
        "step",
        problem=f"step and loss_fn compute different gradients: they differ by {share:.1%} of the gradient's norm "
        f"within {_STEPS} steps from the same seed (limit {limit:.1%}).",
        hint="Return from loss_fn the loss that step minimises, not divided by accumulate, and declare the precision "
        "and the gradient clipping of step with reference=Reference(precision=..., clip_norm=...).",
        code="step.gradient_differs",
    )


def _other_weights(share: float, limit: float) -> ValueGivenError:
    return ValueGivenError(
        "step",
        problem=f"step moves the weights differently from loss_fn and the optimizer: after {_STEPS} steps from the "
        f"same seed the weights differ by {share:.1%} of the distance moved (limit {limit:.1%}).",
        hint="Make every change of the weights through the optimizer, and call the scheduler in after_step too.",
        code="step.weights_differ",
    )
