"""Loss, metric and input preprocessing of image classifiers.

Shapes in comments: B images, C channels, H x W pixels, K classes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from trimtab.tasks.evaluation import evaluation_mode, on_device_of_model
from trimtab.tasks.task import Batch, Metric


def mean_cross_entropy(model: nn.Module, batch: tuple[Tensor, Tensor], *, label_smoothing: float = 0.0) -> Tensor:
    """Return the mean cross-entropy in nats.

    Args:
        model: Returns logits (B, K) for images.
        batch: Images (B, C, H, W) float and labels (B,) int64.
        label_smoothing: Fraction of the target spread uniformly over all classes (Szegedy et al. 2015).
    """
    images, labels = batch
    return F.cross_entropy(model(images).float(), labels, label_smoothing=label_smoothing)


def accuracy(model: nn.Module, batches: Sequence[Batch]) -> float:
    """Return the top-1 accuracy as a fraction from 0 to 1."""
    hits = total = 0
    with evaluation_mode(model):
        for batch in batches:
            images, labels = on_device_of_model(model, batch)
            hits += int((model(images).argmax(dim=1) == labels).sum())
            total += len(labels)
    return hits / total


ACCURACY = Metric("accuracy", higher_is_better=True, evaluate=accuracy)


def normaliser(mean: Sequence[float], std: Sequence[float]) -> Callable[[Tensor], Tensor]:
    """Return a function that maps images (B, C, H, W) uint8 to float32 `(x/255 - mean) / std` per channel."""
    scale = 1 / (255 * torch.tensor(std).view(-1, 1, 1))
    shift = torch.tensor(mean).view(-1, 1, 1) / torch.tensor(std).view(-1, 1, 1)
    placed = {
        scale.device: (scale, shift)
    }  # constants per device, because copying them for every batch would synchronise

    def normalise(images: Tensor) -> Tensor:
        if images.device not in placed:
            placed[images.device] = scale.to(images.device), shift.to(images.device)
        its_scale, its_shift = placed[images.device]
        return images.float().mul_(its_scale).sub_(its_shift)

    return normalise
