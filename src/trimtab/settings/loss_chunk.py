"""Chunked loss head: the number of tokens whose logits are held at once.

A `trimtab.nn.LossHead` computes its loss in chunks by itself. In other models the logits of the last linear layer are
deferred until `cross_entropy` consumes them (`trimtab.techniques.deferred_logits`).
"""

from __future__ import annotations

import contextlib
import warnings
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
        head, stage, engine = plain_head(loop.model), loop.plan.zero_stage.value, loop.plan.engine.value
        is_whole = not hasattr(head and head.weight, "placements") or stage is not None
        if head is not None and (not is_whole or (stage == 3 and engine != "torch")):
            raise ModelError(
                "plan.loss_chunk",
                got=f"{value} for a last layer with a sharded weight",
                expected="a weight that is whole when the loss is computed",
                hint="Let the plan shard the model with engine='torch', use trimtab.nn.LossHead as the last layer, or "
                "a plan with loss_chunk=None.",
                code="loss_chunk.sharded",
            )

    def apply(self, loop: LiveLoop, value: Scalar) -> Undo | None:
        from trimtab.techniques.deferred_logits import defer_logits

        if (head := plain_head(loop.model)) is None:
            return use_chunks(loop.model, int(value or 0))
        use, remove = defer_logits(head, int(value or 0))
        reshard = _keep_gathered(loop.model, head) if loop.plan.zero_stage.value == 3 else None

        def undo() -> None:
            remove()
            if reshard is not None:
                reshard()
            _warn_of_no_effect(use)

        return undo


def _warn_of_no_effect(use: HeadUse) -> None:
    """Warn if a run with chunks computed the logits as a whole."""
    if use.computed_by or (use.num_calls and not use.tokens):
        names = ", ".join(use.computed_by) or "no cross_entropy"
        warnings.warn(
            f"plan.loss_chunk had no effect in some or all steps, because the loop computes with the logits "
            f"themselves ({names}).",
            UserWarning,
            stacklevel=2,
        )


def loss_heads(model: nn.Module) -> tuple[LossHead, ...]:
    """Return the model's distinct loss heads."""
    from trimtab.nn import LossHead

    return tuple(module for module in model.modules() if isinstance(module, LossHead))


def plain_head(model: nn.Module) -> nn.Linear | None:
    """Return the model's last linear layer, whose logits can be deferred; None if it has few outputs.

    None for a model with a `trimtab.nn.LossHead`, and for a model that the user compiles, which ignores later hooks.
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
    """Set the chunk size of every loss head; return a function that restores the previous sizes.

    Raises:
        ModelError: the model has no loss head.
    """
    from trimtab.techniques.deferred_logits import defer_logits

    require_heads(model, chunk_rows)
    if (plain := plain_head(model)) is not None:
        return defer_logits(plain, chunk_rows)[1]
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
