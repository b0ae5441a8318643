"""Dispatch mode that records birth and death of storages and the work of operators. Views are recognised."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_iter, tree_unflatten

from trimtab.core.errors import ModelError
from trimtab.core.memory_model import Seen
from trimtab.core.units import format_bytes
from trimtab.measure.fake_tensors import EagerDispatchMode
from trimtab.measure.flops import flops_of, python_of
from trimtab.state.peak_memory import peak_growth, storage_bytes
from trimtab.state.process_state import convolves_in_tf32, fp32_places

# Operator workspace: temporary memory inside an operator, measured by running the operator once.

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
_PRECISIONS = {torch.bfloat16: "bf16", torch.float16: "fp16"}


class WorkspaceTooLarge(ModelError):
    """The tensors of a call exceed the limit for measuring its workspace. A smaller micro-batch may suffice."""


@dataclass(frozen=True)
class _Like:
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    def make(self, device: str = "cpu") -> Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=device).zero_()


@dataclass(frozen=True)
class OperatorCall:
    """An operator (or its backward) with its arguments, in which tensors are replaced by their layout. Hashable."""

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
    likes = (
        _Like(tuple(leaf.shape), tuple(leaf.stride()), leaf.dtype) if isinstance(leaf, Tensor) else leaf
        for leaf in leaves
    )
    return OperatorCall(operator, tuple(likes), structure)


def name_of(operator: Any) -> str:
    """Return an operator's name without its overload."""
    packet = getattr(operator, "overloadpacket", None)
    return "" if packet is None else str(packet.__name__)


def measure_calls(calls: Iterable[OperatorCall]) -> dict[OperatorCall, CallMemory]:
    """Return the memory of every call. Only the tensors of a single call are allocated at a time.

    `WorkspaceTooLarge` if the tensors of a call exceed `MOST_BYTES`. No call was run then.
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
    # The process settings that affect the choice of kernel.
    mkldnn = torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled
    precisions = (place.fp32_precision for place in fp32_places())
    modes = torch.get_num_threads(), mkldnn, torch.are_deterministic_algorithms_enabled(), *precisions
    return {call: _taken(call, modes) for call in each}


@functools.lru_cache(maxsize=4096)  # because the traces of a search share most calls
@torch.enable_grad()  # a recurrent layer prepares its backward if gradients are enabled, even if no input requires one
def _taken(call: OperatorCall, modes: tuple[object, ...]) -> CallMemory:
    leaves = [leaf.make() if isinstance(leaf, _Like) else leaf for leaf in call.leaves]
    floats = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    trained = [leaf.requires_grad_() for leaf in floats[:_TRAINED]] if call.is_backward else []
    args, kwargs = tree_unflatten(leaves, call.structure)
    result = call.operator(*args, **kwargs)  # one-time preparations happen here
    if call.is_backward:
        output = result[0]
        slope = torch.zeros_like(output)
        return CallMemory(_beyond_results(lambda: torch.autograd.grad(output, trained, slope, retain_graph=True)))
    sizes = tuple(storage_bytes([each]) for each in tree_iter(result) if isinstance(each, Tensor))
    del result
    return CallMemory(_beyond_results(lambda: call.operator(*args, **kwargs)), sizes)


def _size(call: OperatorCall) -> int:
    """Return the bytes of a call's arguments and results; without the results if the operator has no meta kernel."""
    given = [leaf.make("meta") if isinstance(leaf, _Like) else leaf for leaf in call.leaves]
    args, kwargs = tree_unflatten(given, call.structure)
    try:
        found = call.operator(*args, **kwargs)
    except (NotImplementedError, RuntimeError):  # an operator without a meta implementation
        found = ()
    return sum(each.untyped_storage().nbytes() for each in (*given, *tree_iter(found)) if isinstance(each, Tensor))


def _beyond_results(function: Callable[[], Any]) -> int:
    held: list[Any] = []
    growth = peak_growth(lambda: held.append(function()))
    return max(0, growth - storage_bytes(t for t in tree_iter(held) if isinstance(t, Tensor)))


@dataclass
class StorageEvents:
    """Events recorded in a span of time.

    Attributes:
        events: (storage number, +1 for birth or -1 for death), in order.
        calls: Operators that may need workspace: the call, number of events before it and before its end, and storage
            numbers of its results.
        work: (precision, FLOP, bytes moved) of every operator, if `counts_work` is True.
    """

    events: list[tuple[int, int]] = field(default_factory=list)
    calls: list[tuple[OperatorCall, int, int, tuple[int, ...]]] = field(default_factory=list)
    work: list[Seen] = field(default_factory=list)


class StorageTracker(EagerDispatchMode):
    """Dispatch mode that numbers the storages returned by operators, and records when each is freed.

    Attributes:
        sizes: Size of every storage in bytes, by number.
        counts_work: True to record the work of operators.
        answers_ones: True to return 1 for a tensor value that is read: fake tensors have none, and 1 suits an
            optimizer's step counter.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []
        self.counts_work = False
        self._now = StorageEvents()
        self.answers_ones = False
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
            self.sizes.append(storage.nbytes())
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
    returned = [value.alias_info for value in operator._schema.returns]
    return any(alias is not None and not alias.is_write for alias in returned)
