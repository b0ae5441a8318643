"""Memory that an operator takes for itself while it runs, which no tensor shows: measured by running it once.

On a CPU convolutions and recurrent layers reorder what they are given. A trace on fake tensors notes each such call,
and what it takes is counted on real tensors of the same shapes, one call at a time.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_iter, tree_unflatten

from trimtab.measure.memory import peak_growth, storage_bytes

# A recurrent layer's backward is given what its forward prepared, which no fake has: run by itself it ends the process.
_OPERATORS = ("convolution", "convolution_backward", "mkldnn_rnn_layer")


@dataclass(frozen=True)
class _Like:
    """A tensor's place in memory, without it."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    def make(self) -> Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype).zero_()


@dataclass(frozen=True)
class Call:
    """An operator with what it was given, tensors by their place in memory; calls that are alike are equal."""

    operator: Any
    leaves: tuple[Any, ...]
    structure: Any

    def __hash__(self) -> int:
        return hash((str(self.operator), str(self.leaves)))


@dataclass(frozen=True)
class Taken:
    """What a call took: bytes that were gone when it was over, and those of its results that were not."""

    scratch_bytes: int
    result_bytes: tuple[int, ...]


def call_of(operator: Any, args: Any, kwargs: Any) -> Call | None:
    """Return a call to be measured; None where the operator is not known to take anything."""
    packet = getattr(operator, "overloadpacket", None)
    if packet is None or packet.__name__ not in _OPERATORS:
        return None
    leaves, structure = tree_flatten((args, kwargs or {}))
    return Call(operator, tuple(map(_like, leaves)), structure)


def _like(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return _Like(tuple(value.shape), tuple(value.stride()), value.dtype)


def measured(calls: Iterable[Call]) -> dict[Call, Taken]:
    """Return what each of some calls takes. One call's tensors at a time are allocated."""
    return {call: _measured(call) for call in dict.fromkeys(calls)}


@torch.enable_grad()  # a recurrent layer prepares its backward by this, whatever requires a gradient
def _measured(call: Call) -> Taken:
    leaves = [leaf.make() if isinstance(leaf, _Like) else leaf for leaf in call.leaves]
    args, kwargs = tree_unflatten(leaves, call.structure)
    result = call.operator(*args, **kwargs)  # what is prepared once is there from now on
    sizes = tuple(storage_bytes([each]) for each in tree_iter(result) if isinstance(each, Tensor))
    del result
    held: list[Any] = []
    growth = peak_growth(lambda: held.append(call.operator(*args, **kwargs)))
    return Taken(max(0, growth - storage_bytes(t for t in tree_iter(held) if isinstance(t, Tensor))), sizes)
