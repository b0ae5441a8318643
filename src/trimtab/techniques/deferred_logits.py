"""Deferred logits: a model with a linear head computes the loss in chunks, without a change of the model's code.

While deferral is active, the head returns a tensor without values, which represents hidden states and weight.
Reshaping, casts and slices of tokens stay deferred, and `cross_entropy` becomes the chunked loss of `trimtab.nn`. Any
further operation computes the logits and is recorded; results are as without deferral.
"""

from __future__ import annotations

import functools
import math
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from trimtab.core.errors import LossError
from trimtab.nn import chunked_cross_entropy, product_dtype


@dataclass
class HeadUse:
    """Use of a head's logits in a run.

    Attributes:
        chunk_rows: tokens per chunk, or None to compute all logits in the loss.
        num_calls: number of calls of the head with gradients.
        tokens: number of tokens in losses of deferred logits.
        computed_by: operations on the values of the logits, in order, without duplicates.
    """

    chunk_rows: int | None
    num_calls: int = 0
    tokens: int = 0
    computed_by: dict[str, None] = field(default_factory=dict)


@dataclass(frozen=True)
class _Source:
    """Expression of logits: `linear(hidden, weight, bias)` in a dtype, the classes last or second.

    Args:
        hidden: (..., in_features).
        dtype: of the product (`trimtab.nn.product_dtype`).
        out_dtype: of the logits.
        versions: in-place changes of the operands at the call of the head.
        classes_second: True for logits of shape (N, classes, ...), as cross_entropy takes them.
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    dtype: torch.dtype
    out_dtype: torch.dtype
    use: HeadUse
    versions: tuple[int, ...]
    classes_second: bool = False

    def require_unchanged(self) -> None:
        """Raise `LossError` if the operands have changed since the head was called."""
        if versions_of(self.hidden, self.weight, self.bias) == self.versions:
            return
        raise LossError(
            "loss_fn",
            got="logits that are read after a change of the weights or of the hidden states",
            expected="logits that are read before",
            problem="The plan computes the loss in chunks, so logits are computed only when they are read, and the "
            "weights or the hidden states have changed since.",
            hint="Read the logits in the loss function (logits.detach() is enough), or use a plan with "
            "loss_chunk=None.",
            code="loss_chunk.read_late",
        )

    @property
    def shape(self) -> tuple[int, ...]:
        lead = self.hidden.shape[:-1]
        return (lead[0], len(self.weight), *lead[1:]) if self.classes_second else (*lead, len(self.weight))

    def operands(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return hidden states, weight and bias in the dtype of the product."""
        bias = None if self.bias is None else self.bias.to(self.dtype)
        return self.hidden.to(self.dtype), self.weight.to(self.dtype), bias

    def logits(self) -> Tensor:
        """Return the logits; `LossError` if their operands have changed since the head was called."""
        self.require_unchanged()
        with torch.autocast(self.hidden.device.type, enabled=False):
            product = F.linear(*self.operands()).to(self.out_dtype)
        return product.movedim(-1, 1) if self.classes_second else product


def versions_of(*tensors: Tensor | None) -> tuple[int, ...]:
    """Return the number of in-place changes of each tensor."""
    return tuple(each._version for each in tensors if each is not None)


class _HeadInput(Tensor):
    """Hidden states as the input of a head; the linear product is deferred."""

    hidden: Tensor
    use: HeadUse

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") == "__get__":  # A property, which the compiler reads.
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        return _of_head_input(func, args, kwargs or {})


@torch.compiler.disable
def _of_head_input(func: Any, args: Any, kwargs: Any) -> Any:
    """Return the deferred product, or the result of any other operation on the hidden states."""
    use = next(each.use for each in pytree.tree_leaves((args, kwargs)) if isinstance(each, _HeadInput))
    args, kwargs = pytree.tree_map_only(_HeadInput, lambda each: each.hidden, (args, kwargs))
    if func is not F.linear:
        return func(*args, **kwargs)
    hidden, weight, bias = _linear_arguments(*args, **kwargs)
    dtype = product_dtype(hidden)
    use.num_calls += 1
    return _deferred(_Source(hidden, weight, bias, dtype, dtype, use, versions_of(hidden, weight, bias)), _Shared())


