"""torch's chunked linear cross-entropy: one operator, whose Python holds a chunk's logits where no trace sees them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_NAME = "_linear_cross_entropy_batch_chunked"  # from torch 2.13 on


def _operator() -> Any:
    return getattr(getattr(torch.ops, "torch_nn", None), _NAME, None)


def _load() -> Callable[..., Any] | None:
    try:
        from torch.nn.modules import linear_cross_entropy
    except ImportError:
        return None
    return getattr(getattr(linear_cross_entropy, _NAME, None), "_init_fn", None)


_PYTHON = _load()
OPERATOR = None if _PYTHON is None else _operator()


def python_of(operator: Any) -> Callable[..., Any] | None:
    """Return what runs an operator's Python, so that its own operators are seen; None for another operator.

    Where torch keeps it private is looked for here alone; not found, what it holds inside is not in a trace.
    """
    is_it = OPERATOR is not None and getattr(operator, "overloadpacket", None) is OPERATOR
    return _PYTHON if is_it else None


def flops(features: Any, weight: Any, *args: Any, out_shape: Any = None, out_val: Any = None, **kwargs: Any) -> int:
    """Return FLOP of a call: logits, and the gradients of features and of the weight where they are asked for.

    Args:
        features: (N, D), or their shape. weight: (V, D), or its shape.
    """
    rows, width = features.shape if isinstance(features, Tensor) else features
    words = (weight.shape if isinstance(weight, Tensor) else weight)[0]
    wanted = args[-3:-1]  # of features, of the weight; the last is of the bias
    return 2 * rows * width * words * (1 + sum(map(bool, wanted)))
