"""Policies for k: bounded, monotone, free of units, and silent while nothing is known."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from raising import raises

from trimtab.adaptive_batch.batch_size_policy import (
    MOST_ERROR,
    NoiseEstimate,
    PolicyInput,
    decide,
    gain,
    largest_k,
    throughput_per_memory,
)
from trimtab.adaptive_batch.step_time_model import StepTimes
from trimtab.core.batch_rule import POLICIES, BatchRule
from trimtab.core.errors import ValueGivenError
from trimtab.core.serialization import from_json, to_json

positive = st.floats(1e-6, 1e6)
rounding = st.just(0.0) | st.floats(-1e-6, -1e-12)  # of estimates that are unbiased, where nothing is there
errors = st.just(0.0) | st.floats(1e-9, 0.5)
units = st.integers(1, 5)
powers_of_two = st.integers(-20, 20).map(lambda power: 2.0**power)
KNOWN = NoiseEstimate(trace=640.0, norm2=1.0, norm2_error=0.1, num_windows=100)
STANDING = PolicyInput(k=4, unit=1, micro_batch_samples=8.0, noise=KNOWN, times=StepTimes(0.1, 0.05))


def rule_of(policy: str, k_max: int = 64) -> BatchRule:
    trials = ((k_max, 10.0, 3.0), (1, 4.0, 2.0)) if policy == "throughput_per_memory" else ()
    target = 10.0 if policy in ("paper", "variance") else None
    return BatchRule(policy, k_max=k_max, sigma2_target=target, trials=trials)


@st.composite
def standings(draw):
    unit = draw(units)
    return PolicyInput(
        k=unit * draw(st.integers(1, 12)),
        unit=unit,
        micro_batch_samples=draw(st.floats(1, 512)),
        num_ranks=draw(st.integers(1, 64)),
        noise=NoiseEstimate(
            draw(positive | rounding), draw(positive | rounding), draw(errors), draw(st.integers(0, 200))
        ),
        times=StepTimes(draw(positive), draw(st.just(0.0) | positive)),  # below normal floats all is rounded otherwise
        normalises=draw(st.booleans()),
    )


@given(standings(), st.sampled_from(POLICIES), st.integers(1, 128))
def test_k_stays_in_its_bounds(standing, policy, k_max):
    rule = rule_of(policy, k_max)
    standing = replace(standing, k=min(standing.k, largest_k(rule, standing.unit)))
    k = decide(rule, standing).k
    if policy == "throughput_per_memory":  # a batch is cut: there are no whole ones to keep to
        assert 1 <= k <= k_max
        return
    assert k % standing.unit == 0
    assert 1 <= k <= largest_k(rule, standing.unit)
    if policy != "paper":
        assert k <= 2 * standing.k
        assert k >= standing.k / 2


@given(standings(), powers_of_two, powers_of_two)
def test_no_unit_of_loss_or_time_changes_goodput_or_the_norm_test(standing, loss, time):
    noise, times = standing.noise, standing.times
    scaled = replace(
        standing,
        noise=NoiseEstimate(noise.trace * loss, noise.norm2 * loss, noise.norm2_error * loss, noise.num_windows),
        times=StepTimes(times.micro_s * time, times.fixed_s * time),
    )
    for policy in ("goodput", "norm_test"):
        rule = rule_of(policy)
        ours, theirs = decide(rule, standing), decide(rule, scaled)
        assert (ours.k, ours.wanted) == (theirs.k, theirs.wanted)


@given(
    positive,
    positive,
    st.floats(1, 100),
    st.floats(1, 100),
    st.sampled_from(["goodput", "norm_test", "variance", "paper"]),
)
def test_more_noise_never_asks_for_less(trace, norm2, factor, rows, policy):
    rule, noise = rule_of(policy), NoiseEstimate(trace, norm2, 0.0, 100)
    standing = replace(STANDING, noise=noise, micro_batch_samples=rows)
    more = replace(standing, noise=replace(noise, trace=trace * factor))
    assert decide(rule, more).wanted >= decide(rule, standing).wanted * (1 - 1e-12)


@given(st.integers(1, 64), positive, positive, st.booleans())
def test_goodput_settles_at_the_best_whole_k(start, scale, fixed_s, normalises):
    rule, noise = rule_of("goodput"), replace(KNOWN, trace=scale)
    standing = replace(STANDING, k=start, noise=noise, times=StepTimes(1.0, fixed_s), normalises=normalises)
    for _ in range(20):
        standing = replace(standing, k=decide(rule, standing).k)
    best = min(standing.relative_time(k, scale) for k in range(1, 65))
    assert standing.relative_time(standing.k, scale) <= 1.0101 * best


@pytest.mark.parametrize(
    ("changes", "code", "figures"),
    [
        ({"noise": None}, "noise.too_few_steps", "0 of 10 steps"),
        ({"noise": replace(KNOWN, num_windows=9)}, "noise.too_few_steps", "9 of 10 steps"),
        ({"noise": replace(KNOWN, norm2=-1.0, norm2_error=5.0)}, "noise.norm_unknown", ""),
        ({"noise": replace(KNOWN, norm2=0.0, norm2_error=5.0)}, "noise.norm_unknown", ""),
        ({"noise": replace(KNOWN, norm2_error=0.26)}, "noise.imprecise", "26%, above 25%"),
        ({"noise": replace(KNOWN, norm2_error=math.inf)}, "noise.imprecise", "above 25%"),
        ({"noise": replace(KNOWN, norm2_error=math.nan)}, "noise.imprecise", "above 25%"),
        ({"times": None}, "time.unknown", ""),
    ],
)
@pytest.mark.parametrize("k", [6, 9])
def test_goodput_holds_while_it_is_uncertain(changes, code, figures, k):
    decision = decide(rule_of("goodput"), replace(STANDING, k=k, **changes))
    assert decision.k == k
    assert decision.code == code
    assert figures in decision.reason


@pytest.mark.parametrize("norm2", [1.0, 0.0, -1.0])
def test_a_gradient_lost_in_its_noise_is_given_more_micro_batches(norm2):
    """The noise scale is not known, but that it is 640,000 / (max(norm2, 0) + 2 * 4.5) rows at the least."""
    lost = NoiseEstimate(trace=640_000.0, norm2=norm2, norm2_error=4.5, num_windows=100)
    standing = replace(STANDING, noise=lost)
    least = 640_000.0 / (max(norm2, 0.0) + 9.0)
    wanted = {"goodput": math.sqrt(2 * least / 8 * 0.5), "norm_test": least / (8 * 0.9**2)}
    for policy, k in wanted.items():
        decision = decide(rule_of(policy), standing)
        assert decision.k == 8
        assert decision.wanted == pytest.approx(k)
        assert decision.code == "noise.at_least"
        assert decide(rule_of(policy), replace(standing, noise=replace(lost, norm2_error=math.inf))).k == 4


def test_micro_batches_that_no_noise_asks_for_are_given_up():
    """At the most the scale is 640 / (1 - 2 * 0.3) rows: k* = 14.1; and with nothing fixed about a window it is one."""
    standing = replace(STANDING, k=32, noise=replace(KNOWN, norm2_error=0.3))
    decision = decide(rule_of("goodput"), standing)
    assert (decision.k, decision.wanted) == (16, pytest.approx(math.sqrt(200.0)))
    assert decision.code == "noise.at_most"
    assert decide(rule_of("goodput"), replace(standing, k=28)).k == 14
    lost = replace(standing, noise=replace(KNOWN, norm2=-1.0))
    assert decide(rule_of("goodput"), lost).k == 32
    free = replace(lost, times=StepTimes(0.1, 0.0))  # as good as any other k, should the noise be infinite
    assert decide(rule_of("goodput"), free).k == 32


@given(standings(), st.sampled_from(["goodput", "norm_test"]), st.integers(1, 128), positive)
def test_uncertain_figures_move_k_less_than_certain_ones(standing, policy, k_max, error):
    rule = rule_of(policy, k_max)
    standing = replace(standing, k=min(standing.k, largest_k(rule, standing.unit)))
    unsure = replace(standing, noise=replace(standing.noise, norm2_error=error))
    assume(unsure.noise.relative_error > MOST_ERROR)
    k = decide(rule, unsure).k
    if standing.noise.norm2 > 0:
        certain = decide(rule, replace(standing, noise=replace(standing.noise, norm2_error=0.0))).k
        assert min(standing.k, certain) <= k <= max(standing.k, certain)
    elif standing.noise.trace > 0:  # it may be infinite, which asks for all there is
        assert k >= standing.k


@pytest.mark.parametrize(
    "noise",
    [NoiseEstimate(0.0, 0.0, 0.0, 20), NoiseEstimate(1.0, 0.0, 0.0, 20), NoiseEstimate(0.0, -1.0, math.nan, 20)],
)
@pytest.mark.parametrize("fixed_s", [0.0, 1.0])
@pytest.mark.parametrize("policy", ["goodput", "norm_test"])
def test_gradients_of_zero_decide_nothing_or_one(noise, fixed_s, policy):
    standing = replace(STANDING, noise=noise, times=StepTimes(1.0, fixed_s))
    rule = rule_of(policy)
    assert decide(rule, standing).k in ((2,) if noise.trace == 0 else (4,))  # down by two at a time
    found = gain(rule, standing, 4)
    assert found is None or found >= 0


def test_the_gain_is_that_of_the_best_k_with_the_least_noise():
    rule = rule_of("goodput", k_max=16)
    found = gain(rule, STANDING, 1)
    best = min(STANDING.relative_time(k, 640.0) for k in range(1, 17))
    assert found == pytest.approx(1 - best / STANDING.relative_time(1, 640.0))
    assert gain(rule, STANDING, 9) == pytest.approx(0.0, abs=1e-3)
    assert gain(rule_of("norm_test"), STANDING, 1) is None
    assert gain(rule, replace(STANDING, times=None), 1) is None
    grown = KNOWN.grown(3.0)
    assert (grown.scale, grown.relative_error) == pytest.approx((3 * KNOWN.scale, KNOWN.relative_error))
    rule = rule_of("goodput", k_max=16)
    unsure = replace(STANDING, noise=replace(KNOWN, norm2_error=1.0))
    assert 0.01 < gain(rule, unsure, 1) < gain(rule, STANDING, 1)
    assert gain(rule, unsure, 4) is None  # the best is less or more, nobody knows
    surer = replace(STANDING, noise=replace(KNOWN, norm2_error=0.3))
    more = rule_of("goodput", k_max=40)
    assert 0.01 < gain(more, surer, 40) < gain(more, STANDING, 40)
    assert gain(rule, replace(STANDING, noise=replace(KNOWN, norm2_error=math.inf)), 1) is None


def test_k_changes_where_at_least_one_percent_is_gained():
    times = StepTimes(1.0, 1.0)
    scale = 8.0 * 4.2**2 / 2  # k* = 4.2 at b = 8
    decision = decide(rule_of("goodput"), replace(STANDING, noise=replace(KNOWN, trace=scale), times=times, k=5))
    assert decision.wanted == pytest.approx(4.2)
    assert decision.k == 5
    few = replace(
        STANDING, k=1, noise=replace(KNOWN, trace=800.0), times=StepTimes(1.0, 0.02), normalises=True
    )  # N/b = 100
    assert few.relative_time(1, 800.0) / few.relative_time(2, 800.0) < 1.01
    assert few.relative_time(1, 800.0) / few.relative_time(8, 800.0) > 1.015
    decision = decide(rule_of("goodput"), few)
    assert decision.wanted == pytest.approx(math.cbrt(0.02 * 150.0**2))
    assert decision.k == 2
    assert decision.code == "k.optimal"
    assert all(figure in decision.reason for figure in ("k = 8", "1.6% faster"))
    there = replace(few, k=2)
    assert decide(rule_of("goodput"), there).k == 2  # as near to the best as a change is worth


@pytest.mark.parametrize(("trace", "fixed_s"), [(64.0, 0.0), (0.0, 0.05), (-1e-9, 0.05)])
def test_without_a_fixed_part_or_without_noise_a_single_micro_batch_is_best(trace, fixed_s):
    standing = replace(STANDING, k=2, noise=replace(KNOWN, trace=trace), times=StepTimes(1.0, fixed_s))
    assert decide(rule_of("goodput"), standing).k == 1
    assert trace > 0 or decide(rule_of("norm_test"), standing).k == 1


def test_other_policies_to_the_letter():
    rule = BatchRule("paper", k_max=16, sigma2_target=10.0, allowed=(4, 8))
    wanted = {10.0: 4, 400.0: 4, 401.0: 8, 1e9: 8}
    for trace, k in wanted.items():
        standing = replace(STANDING, k=1, noise=replace(KNOWN, trace=trace * 8 / 10))
        assert decide(rule, replace(standing, micro_batch_samples=8.0)).k == k
    unbounded = BatchRule("paper", k_max=16, sigma2_target=10.0)
    assert decide(unbounded, replace(STANDING, noise=replace(KNOWN, trace=8 * 55.0))).k == 6
    assert decide(unbounded, replace(STANDING, noise=replace(KNOWN, trace=8 * 1e6))).k == 16
    norm = BatchRule("norm_test", theta=0.5, k_max=64)
    assert decide(norm, replace(STANDING, k=16, noise=replace(KNOWN, trace=40.0))).k == 20  # 40 / (8 * 0.25)
    variance = BatchRule("variance", sigma2_target=10.0, k_max=64)
    assert decide(variance, replace(STANDING, k=4, num_ranks=2, noise=replace(KNOWN, trace=8 * 99.0))).k == 5
    assert throughput_per_memory({1: (100.0, 100.0), 2: (95.0, 60.0), 4: (80.0, 40.0), 8: (50.0, 35.0)}) == 4
    assert throughput_per_memory({1: (100.0, 100.0), 2: (50.0, 50.0)}) == 1


INVALID = {"policy": ["best", "paper", "variance", "throughput_per_memory"], "k": [0, 17], "k_max": [0, 2.0]}
INVALID |= {"theta": [0.0, math.nan], "min_windows": [1], "learning_rate": ["cubic", "none"], "allowed": [(4, 8)]}
INVALID |= {"trials": [((1, 1.0, 1.0),)]}
BY_MEMORY = [{"policy": "throughput_per_memory", "trials": (trial,)} for trial in ((0, 1.0, 1.0), (1, 1.0, 0.0))]
BY_VARIANCE = [
    {"policy": "variance", "sigma2_target": 0.0},
    {"policy": "paper", "sigma2_target": 1.0, "allowed": (4, 32)},
]
ALONE = [{name: value} for name, values in INVALID.items() for value in values]


@pytest.mark.parametrize("values", [*ALONE, *BY_MEMORY, *BY_VARIANCE])
def test_a_rule_that_cannot_be_is_refused(values):
    with raises(ValueGivenError, code="value.invalid"):
        BatchRule(**values)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_rule_is_a_value(policy):
    rule = rule_of(policy)
    assert from_json(BatchRule, to_json(rule)) == rule
