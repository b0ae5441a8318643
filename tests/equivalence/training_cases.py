"""Models, losses and data of the equivalence suite: small, seeded, made anew on every call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from plain_loop import Case
from rank_cases import Tokens
from torch import Tensor, nn

from trimtab.losses import Summed
from trimtab.nn import LossHead

ROWS = 12  # divisible by 1, 2, 3, 4, 6 and by nothing else below it
NUM_BATCHES = 5


class Words(nn.Module):
    """A tiny language model whose head is its embedding: the tied weight gets gradients from two places."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.hidden = nn.Linear(8, 8)

    def forward(self, tokens: Tensor) -> Tensor:
        return nn.functional.linear(torch.tanh(self.hidden(self.embedding(tokens))), self.embedding.weight)


class HeadedWords(nn.Module):
    """The same with a loss head that can hold its logits a few tokens at a time; of targets too it is the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.hidden = nn.Linear(8, 8)
        self.head = LossHead(8, 11)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        return self.head.loss(torch.tanh(self.hidden(self.embedding(tokens))), targets)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4))


def wide_mlp() -> nn.Module:
    """With a weight that is large enough for low-bit optimizer state."""
    return nn.Sequential(nn.Linear(6, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4))


def named_mlp() -> nn.Module:
    model = nn.Sequential()
    model.body, model.head = nn.Sequential(nn.Linear(6, 16), nn.Tanh()), nn.Linear(16, 4)
    return model


def dropout_mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Dropout(0.4), nn.Linear(16, 4))


def convolutions() -> nn.Module:
    """Kernels of every kind of stride: 3x3, one input channel, depthwise and 1x1."""
    return nn.Sequential(
        nn.Conv2d(3, 6, 3),
        nn.Tanh(),
        nn.Conv2d(6, 6, 3, groups=6),
        nn.Conv2d(6, 5, 1),
        nn.Tanh(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(5, 4),
    )


def sgd(parameters: Any, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.2, momentum=0.9, weight_decay=1e-3, **options)


def adamw(parameters: Any, **options: Any) -> torch.optim.Optimizer:
    """AdamW with eps 1e-3: at 1e-8 it divides rounding noise by itself where a gradient is nearly zero."""
    return torch.optim.AdamW(parameters, lr=0.01, eps=1e-3, **options)


OPTIMIZERS = {"sgd": sgd, "adamw": adamw}


def class_mean(model: nn.Module, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def token_sum(model: nn.Module, batch: Any) -> Summed:
    """Return the loss sum over tokens that count, and how many as a tensor."""
    tokens, targets = batch
    loss_sum = nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), reduction="sum")
    return Summed(loss_sum, (targets != -100).sum())


def token_sum_int(model: nn.Module, batch: Any) -> Summed:
    found = token_sum(model, batch)
    return Summed(found.loss_sum, int(found.count))


def class_batches(
    rows: Sequence[int] = (ROWS,) * NUM_BATCHES, dtype: torch.dtype = torch.float64, shape: tuple[int, ...] = (6,)
) -> list[tuple[Tensor, Tensor]]:
    source = torch.Generator().manual_seed(2)
    return [
        (torch.randn(n, *shape, generator=source, dtype=dtype), torch.randint(0, 4, (n,), generator=source))
        for n in rows
    ]


def token_batches(kept: Sequence[int], num_batches: int = NUM_BATCHES, length: int = 9) -> list[tuple[Tensor, Tensor]]:
    """Return batches of a row per entry of `kept`: that many of its `length` targets count, the others are -100."""
    source = torch.Generator().manual_seed(3)
    batches = []
    for _ in range(num_batches):
        tokens = torch.randint(0, 11, (len(kept), length), generator=source)
        targets = torch.randint(0, 11, (len(kept), length), generator=source)
        for row, count in zip(targets, kept, strict=True):
            row[count:] = -100
        batches.append((tokens, targets))
    return batches


def class_case(dtype: torch.dtype = torch.float64, optimizer: str = "sgd", **values: Any) -> Case:
    return Case(mlp, OPTIMIZERS[optimizer], class_mean, class_batches(dtype=dtype), dtype).having(**values)


def image_case(dtype: torch.dtype = torch.float64, optimizer: str = "sgd", **options: Any) -> Case:
    batches = class_batches((4,) * 3, dtype, (3, 7, 7))
    return Case(convolutions, lambda p: OPTIMIZERS[optimizer](p, **options), class_mean, batches, dtype)


def headed_loss(model: nn.Module, batch: Any) -> Any:
    return Summed(*model(*batch))


# Very unequal: the first two rows keep all their tokens, the last keep one or none.
UNEQUAL_COUNTS = (9, 9, 1, 1, 5, 1, 1, 2, 1, 9, 1, 3)


def token_case(
    dtype: torch.dtype = torch.float64, kept: Sequence[int] = UNEQUAL_COUNTS, loss_fn: Any = token_sum
) -> Case:
    return Case(Words, sgd, loss_fn, token_batches(kept), dtype)


def headed_case(dtype: torch.dtype = torch.float64, optimizer: str = "sgd", **options: Any) -> Case:
    batches = token_batches((9, 1, 5, 2), 3)
    return Case(HeadedWords, lambda p: OPTIMIZERS[optimizer](p, **options), headed_loss, batches, dtype)


def blocked_case(dtype: torch.dtype = torch.float64, optimizer: Any = adamw) -> Case:
    """A language model of blocks with matrices, its head tied to its embedding."""
    return Case(lambda: Tokens(dtype), optimizer, token_sum, token_batches((9, 1, 5, 2), 3), dtype)
