"""Attention that is written out: scores whose softmax is kept for the backward, which a fused kernel would not keep."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_SMALLEST = 16  # of two square dimensions, what may be scores of tokens against tokens


class ScoresSeen(TorchDispatchMode):
    """Sums up, while it is entered, the bytes of softmaxes over square scores. `kept_bytes`: of all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.kept_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._softmax.default and _is_square(result.shape):
            self.kept_bytes += result.nbytes
        return result


def _is_square(shape: torch.Size) -> bool:
    return len(shape) >= 3 and shape[-1] == shape[-2] >= _SMALLEST
