"""Gradient scaling and clipping of a window with a single fused factor (paper eq. 12; math: section 5)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

from trimtab.measure.gradient_norms import squared_norm


def multiply(optimizer: torch.optim.Optimizer, factor: float | Tensor) -> None:
    """Multiply the gradients in place; does nothing for the float 1.0."""
    if isinstance(factor, float) and factor == 1.0:
        return
    grads = _gradients(optimizer)
    if not grads:
        return
    if isinstance(factor, Tensor) and grads[0].dtype is torch.float32:
        factor = factor.float()  # The fused foreach kernel requires the dtype of the gradients.
    torch._foreach_mul_(grads, factor)


def norm(optimizer: torch.optim.Optimizer) -> Tensor:
    """Return the global norm of the current gradients, a scalar on their device."""
    grads = _gradients(optimizer)
    return squared_norm(grads).sqrt() if any(grad.is_sparse for grad in grads) else get_total_norm(grads)


def scale_and_clip(
    optimizer: torch.optim.Optimizer, factor: float | Tensor, clip_norm: float | None, *, wants_norm: bool = False
) -> Tensor | None:
    """Multiply the gradients by `factor` and the clip coefficient `min(1, clip_norm / (norm + 1e-6))` at once.

    Returns:
        Norm of the gradients after `factor` and before clipping; None if neither `clip_norm` nor `wants_norm` is set.
    """
    if clip_norm is None and not wants_norm:
        multiply(optimizer, factor)
        return None
    total = norm(optimizer) * factor
    clip = 1.0 if clip_norm is None else torch.clamp(clip_norm / (total + 1e-6), max=1.0)
    multiply(optimizer, factor * clip)
    # FSDP2 returns a DTensor, whose full value is equal on all ranks.
    return total.full_tensor() if hasattr(total, "full_tensor") else total


def _gradients(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
