"""Precision: autocast, dynamic loss scale, and the global fp32 mode (paper eqs. 13-16), each put back when done."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch

from trimtab.core.errors import ValueGivenError

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


def use_tf32() -> Callable[[], None]:
    """Let CUDA matmuls and convolutions run in TF32; returns what puts the global modes back."""
    places = (torch.backends.cuda.matmul, torch.backends.cudnn.conv)
    before = [place.fp32_precision for place in places]
    for place in places:
        place.fp32_precision = "tf32"

    def undo() -> None:
        for place, mode in zip(places, before, strict=True):
            place.fp32_precision = mode

    return undo
