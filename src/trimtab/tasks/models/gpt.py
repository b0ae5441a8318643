"""Compact GPT: pre-norm decoder blocks, learned positions, causal attention with torch's SDPA.

Layout and initialisation follow GPT-2 (Radford et al. 2019), except that position embeddings have standard deviation
0.02 instead of 0.01. Shapes in comments: B samples, T tokens, D width, H heads, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from trimtab.core import validation
from trimtab.core.errors import ValueGivenError
from trimtab.nn import LossHead

INIT_STD = 0.02


@dataclass(frozen=True)
class GPTShape:
    """Sizes of a GPT.

    Args:
        vocab_size: Vocabulary size V.
        context: Maximum number of tokens T.
        num_layers: Number of blocks.
        num_heads: Attention heads per block.
        width: Hidden size D, a multiple of `num_heads`.
        dropout: Dropout probability of embeddings, attention weights and residual branches.
        tied_head: True to share the weight of the token embedding with the output projection.
    """

    vocab_size: int
    context: int
    num_layers: int = 4
    num_heads: int = 4
    width: int = 256
    dropout: float = 0.0
    tied_head: bool = False

    def __post_init__(self) -> None:
        for name in ("vocab_size", "context", "num_layers", "num_heads", "width"):
            validation.integer(name, getattr(self, name))
        validation.number("dropout", self.dropout, low=0, high=1)
        if self.width % self.num_heads:
            raise ValueGivenError("width", got=f"{self.width}", expected=f"a multiple of {self.num_heads} heads")


class Attention(nn.Module):
    """Causal multi-head self-attention with a fused QKV projection."""

    def __init__(self, shape: GPTShape) -> None:
        super().__init__()
        self.num_heads = shape.num_heads
        self.dropout = shape.dropout
        self.qkv = nn.Linear(shape.width, 3 * shape.width)
        self.project = nn.Linear(shape.width, shape.width)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, T, D) to (B, T, D)."""
        rows, tokens, width = x.shape
        qkv = self.qkv(x).view(rows, tokens, 3, self.num_heads, width // self.num_heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each (B, H, T, D/H)
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        return self.project(y.transpose(1, 2).reshape(rows, tokens, width))


class Block(nn.Module):
    """Transformer block: `x = x + attention(norm1(x))`, then `x + mlp(norm2(x))`."""

    def __init__(self, shape: GPTShape) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(shape.width)
        self.attention = Attention(shape)
        self.norm2 = nn.LayerNorm(shape.width)
        self.expand = nn.Linear(shape.width, 4 * shape.width)
        self.contract = nn.Linear(4 * shape.width, shape.width)
        self.dropout = nn.Dropout(shape.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, T, D) to (B, T, D)."""
        x = x + self.dropout(self.attention(self.norm1(x)))
        y = F.gelu(self.expand(self.norm2(x)), approximate="tanh")  # (B, T, 4D)
        return x + self.dropout(self.contract(y))


class GPT(nn.Module):
    """Decoder-only transformer. Returns logits for tokens, or the loss for tokens and targets."""

    def __init__(self, shape: GPTShape) -> None:
        super().__init__()
        self.shape = shape
        self.token_embedding = nn.Embedding(shape.vocab_size, shape.width)
        self.position_embedding = nn.Embedding(shape.context, shape.width)
        self.dropout = nn.Dropout(shape.dropout)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.num_layers))
        self.norm = nn.LayerNorm(shape.width)
        self.head = LossHead(shape.width, shape.vocab_size)
        self._initialise()
        if shape.tied_head:
            self.head.weight = self.token_embedding.weight

    def features(self, tokens: Tensor) -> Tensor:
        """Return the last hidden states (B, T, D) of `tokens` (B, T), with T at most the context."""
        if tokens.shape[1] > self.shape.context:
            raise ValueGivenError(
                "tokens", got=f"{tokens.shape[1]} in a row", expected=f"at most the context, {self.shape.context}"
            )
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.dropout(self.token_embedding(tokens) + self.position_embedding(positions))
        for block in self.blocks:
            x = block(x)
        return self.norm(x)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Any:
        """Return logits (B, T, V) of `tokens` (B, T). With `targets` (B, T), return (summed loss, count) instead."""
        features = self.features(tokens)
        return self.head(features) if targets is None else self.head.loss(features, targets)

    def _initialise(self) -> None:
        """Initialise weights with standard deviation 0.02.

        The 2L residual projections are scaled by 1/sqrt(2L), so that the variance of their sum does not grow with L.
        """
        residual_std = INIT_STD / math.sqrt(2 * len(self.blocks))
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                residual = name.endswith((".project", ".contract"))
                nn.init.normal_(module.weight, std=residual_std if residual else INIT_STD)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
