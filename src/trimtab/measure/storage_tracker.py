"""Dispatch mode that records birth and death of storages and the work of operators. Views are recognised."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_iter

from trimtab.core.operator_costs import Seen
from trimtab.measure.chunked_loss import python_of
from trimtab.measure.dispatch_mode import EagerDispatchMode
from trimtab.measure.flops import flops_of
from trimtab.measure.operator_workspace import PREPARED, OperatorCall, call_of, name_of
from trimtab.measure.process_state import convolves_in_tf32

_PRECISIONS = {torch.bfloat16: "bf16", torch.float16: "fp16"}


@dataclass
class StorageEvents:
    """Events recorded in a span of time.

    Attributes:
        events: (storage number, +1 for birth or -1 for death), in order.
        calls: Operators that may need workspace: the call, number of events before it and before its end, and storage
            numbers of its results.
        work: (precision, FLOP, bytes moved) of each operator, if `counts_work` is True.
    """

    events: list[tuple[int, int]] = field(default_factory=list)
    calls: list[tuple[OperatorCall, int, int, tuple[int, ...]]] = field(default_factory=list)
    work: list[Seen] = field(default_factory=list)


class StorageTracker(EagerDispatchMode):
    """Dispatch mode that numbers the storages returned by operators, and records when each is freed.

    Args:
        granule: Allocation granularity in bytes; sizes are rounded up.

    Attributes:
        sizes: Size of each storage in bytes, by number.
        counts_work: True to record the work of operators.
        answers_ones: True to return 1 for a tensor value that is read. Fake tensors have no values, and 1 suits an
            optimizer's step counter.
    """

    def __init__(self, granule: int = 1) -> None:
        super().__init__()
        self.sizes: list[int] = []
        self.counts_work = False
        self._now = StorageEvents()
        self.answers_ones = False
        self._granule = granule
        self._forwards: list[OperatorCall] = []
        self._alive: dict[int, tuple[int, weakref.ref[Any]]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # A fast path for three quarters of all calls: reading a fake tensor's device.
        if func is torch.ops.prim.device.default:
            return func(*args)
        if func is torch.ops.aten._local_scalar_dense.default and self.answers_ones:
            return 1.0 if args[0].is_floating_point() else 1
        python = python_of(func)
        if python is not None:
            with self:
                return python(*args, **(kwargs or {}))
        begin = len(self._now.events)
        result = func(*args, **(kwargs or {}))
        numbers = tuple(self.number_of(each) for each in tree_iter(result) if isinstance(each, Tensor))
        call = self._call(func, args, kwargs)
        if call is not None:
            self._now.calls.append((call, begin, len(self._now.events), numbers))
        if self.counts_work and not _is_view(func):
            self._count_work(func, args, kwargs or {}, result)
        return result

    def _count_work(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        tensors = [each for each in tree_iter((args, kwargs, result)) if isinstance(each, Tensor)]
        if not tensors:
            return
        dtype = next((t.dtype for t in tensors if t.is_floating_point()), torch.float32)
        kind = _PRECISIONS.get(dtype, "fp32")
        if dtype is torch.float32 and "convolution" in name_of(func) and convolves_in_tf32():
            kind = "tf32"
        moved = float(sum(t.numel() * t.element_size() for t in tensors))
        self._now.work.append((kind, flops_of(func, args, kwargs, result), moved))

    def _call(self, func: Any, args: Any, kwargs: Any) -> OperatorCall | None:
        name = name_of(func)
        if name in PREPARED:  # backwards run in reverse order of their forwards
            return replace(self._forwards.pop(), is_backward=True) if self._forwards else None
        call = call_of(func, args, kwargs)
        if call is not None and name in PREPARED.values() and torch.is_grad_enabled():
            self._forwards.append(call)
        return call

    def begin(self) -> StorageEvents:
        """Start a new span and return the object that collects its events."""
        self._now = StorageEvents()
        return self._now

    def number_of(self, tensor: Tensor) -> int:
        """Return the number of a tensor's storage. An unknown storage is recorded as born."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._alive:
            number = len(self.sizes)
            self.sizes.append(-(-storage.nbytes() // self._granule) * self._granule)
            self._alive[key] = number, weakref.ref(storage, lambda _: self._died(key, number))
            self._now.events.append((number, 1))
        return self._alive[key][0]

    def numbers_of(self, values: Iterable[Any]) -> set[int]:
        """Return the storage numbers of all tensors in nested values."""
        return {self.number_of(each) for each in tree_iter(tuple(values)) if isinstance(each, Tensor)}

    @property
    def alive(self) -> set[int]:
        """Numbers of the storages that are alive."""
        return {number for number, _ in self._alive.values()}

    def _died(self, key: int, number: int) -> None:
        del self._alive[key]
        self._now.events.append((number, -1))


@functools.cache
def _is_view(operator: Any) -> bool:
    """Return True for an operator that returns a view."""
    returned = [value.alias_info for value in operator._schema.returns]
    return any(alias is not None and not alias.is_write for alias in returned)
