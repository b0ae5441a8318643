"""What a window says of its noise where each micro-batch is one of all ranks."""

from __future__ import annotations

import math

import pytest

from trimtab.adaptive_batch.gradient_noise_scale import JointMicroBatches, from_partial_sums, num_figures, window_noise

# of two ranks: ||gbar||^2 of its shards, ||h_j||^2 D^2 of two micro-batches, their terms, their rows
RANKS = [[0.5, 3.0, 2.0, 6.0, 1.0, 2.0, 2.0], [0.25, 5.0, 1.0, 2.0, 3.0, 2.0, 1.0]]


def test_terms_rows_and_shards_of_all_ranks_add_up():
    found = JointMicroBatches.of_ranks(RANKS)
    assert (found.norm2, found.seen, found.terms, found.rows) == (0.75, [32.0, 12.0], [8.0, 4.0], [4.0, 3.0])
    assert len(RANKS[0]) == num_figures(2)


def test_micro_batches_weigh_by_their_terms_on_all_ranks():
    w, m, g2 = (8 / 12, 4 / 12), (4, 3), (32 / 64, 12 / 16)
    spread = sum(one * (1 - one) / rows for one, rows in zip(w, m, strict=True))
    squares = sum(one**2 / rows for one, rows in zip(w, m, strict=True))
    expected = window_noise(sum(one * norm for one, norm in zip(w, g2, strict=True)), 0.75, spread, squares, 2)
    found = JointMicroBatches.of_ranks(RANKS).noise()
    assert vars(found) == pytest.approx(vars(expected), rel=1e-12)


def test_one_without_terms_on_any_rank_is_none():
    with_none = JointMicroBatches(0.75, [32.0, math.nan, 12.0], [8.0, 0.0, 4.0], [4.0, 4.0, 3.0])
    assert with_none.noise() == JointMicroBatches.of_ranks(RANKS).noise()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_rank_that_shows_nothing_leaves_the_window_without_anything_to_say(bad):
    found = JointMicroBatches.of_ranks([RANKS[0], [bad] * 7])
    assert found.noise() is None
    assert found.noise_of_sums() is None


def test_windows_without_terms_or_of_one_micro_batch_say_nothing():
    assert JointMicroBatches(0.0, [0.0, 0.0], [0.0, 0.0], [4.0, 4.0]).noise() is None
    assert JointMicroBatches(1.0, [1.0, 0.0], [4.0, 0.0], [4.0, 4.0]).noise() is None


@pytest.mark.parametrize("terms", [1e200, 1.7e308])
def test_counts_as_large_as_they_may_be_raise_nothing(terms):
    found = JointMicroBatches.of_ranks([[1.0, 1e300, 1e308, terms, terms, 2.0, 2.0]] * 2).noise()
    assert found is None or math.isfinite(found.trace)


def test_sums_so_far_count_the_rows_of_all_ranks_and_only_where_they_are_the_terms():
    rows = JointMicroBatches(0.75, [32.0, 60.0], [4.0, 3.0], [4.0, 3.0])
    assert rows.noise_of_sums() == from_partial_sums([32.0, 60.0], [4.0, 3.0])
    assert JointMicroBatches(0.75, [32.0, 60.0], [8.0, 4.0], [4.0, 3.0]).noise_of_sums() is None
