"""Float8 products on a GPU: near the gradient in bf16, faster for large layers, no wait for the device, undone."""

from __future__ import annotations

import pytest
import torch
from sync import without_waiting
from torch import nn

import trimtab
from trimtab.plans.plan import Plan

pytest.importorskip("torchao")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9), reason="needs float8 products"
    ),
]
WIDTH = 4096


def made():
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(4)]
    model = nn.Sequential(*layers, nn.Linear(WIDTH, 8)).cuda()
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def loss_fn(model, batch):
    return nn.functional.cross_entropy(model(batch[0]).float(), batch[1])


def batch(rows):
    return torch.randn(rows, WIDTH, device="cuda"), torch.arange(rows, device="cuda") % 8


def gradients(plan, given):
    model, optimizer = made()
    with trimtab.start(model, optimizer, plan) as run:
        run.accumulate(run.window(given), loss_fn)
        found = [p.grad.clone() for p in model.parameters()]
    assert {type(each) for each in model.modules()} == {nn.Sequential, nn.Linear, nn.GELU}
    return found


@pytest.mark.parametrize("rows", [512, 500])  # Products of the weight's gradient sum over the rows.
@pytest.mark.parametrize("compiled", [False, True])
def test_gradients_are_near_those_of_bf16(rows, compiled):
    half = Plan.fixed(rows, precision="bf16", compiled=compiled)
    given = batch(rows)
    theirs = gradients(half, given)
    ours = gradients(Plan.fixed(rows, precision="bf16", float8=1024, compiled=compiled), given)
    errors = [float((a - b).norm() / b.norm()) for a, b in zip(ours, theirs, strict=True)]
    assert 1e-3 < max(errors) < 0.2, errors


def test_a_step_does_not_wait_for_the_device():
    model, optimizer = made()
    given = batch(512)
    with trimtab.start(model, optimizer, Plan.fixed(512, precision="bf16", float8=1024)) as run:
        run.train_step(run.window(given), loss_fn)
        with without_waiting():
            run.train_step(run.window(given), loss_fn)


def test_large_compiled_products_are_faster_than_in_bf16():
    def seconds(**values):
        model, optimizer = made()
        given = batch(16384)
        plan = Plan.fixed(16384, precision="bf16", compiled=True, **values)
        with trimtab.start(model, optimizer, plan) as run:
            for _ in range(3):
                run.train_step(run.window(given), loss_fn)
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(10):
                run.train_step(run.window(given), loss_fn)
            end.record()
            torch.cuda.synchronize()
        return begin.elapsed_time(end)

    assert seconds(float8=1024) < seconds()
