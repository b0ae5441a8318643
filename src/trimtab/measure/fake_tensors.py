"""Dispatch modes that do not disturb compiled code; fake tensors, with shape, dtype and strides but without memory.

torch does not run compiled code under a dispatch mode. Worse, calling a compiled function under a mode permanently
disables its compilation, silently and for all models of the same class. Therefore compiled code runs in eager mode
meanwhile. Only this module uses torch's private interface of fake tensors.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import sys
import threading
from collections.abc import Iterator
from typing import Any, TypeVar
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode
from torch.nn import functional as F
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

T = TypeVar("T")
_lock = threading.Lock()
_depth = 0  # number of active users in all threads; torch's stance is process-wide and restored by the last one
_stance: Any = None


@contextlib.contextmanager
def run_compiled_eagerly() -> Iterator[None]:
    """Run compiled code in eager mode inside the context, in the whole process. Contexts nest and may overlap.

    A model that is first called inside the context is compiled at a later call.
    """
    global _depth, _stance
    with _lock:
        # Without this module nothing is compiled, and importing it is slow.
        if _stance is None and "torch._dynamo" in sys.modules:
            _stance = torch.compiler.set_stance("force_eager")
        _depth += 1
    try:
        yield
    finally:
        with _lock:
            _depth -= 1
            if _depth == 0 and _stance is not None:
                _stance.__exit__(None, None, None)
                _stance = None


def _own_copies(values: Any) -> Iterator[nn.Parameter]:
    """Yield the parameters with a `__deepcopy__` of their own, which would return real tensors (bitsandbytes)."""
    for module in values if isinstance(values, tuple) else (values,):
        for each in module.parameters() if isinstance(module, nn.Module) else ():
            is_torchs = type(each).__deepcopy__ in (Tensor.__deepcopy__, nn.Parameter.__deepcopy__)
            if not (is_torchs or is_lazy(each) or is_traceable_wrapper_subclass(each)):
                yield each


class EagerDispatchMode(TorchDispatchMode):
    """Dispatch mode that switches compiled code to eager mode while active."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._active: list[contextlib.ExitStack] = []

    def __enter__(self) -> Any:
        entered = super().__enter__()  # type: ignore[no-untyped-call]
        self._active.append(contextlib.ExitStack())
        self._active[-1].enter_context(run_compiled_eagerly())
        return entered

    def __exit__(self, *error: Any) -> None:
        with self._active.pop():
            super().__exit__(*error)  # type: ignore[no-untyped-call]


class FakeTensors:
    """Context for fake tensors: operators return the correct shape, dtype and aliasing without computing values.

    Inside the context, new models and optimizers take no memory.
    """

    def __init__(self) -> None:
        self.mode = FakeTensorMode()
        self._active: list[contextlib.ExitStack] = []

    def copy(self, values: T) -> T:
        """Return a deep copy with fake tensors; shared objects stay shared.

        Fake tensors of another context are moved to this one.
        """
        with FakeCopyMode(self.mode):
            memo: dict[int, Any] = {}
            for parameter in _own_copies(values):
                self._copy_parameter(parameter, memo)
            return copy.deepcopy(values, memo)

    def _copy_parameter(self, parameter: nn.Parameter, memo: dict[int, Any]) -> None:
        """Add a fake copy of a parameter, with its attributes, to the memo of a deep copy."""
        fake = self.mode.from_tensor(parameter.detach().as_subclass(Tensor), static_shapes=True)
        memo[id(parameter)] = copied = nn.Parameter(fake, requires_grad=parameter.requires_grad)
        vars(copied).update(copy.deepcopy(vars(parameter), memo))

    def __enter__(self) -> FakeTensors:
        with contextlib.ExitStack() as stack:
            stack.enter_context(_unlogged())
            stack.enter_context(run_compiled_eagerly())
            stack.enter_context(self.mode)
            self._active.append(stack.pop_all())
        return self

    def __exit__(self, *error: Any) -> None:
        self._active.pop().__exit__(*error)


@contextlib.contextmanager
def _unlogged() -> Iterator[None]:
    """Suppress tracebacks of failing operators inside the context: torch logs them in addition to the exception."""
    log = logging.getLogger(FakeTensorMode.__module__)
    level = log.level
    log.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        log.setLevel(level)


# Emulation of CUDA for fake tensors on a CPU: fused attention, dropout masks, and autocast's list of fp32
# operators.

