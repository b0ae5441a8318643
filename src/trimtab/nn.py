"""Modules that a model may adopt: a head over a large vocabulary that need not hold all of its logits.

The logits of N tokens over V words are N x V numbers, several times over in a step: in a small language model with a
large vocabulary most of its memory. A chunk of tokens at a time, loss and gradients need the logits of a chunk.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from trimtab.core import checks
from trimtab.core.errors import BatchError

IGNORED = -100  # the target that counts nothing, torch's own
_OF_TORCH = getattr(F, "linear_cross_entropy", None)  # from torch 2.13 on


class LossHead(nn.Linear):
    """The linear layer from features to logits, and the cross-entropy of what it predicts.

    Called, it is `nn.Linear`: weights and their names are as they would be, and they can be tied to an embedding's.

    Attributes:
        chunk_rows: tokens whose logits are held at once; None for all. Another rounding of the same maths.
    """

    def __init__(
        self, in_features: int, out_features: int, bias: bool = False, *, chunk_rows: int | None = None
    ) -> None:
        super().__init__(in_features, out_features, bias)
        if chunk_rows is not None:
            checks.integer("chunk_rows", chunk_rows)
        self.chunk_rows = chunk_rows

    def loss(self, features: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return (loss_sum, count) over the targets that are not -100: the arguments of `trimtab.Summed`.

        Call it inside the model's forward, and shard the head with the model: hooks on calls of its own never see it.

        Args:
            features: (..., in_features). targets: (...) words.

        Raises:
            BatchError: there are not as many targets as features.
        """
        if features.shape[:-1] != targets.shape:
            given = f"targets of shape {tuple(targets.shape)} for features of {tuple(features.shape)}"
            raise BatchError("targets", given=given, expected="one target for each feature vector")
        rows, words = features.flatten(0, -2), targets.flatten()
        chunk_rows = self.chunk_rows or len(rows)
        if torch.is_grad_enabled() and chunk_rows < len(rows):
            total = _chunked(rows, self.weight, self.bias, words, chunk_rows)
        else:
            parts = zip(rows.split(chunk_rows), words.split(chunk_rows), strict=True)
            total = torch.stack([_summed(self(r), w) for r, w in parts]).sum()
        return total, (words != IGNORED).sum()

    def extra_repr(self) -> str:
        """Say how it is chunked."""
        return f"{super().extra_repr()}, chunk_rows={self.chunk_rows}"


def _summed(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the summed loss, in float32 at the least: in half of its bits a sum over thousands would lose most."""
    exact = torch.promote_types(logits.dtype, torch.float32)
    return F.cross_entropy(logits.to(exact), targets, ignore_index=IGNORED, reduction="sum")


def _chunked(features: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, chunk_rows: int) -> Tensor:
    """Return the summed loss, its logits a chunk at a time, in the precision of the autocast in force."""
    kind = features.device.type
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        features, weight = features.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    with torch.autocast(kind, enabled=False):
        if _OF_TORCH is None or features.dtype is torch.float16:
            result: Tensor = _Chunked.apply(features, weight, bias, targets, chunk_rows)
            return result
        # With options left out torch holds all logits, and by its own choice of them it is several times slower.
        options = nn.LinearCrossEntropyOptions(batch_chunk_size=chunk_rows, acc_policy="accurate")
        sums = {"reduction": "sum", "ignore_index": IGNORED, "options": options}
        total: Tensor = _OF_TORCH(features, weight, targets, linear_bias=bias, **sums)
        return total.to(torch.promote_types(total.dtype, torch.float32))


class _Chunked(torch.autograd.Function):
    """Loss and gradients in one pass: a chunk's logits are done with before the next one's are made.

    For fp16, and for torch before 2.13, which has no such thing of its own.
    """

    @staticmethod
    def forward(
        ctx: Any, features: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, chunk_rows: int
    ) -> Tensor:
        """Return the summed loss in float32 at the least."""
        exact = torch.promote_types(features.dtype, torch.float32)
        total = torch.zeros((), dtype=exact, device=features.device)
        wanted, like = ctx.needs_input_grad[:3], (features, weight, bias)
        if features.dtype is torch.float16:  # whose gradients would be lost before a loss scale reaches them
            features, weight = features.to(exact), weight.to(exact)
            bias = None if bias is None else bias.to(exact)
        grad_features = torch.empty_like(features) if wanted[0] else None
        grad_weight = torch.zeros_like(weight, dtype=exact) if wanted[1] else None
        grad_bias = torch.zeros_like(bias, dtype=exact) if bias is not None and wanted[2] else None
        for begin in range(0, len(features), chunk_rows):
            chunk, words = features[begin : begin + chunk_rows], targets[begin : begin + chunk_rows]
            loss, slope = _loss_and_slope(F.linear(chunk, weight, bias).to(exact), words)
            total += loss
            if grad_bias is not None:
                grad_bias += slope.sum(0)
            slope = slope.to(features.dtype)
            if grad_features is not None:
                torch.mm(slope, weight, out=grad_features[begin : begin + chunk_rows])
            if grad_weight is not None:
                _add_product(grad_weight, slope.t(), chunk)
        ctx.gradients = grad_features, grad_weight, grad_bias
        ctx.dtypes = tuple(None if each is None else each.dtype for each in like)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients, by what the loss is multiplied by."""
        found, ctx.gradients = ctx.gradients, None
        if found is None:
            raise RuntimeError("a second backward through a chunked loss: its gradients were handed out")
        scaled = (None if each is None else each.mul_(slope.to(each.dtype)) for each in found)
        each = (None if g is None else g.to(dtype) for g, dtype in zip(scaled, ctx.dtypes, strict=True))
        return (*each, None, None)


def _loss_and_slope(logits: Tensor, words: Tensor) -> tuple[Tensor, Tensor]:
    """Return the summed loss of a chunk, and its derivative by the logits, in their memory."""
    counts = words != IGNORED
    picked = torch.where(counts, words, 0)[:, None]
    normaliser = logits.logsumexp(1, keepdim=True)
    loss = torch.where(counts, (normaliser - logits.gather(1, picked))[:, 0], 0).sum()
    slope = logits.sub_(normaliser).exp_()
    slope.scatter_add_(1, picked, torch.full_like(picked, -1, dtype=slope.dtype))
    return loss, slope.mul_(counts[:, None])


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add a matrix product to a sum of at least its precision."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    else:
        total += left @ right
