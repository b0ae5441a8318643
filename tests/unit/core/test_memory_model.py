"""A peak is the highest of the moments' lines, at every number of rows."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from raising import raises

from trimtab.core.errors import ValueGivenError
from trimtab.core.memory_model import PeakMemoryModel, aligned_peaks
from trimtab.core.serialization import from_json, to_json

bytes_held = st.integers(0, 10**9)
moments = st.lists(st.tuples(bytes_held, st.integers(0, 10**6)), min_size=1, max_size=40)


def model_of(found, rows=(4, 16)):
    few, many = ([base + slope * n for base, slope in found] for n in rows)
    return PeakMemoryModel.through(few, many, rows)


@given(moments, st.integers(1, 10**5))
def test_it_is_the_highest_moment_whatever_the_rows(found, rows):
    highest = max(base + slope * rows for base, slope in found)
    assert model_of(found).peak_bytes(rows) == pytest.approx(highest, abs=2)


@given(moments)
def test_more_rows_never_take_less_and_few_lines_are_kept(found):
    model = model_of(found)
    peaks = [model.peak_bytes(rows) for rows in (1, 2, 5, 30, 1000)]
    assert peaks == sorted(peaks)
    slopes = [slope for _, slope in model.lines]
    assert all(lower < higher for lower, higher in itertools.pairwise(slopes))
    assert len(model.lines) <= len(found)
    assert from_json(PeakMemoryModel, to_json(model)) == model


def test_a_line_that_is_nowhere_the_highest_is_dropped():
    assert model_of([(100, 0), (0, 10), (40, 4), (90, 0), (100, 0)]).lines == ((100.0, 0.0), (0.0, 10.0))
    assert model_of([(100, 0), (0, 10), (70, 5)]).lines == ((100.0, 0.0), (70.0, 5.0), (0.0, 10.0))


def test_what_is_no_pair_of_steps_is_refused():
    with raises(ValueGivenError, code="value.invalid", field="moments"):
        PeakMemoryModel.through([1, 2], [1], (1, 2))
    for rows in ((2, 2), (0, 2), (3, 2)):
        with raises(ValueGivenError, code="value.invalid", field="rows"):
            PeakMemoryModel.through([1], [2], rows)


def held(changes):
    return list(itertools.accumulate(changes))


def test_a_gradient_that_arrives_later_in_one_of_two_backwards_moves_no_line():
    """Torch may run the nodes of two biases before or after the release of a tensor that they wait for."""
    few = [100, 40, 4, -50, -20, 30]  # the 4, independent of the samples, comes before the releases
    many = [200, 80, -100, -40, 4, 60]  # and here after them
    kinds = [1, 1, 1, -1, -1, 1], [1, 1, -1, -1, 1, 1]
    model = PeakMemoryModel.through(*aligned_peaks(held(few), held(many), *kinds), (4, 8))
    assert model.peak_bytes(4) == 144
    assert model.peak_bytes(8) == 280  # the peak is where the order is the same
    assert model.peak_bytes(2) == 76  # 126 from moments that do not correspond


@given(st.permutations([1, 1, 1, 1, -1, -1, -1]), st.permutations([1, 1, 1, 1, -1, -1, -1]))
def test_the_largest_of_each_trace_is_kept_whatever_the_order(few, many):
    ours, theirs = aligned_peaks(held(few), held(many), few, many)
    assert (max(ours), max(theirs)) == (max(held(few)), max(held(many)))
    assert len(ours) == len(theirs)
    assert aligned_peaks(few, few, few, few) == (few, few)
