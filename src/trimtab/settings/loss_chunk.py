"""Chunk size of a model's loss heads: the number of tokens whose logits are held at once."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from torch import Tensor, nn

from trimtab.core.errors import ModelError
from trimtab.nn import LossHead


def loss_heads(model: nn.Module) -> tuple[LossHead, ...]:
    """Return the model's distinct loss heads."""
    return tuple(module for module in model.modules() if isinstance(module, LossHead))


def use_chunks(model: nn.Module, chunk_rows: int) -> Callable[[], None]:
    """Set the chunk size of every loss head; return a function that restores the previous sizes.

    Raises:
        ModelError: the model has no loss head.
    """
    heads = loss_heads(model)
    if not heads:
        raise ModelError(
            "plan.loss_chunk",
            got=f"{chunk_rows} for a model without a trimtab.nn.LossHead",
            expected="a model that computes its loss with a trimtab.nn.LossHead",
            hint="Use trimtab.nn.LossHead as the last layer, or a plan with loss_chunk=None.",
            code="loss_chunk.no_head",
        )
    before = [(head, head.chunk_rows) for head in heads]

    def undo() -> None:
        for head, rows in before:
            head.chunk_rows = rows

    for head in heads:
        head.chunk_rows = chunk_rows
    return undo


@contextlib.contextmanager
def count_head_tokens(model: nn.Module) -> Iterator[dict[LossHead, int]]:
    """Count the feature vectors passed to each loss head within the block, over all calls."""
    seen: dict[LossHead, int] = {}

    def watch(head: LossHead) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
        def loss(features: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
            seen[head] = seen.get(head, 0) + targets.numel()
            return type(head).loss(head, features, targets)

        return loss

    heads = loss_heads(model)
    try:
        for head in heads:
            head.loss = watch(head)  # type: ignore[method-assign,assignment]
        yield seen
    finally:
        for head in heads:
            vars(head).pop("loss", None)
