"""Loss, metrics and rows of next-token models.

Shapes in comments: B rows, T tokens, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from trimtab.losses import Summed
from trimtab.tasks.evaluation import beside, evaluating
from trimtab.tasks.task import Batch, Metric


def next_token_loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Summed:
    """Return the summed cross-entropy (nats) and the number of tokens it is over.

    Args:
        model: `model(inputs, labels)`, both (B, T) int64, -> (summed loss, count), as of a `trimtab.nn.LossHead`.
        batch: either `(tokens,)` with tokens (B, T+1), where each token is predicted from those before it and the
            count is a Python int; or `(inputs, labels)`, both (B, T), where labels of -100 are ignored and the count
            is a tensor, because to know it is to read the labels (on an accelerator: to wait for them).
    """
    if len(batch) == 1:
        inputs, labels = batch[0][:, :-1], batch[0][:, 1:]
        return Summed(model(inputs, labels)[0], labels.numel())
    inputs, labels = batch
    return Summed(*model(inputs, labels))


def mean_loss(model: nn.Module, batches: Sequence[Batch]) -> float:
    """Return the loss in nats per token over all batches, each token weighing the same."""
    loss, count = 0.0, 0
    with evaluating(model):
        for batch in batches:
            found = next_token_loss(model, beside(model, batch))
            loss += float(found.loss_sum)
            count += int(found.count)
    return loss / count


def perplexity(model: nn.Module, batches: Sequence[Batch]) -> float:
    """Return `exp(loss in nats per token)`; infinite where a float cannot hold it."""
    loss = mean_loss(model, batches)
    return math.inf if loss > 700 else math.exp(loss)


def bits_per_byte(model: nn.Module, batches: Sequence[Batch]) -> float:
    """Return `loss in nats per token / ln 2`, the tokens being bytes."""
    return mean_loss(model, batches) / math.log(2)


PERPLEXITY = Metric("perplexity", higher_is_better=False, evaluate=perplexity)
BITS_PER_BYTE = Metric("loss_bits_per_byte", higher_is_better=False, evaluate=bits_per_byte)


def windows(tokens: np.ndarray, context: int) -> Tensor:
    """Return rows (N, context+1) int64 of a stream: each token is a target once, the tail that fills no row dropped."""
    stream = torch.from_numpy(tokens.astype(np.int64))
    return stream.unfold(0, context + 1, context).contiguous()


def evenly_spaced(rows: Tensor, num_rows: int) -> Tensor:
    """Return `num_rows` of the rows, spread over all of them: a cheap sample that is the same every time."""
    return rows[torch.arange(num_rows) * len(rows) // num_rows]
