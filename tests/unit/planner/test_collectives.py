"""Collectives by hand and for every link, and the link that timed all-reduces tell."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from raising import raises

from trimtab.core.errors import ValueGivenError
from trimtab.core.hardware import LINKS, Link
from trimtab.planner.communication_cost import REACHED, all_gather_s, all_reduce_s, broadcast_s, fit, reduce_scatter_s

COLLECTIVES = (all_reduce_s, reduce_scatter_s, all_gather_s, broadcast_s)


def link_of(latency_s: float, bytes_per_s: float) -> Link:
    return Link("made up", latency_s, bytes_per_s, "made up", calibrated=True)


links = st.builds(link_of, st.floats(0, 1e-3), st.floats(1e7, 1e12))
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


@pytest.mark.parametrize(
    ("points", "ranks", "field", "code"),
    [
        ([], 2, "link.points", "value.invalid"),
        ([(1e3, 1e-3), (1e6, 1e-2)], 2, "link.points", "value.invalid"),
        ([(1e3, 1e-3), (1e3, 1.1e-3), (1e6, 1e-2)], 2, "link.points", "value.invalid"),
        ([(1000, 1e-3), (1001, 1e-3), (1002, 1e-3)], 2, "link.points", "value.invalid"),
        ([(1e3, 1e-3), (1e5, 1e-3), (1e6, 1e-3)], 2, "link.points", "link.no_bandwidth"),
        ([(1e3, 3e-3), (1e5, 2e-3), (1e6, 1e-3)], 2, "link.points", "link.no_bandwidth"),
        ([(1e3, 0.0), (1e5, 2e-3), (1e6, 4e-3)], 2, "link.points.seconds", "value.invalid"),
        ([(1e3, math.nan), (1e5, 2e-3), (1e6, 4e-3)], 2, "link.points.seconds", "value.invalid"),
        ([(0, 1e-3), (1e5, 2e-3), (1e6, 4e-3)], 2, "link.points.bytes", "value.invalid"),
        ([(1e3, 1e-3), (1e5, 2e-3), (1e6, 4e-3)], 1, "link.ranks", "value.invalid"),
    ],
)
def test_times_that_tell_no_link_are_refused(points, ranks, field, code):
    with raises(ValueGivenError, code=code, field=field):
        fit(points, ranks)
