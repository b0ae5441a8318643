"""The loss heads of a model, and how many tokens' logits they hold at once."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from torch import Tensor, nn

from trimtab.core.errors import ModelError
from trimtab.nn import LossHead


def loss_heads(model: nn.Module) -> tuple[LossHead, ...]:
    """Return the model's loss heads, each once."""
    return tuple(module for module in model.modules() if isinstance(module, LossHead))


def use_chunks(model: nn.Module, chunk_rows: int) -> Callable[[], None]:
    """Have every loss head hold the logits of so many tokens at once; returns what puts back what was.

    Raises:
        ModelError: the model has no loss head.
    """
    heads = loss_heads(model)
    if not heads:
        raise ModelError(
            "plan.loss_chunk",
            given=f"{chunk_rows} for a model without a trimtab.nn.LossHead",
            expected="a model whose loss is one's",
            way_out="Make its last layer one, or leave the choice at None.",
        )
    before = [(head, head.chunk_rows) for head in heads]

    def undo() -> None:
        for head, rows in before:
            head.chunk_rows = rows

    for head in heads:
        head.chunk_rows = chunk_rows
    return undo


@contextlib.contextmanager
def watched(model: nn.Module) -> Iterator[dict[LossHead, int]]:
    """Note the feature vectors that each loss head is given while this is open, all its calls together."""
    seen: dict[LossHead, int] = {}

    def watch(head: LossHead) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
        def loss(features: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
            seen[head] = seen.get(head, 0) + targets.numel()
            return type(head).loss(head, features, targets)

        return loss

    heads = loss_heads(model)
    try:
        for head in heads:
            head.loss = watch(head)  # type: ignore[method-assign]
        yield seen
    finally:
        for head in heads:
            vars(head).pop("loss", None)
