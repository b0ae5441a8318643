"""Baseline optimizer and hand-tuned recipes of the built-in tasks. Sweeps gave the peak learning rates."""

from __future__ import annotations

import functools

import torch
from torch import nn

from trimtab.core.objective import Reference
from trimtab.tasks.task import StrongRecipe

FP32_REFERENCE = Reference("fp32", declared=True)
GPT_BETAS, GPT_DECAY = (0.9, 0.95), 0.1


def plain_adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Return AdamW with a constant learning rate of 1e-4, the untuned baseline."""
    return torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.999), weight_decay=0.01)


def strong_gpt(budget_samples: int, peak_rate: float) -> StrongRecipe:
    """Return P2 for the small GPTs: fused AdamW at the given peak rate, beta2 0.95, weight decay 0.1."""
    make = functools.partial(_gpt_adamw, lr=peak_rate)
    return StrongRecipe(make, precision=tuned_precision(), channels_last=False, budget_samples=budget_samples)


def strong_resnet(budget_samples: int) -> StrongRecipe:
    """Return P2 for the small ResNets: fused SGD with Nesterov momentum, channels-last memory format."""
    return StrongRecipe(_resnet_sgd, precision=tuned_precision(), channels_last=True, budget_samples=budget_samples)


def tuned_precision() -> str:
    """Return "bf16" on a GPU or on a CPU with bf16 instructions, otherwise "fp32".

    Without these instructions a CPU emulates bf16, which is too slow for a baseline: a bf16 step of a small
    ResNet-18 took 13 times as long as an fp32 step (3.75 s against 0.30 s, channels last, two AVX2 cores).
    """
    if torch.cuda.device_count():  # queries the driver without creating a CUDA context
        return "bf16"
    capabilities = getattr(torch.cpu, "get_capabilities", dict)()  # torch >= 2.10; unknown, hence fp32, before
    return "bf16" if any("bf16" in name and present is True for name, present in capabilities.items()) else "fp32"


def _gpt_adamw(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=lr, betas=GPT_BETAS, weight_decay=GPT_DECAY, fused=True)


def _resnet_sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4, nesterov=True, fused=True)
