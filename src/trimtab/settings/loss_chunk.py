"""Chunked loss head: the number of tokens with logits held at once.

A `trimtab.nn.LossHead` supports chunks directly. In models without a `LossHead`, the logits of the last linear layer
are deferred until `cross_entropy` (`trimtab.techniques.deferred_logits`).
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from trimtab.core import validation
from trimtab.core.choice import Effect, Note, Scalar
from trimtab.core.errors import ModelError
from trimtab.settings.base import LiveLoop, Setting, Undo
from trimtab.settings.sharding import weight_sharding

if TYPE_CHECKING:
    from torch import Tensor, nn

    from trimtab.nn import LossHead
    from trimtab.plans.plan import Plan
    from trimtab.plans.profile import Profile
    from trimtab.techniques.deferred_logits import HeadUse

WORTH_CHUNKING = 0.05  # Least part of the peak memory that the logits must take.
LEAST_CLASSES = 512  # Smaller linear layers are not taken for a head.


class LossChunk(Setting):
    """Chunk size of all loss heads of the model."""

    name = "loss_chunk"
    title = "chunked loss head"
    default = None
    effect = Effect.ROUNDING
    summary = "Tokens whose logits are held at once by the model's last layer and its cross-entropy loss."
    values = "a whole number of tokens, or None for the loop's own"
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
            return Note(
                "head.missing", loop.head_refusal or "the loss is not the cross-entropy of a large linear layer"
            )
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
        head = plain_head(loop.model)
        # Settings are checked before the plan shards the model, so a sharded weight is the user's.
        if head is not None and (hasattr(head.weight, "placements") or weight_sharding(loop.plan) == "deepspeed"):
            raise ModelError(
                "plan.loss_chunk",
                got=f"{value} for a last layer with a sharded weight",
                expected="a weight that is whole when the loss is computed",
                hint="Let the plan shard the model with engine='torch', use trimtab.nn.LossHead as the last layer, or "
                "a plan with loss_chunk=None.",
                code="loss_chunk.sharded",
            )

    def apply(self, loop: LiveLoop, value: Scalar) -> Undo | None:
        undo, head = contextlib.ExitStack(), plain_head(loop.model)
        undo.callback(use_chunks(loop.model, int(value or 0)))
        if head is not None and weight_sharding(loop.plan) == "torch":
            undo.callback(_keep_gathered(loop.model, head))
        return undo.close


def _warn_of_no_effect(use: HeadUse) -> None:
    """Warn if a run with chunks computed the logits as a whole."""
    if use.computed_by or (use.num_calls and not use.tokens):
        names = ", ".join(use.computed_by) or "no cross_entropy"
        warnings.warn(
            "plan.loss_chunk had no effect in some or all steps, because the loop computes with the logits "
            f"themselves ({names}).",
            UserWarning,
            stacklevel=2,
        )


def loss_heads(model: nn.Module) -> tuple[LossHead, ...]:
    """Return the model's distinct loss heads."""
    from trimtab.nn import LossHead

    return tuple(module for module in model.modules() if isinstance(module, LossHead))


def plain_head(model: nn.Module) -> nn.Linear | None:
    """Return the model's last linear layer as the head to defer; None for fewer than `LEAST_CLASSES` outputs.

    None also for a model with a `trimtab.nn.LossHead`, and for a compiled model, because compiled code ignores hooks
    added later.
    """
    from torch import nn

    from trimtab.techniques.compiled_call import is_compiled

    if loss_heads(model) or is_compiled(model):
        return None
    layers = [each for each in model.modules() if isinstance(each, nn.Linear)]
    is_plain = bool(layers) and type(layers[-1]).forward is nn.Linear.forward
    return layers[-1] if is_plain and layers[-1].out_features >= LEAST_CLASSES else None


def _keep_gathered(model: nn.Module, head: nn.Linear) -> Undo:
    """Keep the weight of a head gathered from forward to backward, because the loss is computed after the forward."""
    from torch.distributed.fsdp import FSDPModule

    owners = [each for each in model.modules() if isinstance(each, FSDPModule) and head in each.modules()]
    for owner in owners[-1:]:  # None on a single rank.
        owner.set_reshard_after_forward(reshard_after_forward=False, recurse=False)

    def undo() -> None:
        for owner in owners[-1:]:
            owner.set_reshard_after_forward(reshard_after_forward=True, recurse=False)

    return undo


def require_heads(model: nn.Module, chunk_rows: int) -> None:
    """Raise `ModelError` if the model has no loss head."""
    if not loss_heads(model) and plain_head(model) is None:
        raise ModelError(
            "plan.loss_chunk",
            got=f"{chunk_rows} for a model without a loss head",
            expected="a model with a trimtab.nn.LossHead, or whose last linear layer has at least "
            f"{LEAST_CLASSES} outputs, not compiled by its own code",
            hint="Use trimtab.nn.LossHead as the last layer, or a plan with loss_chunk=None.",
            code="loss_chunk.no_head",
        )


def use_chunks(model: nn.Module, chunk_rows: int) -> Callable[[], None]:
    """Set the chunk size of every loss head, or defer the logits of the last layer; return a function to undo this.

    Raises:
        ModelError: the model has no loss head.
    """
    from trimtab.techniques.deferred_logits import defer_logits

    require_heads(model, chunk_rows)
    if (plain := plain_head(model)) is not None:
        use, remove = defer_logits(plain, chunk_rows)

        def end() -> None:
            remove()
            _warn_of_no_effect(use)

        return end
    heads = loss_heads(model)
    before = [(head, head.chunk_rows) for head in heads]

    def undo() -> None:
        for head, rows in before:
            head.chunk_rows = rows

    for head in heads:
        head.chunk_rows = chunk_rows
    return undo


@contextlib.contextmanager
def count_head_tokens(model: nn.Module) -> Iterator[dict[nn.Linear, int]]:
    """Count the feature vectors passed to each `trimtab.nn.LossHead` within the block, over all calls."""
    seen: dict[nn.Linear, int] = {}

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


class PlainHeadUse(NamedTuple):
    """Use of the logits of a plain linear head in a step.

    Attributes:
        tokens: number of tokens in the cross-entropy of the logits, by head; empty if chunks are not possible.
        refusal: the reason if chunks are not possible although the model has a large linear layer, or "".
    """

    tokens: dict[nn.Linear, int]
    refusal: str = ""


def plain_head_use(model: nn.Module, forward: Callable[[], object]) -> PlainHeadUse:
    """Run a forward up to the loss with deferred logits, and return the use of the model's plain head."""
    from trimtab.techniques.deferred_logits import defer_logits

    head = plain_head(model)
    if head is None:
        return PlainHeadUse({})
    use, undo = defer_logits(head, None)
    try:
        forward()
    finally:
        undo()
    if use.computed_by:
        names = ", ".join(use.computed_by)
        return PlainHeadUse({}, f"the loop computes with the logits themselves ({names}), not only their cross-entropy")
    return PlainHeadUse({head: use.tokens} if use.tokens else {})
