"""CIFAR-10 data, augmentation and batch shapes, shared by the CIFAR-10 tasks."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.paper.datasets import CIFAR10_SHAPE, cifar10
from trimtab.tasks.image_classification import normaliser
from trimtab.tasks.task import SampleDraws, TaskData

BATCH_SIZE = 128
EVALUATION_BATCH = 200

normalise = normaliser(mean=(0.4914, 0.4822, 0.4465), std=(0.2470, 0.2435, 0.2616))


def load_cifar10(judged_images: int) -> TaskData:
    """Return CIFAR-10 as training samples and validation batches.

    Training images are (50000, 3, 32, 32) uint8, labels (50000,) int64. Images stay uint8 (154 MB, a quarter of
    float32) until `augment` converts a batch.

    Args:
        judged_images: Number of test images in the validation batches, taken from the start of the test set.
    """
    data = cifar10()
    images = normalise(torch.from_numpy(data.test_images[:judged_images]))
    labels = torch.from_numpy(data.test_labels[:judged_images]).long()
    return TaskData(
        columns=(torch.from_numpy(data.train_images), torch.from_numpy(data.train_labels).long()),
        held_out=tuple(zip(images.split(EVALUATION_BATCH), labels.split(EVALUATION_BATCH), strict=True)),
        source=data.source,
        augment=augment,
    )


def augment(batch: tuple[Tensor, ...], draws: SampleDraws) -> tuple[Tensor, ...]:
    """Return (images float32, labels) with random flips, random crops (4 pixels of zero padding) and normalisation."""
    images, labels = batch
    return normalise(flip_and_crop(images, draws, padding=4)), labels


def flip_and_crop(images: Tensor, draws: SampleDraws, *, padding: int = 4) -> Tensor:
    """Return images (B, C, H, W) with random horizontal flips (probability 1/2) and random crops after zero padding.

    The crops are gathered from a strided view of the padded images: 2 ms for 128 images of 32x32 pixels on two cores,
    0.5% of a step of a small ResNet-18.

    Args:
        images: (B, C, H, W).
        draws: Generator of random numbers for each sample.
        padding: Zero padding on each side, and the largest shift, in pixels.
    """
    height, width = images.shape[2:]
    padded = F.pad(images, (padding, padding, padding, padding))
    windows = padded.unfold(2, height, 1).unfold(3, width, 1)  # (B, C, 2p+1, 2p+1, H, W), no copy
    down, right, flip = draws.integers(2 * padding + 1), draws.integers(2 * padding + 1), draws.chance(0.5)
    cropped = windows[torch.arange(len(images), device=images.device), :, down, right]  # (B, C, H, W)
    return torch.where(flip[:, None, None, None], cropped.flip(3), cropped)


def example(rows: int) -> tuple[Tensor, Tensor]:
    """Return a batch of zeros with the shapes and dtypes of an augmented batch."""
    return torch.zeros(rows, *CIFAR10_SHAPE), torch.zeros(rows, dtype=torch.int64)
