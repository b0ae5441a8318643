"""Communication beside the computation of a micro-batch: what of it is waited for.

One collective runs at a time, in the order they are asked for: those of one process group do.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

from trimtab.core.link import Link
from trimtab.core.parallelism import Parallelism, StepShape
from trimtab.decide.collectives import all_reduce_s

# DDP's own: the first bucket is smaller, so that communication begins early (torch/nn/parallel/distributed.py and
# kDefaultFirstBucketBytes in reducer.hpp). Of a size that is given all of them are.
FIRST_BYTES, BUCKET_BYTES = 2**20, 25 * 2**20
# A bucket holds a tensor at least, however small it is asked to be.
MOST_BUCKETS = 4096
# What a gradient or a parameter is sent as, in bytes of what it is.
SENT = {"fp32": 1.0, "bf16": 0.5}


class Spent(NamedTuple):
    """Seconds of communication: those that are waited for, and all."""

    exposed_s: float
    total_s: float

    def times(self, count: int) -> Spent:
        """Return so many in a row."""
        return Spent(count * self.exposed_s, count * self.total_s)

    def plus(self, other: Spent) -> Spent:
        """Return one after the other."""
        return Spent(self.exposed_s + other.exposed_s, self.total_s + other.total_s)

    def hidden_by(self, share: float) -> Spent:
        """Return it where only a share of what could run beside the computation does."""
        return Spent(self.total_s - share * (self.total_s - self.exposed_s), self.total_s)


NOTHING = Spent(0.0, 0.0)


class BlockTimes(NamedTuple):
    """Seconds of a block as it runs once: computing, gathering its parameters before, reducing its gradients after."""

    compute_s: float
    gather_s: float = 0.0
    reduce_s: float = 0.0


def spent_on_blocks(blocks: Sequence[BlockTimes]) -> Spent:
    """Return what a sharded model's forward, or backward, waits for, of blocks in the order they run in.

    As torch's FSDP2 has it (`_fsdp_param_group.py`): a block's parameters are gathered while the one before it runs;
    gradients are reduced behind the block, and a block's wait until those of the one before are, whose buffer they
    take. The backward ends with the last of them.
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


def spent_on_buckets(how: Parallelism, link: Link, shape: StepShape) -> Spent:
    """Return what a replicated model's backward that reduces waits for at its end, as torch's DDP has it.

    Blocks run from the last to the first, and a block's gradients come evenly while it runs. A bucket is reduced when
    it is full and the one before it is done.
    """
    sizes = bucket_sizes(sum(shape.block_bytes), how.bucket_bytes)
    seconds = [all_reduce_s(link, how.ranks, SENT[how.reduce_dtype] * size) for size in sizes]
    ready_s = _ready(shape, accumulate(sizes))
    done = 0.0
    for ready, takes in zip(ready_s, seconds, strict=True):
        done = max(done, ready) + takes
    return _spent(done - shape.backward_s, sum(seconds))


def bucket_sizes(num_bytes: int, bucket_bytes: int | None) -> list[int]:
    """Return the bytes of DDP's buckets, in the order they are reduced in; None: its own sizes."""
    first, others = (FIRST_BYTES, BUCKET_BYTES) if bucket_bytes is None else (bucket_bytes, bucket_bytes)
    others = max(others, math.ceil(num_bytes / MOST_BUCKETS))
    first = min(first, num_bytes)
    full, left = divmod(num_bytes - first, others)
    return [size for size in (first, *[others] * full, left) if size]


def _ready(shape: StepShape, ends: Iterable[int]) -> list[float]:
    """Return seconds from a backward's begin to when so many bytes of gradients have come."""
    come = [0, *accumulate(reversed(shape.block_bytes))]
    at = [0.0, *accumulate(shape.backward_s * share for share in reversed(shape.block_shares))]

    def ready(end: int) -> float:
        block = bisect_left(come, end)
        share = (end - come[block - 1]) / (come[block] - come[block - 1])
        return at[block - 1] + share * (at[block] - at[block - 1])

    return [ready(end) for end in ends]


def _spent(exposed_s: float, total_s: float) -> Spent:
    """Return it without what rounding leaves below nothing or above all."""
    return Spent(min(max(0.0, exposed_s), total_s), total_s)
