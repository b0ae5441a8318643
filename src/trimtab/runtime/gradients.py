"""Gradients of a window: one fused factor for correction and clipping (paper eq. 12; math: section 5)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm


def multiply(optimizer: torch.optim.Optimizer, factor: float | Tensor) -> None:
    """Multiply the gradients in place; nothing to do for the float 1.0."""
    if isinstance(factor, float) and factor == 1.0:
        return
    grads = _gradients(optimizer)
    if not grads:
        return
    if isinstance(factor, Tensor) and grads[0].dtype is torch.float32:
        factor = factor.float()  # the kernel over all tensors at once wants their own dtype
    torch._foreach_mul_(grads, factor)


def finish(optimizer: torch.optim.Optimizer, factor: float | Tensor, clip_norm: float | None) -> Tensor | None:
    """Apply `factor` and the clip coefficient `min(1, tau / (norm + 1e-6))` in one pass.

    Returns:
        The norm of the gradients after `factor` and before clipping, or None without a `clip_norm`.
    """
    if clip_norm is None:
        multiply(optimizer, factor)
        return None
    norm = get_total_norm(_gradients(optimizer)) * factor
    multiply(optimizer, factor * torch.clamp(clip_norm / (norm + 1e-6), max=1.0))
    return norm


def _gradients(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
