"""Estimates of gradient noise: unbiased where the truth is known, smoothed apart, sure only after enough windows."""

from __future__ import annotations

import math

import numpy
import pytest

from trimtab.adaptive_batch.gradient_noise_scale import (
    JointMicroBatches,
    NoiseAverage,
    WindowNoise,
    from_partial_sums,
    num_figures,
    window_noise,
)
from trimtab.core.errors import UsageError

pytestmark = pytest.mark.slow

DIM = 6
TRUE = numpy.linspace(-1, 1, DIM)
SPREAD = numpy.linspace(0.5, 2.0, DIM)  # standard deviation of one row's gradient, by component
TRACE, NORM2 = float((SPREAD**2).sum()), float((TRUE**2).sum())
COPIES = 10  # components of each kind, where a gradient is not as short as that


def window_of(rng, rows, terms=None, copies=1):
    """Return (gradients of micro-batches' mean losses, terms, rows): each row's is Gaussian around the truth."""
    terms = rows if terms is None else terms
    true, spread = numpy.tile(TRUE, copies), numpy.tile(SPREAD, copies)
    means = [true + spread * rng.standard_normal((m, DIM * copies)).mean(0) for m in rows]
    return means, numpy.array(terms, float), numpy.array(rows, float)


def estimate(means, terms, rows):
    """Return a window's estimates, by the sums that a run makes of it."""
    n = terms.sum()
    weights = terms / n
    mean = sum(w * g for w, g in zip(weights, means, strict=True))
    norms = sum(w * (g**2).sum() for w, g in zip(weights, means, strict=True))
    spread = (weights * (1 - weights) / rows).sum()
    return window_noise(norms, (mean**2).sum(), spread, (weights**2 / rows).sum(), len(means))


def interval(values):
    """Return mean and half-width of a 99.9% interval."""
    return numpy.mean(values), 3.3 * numpy.std(values, ddof=1) / math.sqrt(len(values))


@pytest.mark.parametrize("rows", [(4, 4), (4,) * 8, (1, 2, 3, 10), (16, 1)])
@pytest.mark.parametrize("uneven_terms", [False, True])
def test_a_windows_estimates_are_unbiased(rows, uneven_terms):
    rng = numpy.random.default_rng(0)
    terms = [(1 + index % 3) * m for index, m in enumerate(rows)] if uneven_terms else None
    found = [estimate(*window_of(rng, rows, terms)) for _ in range(2500)]
    for name, truth in (("trace", TRACE), ("norm2", NORM2)):
        mean, half = interval([getattr(each, name) for each in found])
        assert abs(mean - truth) < half, name
        assert half < 0.2 * truth


@pytest.mark.parametrize("rows", [(4,) * 8, (3, 5, 4, 2)])
def test_partial_sums_agree_with_the_exact_estimates(rows):
    rng = numpy.random.default_rng(1)
    exact, partial = [], []
    for _ in range(3000):
        means, terms, sizes = window_of(rng, rows)
        exact.append(estimate(means, terms, sizes))
        sums = numpy.cumsum([m * g for m, g in zip(sizes, means, strict=True)], axis=0)
        partial.append(from_partial_sums([float((s**2).sum()) for s in sums], list(sizes)))
    for name, truth in (("trace", TRACE), ("norm2", NORM2)):
        mean, half = interval([getattr(each, name) for each in partial])
        assert abs(mean - truth) < half, name
    spread = [numpy.std([each.trace for each in found]) for found in (exact, partial)]
    assert spread[1] > spread[0]


@pytest.mark.parametrize(
    "sums",
    [(1.0, 1.0, 0.1, 0.1, 1), (1.0, 1.0, 0.0, 0.1, 4), (math.inf, 1.0, 0.1, 0.1, 4), (1.0, math.nan, 0.1, 0.1, 4)],
)
def test_a_window_that_says_nothing(sums):
    assert window_noise(*sums) is None


@pytest.mark.parametrize("found", [([1.0], [4.0]), ([1.0, 2.0], [0.0, 0.0]), ([1.0, math.inf], [1.0, 1.0])])
def test_partial_sums_that_say_nothing(found):
    assert from_partial_sums(*found) is None


def average_of(seed, rows=(4,) * 4, num=200, copies=1):
    rng, average = numpy.random.default_rng(seed), NoiseAverage()
    for _ in range(num):
        average.add(estimate(*window_of(rng, rows, copies=copies)))
    return average.noise


