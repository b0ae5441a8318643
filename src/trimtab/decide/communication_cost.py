"""Time of an optimizer step on several ranks (math: section 4)."""

from __future__ import annotations

from dataclasses import dataclass

from trimtab.core import validation
from trimtab.core.interconnect import Link
from trimtab.core.parallelism import Parallelism, StepShape
from trimtab.decide.collectives import all_gather_s, broadcast_s, reduce_scatter_s
from trimtab.decide.communication_overlap import (
    NOTHING,
    SENT,
    BlockTimes,
    CommunicationTime,
    spent_on_blocks,
    spent_on_buckets,
)


@dataclass(frozen=True)
class WindowCost:
    """Seconds of a step on each rank.

    Args:
        compute_s: forwards and backwards.
        exposed_s: communication that the computation waits for.
        communication_s: all communication, overlapped or exposed.
        optimizer_s: optimizer step; of this rank's shard if the optimizer state is sharded.
    """

    compute_s: float
    exposed_s: float
    communication_s: float
    optimizer_s: float

    @property
    def total_s(self) -> float:
        """Seconds of the whole step."""
        return self.compute_s + self.exposed_s + self.optimizer_s


def window_s(how: Parallelism, link: Link, shape: StepShape, k: int, *, overlap_share: float = 1.0) -> WindowCost:
    """Return the cost of a step with k micro-batches on each rank.

    Args:
        how: parallelism.
        link: latency and bandwidth.
        shape: times and sizes of a micro-batch.
        k: micro-batches per step and rank.
        overlap_share: fraction of overlappable communication that overlaps with computation: 1 on devices with separate
            copy engines, less if both use the same processors, as with gloo.

    Raises:
        ValueGivenError: k is below 1, or the fraction is outside 0 to 1.
    """
    validation.integer("k", k)
    share = validation.number("overlap_share", overlap_share, low=0, high=1) if how.overlaps else 0.0
    spent = NOTHING
    if how.ranks > 1:
        spent = (_replicated if how.zero_stage < 2 else _sharded)(how, link, shape, k, share)
    sharers = how.ranks if how.zero_stage else 1
    compute_s = k * (shape.forward_s + shape.backward_s)
    return WindowCost(compute_s, spent.exposed_s, spent.total_s, shape.optimizer_s / sharers)


def _replicated(how: Parallelism, link: Link, shape: StepShape, k: int, share: float) -> CommunicationTime:
    reductions = 1 if how.reduces_once else k
    spent = spent_on_buckets(how, link, shape).hidden_by(share).times(reductions)
    return spent.plus(_stepped_parameters(how, link, shape)) if how.zero_stage == 1 else spent


def _stepped_parameters(how: Parallelism, link: Link, shape: StepShape) -> CommunicationTime:
    """Return the cost of broadcasting updated parameters after the step at ZeRO stage 1.

    torch's ZeroRedundancyOptimizer broadcasts tensors in sequence.
    """
    count = shape.num_tensors or len(shape.block_bytes)
    seconds = count * broadcast_s(link, how.ranks, sum(shape.block_bytes) / count)
    return CommunicationTime(seconds, seconds)


def _sharded(how: Parallelism, link: Link, shape: StepShape, k: int, share: float) -> CommunicationTime:
    """Return the cost of parameter all-gathers and gradient reduce-scatters in the k micro-batches of a step."""
    gathers = k if how.zero_stage == 3 else 1  # At stage 2, parameters stay gathered until the optimizer step.
    reductions = 1 if how.reduces_once else k
    again = how.zero_stage == 3  # gathered again in the backward
    parts = (
        (_forward(how, link, shape), gathers),
        (_backward(how, link, shape, gathers=again, reduces=True), reductions),
        (_backward(how, link, shape, gathers=again, reduces=False), k - reductions),
    )
    spent = NOTHING
    for part, count in parts:
        spent = spent.plus(part.hidden_by(share).times(count))
    return spent


def _forward(how: Parallelism, link: Link, shape: StepShape) -> CommunicationTime:
    """Return the exposed and total seconds of a forward that gathers the blocks' parameters."""
    blocks = zip(_gathered(shape), shape.block_shares, strict=True)
    sent = SENT[how.gather_dtype]
    return spent_on_blocks(
        [BlockTimes(share * shape.forward_s, all_gather_s(link, how.ranks, sent * size)) for size, share in blocks]
    )


def _backward(how: Parallelism, link: Link, shape: StepShape, *, gathers: bool, reduces: bool) -> CommunicationTime:
    """Return the exposed and total seconds of a backward; blocks run from last to first."""
    blocks = zip(*map(reversed, (_gathered(shape), shape.block_bytes, shape.block_shares)), strict=True)
    gathered, sent = SENT[how.gather_dtype], SENT[how.reduce_dtype]
    return spent_on_blocks(
        [
            BlockTimes(
                share * shape.backward_s,
                all_gather_s(link, how.ranks, gathered * whole) if gathers else 0.0,
                reduce_scatter_s(link, how.ranks, sent * size) if reduces else 0.0,
            )
            for whole, size, share in blocks
        ]
    )


def _gathered(shape: StepShape) -> tuple[int, ...]:
    return shape.block_bytes if shape.gathered_bytes is None else shape.gathered_bytes
