"""Time to a loss by rows of a window: least where the closed form says, for both kinds of optimizers."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimtab.decide.goodput import NOISY, Times, goodput_k, relative_time, rows_needed

positive = st.floats(1e-6, 1e6)
kinds = st.booleans()


@given(positive, st.floats(1, 4096), positive, positive, kinds)
def test_the_closed_form_is_where_time_is_least(scale, rows, micro_s, fixed_s, normalises):
    times = Times(micro_s, fixed_s)
    best = goodput_k(scale, rows, times, normalises=normalises)
    least = relative_time(best, scale, rows, times, normalises=normalises)
    for other in (0.1, 0.5, 0.9, 0.99, 1.01, 1.1, 2, 10):
        assert relative_time(other * best, scale, rows, times, normalises=normalises) >= least * (1 - 1e-9)


@given(positive, positive, st.floats(1, 100), kinds)
def test_more_noise_or_more_of_a_fixed_part_never_asks_for_less(scale, fixed_s, factor, normalises):
    def best(scale, fixed_s):
        return goodput_k(scale, 8.0, Times(1.0, fixed_s), normalises=normalises)

    assert best(scale * factor, fixed_s) >= best(scale, fixed_s) * (1 - 1e-12)
    assert best(scale, fixed_s * factor) >= best(scale, fixed_s) * (1 - 1e-12)


@given(positive, positive)
def test_an_optimizer_that_normalises_is_never_asked_for_less(scale, fixed_s):
    times = Times(1.0, fixed_s)
    assert goodput_k(scale, 8.0, times, normalises=True) >= goodput_k(scale, 8.0, times) * (1 - 1e-12)


@given(st.floats(0, 1e3), st.floats(1, 100), kinds)
def test_a_larger_window_never_needs_fewer_rows(scales, factor, normalises):
    few, many = (rows_needed(each, normalises=normalises) for each in (scales, scales * factor))
    assert many >= few
    assert many <= 1 + scales * factor


@pytest.mark.parametrize("scales", [0.0, 0.01, NOISY])
def test_a_row_is_worth_its_root_while_noise_is_most_of_a_gradient(scales):
    assert rows_needed(scales, normalises=True) == pytest.approx(math.sqrt(1 + scales))
    assert rows_needed(scales, normalises=False) == 1 + scales


@pytest.mark.parametrize("component", [0.01, 0.1, 0.3])
def test_the_root_is_that_of_a_step_which_divides_by_its_root_mean_square(component):
    """A step along a component of mean G and deviation s a row: G / sqrt(G^2 + s^2 / B), times a rate like sqrt(B)."""
    noise_scale = 1 / component**2

    def of_a_row(batch):
        return math.sqrt(batch) * component / math.sqrt(component**2 + 1 / batch) / batch

    for scales in (0.1, 1.0, NOISY):
        ratio = of_a_row(1e-9) / of_a_row(scales * noise_scale)
        assert ratio == pytest.approx(rows_needed(scales, normalises=True), rel=1e-6)


@pytest.mark.parametrize("normalises", [False, True])
def test_limits(normalises):
    times = Times(1.0, 3.0)
    assert goodput_k(0.0, 8.0, times, normalises=normalises) == 0.0
    assert goodput_k(100.0, 8.0, Times(1.0, 0.0), normalises=normalises) == 0.0
    assert goodput_k(math.inf, 8.0, times, normalises=normalises) == math.inf
    assert relative_time(4, math.inf, 8.0, times, normalises=normalises) == 7.0 / 4
    assert relative_time(4, 0.0, 8.0, times, normalises=normalises) == 7.0