class _WrappedHeadInput(_HeadInput):
    """Head input of a tensor subclass, such as a fake tensor."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = pytree.tree_map_only(cls, lambda each: each.hidden, (args, kwargs or {}))
        return func(*args, **kwargs)


def _head_input(hidden: Tensor, use: HeadUse) -> _HeadInput:
    """Return hidden states as the input of a head, detached, because the compiler does not trace a second graph."""
    made: _HeadInput
    if type(hidden) is Tensor:
        made = hidden.detach().as_subclass(_HeadInput)
    else:  # A fake tensor, for example.
        made = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            _WrappedHeadInput, hidden.shape, dtype=hidden.dtype, device=hidden.device
        )
    made.hidden, made.use = hidden, use
    return made


def _linear_arguments(
    input: Tensor, weight: Tensor, bias: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the arguments of `torch.nn.functional.linear`, given by position or name."""
    return input, weight, bias


@dataclass
class _Shared:
    """State shared by a head's result and all tensors made from the result by reshaping, casts and slices.

    Attributes:
        is_computed: True after the first computation of logits; later operations are not deferred.
        hooks: hooks of torch's FSDP, called before the backward of the logits; gradients stay unchanged.
    """

    is_computed: bool = False
    hooks: list[Callable[[Tensor], Any]] = field(default_factory=list)


