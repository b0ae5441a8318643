"""Settings of the hand-written recipes: paper baseline (P0), hand-tuned recipe (P2), hand-tuned recipe with Muon (P3).

Sources of the peak learning rates:

- Small tasks: the sweeps in docs/LOG.md.
- Tasks at the size of the paper: published values, quoted from memory and not swept. SGD 0.1 at batch size 128
  (He et al. 2015, section 4.2); AdamW 6e-4 with betas (0.9, 0.95), weight decay 0.1 and clipping at 1 for this model
  size (Brown et al. 2020, table 2.1, appendix B).
- Muon: 0.02, published for its authors' GPT-2 runs (Jordan et al. 2024), not swept. Its weight decay of 0.1 equals
  AdamW's and is neither published nor swept.

Comparisons list these limits in their notes.
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
    """Return the paper's baseline optimizer (section IV): AdamW with a constant learning rate of 1e-4."""
    return torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.999), weight_decay=0.01)


def strong_gpt(budget_rows: int, peak_rate: float) -> StrongRecipe:
    """Return P2 for the small GPTs: fused AdamW at the given peak rate, beta2 0.95, weight decay 0.1."""
    make = functools.partial(_gpt_adamw, lr=peak_rate)
    return StrongRecipe(make, precision=tuned_precision(), channels_last=False, budget_rows=budget_rows)


def strong_gpt2(budget_rows: int, make_model: Callable[[], nn.Module]) -> StrongRecipe:
    """Return P2 for GPT-2 Small: `strong_gpt` at a published rate, with cosine decay and clipping.

    Args:
        budget_rows: Length of the schedule in samples.
        make_model: Returns the model, here with more dropout than the task's.
    """
    small = strong_gpt(budget_rows, peak_rate=6e-4)
    return replace(small, decay="cosine", clip_norm=1.0, make_model=make_model, rates=NOT_SWEPT)


def strong_resnet(budget_rows: int) -> StrongRecipe:
    """Return P2 for the small ResNets: fused SGD with Nesterov momentum, channels-last memory format."""
    return StrongRecipe(_resnet_sgd, precision=tuned_precision(), channels_last=True, budget_rows=budget_rows)


def strong_resnet50(budget_rows: int) -> StrongRecipe:
    """Return P2 for ResNet-50: `strong_resnet` with cosine decay and label smoothing of 0.1."""
    loss_fn = functools.partial(mean_cross_entropy, label_smoothing=LABEL_SMOOTHING)
    return replace(strong_resnet(budget_rows), decay="cosine", loss_fn=loss_fn, rates=NOT_SWEPT)


def muon_gpt(strong: StrongRecipe, rate: float) -> StrongRecipe:
    """Return P3 for a GPT: `strong` with Muon for the matrices of the blocks and AdamW at `rate` for the rest."""
    rates = f"Muon at {MUON_RATE:g}, {NOT_SWEPT}, its weight decay {GPT_DECAY:g}; AdamW at {rate:g}"
    its = f", {strong.rates}" if strong.rates else ", as swept without Muon"
    return replace(strong, make_optimizer=functools.partial(_gpt_muon, rate=rate), rates=rates + its)


def tuned_precision() -> str:
    """Return "bf16" on a GPU or on a CPU with bf16 instructions, otherwise "fp32".

    Without these instructions a CPU emulates bf16, which is too slow for a baseline: a bf16 step of the thin ResNet
    took 13 times as long as an fp32 step (3.75 s against 0.30 s, channels last, two AVX2 cores).
    """
    if torch.cuda.device_count():  # queries the driver without creating a CUDA context
        return "bf16"
    capabilities = getattr(torch.cpu, "get_capabilities", dict)()  # torch >= 2.10; unknown, hence fp32, before
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
