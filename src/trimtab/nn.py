"""Modules that a model may adopt: a language-model head that computes its loss in chunks.

The logits of N tokens over a vocabulary of V take N x V elements, several times over in a step: most of the memory of
a small language model with a large vocabulary. In chunks, loss and gradients need a single chunk's logits at a time.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from trimtab.core import validation
from trimtab.core.errors import BatchError

IGNORED = -100  # The target that torch's cross_entropy ignores by default.
_OF_TORCH = getattr(F, "linear_cross_entropy", None)  # From torch 2.13 on.


class LossHead(nn.Linear):
    """Linear layer from features to logits, with a chunked cross-entropy loss.

    Called as a module it is `nn.Linear`, with the same parameter names; its weight can be tied to an embedding.

    Attributes:
        chunk_rows: tokens per chunk, whose logits are held at once; None for all. Changes the result by rounding
            only.
    """

    def __init__(
        self, in_features: int, out_features: int, bias: bool = False, *, chunk_rows: int | None = None
    ) -> None:
        super().__init__(in_features, out_features, bias)
        if chunk_rows is not None:
            validation.integer("chunk_rows", chunk_rows)
        self.chunk_rows = chunk_rows

    def loss(self, features: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return (loss_sum, count) over the targets other than -100: the arguments of `trimtab.Summed`.

        Call `loss` inside the model's forward, and shard the head together with the model: forward hooks of the head
        itself do not run here.

        Args:
            features: (..., in_features).
            targets: (...) token indices.

        Raises:
            BatchError: the numbers of targets and features differ.
        """
        if features.shape[:-1] != targets.shape:
            raise BatchError(
                "targets",
                got=f"targets of shape {tuple(targets.shape)} for features of shape {tuple(features.shape)}",
                expected=f"one target per feature vector: shape {tuple(features.shape[:-1])}",
                hint="Reshape the targets, or shift features and targets by the same number of tokens.",
                code="loss_head.targets_shape",
            )
        rows, words = features.flatten(0, -2), targets.flatten()
        chunk_rows = self.chunk_rows or len(rows)
        if torch.is_grad_enabled() and chunk_rows < len(rows):
            dtype = product_dtype(rows)
            bias = None if self.bias is None else self.bias.to(dtype)
            total = chunked_cross_entropy(rows.to(dtype), self.weight.to(dtype), bias, words, chunk_rows)
        else:
            parts = zip(rows.split(chunk_rows), words.split(chunk_rows), strict=True)
            total = torch.stack([_summed(self(r), w) for r, w in parts]).sum()
        return total, (words != IGNORED).sum()

    def extra_repr(self) -> str:
        """Return the module's repr with the chunk size."""
        return f"{super().extra_repr()}, chunk_rows={self.chunk_rows}"


