"""The objective of the paper's equation 3: bounds, invariances, and no silent zero for what is unknown."""

from __future__ import annotations

import math
import sys

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from raising import raises

from trimtab.core.errors import ValueGivenError
from trimtab.core.objective import ASSUMED_REFERENCE, Budget, Cost, Objective, Reference

magnitudes = st.floats(1e-9, 1e15)
costs = st.builds(Cost, magnitudes, magnitudes, magnitudes)
shares = st.floats(0, 1e6)
weights = st.tuples(shares, shares, shares).filter(lambda given: sum(given) > 1e-3)
TERMS = ("time_s", "memory_bytes", "energy_j")


def with_term(cost: Cost, term: str, value: float | None) -> Cost:
    return Cost(**{name: getattr(cost, name) for name in TERMS} | {term: value})


@given(weights, costs)
def test_the_reference_costs_one(given_weights, reference):
    assert math.isclose(Objective(*given_weights).score(reference, reference), 1.0, rel_tol=4 * sys.float_info.epsilon)


@given(weights)
def test_weights_sum_to_one_and_keep_their_proportions(given_weights):
    objective = Objective(*given_weights)
    normalised = (objective.time, objective.memory, objective.energy)
    assert math.isclose(math.fsum(normalised), 1.0, rel_tol=1e-15)
    total = sum(given_weights)
    assert normalised == pytest.approx([weight / total for weight in given_weights], rel=1e-14)
    assert Objective(*normalised) == objective


@given(weights, costs, costs, st.sampled_from(TERMS), st.floats(1e-6, 1e6))
def test_units_do_not_matter(given_weights, cost, reference, term, unit):
    objective = Objective(*given_weights)
    ours, theirs = (with_term(c, term, getattr(c, term) * unit) for c in (cost, reference))
    assert math.isclose(objective.score(ours, theirs), objective.score(cost, reference), rel_tol=1e-12)


@given(weights, costs, costs, st.integers(0, 2), st.floats(1.01, 100))
def test_more_of_anything_weighted_costs_more(given_weights, cost, reference, index, factor):
    objective = Objective(*given_weights)
    term = TERMS[index]
    before = objective.score(cost, reference)
    after = objective.score(with_term(cost, term, getattr(cost, term) * factor), reference)
    assert after >= before
    share = given_weights[index] / sum(given_weights) * getattr(cost, term) / getattr(reference, term)
    assume(share > 1e-9 * before)
    assert after > before


@pytest.mark.parametrize(
    ("objective", "cost", "expected"),
    [
        (Objective(), Cost(5.0), 0.5),
        (Objective(time=2, memory=1, energy=1), Cost(5.0, 200.0, 3.0), 0.25 + 0.5 + 0.25),
        (Objective(time=0, memory=1), Cost(99.0, 25.0), 0.25),
        (Objective(time=1, energy=3), Cost(20.0, None, 3.0), 0.5 + 0.75),
        (Objective(), Cost(0.0), 0.0),
        (Objective(), Cost(math.inf), math.inf),
        (Objective(time=1, memory=1), Cost(math.inf, 1.0), math.inf),
    ],
)
def test_score_by_hand(objective, cost, expected):
    assert objective.score(cost, Cost(10.0, 100.0, 3.0)) == expected


@given(costs, st.sampled_from(TERMS), st.booleans())
def test_an_unknown_term_is_an_error_only_where_it_is_weighted(cost, term, ours):
    name = term.partition("_")[0]
    unknown = with_term(cost, term, None)
    pair = (unknown, cost) if ours else (cost, unknown)
    others = dict.fromkeys(("time", "memory", "energy"), 1.0) | {name: 0.0}
    assert math.isclose(Objective(**others).score(*pair), 1.0, rel_tol=1e-15)
    with raises(ValueGivenError, code="objective.not_measured") as caught:
        Objective(**others | {name: 1e-6}).score(*pair)
    assert caught.value.field == name


@pytest.mark.parametrize("theirs", [0.0, -1.0, math.inf, math.nan])
def test_a_reference_that_is_no_yardstick_is_an_error(theirs):
    with raises(ValueGivenError, code="objective.not_measured", field="time"):
        Objective().score(Cost(1.0), Cost(theirs))


@pytest.mark.parametrize("given_weights", [(-1, 1, 1), (1, math.nan, 0), (1, 0, math.inf), (0, 0, 0), (True, 0, 0)])
def test_weights_that_are_none_are_refused(given_weights):
    with pytest.raises(ValueGivenError):
        Objective(*given_weights)


@pytest.mark.parametrize(
    ("weights", "left"), [((1, 1, 2), (1, 1)), ((1e-20, 0, 1), (1, 0)), ((0, 1e-20, 1), (0, 1)), ((1, 0, 0), (1, 0))]
)
def test_without_energy_the_other_weights_are_left_however_small(weights, left):
    assert Objective(*weights).without_energy() == Objective(*left)
    with raises(ValueGivenError, code="energy.no_meter", field="energy"):
        Objective(0, 0, 3).without_energy()


@pytest.mark.parametrize(
    ("memory", "expected"), [("8GiB", 8 * 2**30), ("8 gb", 8 * 10**9), (1e9, 10**9), (1, 1), (None, None)]
)
def test_budget_memory_is_bytes(memory, expected):
    budget = Budget(memory=memory)
    assert budget.memory_bytes == expected
    assert budget.memory == expected


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("memory", value) for value in (0, -1, "0", "lots", "8XB", math.nan, math.inf, True, 1e300, "")),
        *((name, value) for name in ("time", "energy") for value in (0, -1.0, math.inf, math.nan, "1", True)),
    ],
)
def test_a_budget_that_is_no_limit_is_refused_by_name(field, value):
    with pytest.raises(ValueGivenError) as caught:
        Budget(**{field: value})
    assert caught.value.field == field


def test_a_reference_says_whether_it_was_declared():
    assert ASSUMED_REFERENCE.describe() == "assumed fp32 eager"
    assert Reference("bf16", clip_norm=0.5).describe() == "declared bf16 eager, clip 0.5"


@pytest.mark.parametrize("values", [{"precision": "fp8"}, {"clip_norm": 0}, {"clip_norm": math.inf}])
def test_a_reference_that_is_no_loop_is_refused(values):
    with raises(ValueGivenError, code="value.invalid"):
        Reference(**values)


limits = st.none() | st.integers(1, 100)


@given(limits, limits, limits, limits)
def test_a_budget_is_within_another_where_whatever_meets_it_meets_both(memory, time, other_memory, other_time):
    ours, theirs = Budget(memory=memory, time=time), Budget(memory=other_memory, time=other_time)
    assert not ours.is_within(Budget(energy=2.0))

    def meets(budget: Budget, size: int, seconds: int) -> bool:
        return size <= (budget.memory or math.inf) and seconds <= (budget.time or math.inf)

    costs = [(size, seconds) for size in (*range(1, 101, 9), 1000) for seconds in (1, 50, 100, 1000)]
    costs += [(memory or 1000, time or 1000)]
    assert ours.is_within(theirs) == all(meets(theirs, *cost) for cost in costs if meets(ours, *cost))
