"""Cost model of a model's blocks as a chain of stages: seconds and bytes as functions of the micro-batch size."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

from trimtab.core.errors import ValueGivenError

Seconds = Callable[[int, int], float]  # Seconds of a stage, by (stage index, samples).


@dataclass(frozen=True)
class ExpensivePart:
    """Costs of a block that keeps only the outputs of matrix products and attention, and recomputes the rest.

    Args:
        backward_bytes: peak of the backward, beyond saved_bytes and the output's gradient.
        recompute_s: seconds to compute the rest.
    """

    saved_bytes: int
    backward_bytes: int
    recompute_s: float
    passing_bytes: int = 0


@dataclass(frozen=True)
class BlockCost:
    """Costs of one stage of a chain, in seconds and in bytes beyond the stage's input.

    Args:
        forward_s: seconds to run the forward again.
        output_bytes: bytes of the output, and of the output's gradient.
        saved_bytes: held from forward to backward if the stage is kept. Includes the output, and the input if the
            model releases the input later (an overestimate for a recomputed stage).
        forward_bytes: peak of the forward, if the stage is kept.
        dropping_bytes: peak of the forward, if nothing is kept.
        backward_bytes: peak of the backward, beyond saved bytes and the output's gradient.
        gradient_bytes: change in held gradients over the backward: gradients of the stage's parameters, and others
            kept for an earlier stage, minus gradients that are consumed. May be negative.
        spare_bytes: part of `saved_bytes` that is released when the backward begins, such as an output that only the
            next stage needs.
        beside_bytes: held until the backward by code between this stage and the next, which is not recomputed.
        passing_bytes: held until the end of the whole forward, and not saved: autocast's cache of weights.
        cached_bytes: the same, if nothing is kept.
        is_linked: True if only the next stage uses the output, so that a segment may extend beyond this stage.
        part: costs of keeping the expensive part only, if possible.
    """

    forward_s: float
    output_bytes: int
    saved_bytes: int
    forward_bytes: int
    dropping_bytes: int
    backward_bytes: int
    gradient_bytes: int = 0
    spare_bytes: int = 0
    beside_bytes: int = 0
    passing_bytes: int = 0
    cached_bytes: int = 0
    is_linked: bool = True
    part: ExpensivePart | None = None


Cost = TypeVar("Cost", BlockCost, ExpensivePart)


@dataclass(frozen=True)
class BlockChain:
    """Stages of a micro-batch: the model's blocks, and the remaining code after the last block, which is always kept.

    Args:
        held_bytes: held before the first stage: parameters, buffers, optimizer state, batch, earlier gradients.
    """

    stages: tuple[BlockCost, ...]
    held_bytes: int


@dataclass(frozen=True)
class BlockChainModel:
    """A chain as a linear function of the micro-batch size, from measurements at two sizes.

    Args:
        few, many: the chain at the smaller and at the larger size.
        rows: the two sizes, in samples, in ascending order.
    """

    few: BlockChain
    many: BlockChain
    rows: tuple[int, int]

    def __post_init__(self) -> None:
        fewer, more = self.rows
        if not 0 < fewer < more:
            raise ValueGivenError(
                "rows", got=str(self.rows), expected="two positive numbers of samples in ascending order"
            )
        if len(self.few.stages) != len(self.many.stages):
            given = f"{len(self.few.stages)} and {len(self.many.stages)} stages"
            raise ValueGivenError("stages", got=given, expected="the same number of stages at both sizes")

    def at(self, rows: int) -> BlockChain:
        """Return the chain for a micro-batch size in samples."""
        stages = tuple(
            self._stage(ours, theirs, rows) for ours, theirs in zip(self.few.stages, self.many.stages, strict=True)
        )
        return BlockChain(stages, self._bytes(self.few.held_bytes, self.many.held_bytes, rows))

    def holding(self, more_bytes: int) -> BlockChainModel:
        """Return the chain with additional bytes held before its first stage."""
        return self._each(lambda chain: replace(chain, held_bytes=chain.held_bytes + more_bytes))

    def unlinked(self) -> BlockChainModel:
        """Return the chain restricted to segments of single stages."""
        return self._each(
            lambda chain: replace(chain, stages=tuple(replace(stage, is_linked=False) for stage in chain.stages))
        )

    def _each(self, change: Callable[[BlockChain], BlockChain]) -> BlockChainModel:
        return replace(self, few=change(self.few), many=change(self.many))

    def with_parts(self, traced: BlockChainModel) -> BlockChainModel:
        """Return the chain with the costs of expensive parts, of a chain traced with only these kept."""

        def parted(chain: BlockChain, parts: BlockChain) -> BlockChain:
            *stages, last = chain.stages
            found = (ExpensivePart(p.saved_bytes, p.backward_bytes, 0.0, p.passing_bytes) for p in parts.stages)
            kept = (replace(stage, part=part) for stage, part in zip(stages, found, strict=False))
            return replace(chain, stages=(*kept, last))

        return replace(self, few=parted(self.few, traced.few), many=parted(self.many, traced.many))

    def with_seconds(self, forward_s: Seconds, part_s: Seconds) -> BlockChainModel:
        """Return the chain with the seconds of a stage's forward, and of that without its expensive part."""

        def timed(chain: BlockChain, rows: int) -> BlockChain:
            *stages, last = chain.stages
            found = []
            for index, stage in enumerate(stages):
                part = stage.part and replace(stage.part, recompute_s=part_s(index, rows))
                found.append(replace(stage, forward_s=forward_s(index, rows), part=part))
            return replace(chain, stages=(*found, last))

        fewer, more = self.rows
        return replace(self, few=timed(self.few, fewer), many=timed(self.many, more))

    def _stage(self, few: BlockCost, many: BlockCost, rows: int) -> BlockCost:
        part = few.part and many.part and self._interpolated(few.part, many.part, rows)
        return replace(self._interpolated(few, many, rows), part=part)

    def _interpolated(self, few: Cost, many: Cost, rows: int) -> Cost:
        """Return the costs with all bytes and seconds on lines; none but gradients is below 0."""
        found: dict[str, Any] = {}
        for name in (each.name for each in fields(few)):
            one, other = getattr(few, name), getattr(many, name)
            if name.endswith("_s"):
                found[name] = self._seconds(one, other, rows)
            elif name == "gradient_bytes":
                found[name] = self._line(one, other, rows)
            elif name.endswith("_bytes"):
                found[name] = self._bytes(one, other, rows)
        return replace(many, **found)

    def _seconds(self, few: float, many: float, rows: int) -> float:
        fewer, more = self.rows
        return max(0.0, few + (many - few) * (rows - fewer) / (more - fewer))

    def _bytes(self, few: int, many: int, rows: int) -> int:
        return max(0, self._line(few, many, rows))

    def _line(self, few: int, many: int, rows: int) -> int:
        fewer, more = self.rows
        return math.ceil(few + (many - few) * (rows - fewer) / (more - fewer))