def test_the_average_is_that_of_its_windows_and_knows_how_sure_it_is():
    """Of 200 windows, the interval of two standard errors holds the truth about as often as it should."""
    truth, covered = COPIES * NORM2, 0
    for seed in range(60):
        noise = average_of(seed, copies=COPIES)
        covered += abs(noise.norm2 - truth) < 2 * noise.relative_error * noise.norm2
        assert noise.trace == pytest.approx(COPIES * TRACE, rel=0.1)
    assert covered >= 53


@pytest.mark.parametrize(("copies", "most"), [(1, 0.035), (COPIES, 0.006)])
def test_windows_in_units_of_their_own_make_little_of_an_average_wrong(copies, most):
    """As shares of its own energy a window's G2 is not unbiased any more: by the less the longer a gradient is."""
    found = numpy.mean([average_of(seed, copies=copies).norm2 for seed in range(60)])
    assert found == pytest.approx(copies * NORM2, rel=most)


def test_an_average_stays_as_sure_as_it_says_while_k_rises():
    """From 1 row a micro-batch split in two to 16 micro-batches: late windows tell G2 a hundred times as well."""
    covered, errors, truth = 0, [], COPIES * NORM2
    for seed in range(80):
        rng = numpy.random.default_rng(seed)
        average, alike = NoiseAverage(), NoiseAverage()  # the other's weigh by the degrees of freedom
        for k, num in ((2, 100), (4, 20), (8, 20), (16, 20)):
            for _ in range(num):
                found = estimate(*window_of(rng, (1,) * k, copies=COPIES))
                average.add(found)
                alike.add(ByDegrees(found.trace, found.norm2, found.num, found.rows))
        noise = average.noise
        errors.append(noise.norm2 - truth)
        covered += abs(noise.norm2 - truth) < 2 * noise.relative_error * noise.norm2
        said, unsure = noise.relative_error * noise.norm2, alike.noise.relative_error * alike.noise.norm2
    assert covered >= 68
    assert said < 2 * numpy.std(errors)
    assert said < 0.8 * unsure


class ByDegrees(WindowNoise):
    norm2_weight = WindowNoise.degrees


def test_an_old_average_weighs_less_but_never_nothing():
    def after(age, changed=30):
        average = NoiseAverage()
        for trace in [1.0] * 400 + [5.0] * changed:
            average.add(WindowNoise(trace, 1.0, 2, 2), age=age)
        return average.noise.trace

    assert after(1) < after(2) < after(3) == pytest.approx(after(50), rel=1e-4)
    assert after(50) == pytest.approx(5 - 4 * (1 - 0.01) ** (3 * 30), rel=1e-3)


