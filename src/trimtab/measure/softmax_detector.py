"""Detector of softmaxes in a forward: attention scores of unfused attention, and logits."""

from __future__ import annotations

import math
from typing import Any

import torch

from trimtab.measure.dispatch_mode import EagerDispatchMode

_SMALLEST = 16  # minimum size of two equal dimensions to count as attention scores


class SoftmaxDetector(EagerDispatchMode):
    """Dispatch mode that records softmaxes.

    Attributes:
        kept_bytes: Total bytes of softmaxes over square scores.
        logits: Shape (N, V) of the largest log-softmax, or None.
    """

    def __init__(self) -> None:
        super().__init__()
        self.kept_bytes = 0
        self.logits: tuple[int, int] | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._softmax.default and _is_square(result.shape):
            self.kept_bytes += result.nbytes
        if func is torch.ops.aten._log_softmax.default and result.numel() > math.prod(self.logits or (0,)):
            self.logits = result.numel() // result.shape[-1], result.shape[-1]
        return result


def _is_square(shape: torch.Size) -> bool:
    return len(shape) >= 3 and shape[-1] == shape[-2] >= _SMALLEST
