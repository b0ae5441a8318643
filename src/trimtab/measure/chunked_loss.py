"""torch's chunked linear cross-entropy, a single operator in traces.

Its Python implementation, which allocates the logits of a chunk, can be run explicitly to make the memory visible.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_NAME = "_linear_cross_entropy_batch_chunked"  # since torch 2.13


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
    """Return the Python implementation of the chunked loss operator, or None for any other operator.

    torch keeps the implementation private. If it is missing, the operator's internal memory is not traced.
    """
    is_it = OPERATOR is not None and getattr(operator, "overloadpacket", None) is OPERATOR
    return _PYTHON if is_it else None


def flops(features: Any, weight: Any, *args: Any, out_shape: Any = None, out_val: Any = None, **kwargs: Any) -> int:
    """Return the FLOP of a call: logits, and the requested gradients of features and weight.

    Args:
        features: Tensor of shape (N, D), or the shape.
        weight: Tensor of shape (V, D), or the shape.
    """
    rows, width = features.shape if isinstance(features, Tensor) else features
    words = (weight.shape if isinstance(weight, Tensor) else weight)[0]
    wanted = args[-3:-1]  # for features and weight; the last flag is for the bias
    return 2 * rows * width * words * (1 + sum(map(bool, wanted)))
