"""CIFAR-10 as its tasks share it: data, augmentation, shapes of a batch. Model, ladder and length are each's own."""

from __future__ import annotations

import torch
from torch import Tensor

from trimtab.tasks.datasets import CIFAR10_SHAPE, cifar10
from trimtab.tasks.image_classification import flip_and_crop, normaliser
from trimtab.tasks.sample_draws import SampleDraws
from trimtab.tasks.task import TaskData

BATCH_ROWS = 128
EVALUATION_BATCH = 200

normalise = normaliser(mean=(0.4914, 0.4822, 0.4465), std=(0.2470, 0.2435, 0.2616))


def load_cifar10(judged_images: int) -> TaskData:
    """Return images (50000, 3, 32, 32) uint8 and labels (50000,) int64, judged by the first so many test images.

    Training images stay uint8 (154 MB, a quarter of float32) until `augment` makes a batch of them.
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
    """Return (images float32, labels): flipped, cropped out of a 4-pixel border and normalised."""
    images, labels = batch
    return normalise(flip_and_crop(images, draws, padding=4)), labels


def example(rows: int) -> tuple[Tensor, Tensor]:
    """Return a batch of the shapes that `augment` makes."""
    return torch.zeros(rows, *CIFAR10_SHAPE), torch.zeros(rows, dtype=torch.int64)
