"""FLOP of a call, counted from operator shapes (a multiply-add counts 2)."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from torch.utils.flop_counter import (
    FlopCounterMode,
    flop_registry,
    sdpa_backward_flop_count,
    sdpa_flop_count,
)

from trimtab.measure.fake_tensors import run_compiled_eagerly

_NAME = "_linear_cross_entropy_batch_chunked"


def _load() -> tuple[Any, Callable[..., Any] | None]:
    """Return the chunked loss operator of torch 2.13 and its Python implementation, which torch keeps private."""
    try:
        from torch.nn.modules import linear_cross_entropy
    except ImportError:
        return None, None
    python = getattr(getattr(linear_cross_entropy, _NAME, None), "_init_fn", None)
    return (None if python is None else getattr(getattr(torch.ops, "torch_nn", None), _NAME, None)), python


CHUNKED_LOSS, _PYTHON = _load()


def python_of(operator: Any) -> Callable[..., Any] | None:
    """Return the Python implementation of the chunked loss operator, whose internal memory is traced; else None."""
    is_it = CHUNKED_LOSS is not None and getattr(operator, "overloadpacket", None) is CHUNKED_LOSS
    return _PYTHON if is_it else None


def chunked_loss_flops(
    features: Any, weight: Any, *args: Any, out_shape: Any = None, out_val: Any = None, **kwargs: Any
) -> int:
    """Return the FLOP of a call: logits, and the requested gradients of features (N, D) and weight (V, D)."""
    rows, width = features.shape if isinstance(features, Tensor) else features
    words = (weight.shape if isinstance(weight, Tensor) else weight)[0]
    wanted = args[-3:-1]  # for features and weight; the last flag is for the bias
    return 2 * rows * width * words * (1 + sum(map(bool, wanted)))


def count_flops(function: Callable[[], object]) -> float | None:
    """Return the FLOP of matrix products, convolutions and attention in a call, including a backward that runs in it.

    None if an operator fails under the counter's dispatch mode, or if torch's formula does not support it.
    Recomputation counts: a step without activation checkpointing gives model FLOP (MFU), a step with it hardware FLOP
    (HFU). A compiled model is counted in eager mode.
    """
    try:
        chunked = {} if CHUNKED_LOSS is None else {CHUNKED_LOSS: chunked_loss_flops}
        counter = FlopCounterMode(display=False, custom_mapping=_own_formulas() | chunked)
        counter.mod_tracker = _NoModules()  # type: ignore[assignment]
        with run_compiled_eagerly(), counter:
            function()
    except (NotImplementedError, AssertionError):
        return None
    return float(counter.get_total_flops())


class _NoModules:
    """Replacement for the counter's module tracker, whose hooks fail inside `torch.autograd.grad`."""

    parents = frozenset({"Global"})

    def __enter__(self) -> None: ...

    def __exit__(self, *error: object) -> None: ...


def flops_of(operator: Any, args: Any, kwargs: Any, result: Any) -> float:
    """Return the FLOP of an operator call from its shapes; 0 for an operator without a formula."""
    if operator in _OWN:
        shapes = tree_map(lambda each: each.shape if isinstance(each, Tensor) else each, args)
        return float(_OWN[operator](*shapes, **kwargs, out_shape=None))
    formula = flop_registry.get(getattr(operator, "overloadpacket", None))
    try:
        return 0.0 if formula is None else float(formula(*args, **kwargs, out_val=result))
    except AssertionError:  # shapes that the formula does not support
        return 0.0


def _own_formulas() -> dict[Any, Any]:
    # torch's table covers the CUDA kernels of scaled_dot_product_attention, not the CPU kernel.
    found: dict[str, Any] = {
        "convolution_backward": _convolution_backward,
        "_scaled_dot_product_flash_attention_for_cpu": _attention,
        "_scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward,
    }
    # Weights of a layer, followed by its biases or by the weights again; weights of all layers.
    for name, weights_of in (("mkldnn_rnn_layer", lambda args: args[:2]), ("_cudnn_rnn", lambda args: args[0])):
        found[name] = functools.partial(_recurrent, weights_of, 1)
        found[f"{name}_backward"] = functools.partial(_recurrent, weights_of, 2)
    return {getattr(torch.ops.aten, name): formula for name, formula in found.items()}


def _recurrent(
    weights_of: Callable[[Sequence[Any]], Sequence[Any]],
    times: int,
    rows: Any,
    *args: Any,
    out_shape: Any = None,
    **kwargs: Any,
) -> int:
    """Return the FLOP of recurrent layers: samples times weights for each time step, twice in the backward."""
    matrices = [weight for weight in weights_of(args) if len(weight) > 1]
    flops: int = times * 2 * math.prod(rows[:-1]) * sum(map(math.prod, matrices))
    return flops


def _convolution_backward(grad: Any, rows: Any, weight: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    """Return the FLOP of the requested gradients, each equal to the forward's.

    torch's own formula ignores groups in the weight gradient.
    """
    is_transposed, asked = args[4], args[7]
    positions = math.prod((rows if is_transposed else grad)[2:])
    flops: int = 2 * rows[0] * positions * math.prod(weight) * sum(asked[:2])
    return flops


def _attention(query: Any, key: Any, value: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    return int(sdpa_flop_count(query, key, value))


def _attention_backward(grad: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> int:
    return int(sdpa_backward_flop_count(grad, query, key, value))


_OWN = {operator.default: formula for operator, formula in _own_formulas().items()}
