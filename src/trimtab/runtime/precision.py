"""Precision: autocast, dynamic loss scale, and the global fp32 mode (paper eqs. 13-16), each put back when done."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import torch

from trimtab.core import checks
from trimtab.core.errors import ValueGivenError
from trimtab.runtime.modes import SharedMode

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def check_available(precision: str, device: torch.device) -> None:
    """Raise `ValueGivenError` when the device cannot run a precision."""
    if precision == "tf32" and device.type != "cuda":
        raise ValueGivenError(
            "plan.precision", given=f"tf32 on {device.type}", expected="a CUDA device for tf32", way_out="Use fp32."
        )


def autocast(precision: str, device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Return the context for the forward pass; one that does nothing for fp32 and tf32."""
    dtype = _DTYPES.get(precision)
    return contextlib.nullcontext() if dtype is None else torch.autocast(device.type, dtype=dtype)


def loss_scaler(precision: str, device: torch.device) -> torch.amp.GradScaler | None:
    """Return torch's dynamic loss scaler for fp16, else None."""
    return torch.amp.GradScaler(device.type) if precision == "fp16" else None


def step(scaler: torch.amp.GradScaler | None, optimizer: torch.optim.Optimizer) -> bool:
    """Step the optimizer, through the loss scaler where there is one; returns whether it stepped (no overflow)."""
    if scaler is None:
        optimizer.step()
        return True
    before = scaler.get_scale()
    scaler.step(optimizer)
    scaler.update()
    return scaler.get_scale() >= before


def renewed(scaler: torch.amp.GradScaler, device: torch.device) -> torch.amp.GradScaler:
    """Return a loss scaler at the same scale that has not unscaled yet: torch's own allows it once between updates."""
    made = torch.amp.GradScaler(device.type)
    made.load_state_dict(scaler.state_dict())
    return made


def load_scaler(scaler: torch.amp.GradScaler | None, state: Any, precision: str) -> None:
    """Load a loss scaler's state; raises `ValueGivenError` when it does not fit, and changes nothing then."""
    if (state is None) != (scaler is None):
        raise ValueGivenError(
            "state.scaler", given="a state saved under another precision", expected=f"one of {precision}"
        )
    if scaler is None:
        return
    expected = scaler.state_dict()
    if not isinstance(state, Mapping) or state.keys() != expected.keys():
        raise ValueGivenError("state.scaler", given=f"{state!r:.80}", expected="the keys " + ", ".join(expected))
    for name, value in state.items():
        checks.number(f"state.scaler.{name}", value, low=0)
    scaler.load_state_dict(dict(state))


def _use_tf32() -> Callable[[], None]:
    """Let CUDA matmuls and convolutions run in TF32; returns what puts the global modes back."""
    places = (torch.backends.cuda.matmul, torch.backends.cudnn.conv)
    before = [place.fp32_precision for place in places]
    for place in places:
        place.fp32_precision = "tf32"

    def undo() -> None:
        for place, mode in zip(places, before, strict=True):
            place.fp32_precision = mode

    return undo


tf32 = SharedMode(_use_tf32)
