"""Time of an optimizer step on several ranks (math: section 4)."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

from trimtab.core import validation
from trimtab.core.errors import ValueGivenError
from trimtab.core.hardware import Link
from trimtab.core.parallelism import Parallelism, StepShape

# Fraction of a published bandwidth that a ring reaches. NCCL assumes 20 of an NVLink's 25 GB/s on an A100, 20.6 of 25
# on an H100 and 40.1 of 50 on a B200 (2.30, src/graph/topo.h); for networks the value is an assumption.
REACHED = 0.8


def all_reduce_s(link: Link, ranks: int, num_bytes: float) -> float:
    """Return the seconds of an all-reduce; 0 for a single rank."""
    return 2 * _around_s(link, ranks, num_bytes)


def reduce_scatter_s(link: Link, ranks: int, num_bytes: float) -> float:
    """Return the seconds of a reduce-scatter of a tensor that every rank holds whole before."""
    return _around_s(link, ranks, num_bytes) if link.scatters else all_reduce_s(link, ranks, num_bytes)


def all_gather_s(link: Link, ranks: int, num_bytes: float) -> float:
    """Return the seconds of an all-gather of a tensor that every rank holds whole afterwards."""
    return _around_s(link, ranks, num_bytes)


def broadcast_s(link: Link, ranks: int, num_bytes: float) -> float:
    """Return the seconds of a pipelined broadcast along the ring."""
    if ranks == 1 or not num_bytes:
        return 0.0
    return (ranks - 1) * link.latency_s + num_bytes / _bandwidth(link)


def _around_s(link: Link, ranks: int, num_bytes: float) -> float:
    if ranks == 1 or not num_bytes:
        return 0.0
    return (ranks - 1) * (link.latency_s + num_bytes / ranks / _bandwidth(link))


def _bandwidth(link: Link) -> float:
    return link.bytes_per_s if link.calibrated else REACHED * link.bytes_per_s


def fit(
    points: Sequence[tuple[float, float]], ranks: int, name: str = "measured", *, scatters: bool = True
) -> tuple[Link, float]:
    """Return the link that best explains timed all-reduces, (bytes, seconds), and the largest relative error.

    Least squares of relative errors, so that small sizes (latency) and large sizes (bandwidth) count equally.

    Raises:
        ValueGivenError: times that do not grow with size.
    """
    base_s, byte_s = _line(points)
    if byte_s <= 0:
        raise ValueGivenError(
            "link.points",
            problem="The timed all-reduces do not take longer with more bytes, so no bandwidth can be fitted.",
            hint="Time larger all-reduces, or repeat each size more often.",
            code="link.no_bandwidth",
        )
    hops = 2 * (ranks - 1)
    source = f"timed all-reduces of {ranks} ranks"
    link = Link(name, base_s / hops, hops / ranks / byte_s, source, calibrated=True, scatters=scatters)
    return link, max(abs(all_reduce_s(link, ranks, size) / seconds - 1) for size, seconds in points)


def _line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return (seconds at 0 bytes, seconds per byte), both not negative."""
    weighed = [(1 / seconds**2, size, seconds) for size, seconds in points]
    total = math.fsum(weight for weight, _, _ in weighed)
    size_mean = math.fsum(weight * size for weight, size, _ in weighed) / total
    seconds_mean = math.fsum(weight * seconds for weight, _, seconds in weighed) / total
    spread = math.fsum(weight * (size - size_mean) ** 2 for weight, size, _ in weighed)
    slope = math.fsum(weight * (size - size_mean) * (seconds - seconds_mean) for weight, size, seconds in weighed)
    slope /= spread
    base = seconds_mean - slope * size_mean
    if base >= 0:
        return base, slope
    squares = math.fsum(weight * size**2 for weight, size, _ in weighed)
    return 0.0, math.fsum(weight * size * seconds for weight, size, seconds in weighed) / squares


# Overlap of communication with a micro-batch's computation: exposed and total seconds.

# DDP's defaults: a smaller first bucket starts communication early (torch/nn/parallel/distributed.py and
# kDefaultFirstBucketBytes in reducer.hpp). A given size applies to all buckets.
FIRST_BYTES, BUCKET_BYTES = 2**20, 25 * 2**20
# A bucket holds at least one tensor, however small the requested size.
MOST_BUCKETS = 4096
# Bytes sent, relative to the bytes of the gradient or parameter.
SENT = {"fp32": 1.0, "bf16": 0.5}


class CommunicationTime(NamedTuple):
    """Seconds of communication: exposed, and in total."""

    exposed_s: float
    total_s: float

    def times(self, count: int) -> CommunicationTime:
        return CommunicationTime(count * self.exposed_s, count * self.total_s)

    def plus(self, other: CommunicationTime) -> CommunicationTime:
        return CommunicationTime(self.exposed_s + other.exposed_s, self.total_s + other.total_s)

    def hidden_by(self, share: float) -> CommunicationTime:
        """Return the cost if only a fraction of the overlappable communication overlaps."""
        return CommunicationTime(self.total_s - share * (self.total_s - self.exposed_s), self.total_s)


