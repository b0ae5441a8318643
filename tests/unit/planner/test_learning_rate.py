"""The peak rate from a range test: on curves whose answer is known."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimtab.planner.tuned_plan import SAFETY, RatePoint, choose_rate, exponential_average, has_diverged, typical_norm

STEPS, WIDEST = 60, 300.0
SCALES = [WIDEST ** (i / (STEPS - 1)) for i in range(STEPS)]


def curve(lowest_at: float, *, noise: float = 0.0, top: float = 4.0) -> list[RatePoint]:
    """Return a test whose loss falls to a valley at `lowest_at` times the user's rate, and rises steeply after it."""
    rng = random.Random(1)
    points = []
    for scale in SCALES:
        distance = math.log(scale / lowest_at)
        slope = 0.3 if distance < 0 else 3.0
        points.append(RatePoint(scale, top + slope * abs(distance) + rng.gauss(0, noise)))
    return points


def changed(points: list[RatePoint], function) -> list[RatePoint]:
    return [RatePoint(point.scale, function(point.loss)) for point in points]


@pytest.mark.parametrize("lowest_at", [9.0, 30.0, 100.0])
def test_a_third_of_the_rate_at_the_lowest_loss(lowest_at):
    found = choose_rate(curve(lowest_at))
    assert lowest_at * SAFETY == pytest.approx(found.scale, rel=0.15)  # the smoothed loss lags by a step, each 10%
    assert found.code == "range_test.third_of_edge"
    assert [loser.value for loser in found.rejected] == [1.0]


def test_noise_of_single_steps_is_smoothed_away():
    noisy = curve(30.0, noise=0.02)
    lone = [*noisy[:5], RatePoint(SCALES[5], 3.9), *noisy[6:]]  # one lucky step, below every other
    assert choose_rate(lone).scale == pytest.approx(10, rel=0.3)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("steps", [40, 60, 100])
def test_where_on_a_floor_the_loss_is_lowest_does_not_matter(steps, seed):
    """It falls to a floor at 12x, and is ragged from there on."""
    rng = random.Random(seed)
    scales = [WIDEST ** (i / (steps - 1)) for i in range(steps)]
    points = [RatePoint(s, 3 + max(0.0, 1 - math.log(s) / math.log(12)) * 2.5 + rng.gauss(0, 0.1)) for s in scales]
    assert 5 < choose_rate(points).scale < 13


def test_the_reason_says_which_of_the_two_it_was():
    floor = [RatePoint(s, 3 + max(0.0, 1 - math.log(s) / math.log(12)) - 1e-3 * i) for i, s in enumerate(SCALES)]
    assert choose_rate(floor).code == "range_test.most_of_decrease"
    assert all(figure in choose_rate(floor).reason for figure in ("85%", "60 steps"))
    assert choose_rate(curve(30.0)).code == "range_test.third_of_edge"


def test_a_rate_that_is_tuned_already_is_hardly_moved():
    """The loss falls because the model learns, and the next higher rates take it apart."""
    losses = [5.5 * 0.8**i + 3 + max(0.0, math.log(s / 2.5)) * 2 for i, s in enumerate(SCALES)]
    points = [RatePoint(scale, loss) for scale, loss in zip(SCALES, losses, strict=True)]
    assert choose_rate(points).scale < 1.5


def test_a_loss_that_only_rises_keeps_the_users_rate():
    found = choose_rate([RatePoint(scale, 2 + scale) for scale in SCALES])
    assert (found.scale, found.rejected) == (1.0, ())
    assert found.code == "range_test.no_higher_rate"
    assert "lowest at 1x" in found.reason


def test_a_fall_that_came_at_the_users_own_rate_hardly_moves_it():
    """The first step brings nearly all; the loss creeps on to be lowest far above."""
    found = choose_rate([RatePoint(s, 9.0 if i < 1 else 2 - 1e-3 * i) for i, s in enumerate(SCALES)])
    assert found.scale < 1.6
    assert found.code == "range_test.most_of_decrease"


def test_a_loss_that_never_falls_clearly_below_its_first_keeps_the_users_rate_and_says_so():
    """The mean of the first losses is the lowest, though a lagging one is lower later."""
    losses = [1.0] * 4 + [3.0] * 6 + [1.3] * 50
    found = choose_rate([RatePoint(scale, loss) for scale, loss in zip(SCALES, losses, strict=True)])
    assert found.scale == 1.0
    assert found.code in ("range_test.no_higher_rate", "range_test.no_decrease")


def test_an_edge_below_three_times_keeps_the_users_rate():
    found = choose_rate(curve(2.0))
    assert (found.scale, found.rejected) == (1.0, ())


@pytest.mark.parametrize("losses", [[], [2.0] * 4, [2.0, 1.9, 1.8, 1.7] + [math.nan] * 20, [math.inf] * 30])
def test_a_test_that_diverged_at_once_keeps_the_users_rate(losses):
    found = choose_rate([RatePoint(scale, loss) for scale, loss in zip(SCALES, losses, strict=False)])
    assert (found.scale, found.rejected) == (1.0, ())
    assert found.code == "range_test.diverged"


NOISES = {
    "gauss": lambda rng: rng.gauss(0, 0.1),
    "skewed": lambda rng: 0.2 * rng.lognormvariate(0, 0.5),
    "even": lambda rng: rng.random(),
}


