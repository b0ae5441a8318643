"""FLOP of a call, counted from operator shapes (a multiply-add counts 2)."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
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


def count_flops(function: Callable[[], object]) -> float | None:
    """Return the FLOP of matrix products, convolutions and attention in a call, including a backward that runs in it.

    None if an operator fails under the counter's dispatch mode, or if torch's formula does not support it.
    Recomputation counts: a step without activation checkpointing gives model FLOP (MFU), a step with it hardware FLOP
    (HFU). A compiled model is counted in eager mode.
    """
    try:
        counter = FlopCounterMode(display=False, custom_mapping=OWN_FORMULAS)
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
    packet = getattr(operator, "overloadpacket", None)
    if packet in OWN_FORMULAS:
        shapes = tree_map(lambda each: each.shape if isinstance(each, Tensor) else each, args)
        return float(OWN_FORMULAS[packet](*shapes, **kwargs))
    formula = flop_registry.get(packet)
    try:
        return 0.0 if formula is None else float(formula(*args, **kwargs, out_val=result))
    except AssertionError:  # shapes that the formula does not support
        return 0.0


# Formulas of operators; their arguments are shapes in place of tensors.


def _recurrent(weights_of: Callable[[Any], Any], times: int, rows: Any, *args: Any, **kwargs: Any) -> int:
    """Return the FLOP of recurrent layers: samples times weights for every time step, twice in the backward."""
    matrices = [weight for weight in weights_of(args) if len(weight) > 1]
    flops: int = times * 2 * math.prod(rows[:-1]) * sum(map(math.prod, matrices))
    return flops


def _convolution_backward(grad: Any, rows: Any, weight: Any, *args: Any, **kwargs: Any) -> int:
    """Return the FLOP of the requested gradients, each equal to the forward's; torch's formula ignores groups."""
    is_transposed, asked = args[4], args[7]
    positions = math.prod((rows if is_transposed else grad)[2:])
    flops: int = 2 * rows[0] * positions * math.prod(weight) * sum(asked[:2])
    return flops


def _chunked_loss(features: Any, weight: Any, *args: Any, **kwargs: Any) -> int:
    """Return the FLOP of logits, and of the requested gradients of features (N, D) and weight (V, D)."""
    wanted = args[-3:-1]  # for features and weight; the last flag is for the bias
    flops: int = 2 * math.prod(features) * weight[0] * (1 + sum(map(bool, wanted)))
    return flops


_aten = torch.ops.aten
OWN_FORMULAS: dict[Any, Any] = {
    _aten.convolution_backward: _convolution_backward,
    # torch's table covers the CUDA kernels of scaled_dot_product_attention, not the CPU kernel.
    _aten._scaled_dot_product_flash_attention_for_cpu: lambda q, k, v, *args, **kwargs: sdpa_flop_count(q, k, v),
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: lambda g, q, k, v, *args, **kwargs: (
        sdpa_backward_flop_count(g, q, k, v)
    ),
}
# Weights of a layer, followed by its biases or by the weights again; weights of all layers.
for _name, _weights_of in (("mkldnn_rnn_layer", lambda args: args[:2]), ("_cudnn_rnn", lambda args: args[0])):
    OWN_FORMULAS[getattr(_aten, _name)] = functools.partial(_recurrent, _weights_of, 1)
    OWN_FORMULAS[getattr(_aten, f"{_name}_backward")] = functools.partial(_recurrent, _weights_of, 2)
if CHUNKED_LOSS is not None:
    OWN_FORMULAS[CHUNKED_LOSS] = _chunked_loss
