"""Rates that are scaled only inside the block."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trimtab.runtime.schedule import scaled_rates


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
