"""Predicted time and memory of an activation checkpointing schedule, and the standard schedules."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from trimtab.core.block_costs import BlockCost, ExpensivePart
from trimtab.core.errors import ValueGivenError
from trimtab.core.recompute_schedule import (
    EVERY_BLOCK,
    KeptBlock,
    Part,
    RecomputedSegment,
    Schedule,
    check_schedule,
    kept_in,
    schedule_of,
    stages_of,
)


@dataclass(frozen=True)
class ScheduleCost:
    """Predicted memory and recomputation of a schedule.

    Args:
        peak_bytes: peak memory of the step, beyond the memory held before.
        recompute_s: seconds beyond a step without recomputation.
        runs: number of forwards per stage; partial recomputation is not counted.
    """

    peak_bytes: int
    recompute_s: float
    runs: tuple[int, ...]


def keep_all(num_stages: int) -> Schedule:
    """Return the schedule without recomputation."""
    return tuple(map(KeptBlock, range(num_stages)))


def every_block(num_stages: int) -> Schedule:
    """Return the schedule that recomputes every stage separately, except the last: its backward follows at once."""
    return (*schedule_of(EVERY_BLOCK, num_stages - 1), KeptBlock(num_stages - 1))


def sqrt_segments(num_stages: int, links: Sequence[bool] = ()) -> Schedule:
    """Return segments of ceil(sqrt(L)) stages; the last segment is kept (paper eqs. 18 and 19; Chen et al. 2016).

    Args:
        num_stages: L, length of the chain.
        links: for all stages but the last, True if a segment may continue to the next stage; segments end at False.
    """
    width = math.isqrt(num_stages - 1) + 1 if num_stages > 1 else 1
    cuts = {index for index, linked in enumerate(links, 1) if not linked}
    edges = sorted({*range(0, num_stages, width), *cuts, num_stages})
    *segments, last = (tuple(map(KeptBlock, range(begin, end))) for begin, end in itertools.pairwise(edges))
    return (*map(RecomputedSegment, segments), *last)


def predict(chain: Sequence[BlockCost], schedule: Schedule) -> ScheduleCost:
    """Return the memory and recomputation of a schedule; `ValueGivenError` unless it has every stage once, in order."""
    check_schedule(schedule, len(chain))
    if any(kept.in_part and part_of(chain[kept.index], kept) is None for kept in kept_in(schedule)):
        raise ValueGivenError(
            "schedule",
            got="~ for a block whose cost is unknown with these results kept",
            expected="results among those measured for the block",
            hint="Recompute this block as a whole, or keep its activations.",
        )
    step = _Step(chain)
    step.run(schedule)
    return ScheduleCost(step.peak, step.recompute_s, tuple(step.runs))


class _Step:
    """Simulation of a step, stage by stage: memory held and its peak."""

    def __init__(self, chain: Sequence[BlockCost]) -> None:
        self._chain = chain
        self._held = self._gradients = self._cached = self.peak = 0
        self.recompute_s = 0.0
        self.runs = [0] * len(chain)

    def run(self, schedule: Schedule) -> None:
        """Run the step. Memory between stages is held from forward to backward and never recomputed."""
        for part in schedule:
            self.forward((part,), 0)
            self._held += self._beside(part)
            self._cached += self._passing(part)
        self._cached = 0
        for part in reversed(schedule):
            self._held -= self._beside(part)
            self.backward((part,))

    def _passing(self, part: Part) -> int:
        """Return the bytes of a part that are held until the end of the whole forward."""
        if isinstance(part, RecomputedSegment):
            return sum(self._chain[index].cached_bytes for index in part.stages)
        stage = self._chain[part.index]
        return (part_of(stage, part) or stage).passing_bytes

    def _beside(self, part: Part) -> int:
        return sum(self._chain[index].beside_bytes for index in stages_of(part))

    def forward(self, schedule: Schedule, slope: int) -> None:
        """Run forward while holding `slope` bytes of the output's gradient."""
        for part in schedule:
            if isinstance(part, KeptBlock):
                self._note(slope + self._chain[part.index].forward_bytes)
                self._held += kept_bytes(self._chain[part.index], part)
                self.runs[part.index] += 1
                continue
            before = 0
            for index in part.stages:
                self._note(slope + before + self._chain[index].dropping_bytes)
                before = self._chain[index].output_bytes
                self.runs[index] += 1
            self._held += before

    def backward(self, schedule: Schedule) -> None:
        """Run backward and release the memory held for it."""
        for part in reversed(schedule):
            if isinstance(part, KeptBlock):
                stage = self._chain[part.index]
                self._held -= kept_bytes(stage, part)
                self._note(backward_need(stage, part))
                self._gradients += stage.gradient_bytes
                found = part_of(stage, part)
                self.recompute_s += found.recompute_s if found else 0.0
                continue
            output = self._chain[part.stages[-1]].output_bytes
            self._held -= output
            self.recompute_s += sum(self._chain[index].forward_s for index in part.stages)
            self.forward(part.parts, output)
            self.backward(part.parts)

    def _note(self, more: int) -> None:
        self.peak = max(self.peak, self._held + self._gradients + self._cached + more)


def part_of(stage: BlockCost, kept: KeptBlock) -> ExpensivePart | None:
    """Return the costs of a stage kept in part; None if it is kept whole, or was not measured like this."""
    found = (each for each in stage.parts if each.results == kept.results)
    return next(found, None) if kept.in_part else None


def kept_bytes(stage: BlockCost, kept: KeptBlock) -> int:
    """Return the bytes held by a stage between forward and backward."""
    return (part_of(stage, kept) or stage).saved_bytes


def backward_need(stage: BlockCost, kept: KeptBlock) -> int:
    """Return the peak bytes of a stage's backward, including saved tensors and the output's gradient."""
    if (part := part_of(stage, kept)) is not None:
        return part.saved_bytes + stage.output_bytes + part.backward_bytes
    return stage.saved_bytes - stage.spare_bytes + stage.output_bytes + stage.backward_bytes
