"""Modules that a loss runs beside the model: which are found, and that they are afterwards as they were."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from trimtab.measure.bystanders import Bystanders, modules_of

OTHER = nn.BatchNorm1d(2)


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


class Owner:
    """What has a loss as a method, and the module beside it."""

    def __init__(self, other):
        self.parts = {"other": [other]}

    def loss(self, model, batch):
        return self.parts["other"][0](model(batch)).mean()

    __call__ = loss


class Called:
    """What refers to the module in the code it is called by."""

    def __call__(self, model, batch):
        return OTHER(model(batch)).mean()


def called(model, batch):
    return OTHER(model(batch)).mean()


def loss_of(model, batch, other):
    return other(model(batch)).mean()


def closure(other):
    return lambda model, batch: loss_of(model, batch, other)


def by_default(model, batch, other=OTHER):
    return loss_of(model, batch, other)


def by_keyword(model, batch, *, other=OTHER):
    return loss_of(model, batch, other)


LOSSES = {
    "a global": called,
    "one of a function it calls": lambda model, batch: called(model, batch),
    "a closure": closure(OTHER),
    "a default": by_default,
    "a default of a keyword": by_keyword,
    "a partial": functools.partial(loss_of, other=OTHER),
    "a method": Owner(OTHER).loss,
    "an object that is called": Owner(OTHER),
    "the code of one": Called(),
}


@pytest.mark.parametrize("loss_fn", LOSSES.values(), ids=LOSSES)
def test_what_a_loss_moves_is_put_back(loss_fn):
    model, batch = nn.Linear(3, 2), torch.randn(5, 3)
    OTHER.zero_grad(set_to_none=True)
    OTHER.weight.grad = torch.ones(2)
    gradient, before = OTHER.weight.grad, {name: value.clone() for name, value in OTHER.state_dict().items()}
    assert list(modules_of(loss_fn)) == [OTHER]
    with Bystanders(loss_fn, model, sgd(model)):
        loss_fn(model, batch).backward()
        assert int(OTHER.num_batches_tracked) == 1 + int(before["num_batches_tracked"])
        assert OTHER.bias.grad is not None
    assert all(torch.equal(value, before[name]) for name, value in OTHER.state_dict().items())
    assert OTHER.weight.grad is gradient
    assert torch.equal(gradient, torch.ones(2))
    assert OTHER.bias.grad is None


def test_the_model_itself_is_none_of_them():
    model = nn.BatchNorm1d(2)
    with Bystanders(closure(model), model, sgd(model)):
        model(torch.randn(5, 2)).sum().backward()
    assert int(model.num_batches_tracked) == 1
    assert model.weight.grad is not None


def test_a_name_that_is_not_bound_yet_is_no_module():
    def loss_fn(model, batch):
        return later(model(batch))

    assert list(modules_of(loss_fn)) == []
    later = nn.Identity()
    assert list(modules_of(loss_fn)) == [later]


def test_an_average_of_weights_that_a_hook_keeps_is_put_back():
    model = nn.Linear(3, 2)
    optimizer, average = sgd(model), AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    average.update_parameters(model)
    optimizer.register_step_post_hook(lambda *_: average.update_parameters(model))
    before = {name: value.clone() for name, value in average.state_dict().items()}
    with Bystanders(lambda model, batch: model(batch).sum(), model, optimizer):
        model(torch.randn(5, 3)).sum().backward()
        optimizer.step()
        assert int(average.n_averaged) == 2
        assert not torch.equal(average.module.weight, before["module.weight"])
    assert all(torch.equal(value, before[name]) for name, value in average.state_dict().items())
