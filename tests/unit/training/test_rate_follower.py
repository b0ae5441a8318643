"""The learning rate that follows the batch: a rise over some windows, a short window without consequences."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from trimtab.techniques.learning_rate import RateFollower, is_scale_invariant


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


def test_a_fall_is_taken_at_once():
    follower = RateFollower("linear")
    level_after(follower, 16.0, 60)
    follower.applied(16.0, 8.0)
    assert factor(follower, 8.0) == 8.0
    assert factor(follower, 16.0) == pytest.approx(8.0 * 2**0.1)


def test_a_loaders_short_last_window_costs_no_level():
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
    """As one that is made so to be measured, of which several follow each other: the rate does not jump for them."""
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
