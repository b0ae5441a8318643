"""Learning rates that follow the batch size, and rates that are scaled only inside a block."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from small_loops import sgd
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR

import trimtab
from trimtab.plans.plan import Plan
from trimtab.techniques.learning_rate import RateFollower, is_scale_invariant, scaled_rates


def level_after(follower, ratio, windows, decided=None):
    for _ in range(windows):
        follower.applied(ratio, ratio if decided is None else decided)
    return factor(follower, ratio if decided is None else decided)


def factor(follower, ratio):
    return follower.factor(ratio, ratio)


@pytest.mark.parametrize(("rule", "most"), [("linear", 16.0), ("sqrt", 4.0), ("none", 1.0)])
def test_a_rise_takes_ten_windows_a_doubling(rule, most):
    follower = RateFollower(rule)
    assert factor(follower, 16.0) == pytest.approx(min(most, 2**0.1))
    assert level_after(follower, 16.0, 9) == pytest.approx(min(most, 2.0))
    assert level_after(follower, 16.0, 40) == most


def test_a_fall_is_taken_at_once_and_a_short_last_window_costs_no_level():
    follower = RateFollower("linear")
    level_after(follower, 16.0, 60)
    follower.applied(16.0, 8.0)
    assert factor(follower, 8.0) == 8.0
    assert factor(follower, 16.0) == pytest.approx(8.0 * 2**0.1)
    follower = RateFollower("linear")
    level_after(follower, 16.0, 60)
    assert follower.factor(1.0, 16.0) == 1.0
    follower.applied(1.0, 16.0)
    assert factor(follower, 16.0) == 16.0


def test_asking_changes_nothing():
    follower = RateFollower("linear")
    assert [factor(follower, 8.0) for _ in range(5)] == [pytest.approx(2**0.1)] * 5


@pytest.mark.parametrize("rule", ["linear", "sqrt", "none"])
def test_a_window_larger_than_decided_has_no_more_and_leaves_no_level(rule):
    follower = RateFollower(rule)
    for _ in range(20):
        assert follower.factor(3.0, 1.0) == 1.0
        follower.applied(3.0, 1.0)
    assert factor(follower, 1.0) == 1.0


def test_the_optimizer_chooses():
    parameters = nn.Linear(2, 2).parameters()
    assert RateFollower.for_optimizer("auto", torch.optim.SGD(parameters, 0.1)).rule == "linear"
    assert RateFollower.for_optimizer("auto", torch.optim.AdamW(nn.Linear(2, 2).parameters())).rule == "sqrt"
    assert RateFollower.for_optimizer("none", torch.optim.AdamW(nn.Linear(2, 2).parameters())).rule == "none"


class Sharded:
    """What a sharding engine puts around an optimizer."""

    def __init__(self, optim):
        self.optim = optim


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (torch.optim.SGD, False),
        (torch.optim.ASGD, False),
        (lambda found, lr: Sharded(torch.optim.SGD(found, lr)), False),
        (lambda found, lr: Sharded(torch.optim.AdamW(found, lr)), True),
        (torch.optim.AdamW, True),
        (torch.optim.RMSprop, True),
    ],
)
def test_all_but_sgd_divide_by_their_gradients_size(make, expected):
    assert is_scale_invariant(make(nn.Linear(2, 2).parameters(), lr=0.1)) is expected


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
        with scaled_rates(optimizer, 2.0):
            optimizer.step()
        assert rates(optimizer) == [0.1 * factor, 0.3 * factor]
    assert rates(optimizer) == [0.1, 0.3]
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
    with pytest.raises(UserWarning, match=SAID), scaled_rates(optimizer, 3.0):  # these tests make warnings errors
        optimizer.step()
    assert rates(optimizer) == [0.1, 0.3]
    with scaled_rates(optimizer, 1.0):  # without a factor a hook may change the rates
        optimizer.step()
    assert rates(optimizer) == [0.05, 0.15]


def test_a_run_says_it_too_and_trains_at_the_plans_rate():
    model = torch.nn.Linear(3, 2)
    optimizer, seen = sgd(model), []
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
