"""Warm-up and cosine: the values of paper eq. 10, and rates that are scaled only inside the block."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trimtab.runtime.schedule import FINAL_FRACTION, WARMUP_FRACTION, scaled_rates, warmup_cosine

progresses = st.floats(0, 1)


@pytest.mark.parametrize(
    ("progress", "factor"),
    [(0.0, 0.0), (0.0125, 0.25), (0.025, 0.5), (0.05, 1.0), (0.525, 0.55), (1.0, 0.1), (2.0, 0.1), (-1.0, 0.0)],
)
def test_values_by_hand(progress, factor):
    assert warmup_cosine(progress) == pytest.approx(factor, abs=1e-15)


@given(progresses, progresses)
def test_it_rises_to_the_base_rate_then_falls_to_a_tenth(one, other):
    low, high = sorted((one, other))
    unit = 1e-15  # neighbouring progresses may differ by a rounding
    assert 0 <= warmup_cosine(low) <= 1
    if high <= WARMUP_FRACTION:
        assert warmup_cosine(low) <= warmup_cosine(high) + unit
    elif low >= WARMUP_FRACTION:
        assert warmup_cosine(low) + unit >= warmup_cosine(high) >= FINAL_FRACTION - unit


@given(st.floats(0.001, 0.5), st.floats(0, 1))
def test_it_is_continuous_where_the_warm_up_ends(warmup, final):
    assert warmup_cosine(math.nextafter(warmup, 0), warmup, final) == pytest.approx(1, abs=1e-12)
    assert warmup_cosine(warmup, warmup, final) == 1
    assert warmup_cosine(1, warmup, final) == pytest.approx(final, abs=1e-15)


def groups():
    parameters = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
    return torch.optim.SGD([{"params": parameters[:1], "lr": 0.1}, {"params": parameters[1:], "lr": 0.3}])


def rates(optimizer):
    return [group["lr"] for group in optimizer.param_groups]


@given(st.floats(1e-6, 1e6))
def test_rates_are_scaled_inside_and_stand_again_after(factor):
    optimizer = groups()
    with scaled_rates(optimizer, factor):
        assert rates(optimizer) == [0.1 * factor, 0.3 * factor]
    assert rates(optimizer) == [0.1, 0.3]


def test_rates_stand_again_after_an_error():
    optimizer = groups()
    with pytest.raises(ZeroDivisionError), scaled_rates(optimizer, 3.0):
        1 / 0  # noqa: B018
    assert rates(optimizer) == [0.1, 0.3]


def test_a_tensor_rate_is_not_changed_in_place():
    optimizer = groups()
    rate = optimizer.param_groups[0]["lr"] = torch.tensor(0.5)
    with scaled_rates(optimizer, 2.0):
        assert float(optimizer.param_groups[0]["lr"]) == 1.0
    assert optimizer.param_groups[0]["lr"] is rate
    assert float(rate) == 0.5
