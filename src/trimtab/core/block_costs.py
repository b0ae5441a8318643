"""Cost model of a model's blocks as a chain of stages: seconds and bytes as functions of the micro-batch size."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

from trimtab.core.errors import ValueGivenError

Seconds = Callable[[int, int], float]  # Seconds of a stage, by (stage index, samples).


@dataclass(frozen=True)
class ExpensivePart:
    """Costs of a block that keeps only the results of some operators, and recomputes the rest.

    Args:
        backward_bytes: peak of the backward, beyond saved_bytes and the output's gradient.
        recompute_s: seconds to compute the rest.
        results: indices of the expensive operators with kept results; None for matrix products and attention.
        forward_share: the same seconds as a fraction of the block's forward; 0 if unknown.
    """

    saved_bytes: int
    backward_bytes: int
    recompute_s: float
    passing_bytes: int = 0
    results: tuple[int, ...] | None = None
    forward_share: float = 0.0


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
        parts: costs of keeping only some results, if possible; the first of matrix products and attention only.
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
    parts: tuple[ExpensivePart, ...] = ()


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

    def with_parts(self, traced: Sequence[KeptResults]) -> BlockChainModel:
        """Return the chain with the costs of blocks kept in part.

        Args:
            traced: sets of kept results; the first is matrix products and attention.
        """

        def parted(chain: BlockChain, parts: Sequence[BlockChain]) -> BlockChain:
            *stages, last = chain.stages
            found = []
            for index, stage in enumerate(stages):
                each = {}  # Blocks with few operators repeat a set.
                for kept, part in zip(traced, parts, strict=True):
                    each[kept.results[index]] = _part(part.stages[index], kept.results[index], kept.shares[index])
                found.append(replace(stage, parts=tuple(each.values())))
            return replace(chain, stages=(*found, last))

        few = parted(self.few, [each.chain.few for each in traced])
        many = parted(self.many, [each.chain.many for each in traced])
        return replace(self, few=few, many=many)

    def with_seconds(self, forward_s: Seconds, part_s: Seconds | None = None) -> BlockChainModel:
        """Return the chain with the seconds of a stage's forward.

        Args:
            part_s: seconds recomputed by a stage that keeps matrix products and attention; None to compute the seconds
                of all parts from their `forward_share`.
        """

        def timed(chain: BlockChain, rows: int) -> BlockChain:
            *stages, last = chain.stages
            found = []
            for index, stage in enumerate(stages):
                whole_s = forward_s(index, rows)
                parts = [replace(each, recompute_s=each.forward_share * whole_s) for each in stage.parts]
                if parts and part_s is not None:
                    parts[0] = replace(parts[0], recompute_s=part_s(index, rows))
                found.append(replace(stage, forward_s=whole_s, parts=tuple(parts)))
            return replace(chain, stages=(*found, last))

        fewer, more = self.rows
        return replace(self, few=timed(self.few, fewer), many=timed(self.many, more))

    def _stage(self, few: BlockCost, many: BlockCost, rows: int) -> BlockCost:
        parts = tuple(self._interpolated(*pair, rows) for pair in zip(few.parts, many.parts, strict=True))
        return replace(self._interpolated(few, many, rows), parts=parts)

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


@dataclass(frozen=True)
class KeptResults:
    """A set of kept results for every block.

    Args:
        chain: the chain, traced with these results kept.
        results: for every block, as in `ExpensivePart`.
        shares: `forward_share` of every block.
    """

    chain: BlockChainModel
    results: tuple[tuple[int, ...] | None, ...]
    shares: tuple[float, ...]


def _part(stage: BlockCost, results: tuple[int, ...] | None, share: float) -> ExpensivePart:
    """Return the costs of a stage that was traced with only some results kept."""
    return ExpensivePart(stage.saved_bytes, stage.backward_bytes, 0.0, stage.passing_bytes, results, share)


@dataclass(frozen=True)
class ExpensiveOperator:
    """A matrix product, convolution, attention, or an operator that draws random numbers, in a block's forward.

    Args:
        num_bytes: bytes of the results.
        is_random: True if the operator draws random numbers.
        is_needed: True if backward needs the results, possibly to recompute tensors.
    """

    num_bytes: int
    seconds: float
    is_random: bool
    is_needed: bool = False


@dataclass(frozen=True)
class BlockOperators:
    """Operators of a block's forward.

    Args:
        expensive: the expensive operators, in order.
        forward_s: seconds of the forward.
        more_s: additional seconds of a step that keeps all results of expensive operators, and recomputes the rest.
    """

    expensive: tuple[ExpensiveOperator, ...]
    forward_s: float
    more_s: float

    def levels(self, most: int) -> list[tuple[tuple[int, ...] | None, float]]:
        """Return sets of kept results with the recomputed fraction of the forward's time.

        The first set is None (matrix products and attention). At most `most` sets follow. Results are given up in the
        order of bytes per second of recomputation, until backward needs no kept result.
        """
        needed = [index for index, each in enumerate(self.expensive) if each.is_needed]
        drawn = {index for index in needed if self.expensive[index].is_random}
        order = sorted(needed, key=self._bytes_per_second, reverse=True)
        numbers = [*range(0 if drawn else 1, len(order) + 1)]
        if len(numbers) > most:
            numbers = [numbers[round(place * (len(numbers) - 1) / (most - 1))] for place in range(most)]
        found: list[tuple[tuple[int, ...] | None, float]] = [(None, self._share(drawn))]
        for number in numbers:
            given_up = set(order[:number])
            kept = tuple(index for index in range(len(self.expensive)) if index not in given_up)
            found.append((kept, self._share(given_up)))
        return found

    def _bytes_per_second(self, index: int) -> float:
        return self.expensive[index].num_bytes / max(self.expensive[index].seconds, 1e-9)

    def _share(self, given_up: set[int]) -> float:
        seconds = self.more_s + sum(self.expensive[index].seconds for index in given_up)
        return seconds / self.forward_s if self.forward_s > 0 else 0.0


def fastest(runs: Sequence[BlockOperators]) -> BlockOperators:
    """Return a block's operators with the least seconds of several runs."""
    pairs = zip(*(each.expensive for each in runs), strict=True)
    expensive = tuple(min(each, key=lambda one: one.seconds) for each in pairs)
    return BlockOperators(expensive, min(each.forward_s for each in runs), min(each.more_s for each in runs))