NOTHING = CommunicationTime(0.0, 0.0)


class BlockTimes(NamedTuple):
    """Seconds of a block per run: computation, parameter all-gather before, gradient reduce-scatter after."""

    compute_s: float
    gather_s: float = 0.0
    reduce_s: float = 0.0


def spent_on_blocks(blocks: Sequence[BlockTimes]) -> CommunicationTime:
    """Return the communication cost of a sharded model's forward or backward, given its blocks in order of execution.

    Models torch's FSDP2 (`_fsdp_param_group.py`): a block's parameters are gathered during the previous block.
    Gradients are reduced after the block; the reduction waits for the previous block's reduction and reuses its buffer.
    The backward ends with the last reduction.
    """
    begin = BlockTimes(0.0)
    clock = channel = gathered = reduced = 0.0
    for (compute_s, _, reduce_s), following in pairwise((begin, *blocks, begin)):
        clock = max(clock, gathered)
        if following.gather_s:
            channel = gathered = max(channel, clock) + following.gather_s
        clock += compute_s
        if reduce_s:
            clock = max(clock, reduced)
            channel = reduced = max(channel, clock) + reduce_s
    total = sum(block.gather_s + block.reduce_s for block in blocks)
    return _spent(max(clock, channel) - sum(block.compute_s for block in blocks), total)


def spent_on_buckets(how: Parallelism, link: Link, shape: StepShape) -> CommunicationTime:
    """Return the communication cost of a replicated model's backward with reduction, as in torch's DDP.

    Blocks run from last to first, with gradients arriving at a constant rate within a block. A bucket is reduced when
    it is full and the previous reduction is done.
    """
    sizes = bucket_sizes(sum(shape.block_bytes), how.bucket_bytes)
    come = [0, *accumulate(reversed(shape.block_bytes))]
    at_s = [0.0, *accumulate(shape.backward_s * share for share in reversed(shape.block_shares))]
    done = total = 0.0
    for size, end in zip(sizes, accumulate(sizes), strict=True):
        block = bisect_left(come, end)
        share = (end - come[block - 1]) / (come[block] - come[block - 1])
        ready = at_s[block - 1] + share * (at_s[block] - at_s[block - 1])
        takes = all_reduce_s(link, how.ranks, SENT[how.reduce_dtype] * size)
        done, total = max(done, ready) + takes, total + takes
    return _spent(done - shape.backward_s, total)


def bucket_sizes(num_bytes: int, bucket_bytes: int | None) -> list[int]:
    """Return the bytes of DDP's buckets, in order of reduction; `bucket_bytes` None: DDP's defaults."""
    first, others = (FIRST_BYTES, BUCKET_BYTES) if bucket_bytes is None else (bucket_bytes, bucket_bytes)
    others = max(others, math.ceil(num_bytes / MOST_BUCKETS))
    first = min(first, num_bytes)
    full, left = divmod(num_bytes - first, others)
    return [size for size in (first, *[others] * full, left) if size]


def _spent(exposed_s: float, total_s: float) -> CommunicationTime:
    return CommunicationTime(min(max(0.0, exposed_s), total_s), total_s)


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
    spent = spent_on_buckets(how, link, shape).hidden_by(share).times(1 if how.reduces_once else k)
    if how.zero_stage == 0:
        return spent
    # torch's ZeroRedundancyOptimizer broadcasts updated parameters in sequence.
    count = shape.num_tensors or len(shape.block_bytes)
    seconds = count * broadcast_s(link, how.ranks, sum(shape.block_bytes) / count)
    return spent.plus(CommunicationTime(seconds, seconds))


def _sharded(how: Parallelism, link: Link, shape: StepShape, k: int, share: float) -> CommunicationTime:
    """Return the cost of parameter all-gathers and gradient reduce-scatters in the k micro-batches of a step."""
    gathers = k if how.zero_stage == 3 else 1  # At stage 2, parameters stay gathered until the optimizer step.
    reductions = 1 if how.reduces_once else k
    sent = SENT[how.gather_dtype]
    whole = shape.block_bytes if shape.gathered_bytes is None else shape.gathered_bytes
    gather_s = [all_gather_s(link, how.ranks, sent * size) for size in whole]
    forward = [BlockTimes(part * shape.forward_s, s) for part, s in zip(shape.block_shares, gather_s, strict=True)]

    def backward(*, reduces: bool) -> CommunicationTime:
        blocks = [
            BlockTimes(
                part * shape.backward_s,
                again_s if how.zero_stage == 3 else 0.0,  # gathered again
                reduce_scatter_s(link, how.ranks, SENT[how.reduce_dtype] * size) if reduces else 0.0,
            )
            for part, again_s, size in zip(shape.block_shares, gather_s, shape.block_bytes, strict=True)
        ]
        return spent_on_blocks(blocks[::-1])

    spent = spent_on_blocks(forward).hidden_by(share).times(gathers)
    spent = spent.plus(backward(reduces=True).hidden_by(share).times(reductions))
    return spent.plus(backward(reduces=False).hidden_by(share).times(k - reductions))
