"""What of communication is waited for: by hand, as torch cuts its buckets, and against a clock that ticks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimtab.core.hardware import Link
from trimtab.core.parallelism import Parallelism, StepShape
from trimtab.planner.communication_cost import (
    BUCKET_BYTES,
    FIRST_BYTES,
    MOST_BUCKETS,
    BlockTimes,
    bucket_sizes,
    spent_on_blocks,
    spent_on_buckets,
)

MIB = 2**20


def link_of(latency_s: float, bytes_per_s: float) -> Link:
    return Link("made up", latency_s, bytes_per_s, "made up", calibrated=True)


@given(st.integers(0, 2**40), st.none() | st.integers(1, 2**33))
def test_buckets_hold_all_bytes_and_are_no_more_than_tensors_could_be(num_bytes, bucket_bytes):
    sizes = bucket_sizes(num_bytes, bucket_bytes)
    assert sum(sizes) == num_bytes
    assert all(sizes)
    assert len(sizes) <= MOST_BUCKETS + 2


@pytest.mark.parametrize("bucket_bytes", [None, 4 * MIB, 25 * MIB])
def test_buckets_are_those_of_torch_for_tensors_that_fill_them(bucket_bytes):
    import torch
    import torch.distributed as dist

    tensors = [torch.empty(MIB // 4, device="meta") for _ in range(60)]
    limits = [FIRST_BYTES, BUCKET_BYTES] if bucket_bytes is None else [bucket_bytes]
    assert FIRST_BYTES == dist._DEFAULT_FIRST_BUCKET_BYTES
    indices, _ = dist._compute_bucket_assignment_by_size(tensors, limits)
    assert bucket_sizes(60 * MIB, bucket_bytes) == [MIB * len(each) for each in indices]


def by_ticks_of_buckets(blocks, cap: int, latency: int) -> tuple[int, int]:
    """Tick a backward byte by byte: (bytes, ticks a byte) of each block, in the order they run in; two ranks.

    A bucket of n bytes takes 2 latency + n ticks on a link of a byte a tick.
    """
    left = [takes for size, takes in blocks for _ in range(size)]
    compute, channel, total = sum(left), 0, 0
    filling, waiting = 0, []
    clock = 0
    while left or filling or waiting or channel:
        if not channel and waiting:
            channel = 2 * latency + waiting.pop(0)
            total += channel
        clock += 1
        channel -= channel > 0
        if left:
            left[0] -= 1
            if not left[0]:
                left.pop(0)
                filling += 1
        if filling and (filling == cap or not left):
            waiting.append(filling)
            filling = 0
    return clock - compute, total


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(1, 6)), min_size=1, max_size=6).filter(
        lambda blocks: any(size for size, _ in blocks)
    ),
    st.integers(1, 12),
    st.integers(0, 5),
)
def test_buckets_against_a_clock_that_ticks(blocks, cap, latency):
    forwards = [*reversed(blocks)]
    ticks = [size * takes for size, takes in forwards]
    shape = StepShape(1.0, sum(ticks), 0.0, tuple(size for size, _ in forwards), tuple(ticks))
    found = spent_on_buckets(Parallelism(2, bucket_bytes=cap), link_of(latency, 1.0), shape)
    assert found == pytest.approx(by_ticks_of_buckets(blocks, cap, latency))


# Sharded blocks.


def by_ticks_of_blocks(blocks) -> tuple[int, int]:
    """Tick a pass of (compute, gather, reduce) ticks a block, by what may begin when; one collective at a time."""
    num = len(blocks)
    # Collectives in the order they are asked for: the first gather, then the next one's gather before each reduction.
    queue = [("gather", 0)]
    for index in range(num):
        queue += [("gather", index + 1)] * (index + 1 < num) + [("reduce", index)]
    takes = {("compute", i): blocks[i][0] for i in range(num)}
    takes |= {("gather", i): blocks[i][1] for i in range(num)} | {("reduce", i): blocks[i][2] for i in range(num)}
    queue = [each for each in queue if takes[each]]
    begun, ended = {}, {each: 0 for each, ticks in takes.items() if each[0] != "compute" and not ticks}

    def may_begin(work) -> bool:
        kind, index = work
        if kind == "gather":
            return index == 0 or ("compute", index - 1) in begun
        before = [("reduce", i) for i in range(index) if takes["reduce", i]]
        if kind == "reduce":
            return ("compute", index) in ended
        # The block before waited, with its gradients in hand, until the last buffer before its own was free again.
        is_free = index == 0 or not takes["reduce", index - 1] or all(each in ended for each in before[:-1])
        return is_free and ("gather", index) in ended and (index == 0 or ("compute", index - 1) in ended)

    clock = 0
    computing = [("compute", i) for i in range(num)]
    while len(ended) < len(takes):
        for works in (computing, queue):
            if works and works[0] not in begun and may_begin(works[0]):
                begun[works[0]] = clock
        for works in (queue,):  # a collective may wait for a block that began in this very tick
            if works and works[0] not in begun and may_begin(works[0]):
                begun[works[0]] = clock
        clock += 1
        for works in (computing, queue):
            if works and works[0] in begun and begun[works[0]] + takes[works[0]] == clock:
                ended[works.pop(0)] = clock
    return clock - sum(c for c, _, _ in blocks), sum(g + r for _, g, r in blocks)


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=8))
def test_blocks_against_a_clock_that_ticks(blocks):
    assert spent_on_blocks([BlockTimes(*each) for each in blocks]) == pytest.approx(by_ticks_of_blocks(blocks))
