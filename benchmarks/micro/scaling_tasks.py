"""Tasks of scaling.py: the smallest workloads that benefit from several ranks with a thread each."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from benchmarks.micro.regret_cases import small_gpt, small_resnet
from benchmarks.paper.cifar10 import load_cifar10
from benchmarks.paper.cifar10_resnet import EVALUATED_IMAGES
from benchmarks.paper.tasks import load_task
from trimtab.tasks.models.resnet import ResNet
from trimtab.tasks.task import Task, TaskData


def _momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.99))


def resnet() -> Task:
    """Return a ResNet of width 8 on 16x16 images, 8 per rank: small gradients, noise scale of many samples."""
    return replace(small_resnet(), name="resnet_small", make_optimizer=_momentum, strong=None)


def wide_resnet() -> Task:
    """Return a ResNet of width 16 on 32x32 images, 4 per rank: noise scale of many samples, more FLOP per byte."""
    named = replace(load_task("cifar10_resnet"), name="resnet_wide", make_model=_wide, load_data=_images)
    return replace(named, make_optimizer=_momentum, batch_size=4, strong=None)


def _images() -> TaskData:
    whole = load_cifar10(judged_images=EVALUATED_IMAGES)
    return replace(whole, held_out=whole.held_out[::4])


def _wide() -> nn.Module:
    return ResNet(width=16, depths=(1, 1, 1), in_channels=3, num_classes=10)


def gpt() -> Task:
    """Return a byte-level GPT of two layers, 8 samples of 64 bytes per rank: gradients of 1.7 MiB."""
    return replace(small_gpt(), name="gpt_small", make_optimizer=_adamw, batch_size=8, strong=None)


RESNET, WIDE, GPT = resnet(), wide_resnet(), gpt()
BY_NAME = {task.name: task for task in (RESNET, WIDE, GPT)}
