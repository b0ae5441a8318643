"""Chunked loss head: the number of tokens with logits held at once by a `trimtab.nn.LossHead`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from trimtab.core import validation
from trimtab.core.choice import Effect, Note, Scalar
from trimtab.core.errors import ModelError
from trimtab.settings.base import LiveLoop, Setting, Undo

if TYPE_CHECKING:
    from torch import Tensor, nn

    from trimtab.nn import LossHead
    from trimtab.plans.plan import Plan
    from trimtab.plans.profile import Profile

WORTH_CHUNKING = 0.05  # Least part of the peak memory that the logits must take.


class LossChunk(Setting):
    """Chunk size of all loss heads of the model."""

    name = "loss_chunk"
    title = "chunked loss head"
    default = None
    effect = Effect.ROUNDING
    summary = "Tokens whose logits a `trimtab.nn.LossHead` holds at once."
    values = "a whole number of tokens, or None for the head's own"
    examples = (7, 1)
    is_searched = True
    value_type = int | None

    def check(self, value: Scalar, plan: Plan) -> None:
        if value is not None:
            validation.integer(self.field, value)

    def refusal(self, profile: Profile) -> Note | None:
        """Return the reason not to try chunks; they save at least twice the logits."""
        loop = profile.loop
        if loop.bitwise_only:
            return Note("loop.bitwise_only", loop.bitwise_only)
        if not loop.head_tokens or not loop.head_words:
            return Note("head.missing", "the model has no trimtab.nn.LossHead, which computes logits in chunks")
        logits = 2 * 4 * loop.head_tokens * loop.head_words
        peaks = [trial.peak_bytes for trial in profile.trials if trial.peak_bytes]
        if peaks and logits < WORTH_CHUNKING * max(peaks):
            text = f"not tried: the logits are about {100 * logits / max(peaks):.2g}% of the peak memory"
            return Note("head.small_logits", text)
        return None

    def label(self, value: Scalar) -> str:
        return "" if value is None else f"loss in chunks of {value} tokens"

    def value_text(self, value: Scalar) -> str:
        return "off" if value is None else f"{value} tokens"

    def phrase(self, value: Scalar) -> str:
        return "the unchunked loss head" if value is None else f"chunks of {value} tokens"

    def require(self, loop: LiveLoop, value: Scalar) -> None:
        require_heads(loop.model, int(value or 0))

    def apply(self, loop: LiveLoop, value: Scalar) -> Undo | None:
        return use_chunks(loop.model, int(value or 0))


def loss_heads(model: nn.Module) -> tuple[LossHead, ...]:
    """Return the model's distinct loss heads."""
    from trimtab.nn import LossHead

    return tuple(module for module in model.modules() if isinstance(module, LossHead))


def require_heads(model: nn.Module, chunk_rows: int) -> None:
    """Raise `ModelError` if the model has no loss head."""
    if not loss_heads(model):
        raise ModelError(
            "plan.loss_chunk",
            got=f"{chunk_rows} for a model without a trimtab.nn.LossHead",
            expected="a model that computes its loss with a trimtab.nn.LossHead",
            hint="Use trimtab.nn.LossHead as the last layer, or a plan with loss_chunk=None.",
            code="loss_chunk.no_head",
        )


def use_chunks(model: nn.Module, chunk_rows: int) -> Callable[[], None]:
    """Set the chunk size of every loss head; return a function that restores the previous sizes.

    Raises:
        ModelError: the model has no loss head.
    """
    require_heads(model, chunk_rows)
    heads = loss_heads(model)
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
