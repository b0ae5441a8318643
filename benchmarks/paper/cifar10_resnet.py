"""CIFAR-10 with a thin ResNet-18 (paper section IV, reduced to two CPU cores). Trains in six minutes."""

from __future__ import annotations

import functools

from benchmarks.paper.cifar10 import BATCH_SIZE, example, load_cifar10
from benchmarks.paper.recipes.paper import paper
from trimtab.tasks.hand_tuned import FP32_REFERENCE, plain_adamw, strong_resnet
from trimtab.tasks.image_classification import ACCURACY, mean_cross_entropy
from trimtab.tasks.models.resnet import ResNet
from trimtab.tasks.task import Task

EVALUATED_IMAGES = 2_000
# 0.32 s per step (AdamW, fp32, two idle AVX2 cores): 1,120 steps take 360 s, an evaluation of 2,000 images 1.8 s.
EVAL_EVERY_SAMPLES = 56 * BATCH_SIZE
BUDGET_SAMPLES = 20 * EVAL_EVERY_SAMPLES


def make_model() -> ResNet:
    """Return ResNet-18 with a 3x3 stem and a quarter of the usual width: 16 to 128 channels, 0.70M parameters."""
    return ResNet(width=16, depths=(2, 2, 2, 2), in_channels=3, num_classes=10)


task = Task(
    name="cifar10_resnet",
    description="CIFAR-10, ResNet-18 of width 16, 3x3 stem",
    make_model=make_model,
    make_optimizer=plain_adamw,
    loss_fn=mean_cross_entropy,
    load_data=functools.partial(load_cifar10, EVALUATED_IMAGES),
    metric=ACCURACY,
    targets=(0.35, 0.40, 0.43, 0.46, 0.48),
    batch_size=BATCH_SIZE,
    budget_samples=BUDGET_SAMPLES,
    eval_every_samples=EVAL_EVERY_SAMPLES,
    terms="images",
    adapted_samples=5 * EVAL_EVERY_SAMPLES,
    strong=strong_resnet(5 * EVAL_EVERY_SAMPLES),
    baselines={"paper": paper},
    reference=FP32_REFERENCE,
    example=example,
)
