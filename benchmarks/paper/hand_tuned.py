"""Hand-tuned recipes at the size of the paper (P2), and with Muon (P3).

Sources of the peak learning rates, quoted from memory and not swept:

- SGD 0.1 at batch size 128 (He et al. 2015, section 4.2).
- AdamW 6e-4 with betas (0.9, 0.95), weight decay 0.1 and clipping at 1 for this model size (Brown et al. 2020,
  table 2.1, appendix B).
- Muon: 0.02, published for its authors' GPT-2 runs (Jordan et al. 2024). Its weight decay of 0.1 equals AdamW's and is
  not published.

Comparisons list these limits in their notes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import nn

from benchmarks.paper.muon_with_adamw import muon_with_adamw
from trimtab.tasks.hand_tuned import GPT_BETAS, GPT_DECAY, strong_gpt, strong_resnet
from trimtab.tasks.image_classification import mean_cross_entropy
from trimtab.tasks.task import StrongRecipe

LABEL_SMOOTHING = 0.1
MUON_RATE = 0.02
NOT_SWEPT = "published rate, not swept"


def strong_gpt2(budget_samples: int, make_model: Callable[[], nn.Module]) -> StrongRecipe:
    """Return P2 for GPT-2 Small: `strong_gpt` at a published rate, with cosine decay and clipping.

    Args:
        budget_samples: Length of the schedule in samples.
        make_model: Returns the model, here with more dropout than the task's.
    """
    small = strong_gpt(budget_samples, peak_rate=6e-4)
    return replace(small, decay="cosine", clip_norm=1.0, make_model=make_model, rates=NOT_SWEPT)


def strong_resnet50(budget_samples: int) -> StrongRecipe:
    """Return P2 for ResNet-50: `strong_resnet` with cosine decay and label smoothing of 0.1."""
    loss_fn = functools.partial(mean_cross_entropy, label_smoothing=LABEL_SMOOTHING)
    return replace(strong_resnet(budget_samples), decay="cosine", loss_fn=loss_fn, rates=NOT_SWEPT)


def muon_gpt(strong: StrongRecipe, rate: float) -> StrongRecipe:
    """Return P3 for a GPT: `strong` with Muon for the matrices of the blocks and AdamW at `rate` for the rest."""
    rates = f"Muon at {MUON_RATE:g}, {NOT_SWEPT}, its weight decay {GPT_DECAY:g}; AdamW at {rate:g}"
    its = f", {strong.rates}" if strong.rates else ", as swept without Muon"
    return replace(strong, make_optimizer=functools.partial(_gpt_muon, rate=rate), rates=rates + its)


def _gpt_muon(model: nn.Module, rate: float) -> torch.optim.Optimizer:
    blocks = model.get_submodule("blocks")
    matrices = [parameter for parameter in blocks.parameters() if parameter.ndim == 2]
    inside = {id(parameter) for parameter in matrices}
    others = [parameter for parameter in model.parameters() if id(parameter) not in inside]
    shared = {"betas": GPT_BETAS, "weight_decay": GPT_DECAY}
    return muon_with_adamw(matrices, others, muon_rate=MUON_RATE, adamw_rate=rate, **shared)
