"""Interface of the recipes: a training loop with a step method, for interleaved paired runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch import nn

from trimtab.state import process_state
from trimtab.tasks.task import Task

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class SteppedLoop(Protocol):
    """Training loop with an explicit step method.

    Attributes:
        model: Model in training.
        optimizer: Optimizer of the model.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer

    @property
    def precision(self) -> str:
        """Precision of matrix products: "fp32", "tf32", "bf16" or "fp16"."""
        ...

    def step(self, batches: Iterator[Any]) -> int:
        """Draw the batches of an optimizer step, train on them and return the number of samples used."""
        ...

    def close(self) -> None:
        """Restore global state changed by the loop, such as TF32 modes."""
        ...


MakeLoop = Callable[[Task, torch.device], SteppedLoop]


def autocast(precision: str, device: torch.device) -> torch.autocast:
    """Return `torch.autocast` for the precision, disabled for fp32 and tf32."""
    return torch.autocast(device.type, dtype=_DTYPES.get(precision), enabled=precision in _DTYPES)


def hold_tf32(precision: str) -> Callable[[], None]:
    """Enable TF32 for CUDA matmuls and convolutions if `precision` is "tf32". Returns a function to undo the change."""
    return process_state.hold_tf32() if precision == "tf32" else lambda: None


def hold_strict_fp32() -> Callable[[], None]:
    """Disable TF32 and all reduced-precision fp32 modes everywhere. Returns a function to restore the modes.

    Writes only modes different from "ieee", because a written mode no longer inherits.
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
    """Copy a tuple of tensors to the device."""
    return tuple(tensor.to(device, non_blocking=True) for tensor in batch)
