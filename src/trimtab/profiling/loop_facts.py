"""Properties of a loop that are visible without running a step."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import nn

from trimtab.nn import LossHead
from trimtab.plans.profile import LoopFacts
from trimtab.techniques.compiled_call import is_compiled
from trimtab.techniques.memory_format import is_channels_last, sparse_module
from trimtab.techniques.optimizer_self_test import fused_difference
from trimtab.techniques.optimizers import is_fused, supports_fused
from trimtab.training.user_hooks import GradientHook, bitwise_reason, gradient_hooks


def loop_facts(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    rows: int,
    heads: dict[LossHead, int],
    hooks: tuple[GradientHook, ...] | None = None,
) -> LoopFacts:
    """Return the facts of a loop with `rows` samples per step, counted as terms.

    Args:
        heads: number of feature vectors per step of each loss head.
        hooks: gradient hooks; None: the hooks found in the model.
    """
    parameters = list(model.parameters())
    bitwise_only = bitwise_reason(gradient_hooks(model) if hooks is None else hooks)
    sizes = [(tokens, head.out_features) for head, tokens in heads.items() if tokens]
    largest = max(sizes, key=math.prod, default=None)
    return LoopFacts(
        num_parameters=sum(p.numel() for p in parameters),
        trainable_parameters=sum(p.numel() for p in parameters if p.requires_grad),
        parameter_bytes=sum(p.numel() * p.element_size() for p in parameters),
        optimizer=type(optimizer).__name__,
        batch_size=rows,
        terms_per_step=float(rows),
        terms="rows",
        flops_per_step=None,
        has_convolutions=any(p.dim() == 4 for p in parameters),
        has_workspaces=any(isinstance(module, nn.modules.conv._ConvNd) for module in model.modules()),
        supports_fused=supports_fused(optimizer) and not bitwise_only and not sparse_module(model, optimizer),
        bitwise_only=bitwise_only,
        is_fused=is_fused(optimizer),
        layout="channels_last" if is_channels_last(model) else "contiguous",
        is_compiled=is_compiled(model),
        head_tokens=largest and largest[0],
        head_words=largest and largest[1],
    )


def with_tested_step(facts: LoopFacts, optimizer: torch.optim.Optimizer) -> LoopFacts:
    """Return the facts without support for a fused optimizer step that differs from the plain step on this machine."""
    if not facts.supports_fused or facts.is_fused or not (difference := fused_difference(optimizer)):
        return facts
    refusal = f"the fused step of {facts.optimizer} differs from its unfused step on this machine: {difference}"
    return replace(facts, supports_fused=False, fused_refusal=refusal)
