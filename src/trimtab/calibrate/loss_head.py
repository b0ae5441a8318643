"""The loss head timed alone: its forward and backward at the size of a step, on features that nobody computed."""

from __future__ import annotations

import statistics

import torch

from trimtab.measure.page_faults import time_settled
from trimtab.measure.timing import time_call
from trimtab.nn import LossHead
from trimtab.runtime.engine import Run
from trimtab.runtime.loss_head import loss_heads


def largest_head(seen: dict[LossHead, int]) -> tuple[int, int] | None:
    """Return (tokens, words) of the head with most logits among those that were seen; None where there is none."""
    sizes = [(tokens, head.out_features) for head, tokens in seen.items() if tokens]
    return max(sizes, key=lambda size: size[0] * size[1], default=None)


def time_head(run: Run, tokens: int, calls: int, *, retains: bool = False) -> float:
    """Return seconds of a loss head's forward and backward, of the largest where there are several.

    Args:
        tokens: feature vectors of a call. calls: how many to time, after one that is not. retains: whether freed memory
            is retained; a call that asked for more does not count then.
    """
    head = max(loss_heads(run.model), key=lambda each: each.out_features)
    weight = head.weight
    features = torch.randn(tokens, head.in_features, device=weight.device, dtype=weight.dtype, requires_grad=True)
    targets = torch.randint(head.out_features, (tokens,), device=weight.device)
    wanted = [features, *(parameter for parameter in head.parameters() if parameter.requires_grad)]

    def call() -> None:
        with run.autocast():
            total, _ = head.loss(features, targets)
        torch.autograd.grad(total, wanted)

    call()
    if retains:
        return statistics.median(time_settled(call, weight.device) for _ in range(calls))
    return time_call(call, weight.device, calls)
