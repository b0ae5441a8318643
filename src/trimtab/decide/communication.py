"""Seconds of a window of ranks that share a model (math: section 4)."""

from __future__ import annotations

from dataclasses import dataclass

from trimtab.core import checks
from trimtab.core.link import Link
from trimtab.core.parallelism import Parallelism, StepShape
from trimtab.decide.collectives import all_gather_s, broadcast_s, reduce_scatter_s
from trimtab.decide.overlap import NOTHING, SENT, BlockTimes, Spent, spent_on_blocks, spent_on_buckets


@dataclass(frozen=True)
class WindowCost:
    """Seconds of a window on each rank.

    Args:
        compute_s: forwards and backwards.
        exposed_s: of communication that is waited for.
        communication_s: of all of it, beside the computation or not.
        optimizer_s: of the optimizer's step: of this rank's share, where its state is sharded.
    """

    compute_s: float
    exposed_s: float
    communication_s: float
    optimizer_s: float

    @property
    def total_s(self) -> float:
        """From a window's begin to the next one's."""
        return self.compute_s + self.exposed_s + self.optimizer_s


def window_s(how: Parallelism, link: Link, shape: StepShape, k: int, *, overlap_share: float = 1.0) -> WindowCost:
    """Return what a window of k micro-batches on each rank takes.

    Args:
        overlap_share: of the communication that could run beside the computation, how much does: 1 on devices that
            have engines for it, less where both take the same processors, as gloo's threads do.

    Raises:
        ValueGivenError: k is below 1, or the share not from 0 to 1.
    """
    checks.integer("k", k)
    share = checks.number("overlap_share", overlap_share, low=0, high=1) if how.overlaps else 0.0
    spent = NOTHING
    if how.ranks > 1:
        spent = (_replicated if how.zero_stage < 2 else _sharded)(how, link, shape, k, share)
    sharers = how.ranks if how.zero_stage else 1
    compute_s = k * (shape.forward_s + shape.backward_s)
    return WindowCost(compute_s, spent.exposed_s, spent.total_s, shape.optimizer_s / sharers)


def _replicated(how: Parallelism, link: Link, shape: StepShape, k: int, share: float) -> Spent:
    reductions = 1 if how.reduces_once else k
    spent = spent_on_buckets(how, link, shape).hidden_by(share).times(reductions)
    return spent.plus(_stepped_parameters(how, link, shape)) if how.zero_stage == 1 else spent


def _stepped_parameters(how: Parallelism, link: Link, shape: StepShape) -> Spent:
    """Return what giving all ranks each rank's parameters takes, behind the step.

    torch's ZeroRedundancyOptimizer broadcasts one tensor after the other.
    """
    count = shape.num_tensors or len(shape.block_bytes)
    seconds = count * broadcast_s(link, how.ranks, sum(shape.block_bytes) / count)
    return Spent(seconds, seconds)


def _sharded(how: Parallelism, link: Link, shape: StepShape, k: int, share: float) -> Spent:
    """Return what gathering parameters and reducing gradients takes, in the k forwards and backwards of a window."""
    gathers = k if how.zero_stage == 3 else 1  # at stage 2 they stay gathered until they change
    reductions = 1 if how.reduces_once else k
    again = how.zero_stage == 3  # gathered in the backward too
    parts = (
        (_forward(how, link, shape), gathers),
        (_backward(how, link, shape, gathers=again, reduces=True), reductions),
        (_backward(how, link, shape, gathers=again, reduces=False), k - reductions),
    )
    spent = NOTHING
    for part, count in parts:
        spent = spent.plus(part.hidden_by(share).times(count))
    return spent


def _forward(how: Parallelism, link: Link, shape: StepShape) -> Spent:
    """Return what a forward that gathers the blocks' parameters waits for."""
    blocks = zip(_gathered(shape), shape.block_shares, strict=True)
    sent = SENT[how.gather_dtype]
    return spent_on_blocks(
        [BlockTimes(share * shape.forward_s, all_gather_s(link, how.ranks, sent * size)) for size, share in blocks]
    )


def _backward(how: Parallelism, link: Link, shape: StepShape, *, gathers: bool, reduces: bool) -> Spent:
    """Return what a backward waits for; blocks run from the last to the first."""
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
