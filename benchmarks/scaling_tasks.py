"""What scaling.py trains: the smallest workloads that ranks are worth something for, of one thread a rank."""

from __future__ import annotations

from dataclasses import replace

import torch
from regret_cases import small_gpt, small_resnet
from torch import nn

from trimtab.tasks.task import Task


def _momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.99))


def resnet() -> Task:
    """Return a ResNet of width 8 on 16x16 images, 8 a rank: gradients of few bytes, and noise of many rows."""
    return replace(small_resnet(), name="resnet_small", make_optimizer=_momentum, strong=None)


def gpt() -> Task:
    """Return a byte-level GPT of two layers, 8 rows of 64 bytes a rank: gradients of 1.7 MiB."""
    return replace(small_gpt(), name="gpt_small", make_optimizer=_adamw, batch_rows=8, strong=None)


RESNET, GPT = resnet(), gpt()
