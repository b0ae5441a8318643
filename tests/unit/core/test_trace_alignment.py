"""Two traces of the same step, moment by moment."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from trimtab.core.memory_model import PeakMemoryModel, aligned_peaks


def held(changes):
    return list(itertools.accumulate(changes))


def test_a_gradient_that_arrives_later_in_one_of_two_backwards_moves_no_line():
    """Torch may run the nodes of two biases before or after what they wait for is let go of."""
    few = [100, 40, 4, -50, -20, 30]  # the 4 of no rows comes before the deaths
    many = [200, 80, -100, -40, 4, 60]  # and here behind them
    kinds = [1, 1, 1, -1, -1, 1], [1, 1, -1, -1, 1, 1]
    model = PeakMemoryModel.through(*aligned_peaks(held(few), held(many), *kinds), (4, 8))
    assert model.peak_bytes(4) == 144
    assert model.peak_bytes(8) == 280  # the peak is where the order is the same
    assert model.peak_bytes(2) == 76  # and by moments that are not the same 126


@given(st.lists(st.sampled_from([-1, 1]), min_size=1, max_size=20), st.data())
def test_of_courses_that_are_the_same_every_moment_is_kept(kinds, data):
    values = data.draw(st.lists(st.integers(0, 9), min_size=len(kinds), max_size=len(kinds)))
    assert aligned_peaks(values, values, kinds, kinds) == (values, values)


@given(st.permutations([1, 1, 1, 1, -1, -1, -1]), st.permutations([1, 1, 1, 1, -1, -1, -1]))
def test_the_largest_of_each_is_kept_whatever_the_order(few, many):
    ours, theirs = aligned_peaks(held(few), held(many), few, many)
    assert (max(ours), max(theirs)) == (max(held(few)), max(held(many)))
    assert len(ours) == len(theirs)
