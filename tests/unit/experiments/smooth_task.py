"""The tiny task without dropout, whose masks are each rank's own, and with a metric that rounding alone moves.

Ranks and one process train it alike. `counting`: of rows that ranks cannot share evenly, and a loss that counts some.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import tiny_task
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from trimtab.losses import Summed
from trimtab.tasks import Metric

ODD_ROWS = tiny_task.BATCH_SIZE + 1


def make_model() -> nn.Module:
    model = tiny_task.make_model()
    model[2] = nn.Dropout(0.0)
    return model


def entropy(model: nn.Module, batches: Sequence[Any]) -> float:
    with torch.no_grad():
        return float(sum(F.cross_entropy(model(points), labels) for points, labels in batches))


def counted_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Summed:
    points, labels = batch
    kept = labels != 3
    return Summed(F.cross_entropy(model(points), labels, reduction="none")[kept].sum(), kept.sum())


task = replace(
    tiny_task.task, make_model=make_model, metric=Metric("entropy", False, entropy), targets=(1.0,), strong=None
)
counting = replace(
    task, loss_fn=counted_loss, batch_size=ODD_ROWS, eval_every_samples=8 * ODD_ROWS, budget_samples=16 * ODD_ROWS
)