# Operators that autocast computes in fp32 on CUDA, and operators with an fp32 result, by name in any torch namespace
# (ATen/autocast_mode.h). A loss composed of several operators belongs to the first group.
_COMPUTED = """
    acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow __pow__ __rpow__ softplus
    layer_norm rms_norm group_norm cosine_similarity poisson_nll_loss cosine_embedding_loss nll_loss
    hinge_embedding_loss kl_div l1_loss smooth_l1_loss huber_loss mse_loss margin_ranking_loss
    multilabel_margin_loss soft_margin_loss triplet_margin_loss multi_margin_loss binary_cross_entropy_with_logits
    cross_entropy dist pdist cdist renorm logsumexp interpolate upsample normalize
"""
_RETURNED = "prod softmax log_softmax cumprod cumsum vector_norm matrix_norm norm sum"
_MOST_FLASH = 256  # maximum head size of flash attention
# Private; if missing, backward behaves as on a CPU.
_ENGINE: Any = getattr(torch.autograd.Variable, "_execution_engine", None)
_attend, _softmax, _drop_out = F.scaled_dot_product_attention, F.softmax, F.dropout


def _everywhere(names: str) -> frozenset[Any]:
    places = (torch, Tensor, F, torch.linalg)
    return frozenset(getattr(place, name) for place in places for name in names.split() if hasattr(place, name))


_IN_FP32, _TO_FP32 = _everywhere(_COMPUTED), _everywhere(_RETURNED)


class FakeCudaMode(TorchFunctionMode):
    """Torch function mode for fake CPU tensors, under which calls take the same memory and time as on CUDA."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.backward and _is_plain(args[0], **kwargs):
            loss, seed = args[0], kwargs.get("gradient")
            seed = torch.ones_like(loss) if seed is None else seed
            # The public function leaves this mode first, but recomputation has to run in it too.
            with self:
                how = {"allow_unreachable": True, "accumulate_grad": True}
                _ENGINE.run_backward((loss,), (seed,), False, False, (), **how)
            return None
        if func is _attend:
            return _attention(*args, **kwargs)
        if func is _drop_out:
            return _dropout(*args, **kwargs)
        # Calls the functions below internally, where this mode does not see them.
        if func is F.multi_head_attention_forward:
            ours: dict[str, Any] = {
                "scaled_dot_product_attention": _attention,
                "softmax": _softmax_in_fp32,
                "dropout": _dropout,
            }
            with mock.patch.multiple(F, **ours):
                return func(*args, **kwargs)
        if torch.is_autocast_enabled("cpu"):
            if func in _IN_FP32:
                args = tuple(_in_fp32(each) for each in args)
                kwargs = {name: _in_fp32(each) for name, each in kwargs.items()}
            elif func in _TO_FP32 and args and _is_half(args[0]) and kwargs.get("dtype") is None:
                kwargs = kwargs | {"dtype": torch.float32}
        return func(*args, **kwargs)


def kernels_of(kind: str) -> contextlib.AbstractContextManager[object]:
    """Return a context in which fake CPU tensors take the memory and operators of a kind of device, "cuda" or "cpu"."""
    return FakeCudaMode() if kind == "cuda" else contextlib.nullcontext()


def _is_plain(tensor: Tensor, gradient: Tensor | None = None, **others: Any) -> bool:
    """Return True for the backward of a loss into all leaves, if torch's engine is accessible."""
    return _ENGINE is not None and (gradient is not None or tensor.numel() == 1) and not any(others.values())


def _softmax_in_fp32(scores: Tensor, dim: int) -> Tensor:
    half = _is_half(scores) and torch.is_autocast_enabled("cpu")
    return _softmax(scores, dim, dtype=torch.float32 if half else None)


def _dropout(values: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """Return dropout with a mask of 1 byte per element, as on CUDA; a CPU keeps a floating-point factor."""
    if inplace or not training or not 0 < p < 1 or not values.numel():
        return _drop_out(values, p, training, inplace)
    return torch.native_dropout(values, p, True)[0]


def _is_half(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype in (torch.bfloat16, torch.float16)


def _in_fp32(value: Any) -> Any:
    return value.float() if _is_half(value) else value


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Return attention by the kernel used on CUDA, or by the composite implementation if CUDA has no kernel."""
    if torch.is_autocast_enabled("cpu"):
        dtype = torch.get_autocast_dtype("cpu")
        query, key, value = (each.to(dtype) for each in (query, key, value))
    if query.dim() != 4 or enable_gqa:
        return _attend(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    attended: Tensor
    is_half, fits = query.dtype is not torch.float32, max(query.shape[-1], value.shape[-1]) <= _MOST_FLASH
    if is_half and fits and attn_mask is None:
        kernel = torch.ops.aten._scaled_dot_product_flash_attention
        attended = kernel(query, key, value, dropout_p, is_causal, False, scale=scale)[0]
        return attended
    if attn_mask is not None:
        attn_mask = attn_mask.to(query.dtype).expand(*query.shape[:-1], key.shape[-2])
    kernel = torch.ops.aten._scaled_dot_product_efficient_attention
    keeps = any(each.requires_grad for each in (query, key, value))
    attended = kernel(query, key, value, attn_mask, keeps, dropout_p, is_causal, scale=scale)[0]
    return attended
