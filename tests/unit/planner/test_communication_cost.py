"""Windows of ranks that share a model: by hand, and what holds for every link and every way to share."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from raising import raises

from trimtab.core.errors import ValueGivenError
from trimtab.core.hardware import LINKS, Link
from trimtab.core.parallelism import Parallelism, StepShape
from trimtab.planner.communication_cost import (
    BUCKET_BYTES,
    FIRST_BYTES,
    MOST_BUCKETS,
    REACHED,
    BlockTimes,
    WindowCost,
    all_gather_s,
    all_reduce_s,
    broadcast_s,
    bucket_sizes,
    fit,
    reduce_scatter_s,
    spent_on_blocks,
    spent_on_buckets,
    window_s,
)

MIB = 2**20


def link_of(latency_s: float, bytes_per_s: float) -> Link:
    return Link("made up", latency_s, bytes_per_s, "made up", calibrated=True)


@st.composite
def shapes(draw: st.DrawFn) -> StepShape:
    num = draw(st.integers(1, 6))
    sizes = draw(st.lists(st.integers(0, 400 * MIB), min_size=num, max_size=num))
    shares = draw(st.lists(st.floats(0, 1), min_size=num, max_size=num).filter(lambda each: sum(each) > 0.01))
    forward_s, backward_s, optimizer_s = (draw(st.floats(low, 1)) for low in (1e-3, 1e-3, 0))
    return StepShape(forward_s, backward_s, optimizer_s, tuple(sizes), tuple(shares))


flags = st.booleans()
links = st.builds(link_of, st.floats(0, 1e-3), st.floats(1e7, 1e12))
ways = st.builds(
    Parallelism,
    st.integers(1, 64),
    st.integers(0, 3),
    st.sampled_from(["fp32", "bf16"]),
    st.none() | st.integers(MIB, 100 * MIB),
    flags,
    flags,
)
windows = st.integers(1, 16)
overlap_shares = st.floats(0, 1)


def at_most(one: float, other: float) -> bool:
    return one <= other * (1 + 1e-9) + 1e-12


def test_a_window_of_replicas_by_hand():
    """2 blocks of 100 B and 1 s backward each, 160 B/s, buckets of 80 B after 0.8, 1.6 and 2 s: reduced by 2.35 s."""
    shape, link = StepShape(1.0, 2.0, 0.5, (100, 100), (0.5, 0.5)), link_of(0.0, 160.0)
    how = Parallelism(2, bucket_bytes=80)
    cost = window_s(how, link, shape, 3)
    assert (cost.compute_s, cost.exposed_s, cost.communication_s, cost.optimizer_s) == pytest.approx(
        (9, 0.35, 1.25, 0.5)
    )
    assert cost.total_s == pytest.approx(9.85)
    assert window_s(how, link, shape, 3, overlap_share=0.5).exposed_s == pytest.approx(0.8)
    assert window_s(replace(how, overlaps=False), link, shape, 3).exposed_s == pytest.approx(1.25)
    assert window_s(replace(how, reduces_once=False), link, shape, 3).communication_s == pytest.approx(3.75)


def test_stage_1_steps_a_share_and_gives_it_to_all():
    shape, link = StepShape(1.0, 2.0, 0.5, (100, 100), (0.5, 0.5), num_tensors=4), link_of(0.1, 160.0)
    none, sharded = (window_s(Parallelism(2, stage), link, shape, 3) for stage in (0, 1))
    sent = 4 * (0.1 + 50 / 160)
    assert sharded.optimizer_s == 0.25
    assert sharded.exposed_s == pytest.approx(none.exposed_s + sent)
    assert sharded.communication_s == pytest.approx(none.communication_s + sent)


@pytest.mark.parametrize(
    ("stage", "reduces_once", "gathers", "reductions"),
    [(2, True, 1, 1), (2, False, 1, 4), (3, True, 8, 1), (3, False, 8, 4)],
)
def test_what_a_sharded_window_sends(stage, reduces_once, gathers, reductions):
    shape, link = StepShape(1.0, 2.0, 0.5, (400, 800), (0.5, 0.5)), link_of(1e-3, 1e3)
    how = Parallelism(4, stage, reduces_once=reduces_once)
    once = sum(all_gather_s(link, 4, size) for size in shape.block_bytes)
    cost = window_s(how, link, shape, 4)
    assert cost.communication_s == pytest.approx((gathers + reductions) * once)
    assert cost.optimizer_s == pytest.approx(0.125)
    halved = window_s(replace(how, reduce_dtype="bf16"), link_of(0.0, 1e3), shape, 4).communication_s
    whole = sum(all_gather_s(link_of(0.0, 1e3), 4, size) for size in shape.block_bytes)
    assert halved == pytest.approx((gathers + reductions / 2) * whole)
    gathered = window_s(replace(how, gather_dtype="bf16"), link_of(0.0, 1e3), shape, 4).communication_s
    assert gathered == pytest.approx((gathers / 2 + reductions) * whole)


def test_a_sharded_window_by_hand():
    """Blocks gathered in 1 s each run 1 s forward and 2 s backward; 2 ranks, stage 3, windows of 2."""
    shape, link = StepShape(2.0, 4.0, 0.0, (2, 2), (0.5, 0.5)), link_of(0.0, 1.0)
    cost = window_s(Parallelism(2, 3), link, shape, 2)
    # Each forward and each backward waits for its first gather, and the window for its last reduction.
    assert cost == WindowCost(12.0, 4 * 1.0 + 1.0, 2 * 4.0 + 2.0, 0.0)


@given(shapes(), links, ways, windows, overlap_shares)
def test_one_rank_costs_what_it_computes(shape, link, how, k, share):
    cost = window_s(replace(how, ranks=1), link, shape, k, overlap_share=share)
    assert (cost.exposed_s, cost.communication_s, cost.optimizer_s) == (0.0, 0.0, shape.optimizer_s)
    assert cost.compute_s == pytest.approx(k * (shape.forward_s + shape.backward_s))


@given(shapes(), links, ways, windows, overlap_shares, overlap_shares)
def test_what_is_waited_for_is_a_part_and_overlap_never_adds(shape, link, how, k, one, other):
    less, more = sorted((one, other))
    hiding = window_s(how, link, shape, k, overlap_share=more)
    poorly = window_s(how, link, shape, k, overlap_share=less)
    alone = window_s(replace(how, overlaps=False), link, shape, k)
    assert hiding.exposed_s >= 0
    assert at_most(hiding.exposed_s, poorly.exposed_s)
    assert at_most(poorly.exposed_s, alone.exposed_s)
    assert alone.exposed_s == pytest.approx(alone.communication_s)
    assert hiding.communication_s == poorly.communication_s == alone.communication_s


@given(shapes(), links, ways, windows, overlap_shares, st.floats(1, 10))
def test_more_latency_is_never_faster_and_more_bandwidth_never_slower(shape, link, how, k, share, factor):
    def costs(link: Link) -> WindowCost:
        return window_s(how, link, shape, k, overlap_share=share)

    slower, faster = (
        replace(link, latency_s=factor * link.latency_s),
        replace(link, bytes_per_s=factor * link.bytes_per_s),
    )
    for worse, better in ((slower, link), (link, faster)):
        assert at_most(costs(better).exposed_s, costs(worse).exposed_s)
        assert at_most(costs(better).communication_s, costs(worse).communication_s)


@given(shapes(), links, ways, windows, st.integers(1, 8))
def test_more_bytes_never_take_less_communication(shape, link, how, k, factor):
    """What of it is waited for may be less under DDP: buckets that are full sooner begin sooner."""
    larger = replace(shape, block_bytes=tuple(factor * size for size in shape.block_bytes))
    few, many = window_s(how, link, shape, k), window_s(how, link, larger, k)
    assert at_most(few.communication_s, many.communication_s)
    if how.zero_stage > 1 or not how.overlaps:
        assert at_most(few.exposed_s, many.exposed_s)


@given(shapes(), st.floats(1e7, 1e12), st.integers(2, 64), windows)
def test_bf16_sends_half_of_the_bytes(shape, bytes_per_s, ranks, k):
    link = link_of(0.0, bytes_per_s)
    whole, half = (window_s(Parallelism(ranks, reduce_dtype=dtype), link, shape, k) for dtype in ("fp32", "bf16"))
    assert half.communication_s == pytest.approx(whole.communication_s / 2)
    assert at_most(half.exposed_s, whole.exposed_s)


@given(shapes(), links, ways, windows, overlap_shares)
def test_reducing_once_is_never_slower(shape, link, how, k, share):
    each = window_s(replace(how, reduces_once=False), link, shape, k, overlap_share=share)
    once = window_s(replace(how, reduces_once=True), link, shape, k, overlap_share=share)
    assert at_most(once.total_s, each.total_s)


@pytest.mark.parametrize(("k", "share"), [(0, 1.0), (1.0, 1.0), (1, -0.1), (1, 1.1), (1, math.nan)])
def test_windows_that_are_none_are_refused(k, share):
    shape = StepShape(1.0, 2.0, 0.5, (100,), (1.0,))
    with raises(ValueGivenError, code="value.invalid"):
        window_s(Parallelism(2), link_of(0.0, 1.0), shape, k, overlap_share=share)


def test_what_is_not_trained_is_gathered_and_not_reduced():
    """A model of which a tenth is trained: by its gathers it is as the whole, by what it reduces as a tenth."""
    link, how = link_of(0.0, 1e3), Parallelism(4, 3, overlaps=False)
    whole = StepShape(1.0, 2.0, 0.5, (1000, 1000), (0.5, 0.5))
    frozen = replace(whole, block_bytes=(100, 100), gathered_bytes=(1000, 1000))
    gathered = 2 * 2 * all_gather_s(link, 4, 1000)  # in the forward and in the backward
    assert window_s(how, link, frozen, 1).communication_s == pytest.approx(
        gathered + (window_s(how, link, whole, 1).communication_s - gathered) / 10
    )
    with raises(ValueGivenError, code="value.invalid", field="step.gathered_bytes"):
        replace(whole, gathered_bytes=(1,))


# Collectives, and the link from timed all-reduces.


COLLECTIVES = (all_reduce_s, reduce_scatter_s, all_gather_s, broadcast_s)


sizes_of_one = st.floats(1, 1e12)


def test_collectives_by_hand():
    """4 ranks, 1 ms a hop, 1 GB/s, 8 MB: pieces of 2 MB take 2 ms."""
    link = link_of(1e-3, 1e9)
    assert all_reduce_s(link, 4, 8e6) == pytest.approx(6 * 3e-3)
    assert reduce_scatter_s(link, 4, 8e6) == pytest.approx(3 * 3e-3)
    assert all_gather_s(link, 4, 8e6) == pytest.approx(3 * 3e-3)
    assert broadcast_s(link, 4, 8e6) == pytest.approx(3e-3 + 8e-3)


def test_a_published_bandwidth_is_reached_in_part():
    link = LINKS["nvlink:H100"]
    measured = replace(link, bytes_per_s=REACHED * link.bytes_per_s, calibrated=True)
    for collective in COLLECTIVES:
        assert collective(link, 8, 1e9) == pytest.approx(collective(measured, 8, 1e9))
    # 2 * 7/8 GB at 360 GB/s, and 14 hops of 3.4 us.
    assert all_reduce_s(link, 8, 1e9) == pytest.approx(1.75 / 360 + 14 * 3.4e-6)


@given(links, st.integers(1, 64), sizes_of_one)
def test_a_link_that_does_not_scatter_reduces_all(link, ranks, size):
    gloo = replace(link, scatters=False)
    assert reduce_scatter_s(gloo, ranks, size) == all_reduce_s(link, ranks, size)
    assert all_gather_s(gloo, ranks, size) == all_gather_s(link, ranks, size)


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_no_bytes_take_no_hop(collective):
    assert collective(link_of(1.0, 1.0), 4, 0) == 0.0


# A link from timed all-reduces.

SIZES = [2**power for power in range(8, 29, 4)]


def timed(link: Link, ranks: int, sizes=SIZES) -> list[tuple[float, float]]:
    return [(size, all_reduce_s(link, ranks, size)) for size in sizes]


@given(st.floats(1e-6, 1e-3), st.floats(1e8, 1e12), st.integers(2, 64))
def test_a_fit_finds_the_link_that_was_planted(latency_s, bytes_per_s, ranks):
    found, miss = fit(timed(link_of(latency_s, bytes_per_s), ranks), ranks, name="gloo", scatters=False)
    assert found.calibrated
    assert not found.scatters
    assert found.name == "gloo"
    assert f"{ranks} ranks" in found.source
    assert miss < 1e-6
    largest = SIZES[-1] / ranks / bytes_per_s
    assert found.latency_s == pytest.approx(latency_s, rel=1e-6, abs=1e-9 * largest)
    assert found.bytes_per_s == pytest.approx(bytes_per_s, rel=1e-6, abs=1e-6 * SIZES[-1] / latency_s)


@given(st.floats(1e-6, 1e-3), st.floats(1e8, 1e11), st.lists(st.floats(-0.1, 0.1), min_size=6, max_size=6))
def test_a_fit_of_disturbed_times_says_by_how_much_it_misses_them(latency_s, bytes_per_s, noise):
    points = [(n, s * (1 + off)) for (n, s), off in zip(timed(link_of(latency_s, bytes_per_s), 4), noise, strict=True)]
    found, miss = fit(points, 4)
    off = [all_reduce_s(found, 4, size) / seconds - 1 for size, seconds in points]
    assert miss == pytest.approx(max(map(abs, off)))
    # The planted link is one of those that least squares chose from.
    assert math.hypot(*off) <= math.hypot(*(1 / (1 + each) - 1 for each in noise)) + 1e-9


def test_small_and_large_sizes_count_alike():
    """Of absolute errors the two small times, of 2 us and less, would move nothing."""
    points = [(1e3, 1.1e-6), (2e3, 2.1e-6), (1e9, 1.0), (2e9, 2.0)]
    found, miss = fit(points, 2)
    assert miss < 0.06
    assert 2 * found.latency_s == pytest.approx(1e-7, rel=0.2)


def test_a_latency_is_never_below_zero():
    found, _ = fit([(1e6, 0.9e-3), (2e6, 2e-3), (4e6, 4.2e-3)], 2)
    assert found.latency_s == 0.0
    assert found.bytes_per_s == pytest.approx(1e9, rel=0.05)


@pytest.mark.parametrize("seconds", [(1e-3, 1e-3, 1e-3), (3e-3, 2e-3, 1e-3)])
def test_times_that_do_not_grow_with_the_size_are_refused(seconds):
    with raises(ValueGivenError, code="link.no_bandwidth"):
        fit(list(zip((1e3, 1e5, 1e6), seconds, strict=True)), 2)


# Overlap, as torch cuts its buckets, and against a clock that ticks.


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
