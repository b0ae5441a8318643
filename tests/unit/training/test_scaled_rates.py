"""Rates that are scaled only inside the block."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim.lr_scheduler import ExponentialLR

import trimtab
from trimtab.plans.plan import Plan
from trimtab.techniques.learning_rate import scaled_rates


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


SAID = r"scheduler\.step\(\) after run\.step\(\)"


def scheduled_in_a_hook(optimizer):
    """Halve the rates after every step, from within it."""
    schedule = ExponentialLR(optimizer, 0.5)
    optimizer.register_step_post_hook(lambda *_: schedule.step())
    return optimizer


def test_a_rate_that_a_hook_changes_beside_a_factor_is_put_back_with_a_warning():
    optimizer = scheduled_in_a_hook(groups())
    with pytest.warns(UserWarning, match=SAID), scaled_rates(optimizer, 3.0):
        optimizer.step()
    assert rates(optimizer) == [0.1, 0.3]


def test_rates_stand_again_where_that_warning_is_an_error():
    optimizer = scheduled_in_a_hook(groups())
    with pytest.raises(UserWarning, match=SAID), scaled_rates(optimizer, 3.0):  # as all of these tests have it
        optimizer.step()
    assert rates(optimizer) == [0.1, 0.3]


def test_without_a_factor_a_hook_may_change_the_rates():
    optimizer = scheduled_in_a_hook(groups())
    with scaled_rates(optimizer, 1.0):
        optimizer.step()
    assert rates(optimizer) == [0.05, 0.15]


def test_a_factor_within_a_factor_is_no_change_of_the_rates():
    optimizer = groups()
    with scaled_rates(optimizer, 3.0):
        with scaled_rates(optimizer, 2.0):
            optimizer.step()
        assert rates(optimizer) == [0.1 * 3.0, 0.3 * 3.0]
    assert rates(optimizer) == [0.1, 0.3]


def test_a_run_says_it_too_and_trains_at_the_plans_rate():
    model = torch.nn.Linear(3, 2)
    optimizer, seen = torch.optim.SGD(model.parameters(), lr=0.1), []
    optimizer.register_step_pre_hook(lambda *_: seen.extend(rates(optimizer)))
    scheduled_in_a_hook(optimizer)
    with trimtab.start(model, optimizer, Plan.fixed(4, learning_rate_scale=2.0)) as run:
        for _ in range(2):
            with pytest.warns(UserWarning, match=SAID):
                run.train_step(run.window(torch.ones(4, 3)), lambda model, batch: model(batch).mean())
            assert rates(optimizer) == [0.1]
        assert run.applied_steps == 2
    assert seen == [0.2, 0.2]


def test_rates_stand_again_where_a_group_was_added_meanwhile():
    first, second = (torch.nn.Parameter(torch.zeros(1)) for _ in range(2))
    optimizer = torch.optim.SGD([first], lr=0.1)
    with scaled_rates(optimizer, 2.0):
        optimizer.add_param_group({"params": [second], "lr": 0.3})
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.3]
