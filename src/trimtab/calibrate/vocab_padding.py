"""Time that a padded vocabulary would save: the matrix products of the head, timed with both numbers of columns."""

from __future__ import annotations

import functools
import statistics

import torch
from torch import Tensor, nn

from trimtab.decide.recommendations import padded_vocabulary
from trimtab.decide.statistics import ratio_interval
from trimtab.measure.timing import time_call
from trimtab.runtime.out_of_memory import is_out_of_memory
from trimtab.runtime.precision import autocast

MIN_WORDS = 4_096  # With fewer columns, the head's time is negligible.
_TOKENS, _PAIRS = 512, 5


def padding_saves_s(model: nn.Module, words: int, tokens: int, precision: str) -> float | None:
    """Return the seconds per step that padding the head's columns would save; 0 if not significant.

    Timed on random features and weights, a few hundred tokens at a time, forward and backward.

    Args:
        words: columns of the logits.
        tokens: rows of the logits per step.

    Returns:
        None if no padding is needed, no linear layer has this many outputs, or memory runs out.
    """
    head = next((each for each in model.modules() if isinstance(each, nn.Linear) and each.out_features == words), None)
    if head is None or words < MIN_WORDS or words == padded_vocabulary(words):
        return None
    few = min(tokens, _TOKENS)
    try:
        saved = _saved_s(head.in_features, words, few, precision, head.weight.device)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return None
    return saved * tokens / few


def _saved_s(width: int, words: int, tokens: int, precision: str, device: torch.device) -> float:
    rows = torch.randn(tokens, width, device=device, requires_grad=True)
    arms = {n: torch.randn(n, width, device=device, requires_grad=True) for n in (words, padded_vocabulary(words))}
    seconds: dict[int, list[float]] = {n: [] for n in arms}
    for index in range(-1, _PAIRS):
        for n in sorted(arms, reverse=bool(index % 2)):
            took = time_call(functools.partial(_products, rows, arms[n], precision), device)
            if index >= 0:  # The first round is a warm-up.
                seconds[n].append(took)
    ours, theirs = seconds[words], seconds[padded_vocabulary(words)]
    is_clear = ratio_interval([a / b for a, b in zip(ours, theirs, strict=True)]).low > 1
    return statistics.median(a - b for a, b in zip(ours, theirs, strict=True)) if is_clear else 0.0


def _products(rows: Tensor, weight: Tensor, precision: str) -> None:
    with autocast(precision, rows.device):
        logits = nn.functional.linear(rows, weight)
    torch.autograd.grad(logits, [rows, weight], torch.ones_like(logits))
