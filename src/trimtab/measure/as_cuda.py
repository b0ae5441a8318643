"""What torch does on CUDA, for tensors without memory on a CPU: attention in one kernel, and autocast's list of fp32.

On a CPU attention with dropout keeps its scores, which are most of a transformer's memory there, and layer norms and
losses stay in half precision under autocast. Fakes of CUDA's own need a torch that is built for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

# What a model or a loss calls of those operators that run in fp32 under autocast on CUDA.
_IN_FP32 = frozenset(
    {
        *(F.layer_norm, F.group_norm, F.softmax, F.log_softmax, F.cross_entropy, F.nll_loss, F.mse_loss, F.l1_loss),
        *(F.smooth_l1_loss, F.huber_loss, F.kl_div, F.binary_cross_entropy_with_logits, F.cosine_similarity),
        *(torch.layer_norm, torch.group_norm, torch.softmax, torch.log_softmax, torch.logsumexp, torch.exp, torch.log),
        *(torch.pow, torch.rsqrt, torch.sum, torch.cumsum, torch.prod, Tensor.softmax, Tensor.log_softmax),
        *(Tensor.logsumexp, Tensor.exp, Tensor.log, Tensor.pow, Tensor.rsqrt, Tensor.sum, Tensor.cumsum, Tensor.prod),
    }
)
_MOST_FLASH = 256  # width of a head that flash attention has kernels for


class AsCuda(TorchFunctionMode):
    """While it is entered, what is called on CPU fakes runs as it would on CUDA, as far as memory and time tell."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return _attention(*args, **kwargs)
        if func in _IN_FP32 and torch.is_autocast_enabled("cpu"):
            args = tuple(_in_fp32(each) for each in args)
            kwargs = {name: _in_fp32(each) for name, each in kwargs.items()}
        return func(*args, **kwargs)


def _in_fp32(value: Any) -> Any:
    is_half = isinstance(value, Tensor) and value.dtype in (torch.bfloat16, torch.float16)
    return value.float() if is_half else value


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
    """Return attention by the kernel that CUDA has for it; by the operators it is written in where it has none."""
    if torch.is_autocast_enabled("cpu"):
        dtype = torch.get_autocast_dtype("cpu")
        query, key, value = (each.to(dtype) for each in (query, key, value))
    whole = {"dropout_p": dropout_p, "is_causal": is_causal, "scale": scale}
    if query.dim() != 4 or enable_gqa:
        return F.scaled_dot_product_attention(query, key, value, attn_mask, enable_gqa=enable_gqa, **whole)
    kernel: Callable[..., Any]
    is_half, fits = query.dtype is not torch.float32, max(query.shape[-1], value.shape[-1]) <= _MOST_FLASH
    if is_half and fits and attn_mask is None:
        kernel = torch.ops.aten._scaled_dot_product_flash_attention
        return kernel(query, key, value, dropout_p, is_causal, False, scale=scale)[0]
    if attn_mask is not None:
        attn_mask = attn_mask.to(query.dtype).expand(*query.shape[:-1], key.shape[-2])
    kernel = torch.ops.aten._scaled_dot_product_efficient_attention
    keeps = any(each.requires_grad for each in (query, key, value))
    return kernel(query, key, value, attn_mask, keeps, dropout_p, is_causal, scale=scale)[0]
