"""CIFAR-10 with ResNet-50 at the size of the paper (section IV), 3x3 stem. `cifar10_resnet50_7x7` has the 7x7 stem.

Forward and backward of an image take 7.78 GFLOP with the 3x3 stem and 0.50 GFLOP with the 7x7 stem (convolutions and
head, two FLOP per multiply-add). Meant for a GPU: a step of 128 images takes 1 TFLOP.
"""

from __future__ import annotations

import functools

from benchmarks.paper.cifar10 import BATCH_SIZE, example, load_cifar10
from benchmarks.paper.hand_tuned import strong_resnet50
from benchmarks.paper.recipes.paper import paper
from benchmarks.paper.resnet50 import resnet50
from trimtab.tasks.hand_tuned import FP32_REFERENCE, plain_adamw
from trimtab.tasks.image_classification import ACCURACY, mean_cross_entropy
from trimtab.tasks.task import Task

EVALUATED_IMAGES = 10_000  # the whole test set
STEPS_PER_EPOCH = 50_000 // BATCH_SIZE
EVAL_EVERY_SAMPLES = 2 * STEPS_PER_EPOCH * BATCH_SIZE
BUDGET_SAMPLES = 20 * EVAL_EVERY_SAMPLES
ADAPTED_SAMPLES = 10 * EVAL_EVERY_SAMPLES


def make_task(stem: str, name: str) -> Task:
    """Return the ResNet-50 task.

    The targets were chosen, not measured.

    Args:
        stem: "3x3" or "7x7".
        name: Name of the task.
    """
    return Task(
        name=name,
        description=f"CIFAR-10, ResNet-50, {stem} stem",
        make_model=functools.partial(resnet50, stem),
        make_optimizer=plain_adamw,
        loss_fn=mean_cross_entropy,
        load_data=functools.partial(load_cifar10, EVALUATED_IMAGES),
        metric=ACCURACY,
        targets=(0.60, 0.70, 0.80, 0.85, 0.90, 0.94),
        batch_size=BATCH_SIZE,
        budget_samples=BUDGET_SAMPLES,
        eval_every_samples=EVAL_EVERY_SAMPLES,
        terms="images",
        adapted_samples=ADAPTED_SAMPLES,
        strong=strong_resnet50(ADAPTED_SAMPLES),
        baselines={"paper": paper},
        reference=FP32_REFERENCE,
        example=example,
    )


task = make_task("3x3", "cifar10_resnet50")
