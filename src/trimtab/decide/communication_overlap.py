"""Overlap of communication with a micro-batch's computation: exposed and total seconds.

Collectives run in sequence, in the order of the calls, as in a single process group.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

from trimtab.core.interconnect import Link
from trimtab.core.parallelism import Parallelism, StepShape
from trimtab.decide.collectives import all_reduce_s

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
        """Return the cost of `count` repetitions."""
        return CommunicationTime(count * self.exposed_s, count * self.total_s)

    def plus(self, other: CommunicationTime) -> CommunicationTime:
        """Return the sum of two costs."""
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
    seconds = [all_reduce_s(link, how.ranks, SENT[how.reduce_dtype] * size) for size in sizes]
    ready_s = _ready(shape, accumulate(sizes))
    done = 0.0
    for ready, takes in zip(ready_s, seconds, strict=True):
        done = max(done, ready) + takes
    return _spent(done - shape.backward_s, sum(seconds))


def bucket_sizes(num_bytes: int, bucket_bytes: int | None) -> list[int]:
    """Return the bytes of DDP's buckets, in order of reduction; `bucket_bytes` None: DDP's defaults."""
    first, others = (FIRST_BYTES, BUCKET_BYTES) if bucket_bytes is None else (bucket_bytes, bucket_bytes)
    others = max(others, math.ceil(num_bytes / MOST_BUCKETS))
    first = min(first, num_bytes)
    full, left = divmod(num_bytes - first, others)
    return [size for size in (first, *[others] * full, left) if size]


def _ready(shape: StepShape, ends: Iterable[int]) -> list[float]:
    """Return the seconds from the begin of a backward until given numbers of gradient bytes are available."""
    come = [0, *accumulate(reversed(shape.block_bytes))]
    at = [0.0, *accumulate(shape.backward_s * share for share in reversed(shape.block_shares))]

    def ready(end: int) -> float:
        block = bisect_left(come, end)
        share = (end - come[block - 1]) / (come[block] - come[block - 1])
        return at[block - 1] + share * (at[block] - at[block - 1])

    return [ready(end) for end in ends]


def _spent(exposed_s: float, total_s: float) -> CommunicationTime:
    """Return the cost with exposed seconds clipped to 0 and the total, against rounding."""
    return CommunicationTime(min(max(0.0, exposed_s), total_s), total_s)
