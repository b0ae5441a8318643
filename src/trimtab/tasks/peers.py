"""The two hand-made recipes a task is judged against: the paper's baseline (P0) and a strong tuned one (P2)."""

from __future__ import annotations

import functools

import torch
from torch import nn

from trimtab.core.objective import Reference
from trimtab.tasks.task import StrongRecipe

PAPER_REFERENCE = Reference("fp32", declared=True)


def paper_adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Return the paper's baseline optimizer (section IV): AdamW, lr 1e-4, held constant."""
    return torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.999), weight_decay=0.01)


def strong_gpt(budget_rows: int, peak_rate: float) -> StrongRecipe:
    """Return P2 for the GPTs: AdamW at its swept peak rate, beta2 0.95, weight decay 0.1."""
    make = functools.partial(_gpt_adamw, lr=peak_rate)
    return StrongRecipe(make, precision=tuned_precision(), channels_last=False, budget_rows=budget_rows)


def strong_resnet(budget_rows: int) -> StrongRecipe:
    """Return P2 for the ResNets: fused SGD with Nesterov momentum, channels last."""
    return StrongRecipe(_resnet_sgd, precision=tuned_precision(), channels_last=True, budget_rows=budget_rows)


def tuned_precision() -> str:
    """Return "bf16" where the device multiplies bf16 itself, else "fp32".

    A processor without such instructions emulates it: there the thin ResNet's bf16 step took 13 times its fp32 one
    (3.75 s against 0.30 s, channels last, two AVX2 cores), and a peer so slow would be no peer.
    """
    if torch.cuda.device_count():  # asks the driver, starts no CUDA context
        return "bf16"
    capabilities = getattr(torch.cpu, "get_capabilities", dict)()  # torch >= 2.10; without it: not known to be fast
    return "bf16" if any("bf16" in name and present is True for name, present in capabilities.items()) else "fp32"


def _gpt_adamw(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.1, fused=True)


def _resnet_sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4, nesterov=True, fused=True)
