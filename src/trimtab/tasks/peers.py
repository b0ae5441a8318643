"""The hand-made recipes a task is judged against: the paper's baseline (P0), a strong tuned one (P2), and Muon's (P3).

Peak rates of the small tasks come from the sweeps in docs/LOG.md. Those of the tasks at the paper's size, and Muon's,
are published rates, from memory, not swept here: 0.1 of SGD at batch 128 is He et al.'s (2015, section 4.2), 6e-4 of
AdamW with betas (0.9, 0.95), weight decay 0.1 and clipping at 1 is that of the model of this size in Brown et al. 2020
(table 2.1, appendix B), 0.02 of Muon is that of its authors' GPT-2 runs (Jordan et al. 2024). Muon's weight decay is
0.1 here, as AdamW's beside it: ours, neither published nor swept. Comparisons say so in their notes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import nn

from trimtab.core.objective import Reference
from trimtab.tasks.image_classification import mean_cross_entropy
from trimtab.tasks.muon_with_adamw import muon_with_adamw
from trimtab.tasks.task import StrongRecipe

PAPER_REFERENCE = Reference("fp32", declared=True)
LABEL_SMOOTHING = 0.1
MUON_RATE = 0.02
GPT_BETAS, GPT_DECAY = (0.9, 0.95), 0.1
NOT_SWEPT = "published rate, not swept"


def paper_adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Return the paper's baseline optimizer (section IV): AdamW, lr 1e-4, held constant."""
    return torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.999), weight_decay=0.01)


def strong_gpt(budget_rows: int, peak_rate: float) -> StrongRecipe:
    """Return P2 for the small GPTs: AdamW at its swept peak rate, beta2 0.95, weight decay 0.1."""
    make = functools.partial(_gpt_adamw, lr=peak_rate)
    return StrongRecipe(make, precision=tuned_precision(), channels_last=False, budget_rows=budget_rows)


def strong_gpt2(budget_rows: int, make_model: Callable[[], nn.Module]) -> StrongRecipe:
    """Return P2 for GPT-2 Small: that, at a published rate, by cosine, clipped, and the model with more dropout."""
    small = strong_gpt(budget_rows, peak_rate=6e-4)
    return replace(small, decay="cosine", clip_norm=1.0, make_model=make_model, rates=NOT_SWEPT)


def strong_resnet(budget_rows: int) -> StrongRecipe:
    """Return P2 for the ResNets: fused SGD with Nesterov momentum, channels last."""
    return StrongRecipe(_resnet_sgd, precision=tuned_precision(), channels_last=True, budget_rows=budget_rows)


def strong_resnet50(budget_rows: int) -> StrongRecipe:
    """Return P2 for ResNet-50: that, by cosine, its labels smoothed by a tenth."""
    loss_fn = functools.partial(mean_cross_entropy, label_smoothing=LABEL_SMOOTHING)
    return replace(strong_resnet(budget_rows), decay="cosine", loss_fn=loss_fn, rates=NOT_SWEPT)


def muon_gpt(strong: StrongRecipe, rate: float) -> StrongRecipe:
    """Return P3 for a GPT: its P2 with Muon for the matrices of its blocks, and AdamW at `rate` for the rest."""
    rates = f"Muon at {MUON_RATE:g}, {NOT_SWEPT}, its weight decay {GPT_DECAY:g}; AdamW at {rate:g}"
    its = f", {strong.rates}" if strong.rates else ", as swept without Muon"
    return replace(strong, make_optimizer=functools.partial(_gpt_muon, rate=rate), rates=rates + its)


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
    return torch.optim.AdamW(model.parameters(), lr=lr, betas=GPT_BETAS, weight_decay=GPT_DECAY, fused=True)


def _gpt_muon(model: nn.Module, rate: float) -> torch.optim.Optimizer:
    blocks = model.get_submodule("blocks")
    matrices = [parameter for parameter in blocks.parameters() if parameter.ndim == 2]
    inside = {id(parameter) for parameter in matrices}
    others = [parameter for parameter in model.parameters() if id(parameter) not in inside]
    shared = {"betas": GPT_BETAS, "weight_decay": GPT_DECAY}
    return muon_with_adamw(matrices, others, muon_rate=MUON_RATE, adamw_rate=rate, **shared)


def _resnet_sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4, nesterov=True, fused=True)
