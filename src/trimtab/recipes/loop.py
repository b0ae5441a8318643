"""What a recipe is: a loop that can be stepped from outside, so that several can be raced in turn."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch import nn

from trimtab.measure import process_state
from trimtab.tasks.task import Task

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Loop(Protocol):
    """One arm: a model that is trained by whole optimizer steps, its matrix products in `precision`."""

    model: nn.Module
    optimizer: torch.optim.Optimizer

    @property
    def precision(self) -> str:
        """Return "fp32", "tf32", "bf16" or "fp16"."""
        ...

    def step(self, batches: Iterator[Any]) -> int:
        """Take what one optimizer step needs from the batches; returns the rows it used."""
        ...

    def close(self) -> None:
        """Undo what was changed outside the model."""
        ...


MakeLoop = Callable[[Task, torch.device], Loop]


def autocast(precision: str, device: torch.device) -> torch.autocast:
    """Return torch's own autocast, switched off for fp32 and tf32."""
    return torch.autocast(device.type, dtype=_DTYPES.get(precision), enabled=precision in _DTYPES)


def hold_tf32(precision: str) -> Callable[[], None]:
    """Let CUDA matmuls and convolutions run in TF32 for a "tf32" recipe; returns what puts the global modes back."""
    return process_state.hold_tf32() if precision == "tf32" else lambda: None


def hold_strict_fp32() -> Callable[[], None]:
    """Compute in whole fp32 wherever torch may round its operands to fewer bits; returns what puts the modes back.

    What differs alone is written: a place that was written to no longer follows the mode above it.
    """
    before = [(place, place.fp32_precision) for place in process_state.fp32_places()]
    changed = [(place, mode) for place, mode in before if mode != "ieee"]

    def put_back() -> None:
        for place, mode in changed:
            place.fp32_precision = mode

    for place, _ in changed:
        place.fp32_precision = "ieee"
    return put_back


def move(batch: Any, device: torch.device) -> Any:
    """Return a tuple batch on the device."""
    return tuple(tensor.to(device, non_blocking=True) for tensor in batch)