@pytest.mark.parametrize("every", [1, 20])
def test_a_change_of_the_gradients_size_does_not_outweigh_other_windows(every):
    average = NoiseAverage()
    for _ in range(10):
        average.add(WindowNoise(600.0, 150.0, 2, 8))  # N = 4
    for _ in range(200 // every):
        average.add(WindowNoise(40.0, 2.0, 2, 8), age=every)  # N = 20
    assert average.noise.scale == pytest.approx(20.0, rel=0.1)
    assert average.noise.norm2 == pytest.approx(average.noise.trace / average.noise.scale)
    average = NoiseAverage()
    for window in range(100):
        average.add(WindowNoise(5e4, 5e5, 2, 8) if window == 50 else WindowNoise(40.0, 2.0, 2, 8))
    assert average.noise.scale == pytest.approx(20.0, rel=0.1)


@pytest.mark.parametrize("found", [WindowNoise(0.0, 0.0, 2, 8), WindowNoise(-3.0, 0.5, 4, 8)])
def test_a_window_without_energy_is_in_units_of_something(found):
    average = NoiseAverage()
    average.add(found)
    average.add(found)
    assert math.isfinite(average.noise.norm2)
    assert average.noise.scale == 0.0


def test_averages_weigh_windows_by_degrees_of_freedom_and_age():
    average = NoiseAverage()
    average.add(WindowNoise(1.0, 1.0, 2, 2))
    average.add(WindowNoise(4.0, 1.0, 8, 8))
    faded = 0.5**2
    assert average.noise.trace == pytest.approx((faded * 1 + 7 * 4) / (faded + 7), rel=1e-9)
    average = NoiseAverage()
    for _ in range(10):
        average.add(WindowNoise(1.0, 1.0, 2, 2))
    average.add(WindowNoise(5.0, 1.0, 2, 2), age=20)  # at three times as long
    weight = sum(n**2 for n in range(1, 11)) / 10**2 / 3**2
    assert average.noise.trace == pytest.approx((weight + 5.0) / (weight + 1.0))


def test_too_few_windows_are_not_sure():
    average = NoiseAverage()
    assert average.noise is None
    average.add(WindowNoise(1.0, 1.0, 4, 4))
    assert average.noise.relative_error == math.inf
    average.add(WindowNoise(1.0, -5.0, 4, 4))
    assert average.noise.norm2 < 0
    assert average.noise.relative_error == math.inf
    assert average.noise.scale == math.inf


def test_a_saved_average_goes_on_as_if_it_had_not_stopped():
    rng = numpy.random.default_rng(3)
    windows = [estimate(*window_of(rng, (4,) * 4)) for _ in range(30)]
    whole, first, second = NoiseAverage(), NoiseAverage(), NoiseAverage()
    for each in windows:
        whole.add(each)
    for each in windows[:13]:
        first.add(each)
    second.load_state_dict(first.state_dict())
    for each in windows[13:]:
        second.add(each)
    assert second.noise == whole.noise


@pytest.mark.parametrize("damage", [{}, {"trace": "1"}, {"num_windows": -1}, {"weight": math.nan}, {"extra": 1}])
def test_a_damaged_state_is_refused_and_changes_nothing(damage):
    average = NoiseAverage()
    average.add(WindowNoise(1.0, 2.0, 4, 4))
    before = average.state_dict()
    with pytest.raises(UsageError):
        average.load_state_dict((before | damage) if damage else {})
    assert average.state_dict() == before


# Micro-batches over all ranks.


# of two ranks: ||gbar||^2 of its shards, ||h_j||^2 D^2 of two micro-batches, their terms, their rows
RANKS = [[0.5, 3.0, 2.0, 6.0, 1.0, 2.0, 2.0], [0.25, 5.0, 1.0, 2.0, 3.0, 2.0, 1.0]]


def test_figures_of_all_ranks_add_up_and_weigh_by_terms():
    found = JointMicroBatches.of_ranks(RANKS)
    assert (found.norm2, found.seen, found.terms, found.rows) == (0.75, [32.0, 12.0], [8.0, 4.0], [4.0, 3.0])
    assert len(RANKS[0]) == num_figures(2)
    w, m, g2 = (8 / 12, 4 / 12), (4, 3), (32 / 64, 12 / 16)
    spread = sum(one * (1 - one) / rows for one, rows in zip(w, m, strict=True))
    squares = sum(one**2 / rows for one, rows in zip(w, m, strict=True))
    expected = window_noise(sum(one * norm for one, norm in zip(w, g2, strict=True)), 0.75, spread, squares, 2)
    found = JointMicroBatches.of_ranks(RANKS).noise()
    assert vars(found) == pytest.approx(vars(expected), rel=1e-12)
    with_none = JointMicroBatches(0.75, [32.0, math.nan, 12.0], [8.0, 0.0, 4.0], [4.0, 4.0, 3.0])
    assert with_none.noise() == JointMicroBatches.of_ranks(RANKS).noise()
    assert JointMicroBatches(0.0, [0.0, 0.0], [0.0, 0.0], [4.0, 4.0]).noise() is None
    assert JointMicroBatches(1.0, [1.0, 0.0], [4.0, 0.0], [4.0, 4.0]).noise() is None


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_rank_that_shows_nothing_leaves_the_window_without_anything_to_say(bad):
    found = JointMicroBatches.of_ranks([RANKS[0], [bad] * 7])
    assert found.noise() is None
    assert found.noise_of_sums() is None


@pytest.mark.parametrize("terms", [1e200, 1.7e308])
def test_counts_as_large_as_they_may_be_raise_nothing(terms):
    found = JointMicroBatches.of_ranks([[1.0, 1e300, 1e308, terms, terms, 2.0, 2.0]] * 2).noise()
    assert found is None or math.isfinite(found.trace)


def test_sums_so_far_count_the_rows_of_all_ranks_and_only_where_they_are_the_terms():
    rows = JointMicroBatches(0.75, [32.0, 60.0], [4.0, 3.0], [4.0, 3.0])
    assert rows.noise_of_sums() == from_partial_sums([32.0, 60.0], [4.0, 3.0])
    assert JointMicroBatches(0.75, [32.0, 60.0], [8.0, 4.0], [4.0, 3.0]).noise_of_sums() is None
