"""A model's blocks as a chain of stages: what each takes, in seconds and bytes, for any rows of a micro-batch."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

from trimtab.core.errors import ValueGivenError

Seconds = Callable[[int, int], float]  # of a stage's index, and rows


@dataclass(frozen=True)
class DearPart:
    """What keeping the dear part of a stage takes, as matrix products; the rest is computed again.

    Args:
        saved_bytes: held from forward to backward. backward_bytes: the most in its backward beyond these and the
            output's gradient. recompute_s: what computing the rest takes. passing_bytes: as of a `Stage`.
    """

    saved_bytes: int
    backward_bytes: int
    recompute_s: float
    passing_bytes: int = 0


@dataclass(frozen=True)
class Stage:
    """One stage of a chain, in seconds and in bytes beyond what goes into it.

    Args:
        forward_s: what running its forward again takes. output_bytes: of what it hands on, and of its gradient.
            saved_bytes: held from forward to backward where it is kept whole, the output among them, and what it was
            given where the model lets go of that later: told too large, for one that is run again; spare_bytes: of
            these, gone when its backward begins, as an output that the next one alone needs. forward_bytes: the most in
            its forward, where it is kept; dropping_bytes: where nothing is. backward_bytes: the most in its backward
            beyond what is left and the output's gradient. gradient_bytes: of its parameters, left when it is over, and
            of others that stay for a stage further on; less those of these that it ends, so that it may be below zero.
        passing_bytes: left by its forward until the whole forward is over, and not saved: what autocast has cached, of
            the weights in its dtype. cached_bytes: the same where nothing is kept.
        beside_bytes: held until its backward of what the model does between it and the next, which is not run again.
        is_linked: whether what it hands on goes to the next stage alone, so that a segment may go on past it.
        part: where the dear part alone may be kept.
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
    part: DearPart | None = None


@dataclass(frozen=True)
class Chain:
    """The stages of one micro-batch: the blocks, and what comes behind the last of them, which is kept.

    Args:
        held_bytes: before the first begins: parameters, buffers, the optimizer's state, the batch, earlier gradients.
    """

    stages: tuple[Stage, ...]
    held_bytes: int


@dataclass(frozen=True)
class ChainModel:
    """A chain as a function of a micro-batch's rows, by those of two: bytes and seconds lie on lines.

    Args:
        rows: of the two, the smaller one first.
    """

    few: Chain
    many: Chain
    rows: tuple[int, int]

    def __post_init__(self) -> None:
        fewer, more = self.rows
        if not 0 < fewer < more:
            raise ValueGivenError("rows", given=str(self.rows), expected="two numbers of rows, the lower one first")
        if len(self.few.stages) != len(self.many.stages):
            given = f"{len(self.few.stages)} and {len(self.many.stages)} stages"
            raise ValueGivenError("stages", given=given, expected="as many at both sizes")

    def at(self, rows: int) -> Chain:
        """Return the chain of a micro-batch of so many rows."""
        stages = tuple(
            self._stage(ours, theirs, rows) for ours, theirs in zip(self.few.stages, self.many.stages, strict=True)
        )
        return Chain(stages, self._bytes(self.few.held_bytes, self.many.held_bytes, rows))

    def holding(self, more_bytes: int) -> ChainModel:
        """Return the chain with so many more bytes held before it begins."""
        return self._each(lambda chain: replace(chain, held_bytes=chain.held_bytes + more_bytes))

    def unlinked(self) -> ChainModel:
        """Return the chain with no segments of several stages."""
        return self._each(
            lambda chain: replace(chain, stages=tuple(replace(stage, is_linked=False) for stage in chain.stages))
        )

    def _each(self, change: Callable[[Chain], Chain]) -> ChainModel:
        return replace(self, few=change(self.few), many=change(self.many))

    def with_parts(self, traced: ChainModel) -> ChainModel:
        """Return the chain with the dear parts of its stages but the last, by what a trace that keeps them holds."""

        def parted(chain: Chain, parts: Chain) -> Chain:
            *stages, last = chain.stages
            found = (DearPart(p.saved_bytes, p.backward_bytes, 0.0, p.passing_bytes) for p in parts.stages)
            kept = (replace(stage, part=part) for stage, part in zip(stages, found, strict=False))
            return replace(chain, stages=(*kept, last))

        return replace(self, few=parted(self.few, traced.few), many=parted(self.many, traced.many))

    def with_seconds(self, forward_s: Seconds, part_s: Seconds) -> ChainModel:
        """Return the chain with what running the forward of each stage but the last again takes, and of its part."""

        def timed(chain: Chain, rows: int) -> Chain:
            *stages, last = chain.stages
            found = (replace(stage, forward_s=forward_s(index, rows)) for index, stage in enumerate(stages))
            parted = (
                stage
                if stage.part is None
                else replace(stage, part=replace(stage.part, recompute_s=part_s(index, rows)))
                for index, stage in enumerate(found)
            )
            return replace(chain, stages=(*parted, last))

        fewer, more = self.rows
        return replace(self, few=timed(self.few, fewer), many=timed(self.many, more))

    def _stage(self, few: Stage, many: Stage, rows: int) -> Stage:
        sizes: dict[str, Any] = {name: self._bytes(getattr(few, name), getattr(many, name), rows) for name in _BYTES}
        sizes["gradient_bytes"] = self._line(few.gradient_bytes, many.gradient_bytes, rows)
        part = None
        if few.part is not None and many.part is not None:
            saved, backward, passing = (
                self._bytes(getattr(few.part, name), getattr(many.part, name), rows)
                for name in ("saved_bytes", "backward_bytes", "passing_bytes")
            )
            part = DearPart(saved, backward, self._seconds(few.part.recompute_s, many.part.recompute_s, rows), passing)
        return replace(many, forward_s=self._seconds(few.forward_s, many.forward_s, rows), part=part, **sizes)

    def _seconds(self, few: float, many: float, rows: int) -> float:
        fewer, more = self.rows
        return max(0.0, few + (many - few) * (rows - fewer) / (more - fewer))

    def _bytes(self, few: int, many: int, rows: int) -> int:
        return max(0, self._line(few, many, rows))

    def _line(self, few: int, many: int, rows: int) -> int:
        fewer, more = self.rows
        return math.ceil(few + (many - few) * (rows - fewer) / (more - fewer))


_BYTES = tuple(each.name for each in fields(Stage) if each.name.endswith("_bytes"))
