"""Operator workspace: temporary memory inside an operator, measured by running the operator once.

On a CPU, convolutions and recurrent layers reorder their inputs, matrix products in half precision do too, and softmax
copies inputs with an unsuitable layout. A trace on fake tensors records such calls. Their workspace is then measured on
real tensors of the same shapes, a call at a time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_iter, tree_unflatten

from trimtab.core.errors import ModelError
from trimtab.core.units import format_bytes
from trimtab.measure.peak_memory import peak_growth, storage_bytes
from trimtab.measure.process_state import fp32_places

_OPERATORS = (
    *("convolution", "convolution_backward", "mkldnn_rnn_layer"),
    *("_softmax", "_softmax_backward_data", "_log_softmax", "_log_softmax_backward_data"),
)
_OPERATORS_OF_HALF = ("mm", "addmm", "bmm", "baddbmm")
# These backwards need data prepared by the forward, which fake tensors lack. Running one alone would crash the process.
PREPARED = {"mkldnn_rnn_layer_backward": "mkldnn_rnn_layer"}
_TRAINED = 5  # of a recurrent layer's tensors: the input and four weights
# Limit for the tensors of a call in bytes, so that tracing uses little memory compared with the step.
MOST_BYTES = 2**31


class WorkspaceTooLarge(ModelError):
    """The tensors of a call exceed the limit for measuring its workspace. A smaller micro-batch may suffice."""


@dataclass(frozen=True)
class _Like:
    """Shape, strides and dtype of a tensor."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    def make(self, device: str = "cpu") -> Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=device).zero_()


@dataclass(frozen=True)
class OperatorCall:
    """An operator with its arguments, in which tensors are replaced by their layout. Comparable and hashable.

    Args:
        operator: torch operator.
        leaves: Flattened arguments.
        structure: Structure of the arguments.
        is_backward: True if the backward of this call is meant.
    """

    operator: Any
    leaves: tuple[Any, ...]
    structure: Any
    is_backward: bool = False

    def __hash__(self) -> int:
        return hash((name_of(self.operator), str(self.leaves), self.is_backward))


@dataclass(frozen=True)
class CallMemory:
    """Memory of a call: workspace in bytes, and sizes of its results if fake tensors do not show them."""

    scratch_bytes: int
    result_bytes: tuple[int, ...] = ()


def call_of(operator: Any, args: Any, kwargs: Any) -> OperatorCall | None:
    """Return the call to measure, or None for an operator without known workspace."""
    name = name_of(operator)
    if name not in _OPERATORS and name not in _OPERATORS_OF_HALF:
        return None
    leaves, structure = tree_flatten((args, kwargs or {}))
    if name in _OPERATORS_OF_HALF and not any(isinstance(leaf, Tensor) and leaf.itemsize == 2 for leaf in leaves):
        return None
    return OperatorCall(operator, tuple(map(_like, leaves)), structure)


def name_of(operator: Any) -> str:
    """Return an operator's name without its overload."""
    packet = getattr(operator, "overloadpacket", None)
    return "" if packet is None else str(packet.__name__)


def _like(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return _Like(tuple(value.shape), tuple(value.stride()), value.dtype)


def measure_calls(calls: Iterable[OperatorCall]) -> dict[OperatorCall, CallMemory]:
    """Return the memory of each call. Only the tensors of a single call are allocated at a time.

    Raises:
        TooLarge: The tensors of a call exceed `MOST_BYTES`. No call was run.
    """
    each = dict.fromkeys(calls)
    for call in each:
        if (size := _size(call)) > MOST_BYTES:
            raise WorkspaceTooLarge(
                "model",
                got=f"{format_bytes(size)} of tensors",
                expected=f"at most {format_bytes(MOST_BYTES)}",
                problem=f"The workspace of {name_of(call.operator)} cannot be measured: its tensors take "
                f"{format_bytes(size)}, more than the limit of {format_bytes(MOST_BYTES)}.",
                hint="Use a smaller micro-batch.",
                code="model.operator_too_large",
            )
    modes = _modes()
    return {call: _taken(call, modes) for call in each}


def _modes() -> tuple[object, ...]:
    """Return the process settings that affect the choice of kernel."""
    mkldnn = torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled
    precisions = (place.fp32_precision for place in fp32_places())
    return torch.get_num_threads(), mkldnn, torch.are_deterministic_algorithms_enabled(), *precisions


@functools.lru_cache(maxsize=4096)
def _taken(call: OperatorCall, modes: tuple[object, ...]) -> CallMemory:
    """Return the memory of a call. Cached, because the traces of a search share most calls."""
    return _measured_backward(call) if call.is_backward else _measured(call)


def _size(call: OperatorCall) -> int:
    """Return the bytes of a call's arguments and results; without the results if the operator has no meta kernel."""
    given = [leaf.make("meta") if isinstance(leaf, _Like) else leaf for leaf in call.leaves]
    args, kwargs = tree_unflatten(given, call.structure)
    try:
        found = call.operator(*args, **kwargs)
    except (NotImplementedError, RuntimeError):  # an operator without a meta implementation
        found = ()
    return sum(each.untyped_storage().nbytes() for each in (*given, *tree_iter(found)) if isinstance(each, Tensor))


@torch.enable_grad()  # a recurrent layer prepares its backward if gradients are enabled, even if no input requires one
def _measured(call: OperatorCall) -> CallMemory:
    leaves = [leaf.make() if isinstance(leaf, _Like) else leaf for leaf in call.leaves]
    args, kwargs = tree_unflatten(leaves, call.structure)
    result = call.operator(*args, **kwargs)  # one-time preparations happen here
    sizes = tuple(storage_bytes([each]) for each in tree_iter(result) if isinstance(each, Tensor))
    del result
    return CallMemory(_beyond_results(lambda: call.operator(*args, **kwargs)), sizes)


@torch.enable_grad()
def _measured_backward(call: OperatorCall) -> CallMemory:
    leaves = [leaf.make() if isinstance(leaf, _Like) else leaf for leaf in call.leaves]
    floats = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    trained = [leaf.requires_grad_() for leaf in floats[:_TRAINED]]
    args, kwargs = tree_unflatten(leaves, call.structure)
    output = call.operator(*args, **kwargs)[0]
    slope = torch.zeros_like(output)
    return CallMemory(_beyond_results(lambda: torch.autograd.grad(output, trained, slope, retain_graph=True)))


def _beyond_results(function: Callable[[], Any]) -> int:
    """Return the peak bytes of a call, minus the bytes of its results."""
    held: list[Any] = []
    growth = peak_growth(lambda: held.append(function()))
    return max(0, growth - storage_bytes(t for t in tree_iter(held) if isinstance(t, Tensor)))
