"""CIFAR-10 with a thin ResNet-18 (paper section IV at a size for two cores): six minutes of training."""

from __future__ import annotations

import torch
from torch import Tensor

from trimtab.tasks.datasets import cifar10
from trimtab.tasks.image_classification import ACCURACY, flip_and_crop, mean_cross_entropy, normaliser
from trimtab.tasks.models.resnet import ResNet
from trimtab.tasks.peers import PAPER_REFERENCE, paper_adamw, strong_resnet
from trimtab.tasks.task import Task, TaskData

BATCH_ROWS = 128
EVALUATED_IMAGES = 2_000
EVALUATION_BATCH = 200
# 0.32 s a step (AdamW, fp32, two idle AVX2 cores): 1,120 steps are 360 s, and 2,000 images take 1.8 s to judge.
EVAL_EVERY_ROWS = 56 * BATCH_ROWS
BUDGET_ROWS = 20 * EVAL_EVERY_ROWS

normalise = normaliser(mean=(0.4914, 0.4822, 0.4465), std=(0.2470, 0.2435, 0.2616))


def load_data() -> TaskData:
    """Return images (50000, 3, 32, 32) uint8 and labels (50000,) int64; judged by the first 2,000 test images.

    Training images stay uint8 (154 MB, a quarter of float32) until `augment` makes a batch of them.
    """
    data = cifar10()
    images = normalise(torch.from_numpy(data.test_images[:EVALUATED_IMAGES]))
    labels = torch.from_numpy(data.test_labels[:EVALUATED_IMAGES]).long()
    return TaskData(
        columns=(torch.from_numpy(data.train_images), torch.from_numpy(data.train_labels).long()),
        held_out=tuple(zip(images.split(EVALUATION_BATCH), labels.split(EVALUATION_BATCH), strict=True)),
        source=data.source,
        augment=augment,
    )


def augment(batch: tuple[Tensor, ...], generator: torch.Generator) -> tuple[Tensor, ...]:
    """Return (images float32, labels): flipped, cropped out of a 4-pixel border and normalised."""
    images, labels = batch
    return normalise(flip_and_crop(images, generator, padding=4)), labels


def make_model() -> ResNet:
    """Return ResNet-18 with the 3x3 stem and a quarter of its width: 16 to 128 channels, 0.70M parameters."""
    return ResNet(width=16, depths=(2, 2, 2, 2), in_channels=3, num_classes=10)


TASK = Task(
    name="cifar10_resnet",
    description="CIFAR-10, ResNet-18 of width 16, 3x3 stem",
    make_model=make_model,
    make_optimizer=paper_adamw,
    loss_fn=mean_cross_entropy,
    load_data=load_data,
    metric=ACCURACY,
    targets=(0.35, 0.40, 0.43, 0.46, 0.48),
    batch_rows=BATCH_ROWS,
    budget_rows=BUDGET_ROWS,
    eval_every_rows=EVAL_EVERY_ROWS,
    terms="images",
    adapted_rows=5 * EVAL_EVERY_ROWS,
    strong=strong_resnet(5 * EVAL_EVERY_ROWS),
    reference=PAPER_REFERENCE,
)
