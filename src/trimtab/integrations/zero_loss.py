"""A zero loss in place of a mean over no terms, whose value and gradients are NaN even at weight 0."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.autograd.graph import Node

from trimtab.core.errors import ValueGivenError


def zero_loss(mean: Tensor) -> Tensor:
    """Return a zero loss with zero gradients for exactly the parameters that `mean` depends on.

    Other parameters keep the gradient None: with a zero gradient, an optimizer would apply weight decay.

    Raises:
        ValueGivenError: the graph of `mean` shows no trained parameter.
    """
    # Sums of empty slices, since elements may be infinite.
    parts = [leaf.reshape(-1)[:0].sum().to(mean) for leaf in _leaves(mean)]
    if not parts:
        raise ValueGivenError(
            "loss",
            problem="The loss is a mean over no labels and depends on no parameter, so its gradient would be NaN.",
            hint="Return sum / count.clamp(min=1), which is zero if no label counts.",
            code="loss.no_labels",
        )
    return torch.stack(parts).sum()


def _leaves(loss: Tensor) -> Iterator[Tensor]:
    """Yield each leaf tensor that a backward of `loss` reaches."""
    waiting: list[Node | None] = [loss.grad_fn]
    seen: set[Node] = set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if isinstance(leaf := getattr(node, "variable", None), Tensor) and leaf.is_leaf:
            yield leaf
        waiting += [each for each, _ in node.next_functions]
