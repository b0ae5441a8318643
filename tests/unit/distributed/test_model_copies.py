"""Copies of a model and its optimizer: tied to each other, and to nothing else."""

from __future__ import annotations

import torch
from torch import nn

from trimtab.distributed.dry_run import copied_together


class Counting(torch.optim.SGD):
    """With things of its own, which torch does not copy."""

    def __init__(self, parameters):
        super().__init__(parameters, lr=0.1, momentum=0.9)
        self.calls, self.average = 0, torch.zeros(2)

    def step(self, closure=None):
        self.calls += 1
        self.average += 1
        return super().step(closure)


def loop():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    model[2].weight = model[0].weight
    optimizer = Counting(model.parameters())
    model(torch.randn(8, 4)).square().sum().backward()
    optimizer.step()
    return model, optimizer


def test_a_step_of_the_copies_is_a_step_of_the_originals_and_moves_them_alone():
    model, optimizer = loop()
    torch.optim.lr_scheduler.StepLR(optimizer, 1)  # stands between a loop and its optimizer's step
    before = [p.detach().clone() for p in model.parameters()]
    own, its = copied_together(model, optimizer)
    assert own[0].weight is own[2].weight
    assert [id(p) for group in its.param_groups for p in group["params"]] == [id(p) for p in own.parameters()]
    for parameter in own.parameters():
        parameter.grad = torch.ones_like(parameter)
    its.step()
    assert (its.calls, optimizer.calls) == (2, 1)
    assert optimizer.average.tolist() == [1, 1]
    assert all(torch.equal(p, was) for p, was in zip(model.parameters(), before, strict=True))
    assert not any(torch.equal(p, was) for p, was in zip(own.parameters(), before, strict=True))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), own.parameters(), strict=True))
