"""Loss, metric and input preparation of image classifiers.

Shapes in comments: B images, C channels, H x W pixels, K classes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from trimtab.tasks.evaluation import beside, evaluating
from trimtab.tasks.task import Batch, Metric


def mean_cross_entropy(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the mean cross-entropy (nats) of `batch`: images (B, C, H, W) float, labels (B,) int64."""
    images, labels = batch
    return F.cross_entropy(model(images).float(), labels)


def accuracy(model: nn.Module, batches: Sequence[Batch]) -> float:
    """Return the share of images, 0 to 1, whose highest logit is the label's."""
    hits = total = 0
    with evaluating(model):
        for batch in batches:
            images, labels = beside(model, batch)
            hits += int((model(images).argmax(dim=1) == labels).sum())
            total += len(labels)
    return hits / total


ACCURACY = Metric("accuracy", higher_is_better=True, evaluate=accuracy)


def normaliser(mean: Sequence[float], std: Sequence[float]) -> Callable[[Tensor], Tensor]:
    """Return a function from uint8 (B, C, H, W) to float32 `(x/255 - mean) / std`, by channel."""
    scale = 1 / (255 * torch.tensor(std).view(-1, 1, 1))
    shift = torch.tensor(mean).view(-1, 1, 1) / torch.tensor(std).view(-1, 1, 1)
    return lambda images: images.float().mul_(scale).sub_(shift)


def flip_and_crop(images: Tensor, generator: torch.Generator, *, padding: int = 4) -> Tensor:
    """Return images (B, C, H, W), each flipped left-right with probability 1/2 and shifted by up to `padding` pixels.

    Pixels from outside are 0. All windows of the padded images are one strided view, of which a gather takes one an
    image: 2 ms for 128 images of 32x32 on two cores, 0.5% of the thin ResNet's step.
    """
    num_images, _, height, width = images.shape
    padded = F.pad(images, (padding, padding, padding, padding))
    windows = padded.unfold(2, height, 1).unfold(3, width, 1)  # (B, C, 2p+1, 2p+1, H, W), no copy
    down, right = torch.randint(2 * padding + 1, (2, num_images), generator=generator)
    flip = torch.rand(num_images, generator=generator) < 0.5
    cropped = windows[torch.arange(num_images), :, down, right]  # (B, C, H, W)
    return torch.where(flip[:, None, None, None], cropped.flip(3), cropped)
