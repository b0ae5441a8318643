"""Windows of ranks that share a model: by hand, and what holds for every link and every way to share."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from raising import raises

from trimtab.core.errors import ValueGivenError
from trimtab.core.hardware import Link
from trimtab.core.parallelism import Parallelism, StepShape
from trimtab.planner.communication_cost import WindowCost, all_gather_s, window_s

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
