"""A loss of zero in place of a mean over nothing, which is no number, nor is its gradient, whatever it weighs."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.autograd.graph import Node

from trimtab.core.errors import ValueGivenError


def zero_loss(mean: Tensor) -> Tensor:
    """Return zero, with a gradient of zero for all that a mean over nothing comes from, and for nothing else.

    What a loss does not come from has no gradient: of one of zero an optimizer would decay it.

    Raises:
        ValueGivenError: it comes from nothing that is trained, as far as its graph shows.
    """
    parts = [leaf.reshape(-1)[:0].sum().to(mean) for leaf in _leaves(mean)]  # of no element, as one may be infinite
    if not parts:
        raise ValueGivenError(
            "loss",
            given="a mean over nothing, whose graph shows no parameter",
            expected="one that comes from some",
            way_out="Divide the sum by count.clamp(min=1): then it is zero, and so is its gradient.",
        )
    return torch.stack(parts).sum()


def _leaves(loss: Tensor) -> Iterator[Tensor]:
    """Yield what a backward would leave a gradient in, each once."""
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
