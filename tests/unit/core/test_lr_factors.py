"""Schedules by progress: the values of paper eq. 10 and of the recipes', and what any of them keeps to."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimtab.core.batch_rule import factor_of, warmup_cosine, warmup_linear

progresses = st.floats(0, 1)


@pytest.mark.parametrize(
    ("progress", "factor"),
    [(0.0, 0.0), (0.0125, 0.25), (0.025, 0.5), (0.05, 1.0), (0.525, 0.55), (1.0, 0.1), (2.0, 0.1), (-1.0, 0.0)],
)
def test_values_by_hand(progress, factor):
    assert warmup_cosine(progress) == pytest.approx(factor, abs=1e-15)


@given(st.floats(0.001, 0.5), st.floats(0, 1))
def test_it_is_continuous_where_the_warm_up_ends(warmup, final):
    assert warmup_cosine(math.nextafter(warmup, 0), warmup, final) == pytest.approx(1, abs=1e-12)
    assert warmup_cosine(warmup, warmup, final) == 1
    assert warmup_cosine(1, warmup, final) == pytest.approx(final, abs=1e-15)


@pytest.mark.parametrize(
    ("progress", "factor"),
    [(0.0, 0.0), (0.05, 0.5), (0.1, 1.0), (0.325, 0.8550), (0.55, 0.505), (0.775, 0.1550), (1.0, 0.01), (1.7, 0.01)],
)
def test_a_cosine_of_another_warm_up_and_end(progress, factor):
    assert warmup_cosine(progress, 0.1, 0.01) == pytest.approx(factor, abs=1e-4)


@pytest.mark.parametrize(
    ("progress", "factor"),
    [(0.0, 0.0), (0.05, 0.5), (0.1, 1.0), (0.55, 0.5), (0.91, 0.1), (0.991, 0.01), (1.0, 0.01), (1.7, 0.01)],
)
def test_a_straight_line_by_hand(progress, factor):
    assert warmup_linear(progress, 0.1, 0.01) == pytest.approx(factor)


@pytest.mark.parametrize(
    ("schedule", "warmup", "progress", "factor"),
    [
        ("warmup_cosine", None, 0.025, 0.5),
        ("warmup_cosine", 0.2, 0.1, 0.5),
        ("warmup_cosine", 0.0, 0.0, 1.0),
        ("warmup_linear", None, 0.525, 0.5),
        ("warmup_linear", 0.2, 0.6, 0.5),
        ("warmup_linear", 0.2, 1.0, 0.01),
    ],
)
def test_a_plans_schedule_is_found_by_its_name(schedule, warmup, progress, factor):
    assert factor_of(schedule, progress, warmup) == pytest.approx(factor)
