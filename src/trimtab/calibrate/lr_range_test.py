"""Learning-rate range test: real batches at geometrically rising rates; state is restored."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from trimtab.calibrate.example_batch import own_loss
from trimtab.calibrate.training_loop import TrainingLoop
from trimtab.core.errors import ValueGivenError
from trimtab.core.plan import Plan
from trimtab.decide.learning_rate import RatePoint, has_diverged
from trimtab.measure.data_state import draw_and_restore_data
from trimtab.measure.loop_state import unchanged_by
from trimtab.runtime.batch import iterate
from trimtab.runtime.lr_schedule import scaled_rates
from trimtab.runtime.run import Run

NUM_STEPS = 40
WIDEST = 300.0
_NO_LIMIT = 1e30  # Limit on the gradient norm that never clips: the factor is exactly 1.


def range_test(
    subject: TrainingLoop,
    plan: Plan,
    batches: Iterable[Any],
    progress: Callable[[str], None],
    num_steps: int = NUM_STEPS,
    widest: float = WIDEST,
) -> tuple[RatePoint, ...]:
    """Return loss and gradient norm at learning rates from 1 to `widest` times the user's own; state is restored.

    Args:
        batches: training batches; the test ends early with fewer than `num_steps`. A loader is restored by
            `draw_and_restore_data`.

    Raises:
        ValueGivenError: there are no batches.
        BatchError: the data are not iterable.
    """
    points: list[RatePoint] = []
    model, optimizer = subject.model, subject.optimizer
    with (
        draw_and_restore_data(batches) as lent,
        unchanged_by(own_loss(subject.loss_fn), subject.trained, optimizer),
        Run(
            model,
            optimizer,
            _with_norms(plan),
            out_of_memory="stop",
            modules=subject.modules,
            batching=subject.batching,
            on_trial=True,
        ) as run,
    ):
        for index, batch in zip(range(num_steps), iterate("data", lent), strict=False):
            scale = widest ** (index / (num_steps - 1))
            progress(f"learning-rate range test: step {index + 1} of {num_steps}, {scale:.3g}x")
            with scaled_rates(optimizer, scale):
                loss = run.train_step(run.window(batch), subject.loss_fn)
            norm = None if run.grad_norm is None else float(run.grad_norm)
            points.append(RatePoint(scale, float(loss), norm))
            if index > 10 and has_diverged([point.loss for point in points]):
                break
    if not points:
        raise ValueGivenError(
            "data",
            got="no batches",
            expected="training batches",
            problem="data yields no batches, but the learning-rate range test trains on some.",
            hint="Pass a loader that yields at least one batch.",
            code="data.too_few_batches",
        )
    return tuple(points)


def _with_norms(plan: Plan) -> Plan:
    """Return a plan that computes gradient norms: a run computes them only for clipping, and this limit never clips."""
    if plan.clip_norm.value is not None:
        return plan
    return replace(plan, clip_norm=replace(plan.clip_norm, value=_NO_LIMIT))