@pytest.mark.parametrize("noise", NOISES.values(), ids=NOISES)
@pytest.mark.parametrize("steps", [40, 60])
def test_noise_alone_keeps_the_users_rate(noise, steps):
    """A flat loss with noise is lowest somewhere, at 17x in the middle of the test: that is no valley."""
    rng, found = random.Random(steps), []
    for _ in range(400):
        scales = (WIDEST ** (i / (steps - 1)) for i in range(steps))
        found.append(choose_rate([RatePoint(scale, 2.0 + noise(rng)) for scale in scales]))
    kept = [choice for choice in found if choice.scale == 1.0]
    assert len(kept) >= 0.95 * len(found)
    assert all(choice.rejected == () for choice in kept)
    assert any(choice.code == "range_test.no_decrease" for choice in kept)


@pytest.mark.parametrize("seed", range(5))
def test_a_valley_five_times_as_deep_as_the_noise_is_found(seed):
    rng = random.Random(seed)
    points = [RatePoint(p.scale, p.loss + rng.gauss(0, 0.2)) for p in curve(30.0)]  # it falls by 0.3 * log(30) = 1.02
    assert choose_rate(points).scale > 3


def test_a_loss_that_falls_to_the_end_of_the_test_says_that_it_is_the_tests_limit():
    found = choose_rate([RatePoint(scale, 4 - 0.3 * math.log(scale)) for scale in SCALES])
    assert found.scale == 100
    assert "a third of 300x, the highest rate of the range test" in found.reason
    assert "highest" not in choose_rate(curve(30.0)).reason


def test_losses_that_are_not_finite_are_left_out():
    whole = curve(30.0)
    broken = whole[:-3] + [
        RatePoint(point.scale, loss) for point, loss in zip(whole[-3:], (math.inf, math.nan, 1e9), strict=True)
    ]
    assert choose_rate(broken).scale == choose_rate(whole).scale


@pytest.mark.parametrize("shift", [-100.0, -4.0, 0.5, 1000.0])
def test_the_choice_does_not_depend_on_where_the_loss_has_its_zero(shift):
    points = curve(30.0, noise=0.01)
    assert choose_rate(changed(points, lambda loss: loss + shift)).scale == choose_rate(points).scale


@pytest.mark.parametrize("factor", [1e-6, 0.3, 1e6])
def test_neither_choice_nor_stop_depends_on_the_unit_of_the_loss(factor):
    points = curve(30.0, noise=0.01)
    scaled = changed(points, lambda loss: factor * loss)
    assert choose_rate(scaled).scale == choose_rate(points).scale
    assert stop(scaled) == stop(points) is not None


def stop(points: list[RatePoint]) -> int | None:
    """Return the step at which the test would have ended."""
    losses = [point.loss for point in points]
    return next((i for i in range(1, len(losses) + 1) if has_diverged(losses[:i])), None)


def test_the_test_stops_when_the_loss_is_half_above_its_lowest():
    flat = [2.0] * 30
    assert not has_diverged([])
    assert not has_diverged(flat)
    assert not has_diverged([*flat, 2.2])
    assert has_diverged([*flat, *[3.2] * 20])
    assert not has_diverged([*flat, *[2.9] * 20])
    assert not has_diverged([8.0, 7.0, 6.0, 5.0, 2.0])  # falling


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_the_test_stops_when_the_loss_is_not_finite(loss):
    assert has_diverged([2.0] * 20 + [loss])


def test_a_negative_loss_that_falls_has_not_diverged():
    falling = [-1.0 - 0.1 * i for i in range(20)]  # a log-likelihood
    assert not has_diverged(falling)
    assert has_diverged(falling + [1.0] * 20)


def test_smoothing_is_corrected_for_its_start():
    assert exponential_average([3.0]) == [pytest.approx(3.0)]
    assert exponential_average([5.0] * 7) == [pytest.approx(5.0)] * 7
    assert exponential_average([0.0, 9.0])[1] == pytest.approx(5.0)  # (0.8 * 0 + 9) / 1.8
    assert exponential_average([]) == []


@given(st.lists(st.one_of(st.floats(-1e6, 1e6), st.sampled_from([math.nan, math.inf])), max_size=STEPS))
def test_never_below_the_users_rate_nor_above_a_third_of_the_widest(losses):
    found = choose_rate([RatePoint(scale, loss) for scale, loss in zip(SCALES, losses, strict=False)])
    assert 1.0 <= found.scale <= WIDEST * SAFETY * 1.05
    assert bool(found.rejected) == (found.scale > 1.0)
    assert found.reason


def test_the_typical_norm_is_that_of_steps_near_the_rate_and_one_accident_is_not_it():
    norms = [4.0 if scale < 5 else 1.0 for scale in SCALES]
    norms[SCALES.index(min(SCALES, key=lambda s: abs(s - 30)))] = 50.0
    points = [RatePoint(s, 2.0, norm) for s, norm in zip(SCALES, norms, strict=True)]
    assert typical_norm(points, 30.0) == 1.0
    assert typical_norm(points, 1.0) == 4.0
    assert typical_norm([RatePoint(2.0, 1.0, math.inf), RatePoint(3.0, 1.0, 7.0)], 2.0) == 7.0
    assert typical_norm([RatePoint(2.0, 1.0)], 2.0) is None


def test_a_choice_tells_the_norm_at_it():
    points = [replace(point, norm=100 / point.scale) for point in curve(30.0)]
    found = choose_rate(points)
    assert found.norm == pytest.approx(100 / found.scale, rel=0.2)
    assert choose_rate(curve(30.0)).norm is None


def test_a_choice_tells_how_many_steps_the_rate_rose_for():
    points = curve(30.0)
    smooth = exponential_average([point.loss for point in points])
    assert choose_rate(points).rising_steps == smooth.index(min(smooth))
