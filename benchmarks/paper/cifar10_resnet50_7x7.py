"""CIFAR-10 with ResNet-50 and the 7x7 ImageNet stem, which needs 1/15.7 of the FLOP of the 3x3 stem."""

from __future__ import annotations

from benchmarks.paper.cifar10_resnet50 import make_task

task = make_task("7x7", "cifar10_resnet50_7x7")
