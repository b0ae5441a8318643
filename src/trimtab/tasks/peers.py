"""The hand-made recipes a task is judged against: the paper's baseline (P0), a strong tuned one (P2), and Muon's (P3).

Peak rates of the small tasks come from the sweeps in docs/LOG.md. Those of the tasks at the paper's size are published
ones, and have not been swept here: 0.1 of SGD at batch 128 is He et al.'s (2015, section 4.2), 6e-4 of AdamW with betas
(0.9, 0.95), weight decay 0.1 and clipping at 1 is that of the model of this size in Brown et al. 2020 (table 2.1,
appendix B).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import nn

from trimtab.core.objective import Reference
from trimtab.tasks.image_classification import smoothed_cross_entropy
from trimtab.tasks.muon import muon_with_adamw
from trimtab.tasks.task import StrongRecipe

PAPER_REFERENCE = Reference("fp32", declared=True)
LABEL_SMOOTHING = 0.1
MUON_RATE = 0.02  # that of its authors' GPT-2 runs (Jordan et al. 2024)


def paper_adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Return the paper's baseline optimizer (section IV): AdamW, lr 1e-4, held constant."""
    return torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.999), weight_decay=0.01)


def strong_gpt(budget_rows: int, peak_rate: float) -> StrongRecipe:
    """Return P2 for the small GPTs: AdamW at its swept peak rate, beta2 0.95, weight decay 0.1."""
    make = functools.partial(_gpt_adamw, lr=peak_rate)
    return StrongRecipe(make, precision=tuned_precision(), channels_last=False, budget_rows=budget_rows)


def strong_gpt2(budget_rows: int, make_model: Callable[[], nn.Module]) -> StrongRecipe:
    """Return P2 for GPT-2 Small: that, at a published rate, by cosine, clipped, and the model with more dropout."""
    return replace(strong_gpt(budget_rows, peak_rate=6e-4), decay="cosine", clip_norm=1.0, make_model=make_model)


def strong_resnet(budget_rows: int) -> StrongRecipe:
    """Return P2 for the ResNets: fused SGD with Nesterov momentum, channels last."""
    return StrongRecipe(_resnet_sgd, precision=tuned_precision(), channels_last=True, budget_rows=budget_rows)


def strong_resnet50(budget_rows: int) -> StrongRecipe:
    """Return P2 for ResNet-50: that, by cosine, its labels smoothed by a tenth."""
    loss_fn = functools.partial(smoothed_cross_entropy, smoothing=LABEL_SMOOTHING)
    return replace(strong_resnet(budget_rows), decay="cosine", loss_fn=loss_fn)


def muon_gpt(strong: StrongRecipe, rate: float) -> StrongRecipe:
    """Return P3 for a GPT: its P2 with Muon for the matrices of its blocks, and AdamW at `rate` for the rest."""
    return replace(strong, make_optimizer=functools.partial(_gpt_muon, rate=rate))


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


def _gpt_muon(model: nn.Module, rate: float) -> torch.optim.Optimizer:
    blocks = model.get_submodule("blocks")
    matrices = [parameter for parameter in blocks.parameters() if parameter.ndim == 2]
    inside = {id(parameter) for parameter in matrices}
    others = [parameter for parameter in model.parameters() if id(parameter) not in inside]
    return muon_with_adamw(matrices, others, muon_rate=MUON_RATE, adamw_rate=rate, betas=(0.9, 0.95), weight_decay=0.1)


def _resnet_sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4, nesterov=True, fused=True)
