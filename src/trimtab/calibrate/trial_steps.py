"""Training steps of a candidate in a trial, with checks that it trains."""

from __future__ import annotations

import torch

from trimtab.calibrate.training_loop import TrainingLoop
from trimtab.core.plan_note import Note
from trimtab.runtime.run import Run

_MOST_SCALES = 20  # fp16 halves its loss scale after each overflow, here from 65536 to 0.125.


class UntrainableCandidate(Exception):
    """A candidate that runs but does not train.

    Args:
        failure: reason with its code.
    """

    def __init__(self, failure: Note) -> None:
        super().__init__(failure.text)
        self.failure = failure


def step(run: Run, subject: TrainingLoop) -> None:
    run.train_step(run.window(subject.batch), subject.loss_fn)


def heaviest_step(run: Run, subject: TrainingLoop) -> None:
    """Run the step with the highest memory use: over two batches if windows may span several."""
    batches = [subject.batch] * (2 if subject.adapts_batch_size else 1)
    run.train_step(run.window(*batches), subject.loss_fn)


def step_until_applied(run: Run, subject: TrainingLoop) -> None:
    """Step until the optimizer has stepped: once, or in fp16 until a loss scale is found.

    Raises:
        Unusable: the loss is NaN or infinite, or gradients overflow at every scale.
    """
    for _ in range(_MOST_SCALES):
        if run.applied_steps > 0:
            return
        step(run, subject)
        require_finite(run)
    if run.applied_steps == 0:
        text = f"gradients overflow at all of the {_MOST_SCALES} loss scales tried"
        raise UntrainableCandidate(Note("trial.gradients_overflow", text))


def require_finite(run: Run) -> None:
    if not bool(torch.isfinite(run.loss)):
        raise UntrainableCandidate(Note("trial.loss_nonfinite", "the loss is NaN or infinite"))