@dataclass(frozen=True)
class _Origin:
    """The operation between two deferred tensors."""

    parent: DeferredLogits
    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class DeferredLogits(Tensor):
    """Logits, computed at the first operation on the values.

    The tensor is a node of autograd's graph, so gradients are right also for C++ operations without Python dispatch.
    """

    source: _Source
    shared: _Shared
    origin: _Origin | None  # None for the head's result.
    result: Tensor | None

    @staticmethod
    def __new__(cls, source: _Source, shared: _Shared, origin: _Origin | None) -> DeferredLogits:
        made: DeferredLogits = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, source.shape, dtype=source.out_dtype, device=source.hidden.device
        )
        made.source, made.shared, made.origin, made.result = source, shared, origin, None
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"DeferredLogits(shape={self.source.shape}, dtype={self.source.out_dtype})"

    def computed(self, name: str) -> Tensor:
        """Return the logits for an operation; computed once, always with a graph, also under `no_grad`."""
        if self.result is None:
            self.shared.is_computed = True
            self.source.use.computed_by[name] = None
            with torch.enable_grad():
                if self.origin is None:
                    self.result = self.source.logits()
                else:
                    parent = self.origin.parent.computed(name)
                    self.result = self.origin.function(parent, *self.origin.args, **self.origin.kwargs)
        return self.result

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _METADATA and args[0].result is None:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        return _of_logits(func, args, kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch.no_grad():  # Autograd has recorded the operation already.
            given = pytree.tree_map_only(cls, lambda each: each.computed(str(func)).detach(), (args, kwargs or {}))
            return func(*given[0], **given[1])


@torch.compiler.disable
def _of_logits(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the result of an operation: deferred if a rule permits, or from the computed logits."""
    ours = args[0] if args and isinstance(args[0], DeferredLogits) else None
    # A view that is made without gradients has none later.
    if ours is not None and not ours.shared.is_computed and torch.is_grad_enabled():
        if func is Tensor.register_hook and _is_of_fsdp(args[1]):
            ours.shared.hooks.append(args[1])
            return RemovableHandle(OrderedDict())
        if func is F.cross_entropy:
            result = _cross_entropy(ours.source, ours.shared, *args[1:], **kwargs)
            if result is not None:
                return result
        elif (rule := _RULES.get(func)) is not None and (source := rule(ours.source, *args[1:], **kwargs)) is not None:
            return _deferred(source, ours.shared, _Origin(ours, func, args[1:], kwargs))
    args, kwargs = pytree.tree_map_only(DeferredLogits, lambda each: each.computed(_name(func)), (args, kwargs))
    return func(*args, **kwargs)


def _name(func: Any) -> str:
    name = getattr(func, "__name__", str(func))
    return str(getattr(func.__self__, "__name__", name)) if name == "__get__" else name


def _is_of_fsdp(hook: Any) -> bool:
    return (getattr(hook, "__module__", None) or "").startswith("torch.distributed.fsdp")


def _deferred(source: _Source, shared: _Shared, origin: _Origin | None = None) -> Tensor:
    found: Tensor = _Product.apply(  # type: ignore[no-untyped-call]
        source, shared, origin, source.hidden, source.weight, source.bias
    )
    return found


class _Product(torch.autograd.Function):
    """The product of hidden states and weight as a node of the graph, whose values are deferred."""

    @staticmethod
    def forward(ctx: Any, source: _Source, shared: _Shared, origin: _Origin | None, *inputs: Tensor | None) -> Tensor:
        """Return the deferred product; `inputs` are hidden states, weight and bias."""
        ctx.source = source
        return DeferredLogits(source, shared, origin)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of an operation in C++ that used the logits."""
        source: _Source = ctx.source
        inputs = [source.hidden, source.weight, *([] if source.bias is None else [source.bias])]
        wanted = [each.requires_grad for each in inputs]
        with torch.enable_grad():
            leaves = [each.detach().requires_grad_(wants) for each, wants in zip(inputs, wanted, strict=True)]
            bias = leaves[2] if len(leaves) > 2 else None
            logits = replace(source, hidden=leaves[0], weight=leaves[1], bias=bias).logits()
        asked = [leaf for leaf, wants in zip(leaves, wanted, strict=True) if wants]
        found = iter(torch.autograd.grad(logits, asked, slope))
        each = [next(found) if wants else None for wants in wanted]
        return (None, None, None, *each, *([None] if source.bias is None else []))


# Rules for operations: the source of a deferred result, or None to compute the logits.


def _reshape(source: _Source, *shape: Any, **named: Any) -> _Source | None:
    if named or source.classes_second or (len(shape) == 1 and isinstance(shape[0], torch.dtype)):
        return None
    sizes = list(shape[0]) if len(shape) == 1 and not isinstance(shape[0], int) else list(shape)
    if sizes.count(-1) == 1:
        known = math.prod(size for size in sizes if size != -1)
        sizes[sizes.index(-1)] = math.prod(source.shape) // known if known else 0
    if len(sizes) < 2 or sizes[-1] != source.shape[-1] or math.prod(sizes) != math.prod(source.shape):
        return None
    return replace(source, hidden=source.hidden.reshape(*sizes[:-1], source.hidden.shape[-1]))


def _flatten(source: _Source, start_dim: int = 0, end_dim: int = -1) -> _Source | None:
    rank = len(source.shape)
    if source.classes_second or rank < 2 or end_dim % rank == rank - 1:
        return None
    return replace(source, hidden=source.hidden.flatten(start_dim % rank, end_dim % rank))


def _index(source: _Source, index: Any) -> _Source | None:
    """Slice tokens. An index of classes, or by a tensor, may change the order of dimensions and needs the logits."""
    parts = index if isinstance(index, tuple) else (index,)
    if source.classes_second or not all(part is Ellipsis or isinstance(part, slice | int) for part in parts):
        return None
    named = [part for part in parts if part is not Ellipsis]
    reaches_classes = len(named) >= len(source.shape) or (Ellipsis in parts and parts[-1] is not Ellipsis)
    if reaches_classes and parts[-1] != slice(None):
        return None
    return replace(source, hidden=source.hidden[index])


def _cast(source: _Source, *args: Any, **kwargs: Any) -> _Source | None:
    """Cast to a floating dtype on the same device."""
    wanted = [each for each in (*args, *kwargs.values()) if not isinstance(each, bool)]
    if any(isinstance(each, Tensor) for each in wanted):
        return None
    dtypes = [each for each in wanted if isinstance(each, torch.dtype)]
    devices = [torch.device(each) for each in wanted if isinstance(each, str | torch.device | int)]
    if len(dtypes) + len(devices) != len(wanted) or kwargs.get("copy") or len(dtypes) > 1:
        return None
    if any(device.type != source.hidden.device.type for device in devices):
        return None
    if any(device.index not in (None, source.hidden.device.index) for device in devices):
        return None
    dtype = dtypes[0] if dtypes else source.out_dtype
    # A cast to fewer digits and back would be lost in a chunked loss, which computes in fp32.
    if not dtype.is_floating_point or torch.promote_types(dtype, source.out_dtype) != dtype:
        return None
    return replace(source, out_dtype=dtype)


def _transpose(source: _Source, dim0: int, dim1: int) -> _Source | None:
    rank = len(source.shape)
    is_swap = rank == 3 and {dim0 % rank, dim1 % rank} == {1, 2}
    return replace(source, classes_second=not source.classes_second) if is_swap else None


def _permute(source: _Source, *dims: Any) -> _Source | None:
    order = tuple(dims[0]) if len(dims) == 1 and not isinstance(dims[0], int) else dims
    rank = len(source.shape)
    to_second = (0, rank - 1, *range(1, rank - 1))
    fits = not source.classes_second and rank > 2 and tuple(dim % rank for dim in order) == to_second
    return replace(source, classes_second=True) if fits else None


def _unchanged(source: _Source, **kwargs: Any) -> _Source | None:
    return None if kwargs else source


def _cross_entropy(
    source: _Source,
    shared: _Shared,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor | None:
    lead = source.hidden.shape[:-1]
    has_classes_at = source.classes_second or len(source.shape) == 2
    is_plain = weight is None and size_average is None and reduce is None and reduction in ("mean", "sum")
    is_indexed = target.shape == lead and target.dtype is torch.int64
    if not (has_classes_at and is_plain and is_indexed):
        return None
    source.require_unchanged()
    source.use.tokens += target.numel()
    hidden, words = source.hidden.flatten(0, -2), target.flatten()
    chunk = source.use.chunk_rows
    if chunk is None or chunk >= len(words):
        options: dict[str, Any] = {"ignore_index": ignore_index, "reduction": reduction}
        return F.cross_entropy(source.logits(), target, label_smoothing=label_smoothing, **options)
    if shared.hooks:
        hidden = hidden.view_as(hidden)
        for hook in shared.hooks:
            hidden.register_hook(functools.partial(_call_before_backward, hook))
    _, weight, bias = source.operands()
    total = chunked_cross_entropy(
        hidden.to(source.dtype),
        weight,
        bias,
        words,
        chunk,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
    )
    if reduction == "sum":
        return total
    count = (words != ignore_index).sum()
    # Without a counted target, the mean is not a number and its gradient is 0, as in torch.
    return total / count.clamp(min=1) + torch.where(count > 0, 0.0, math.nan)


def _call_before_backward(hook: Callable[[Tensor], Any], gradient: Tensor) -> None:
    hook(gradient)


_RULES: dict[Any, Callable[..., _Source | None]] = {
    Tensor.view: _reshape,
    Tensor.reshape: _reshape,
    torch.reshape: _reshape,
    Tensor.flatten: _flatten,
    torch.flatten: _flatten,
    Tensor.__getitem__: _index,
    Tensor.to: _cast,
    Tensor.float: lambda source, **named: None if named else _cast(source, torch.float32),
    Tensor.transpose: _transpose,
    torch.transpose: _transpose,
    Tensor.permute: _permute,
    torch.permute: _permute,
    Tensor.contiguous: _unchanged,
}
_PROPERTIES = (
    "grad",
    "shape",
    "dtype",
    "device",
    "ndim",
    "requires_grad",
    "grad_fn",
    "is_leaf",
    "layout",
    "is_cuda",
    "is_cpu",
    "is_meta",
    "is_nested",
    "is_sparse",
    "is_quantized",
    "_base",
)
_METADATA = {
    *(getattr(Tensor, name).__get__ for name in _PROPERTIES),
    *(getattr(Tensor, name) for name in ("size", "dim", "numel", "nelement", "is_floating_point", "is_complex")),
    *(getattr(Tensor, name) for name in ("element_size", "__len__", "get_device", "__hash__")),
}


class _Deferral:
    """Forward pre-hook of a head; a copy of the model, also by pickle, has a hook without effect."""

    def __init__(self, use: HeadUse) -> None:
        self.use = use

    @torch.compiler.disable
    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        hidden = args[0] if len(args) == 1 else None
        is_plain = type(hidden) is Tensor or isinstance(hidden, FakeTensor)
        # A full backward hook would need the graph of the head's input.
        if not is_plain or not torch.is_grad_enabled() or module._backward_hooks or module._backward_pre_hooks:
            return None
        assert hidden is not None
        return None if hidden.is_nested else (_head_input(hidden, self.use),)

    def __reduce__(self) -> tuple[Any, ...]:
        return _no_hook, ()


def _no_hook() -> Callable[..., None]:
    return _without_effect


def _without_effect(module: nn.Module, args: tuple[Any, ...]) -> None:
    """Return None: the arguments stay."""


def defer_logits(head: nn.Linear, chunk_rows: int | None) -> tuple[HeadUse, Callable[[], None]]:
    """Defer a head's logits while gradients are computed; return the record of use and a function to end deferral."""
    use = HeadUse(chunk_rows)
    return use, head.register_forward_pre_hook(_Deferral(use)).remove
