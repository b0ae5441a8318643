"""Time to a loss by rows of a window: least where the closed form says, for both kinds of optimizers."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimtab.adaptive_batch.step_time_model import StepTimes, goodput_k, relative_time, rows_needed

positive = st.floats(1e-6, 1e6)
kinds = st.booleans()


@given(positive, st.floats(1, 4096), positive, positive, kinds)
def test_the_closed_form_is_where_time_is_least(scale, rows, micro_s, fixed_s, normalises):
    times = StepTimes(micro_s, fixed_s)
    best = goodput_k(scale, rows, times, normalises=normalises)
    least = relative_time(best, scale, rows, times, normalises=normalises)
    for other in (0.1, 0.5, 0.9, 0.99, 1.01, 1.1, 2, 10):
        assert relative_time(other * best, scale, rows, times, normalises=normalises) >= least * (1 - 1e-9)


@given(positive, positive, st.floats(1, 100), kinds)
def test_more_noise_or_more_of_a_fixed_part_never_asks_for_less(scale, fixed_s, factor, normalises):
    def best(scale, fixed_s):
        return goodput_k(scale, 8.0, StepTimes(1.0, fixed_s), normalises=normalises)

    assert best(scale * factor, fixed_s) >= best(scale, fixed_s) * (1 - 1e-12)
    assert best(scale, fixed_s * factor) >= best(scale, fixed_s) * (1 - 1e-12)


@given(st.floats(0, 1e3), st.floats(1, 100), kinds)
def test_a_larger_window_never_needs_fewer_rows(scales, factor, normalises):
    few, many = (rows_needed(each, normalises=normalises) for each in (scales, scales * factor))
    assert many >= few
    assert many <= 1 + scales * factor


@pytest.mark.parametrize("normalises", [False, True])
def test_far_beyond_the_noise_windows_are_what_a_loss_takes(normalises):
    assert rows_needed(2e6, normalises=normalises) == pytest.approx(2 * rows_needed(1e6, normalises=normalises))


@pytest.mark.parametrize("scales", [0.01, 0.1, 0.3, 1.0])
def test_an_optimizer_that_normalises_is_between_a_best_rate_and_one_far_below_it(scales):
    """A row's step is a times as long, and its noise a^2 times as much: progress is 2 a - a^2 of the best, or a."""
    a = 1 / math.sqrt(1 + scales)
    assert 1 / (2 * a - a**2) - 1e-3 <= rows_needed(scales, normalises=True) <= 1 / a


# Optimizer, N in rows as it was measured, batches, and the samples to a loss, in the first one's (math: section 4).
MEASURED = [
    (True, 25, (4, 8, 16, 32, 64), (1, 1.02, 1.06, 1.20, 1.84)),
    (True, 54, (4, 8, 16, 32, 64, 128), (1, 1.05, 1.11, 1.23, 1.48, 1.87)),
    (False, 70, (4, 8, 16, 32, 64, 128), (1, 1.08, 1.19, 1.39, 1.70, 2.07)),
    (False, 200, (16, 32, 64, 128, 256), (1, 1.04, 0.98, 1.21, 1.24)),
]


@pytest.mark.parametrize(("normalises", "scale", "batches", "samples"), MEASURED)
def test_it_is_between_what_was_measured(normalises, scale, batches, samples):
    first = rows_needed(batches[0] / scale, normalises=normalises)
    for batch, measured in zip(batches, samples, strict=True):
        assert rows_needed(batch / scale, normalises=normalises) / first == pytest.approx(measured, rel=0.28)


@pytest.mark.parametrize("normalises", [False, True])
def test_limits(normalises):
    times = StepTimes(1.0, 3.0)
    assert goodput_k(0.0, 8.0, times, normalises=normalises) == 0.0
    assert goodput_k(100.0, 8.0, StepTimes(1.0, 0.0), normalises=normalises) == 0.0
    assert goodput_k(math.inf, 8.0, times, normalises=normalises) == math.inf
    assert relative_time(4, math.inf, 8.0, times, normalises=normalises) == 7.0 / 4
    assert relative_time(4, 0.0, 8.0, times, normalises=normalises) == 7.0
