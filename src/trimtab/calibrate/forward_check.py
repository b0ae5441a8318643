"""Check of the loss's use of the model, before any measurement."""

from __future__ import annotations

import contextlib

import torch

from trimtab.calibrate.training_loop import TrainingLoop
from trimtab.core.errors import LossError
from trimtab.losses import require_unscaled
from trimtab.runtime.compiled_call import noting_calls
from trimtab.runtime.precision import dtype_of


def require_own_forward(subject: TrainingLoop, precision: str) -> None:
    """Compute the loss of the batch once, with gradients and in the loop's precision, and check the model's forward.

    Raises:
        LossError: the loss function raised, its result is not a loss, it did not call the model itself, the model
            runs under the loop's own autocast (which would override every precision that is tried), or the loss is
            multiplied by a `GradScaler`'s scale.
    """
    casts = set[torch.dtype | None]()
    _look(subject, precision, casts)
    if not casts:
        raise LossError(
            "loss_fn",
            got="a loss without a call of model(...)",
            expected="a loss function that calls model(...)",
            problem="loss_fn did not call model(...), so settings of a plan would have no effect on the loss.",
            hint="Call the model that is passed to loss_fn, not a copy, a submodule or another method of it. To use "
            "another method, pass a module whose forward calls that method.",
            code="loss.model_not_called",
        )
    own = casts - {None, dtype_of(precision)}
    if dtype_of(precision) is not None:  # The loop's own autocast to the same dtype is visible only without the plan's.
        in_fp32 = set[torch.dtype | None]()
        with contextlib.suppress(Exception):  # A loop that runs in half precision only is accepted.
            _look(subject, "fp32", in_fp32)
        own |= in_fp32 - {None}
    if own:
        name = str(own.pop()).removeprefix("torch.")
        raise LossError(
            "loss_fn",
            got=f"a forward under autocast to {name}",
            expected="a forward without autocast",
            problem=f"loss_fn runs the model under its own autocast to {name}, which overrides every precision that a "
            "plan can choose.",
            hint="Remove autocast and GradScaler from the loop, and pass its precision to trimtab.plan: "
            'reference=trimtab.Reference("bf16") or trimtab.Reference("fp16").',
            code="loss.own_autocast",
        )


def _look(subject: TrainingLoop, precision: str, casts: set[torch.dtype | None]) -> None:
    """Compute the loss and add the autocast dtype of the model's forwards to `casts`; None without autocast."""
    device = subject.device.type

    def note() -> None:
        casts.add(torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None)

    end = noting_calls(subject.model, note)
    try:
        loss, _ = subject.loss(precision=precision)
        require_unscaled(loss)
    finally:
        end()
