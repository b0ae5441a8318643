"""Loss, metrics and samples of next-token models.

Shapes in comments: B samples, T tokens, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from trimtab.losses import Summed
from trimtab.tasks.evaluation import evaluation_mode, on_device_of_model
from trimtab.tasks.task import Batch, Metric


def next_token_loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Summed:
    """Return the summed cross-entropy in nats and the number of predicted tokens.

    Args:
        model: `model(inputs, labels)`, both (B, T) int64, returns (summed loss, count) like `trimtab.nn.LossHead`.
        batch: `(tokens,)` with tokens (B, T+1), or `(inputs, labels)`, both (B, T). In the first form every token is a
            label and the count is a Python int. In the second form labels of -100 are ignored and the count is a
            tensor, because a Python int would require a device synchronisation.
    """
    if len(batch) == 1:
        inputs, labels = batch[0][:, :-1], batch[0][:, 1:]
        return Summed(model(inputs, labels)[0], labels.numel())
    inputs, labels = batch
    return Summed(*model(inputs, labels))


def mean_loss(model: nn.Module, batches: Sequence[Batch]) -> float:
    """Return the loss in nats per token, averaged over all tokens of all batches."""
    loss, count = 0.0, 0
    with evaluation_mode(model):
        for batch in batches:
            found = next_token_loss(model, on_device_of_model(model, batch))
            loss += float(found.loss_sum)
            count += int(found.count)
    return loss / count


def bits_per_byte(model: nn.Module, batches: Sequence[Batch]) -> float:
    """Return `loss in nats per token / ln 2`, for models of bytes."""
    return mean_loss(model, batches) / math.log(2)


BITS_PER_BYTE = Metric("loss_bits_per_byte", higher_is_better=False, evaluate=bits_per_byte)
NATS_PER_TOKEN = Metric("loss_nats_per_token", higher_is_better=False, evaluate=mean_loss)


def windows(tokens: np.ndarray, context: int) -> Tensor:
    """Split a token stream into samples (N, context+1) int64.

    Neighbouring samples share a token, so that every token is a target exactly once. The incomplete tail is dropped.
    """
    stream = torch.from_numpy(tokens.astype(np.int64))
    return stream.unfold(0, context + 1, context).contiguous()


def evenly_spaced(rows: Tensor, num_samples: int) -> Tensor:
    """Return `num_samples` evenly spaced rows: a cheap, deterministic sample."""
    return rows[torch.arange(num_samples) * len(rows) // num_samples]