def _summed(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the summed cross-entropy in float32 or better.

    A 16-bit sum over thousands of terms would lose most of its digits.
    """
    exact = torch.promote_types(logits.dtype, torch.float32)
    return F.cross_entropy(logits.to(exact), targets, ignore_index=IGNORED, reduction="sum")


def product_dtype(features: Tensor) -> torch.dtype:
    """Return the dtype of a linear product: the autocast dtype if enabled, which does not apply to float64."""
    kind = features.device.type
    is_cast = torch.is_autocast_enabled(kind) and features.dtype is not torch.float64
    return torch.get_autocast_dtype(kind) if is_cast else features.dtype


def chunked_cross_entropy(
    features: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    chunk_rows: int,
    *,
    ignore_index: int = IGNORED,
    label_smoothing: float = 0.0,
) -> Tensor:
    """Return the summed cross-entropy of a linear layer, computed chunk by chunk, in float32 or better.

    Args:
        features: (N, in_features), in the dtype of weight and bias; autocast has no effect.
        targets: (N,) class indices.
        chunk_rows: rows of features whose logits are held at once.
        ignore_index: target whose rows do not count.
        label_smoothing: fraction of the target's probability that is spread over all classes.
    """
    with torch.autocast(features.device.type, enabled=False):
        if _OF_TORCH is None or label_smoothing or features.dtype in (torch.float16, torch.bfloat16):
            counts = targets != ignore_index
            words = targets if ignore_index == IGNORED else torch.where(counts, targets, IGNORED)
            result: Tensor = _ChunkedLoss.apply(  # type: ignore[no-untyped-call]
                features, weight, bias, words, chunk_rows, label_smoothing
            )
            return result
        # torch's default options hold all logits, and its automatic choice of chunks is several times slower.
        total: Tensor = _OF_TORCH(
            features,
            weight,
            targets,
            linear_bias=bias,
            reduction="sum",
            ignore_index=ignore_index,
            options=nn.LinearCrossEntropyOptions(batch_chunk_size=chunk_rows, acc_policy="accurate"),
        )
        return total.to(torch.promote_types(total.dtype, torch.float32))


class _ChunkedLoss(torch.autograd.Function):
    """Loss and gradients in one pass: the logits of a chunk are freed before those of the next are computed.

    For label smoothing and fp16, which torch's `linear_cross_entropy` does not chunk; for bf16, in which it sums losses
    and gradients with too few digits; and for torch before 2.13.
    """

    @staticmethod
    def forward(
        ctx: Any,
        features: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        chunk_rows: int,
        label_smoothing: float,
    ) -> Tensor:
        """Return the summed loss in float32 or better; gradients are computed here and kept for `backward`."""
        exact = torch.promote_types(features.dtype, torch.float32)
        total = torch.zeros((), dtype=exact, device=features.device)
        wanted, like = ctx.needs_input_grad[:3], (features, weight, bias)
        # Gradients computed here are not yet multiplied by the loss scale and would underflow in fp16.
        if features.dtype is torch.float16:
            features, weight = features.to(exact), weight.to(exact)
            bias = None if bias is None else bias.to(exact)
        grad_features = torch.empty_like(features) if wanted[0] else None
        grad_weight = torch.zeros_like(weight, dtype=exact) if wanted[1] else None
        grad_bias = torch.zeros_like(bias, dtype=exact) if bias is not None and wanted[2] else None
        for begin in range(0, len(features), chunk_rows):
            chunk, words = features[begin : begin + chunk_rows], targets[begin : begin + chunk_rows]
            loss, slope = _loss_and_slope(F.linear(chunk, weight, bias).to(exact), words, label_smoothing)
            total += loss
            if grad_bias is not None:
                grad_bias += slope.sum(0)
            slope = slope.to(features.dtype)
            if grad_features is not None:
                torch.mm(slope, weight, out=grad_features[begin : begin + chunk_rows])
            if grad_weight is not None:
                _add_product(grad_weight, slope.t(), chunk)
            del slope  # Otherwise alive until the next chunk's gradient replaces it.
        ctx.gradients = grad_features, grad_weight, grad_bias
        ctx.dtypes = tuple(None if each is None else each.dtype for each in like)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients multiplied by the gradient of the loss."""
        found, ctx.gradients = ctx.gradients, None
        if found is None:
            raise RuntimeError(
                "A second backward through LossHead.loss is not possible, because the first backward returned its "
                "gradients without a copy. Call backward once per forward, or set chunk_rows=None."
            )
        scaled = (None if each is None else each.mul_(slope.to(each.dtype)) for each in found)
        each = (None if g is None else g.to(dtype) for g, dtype in zip(scaled, ctx.dtypes, strict=True))
        return (*each, None, None, None)


def _loss_and_slope(logits: Tensor, words: Tensor, label_smoothing: float) -> tuple[Tensor, Tensor]:
    """Return the summed loss of a chunk and its gradient by the logits, which overwrites the logits."""
    counts = words != IGNORED
    picked = torch.where(counts, words, 0)[:, None]
    normaliser = logits.logsumexp(1, keepdim=True)
    chosen = (1 - label_smoothing) * logits.gather(1, picked)
    if label_smoothing:
        chosen += label_smoothing * logits.mean(1, keepdim=True)
    loss = torch.where(counts, (normaliser - chosen)[:, 0], 0).sum()
    slope = logits.sub_(normaliser).exp_()
    if label_smoothing:
        slope -= label_smoothing / slope.shape[1]
    slope.scatter_add_(1, picked, torch.full_like(picked, label_smoothing - 1, dtype=slope.dtype))
    return loss, slope.mul_(counts[:, None])


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add a matrix product in place to a sum of the same or higher precision."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    else:
        total += left @ right
