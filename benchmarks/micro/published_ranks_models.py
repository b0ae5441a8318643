"""Transformers of published multi-GPU trainings, with the original operators and activation checkpointing.

Shapes in comments: B samples, T tokens, D width, H heads, V vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

Batch = tuple[Tensor, Tensor]
_ATTENTIONS = (
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
)


@dataclass(frozen=True)
class Shape:
    """Sizes of a transformer.

    Args:
        width: Hidden size.
        heads: Attention heads.
        blocks: Number of blocks.
        words: Vocabulary size.
        tokens: Tokens per sample.
        kv_heads: Key and value heads; 0 for `heads`.
        hidden: Width of the feed-forward part; 0 for four times `width`.
        recompute: Activation checkpointing: "none", "all", or "half" (all operators except attention and every second
            matrix product).
    """

    width: int
    heads: int
    blocks: int
    words: int
    tokens: int
    kv_heads: int = 0
    hidden: int = 0
    recompute: str = "none"


def _half(counts: dict[bool, int], context: Any, operator: Any, *_: Any, **__: Any) -> CheckpointPolicy:
    """Save attention and every second matrix product, as torchtitan's selective activation checkpointing does."""
    if operator is torch.ops.aten.mm.default:
        counts[context.is_recompute] = counts.get(context.is_recompute, 0) + 1
        kept = counts[context.is_recompute] % 2 == 1
    else:
        kept = operator in _ATTENTIONS
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def _half_contexts() -> tuple[Any, Any]:
    return create_selective_checkpoint_contexts(functools.partial(_half, {}))


class _Block(nn.Module):
    """Transformer block with the activation checkpointing of its shape."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.recompute = shape.recompute

    def forward(self, x: Tensor, *more: Any) -> Tensor:
        """Return (B, T, D)."""
        if self.recompute == "none":
            return self.compute(x, *more)
        contexts = {"context_fn": _half_contexts} if self.recompute == "half" else {}
        return checkpoint(self.compute, x, *more, use_reentrant=False, preserve_rng_state=False, **contexts)

    def compute(self, x: Tensor, *more: Any) -> Tensor:
        """Return (B, T, D)."""
        raise NotImplementedError


class RootMeanSquareNorm(nn.Module):
    """RMSNorm in fp32 from elementary operators, as in torchtitan and KempnerForge."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """Return (B, T, D)."""
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).type_as(x) * self.weight


def _rotated(x: Tensor, turns: Tensor) -> Tensor:
    """Apply rotary embeddings to (B, T, H, D/H), as complex products in fp32."""
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * turns).flatten(3).type_as(x)


class LlamaBlock(_Block):
    """Llama block: grouped-query attention, rotary positions, SwiGLU."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        width, self.each = shape.width, shape.width // shape.heads
        kv_heads, hidden = shape.kv_heads or shape.heads, shape.hidden or 4 * width
        self.groups = shape.heads // kv_heads
        self.q, self.out = (nn.Linear(width, width, bias=False) for _ in range(2))
        self.k, self.v = (nn.Linear(width, kv_heads * self.each, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)
        self.norm1, self.norm2 = RootMeanSquareNorm(width), RootMeanSquareNorm(width)

    def compute(self, x: Tensor, turns: Tensor) -> Tensor:
        """Return (B, T, D)."""
        normed = self.norm1(x)
        q, k, v = (layer(normed).unflatten(-1, (-1, self.each)) for layer in (self.q, self.k, self.v))
        q, k = _rotated(q, turns), _rotated(k, turns)
        if self.groups > 1:
            k, v = (each.repeat_interleave(self.groups, 2) for each in (k, v))
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))  # (B, H, T, D/H)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        normed = self.norm2(x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))


class Llama(nn.Module):
    """Llama 3 (Grattafiori et al. 2024)."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        each = shape.width // shape.heads
        self.tokens = nn.Embedding(shape.words, shape.width)
        self.blocks = nn.ModuleList(LlamaBlock(shape) for _ in range(shape.blocks))
        self.norm, self.head = RootMeanSquareNorm(shape.width), nn.Linear(shape.width, shape.words, bias=False)
        turns = torch.zeros(1, shape.tokens, 1, each // 2, dtype=torch.complex64)
        self.register_buffer("turns", turns, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return (B, T, V)."""
        y = self.tokens(x)
        for block in self.blocks:
            y = block(y, self.turns)
        return self.head(self.norm(y))


class LowNorm(nn.LayerNorm):
    """Layer norm that stays in half precision under autocast."""

    def forward(self, x: Tensor) -> Tensor:
        """Return (B, T, D)."""
        kind = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else x.dtype
        with torch.autocast("cpu", enabled=False):
            return F.layer_norm(x.to(kind), self.normalized_shape, self.weight.to(kind), self.bias.to(kind), self.eps)


class MptBlock(_Block):
    """GPT-2 block without dropout."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        width, self.heads = shape.width, shape.heads
        self.norm1, self.norm2 = LowNorm(width), LowNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def compute(self, x: Tensor) -> Tensor:
        """Return (B, T, D)."""
        parts = self.qkv(self.norm1(x)).chunk(3, 2)
        q, k, v = (each.unflatten(-1, (self.heads, -1)).transpose(1, 2) for each in parts)  # (B, H, T, D/H)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Mpt(nn.Module):
    """MosaicML's GPT with learned positions and a tied head."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(shape.words, shape.width), nn.Embedding(shape.tokens, shape.width)
        self.blocks = nn.ModuleList(MptBlock(shape) for _ in range(shape.blocks))
        self.norm = LowNorm(shape.width)

    def forward(self, x: Tensor) -> Tensor:
        """Return (B, T, V)."""
        y = self.tokens(x) + self.places(torch.arange(x.shape[1]))
        for block in self.blocks:
            y = block(y)
        return F.linear(self.norm(y), self.tokens.weight)


def over_wide_tokens(model: nn.Module, batch: Batch) -> Tensor:
    """Return the mean cross-entropy of logits converted to fp32."""
    return F.cross_entropy(model(batch[0]).flatten(0, 1).float(), batch[1].flatten())


LossFn = Callable[[nn.Module, Any], Tensor]
