"""A loss of zero where nothing counts: with a gradient for what the mean over it comes from, and for nothing else."""

from __future__ import annotations

import pytest
import torch
from raising import raises
from torch import nn

from trimtab.core.errors import ValueGivenError
from trimtab.integrations.ignored_labels import counts_nothing
from trimtab.integrations.lightning import zero_loss


def mean_over_nothing(model: nn.Module) -> torch.Tensor:
    losses, weights = model(torch.ones(2, 3)).square(), torch.zeros(2, 1)
    return (losses * weights).sum() / weights.sum()


def test_its_gradient_is_zero_where_that_of_the_mean_is_no_number():
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    mean_over_nothing(model).mul(0.0).backward()
    assert all(bool(p.grad.isnan().any()) for p in model.parameters())
    model.zero_grad()
    loss = zero_loss(mean_over_nothing(model))
    loss.backward()
    assert (loss.item(), loss.shape) == (0.0, ())
    assert [int(p.grad.count_nonzero()) for p in model.parameters()] == [0, 0, 0, 0]
    model, beside = nn.Linear(3, 1), nn.Linear(3, 1)
    model.bias.requires_grad_(False)
    zero_loss(mean_over_nothing(model)).backward()
    assert [p.grad is None for p in (model.weight, model.bias, *beside.parameters())] == [False, True, True, True]
    with raises(ValueGivenError, code="loss.no_labels", field="loss"):
        zero_loss(torch.zeros((), requires_grad=True))


def test_weights_of_any_kind_and_value_are_of_no_account():
    """In half precision, of no dimension, and of no finite value: of none an element is read."""

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.full((3, 1), float("inf"), dtype=torch.bfloat16))
            self.scale = nn.Parameter(torch.tensor(2.0))

        def forward(self, inputs):
            return (inputs @ self.weight.float()) * self.scale

    model = Odd()
    loss = zero_loss(mean_over_nothing(model))
    loss.backward()
    assert loss.item() == 0.0
    assert [p.grad.dtype for p in model.parameters()] == [torch.bfloat16, torch.float32]
    assert [int(p.grad.count_nonzero()) for p in model.parameters()] == [0, 0]


@pytest.mark.parametrize(
    ("count", "is_nothing"), [(0, True), (1, False), (0.25, False), (0.0, True), (float("nan"), False)]
)
def test_weights_may_sum_to_less_than_one(count, is_nothing):
    assert counts_nothing(count) is is_nothing
    assert counts_nothing(torch.tensor(count)) is is_nothing
