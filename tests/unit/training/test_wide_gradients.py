"""Gradients of half-precision weights are accumulated in fp32 if a window has many micro-batches."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import trimtab
from trimtab.settings.micro_batch import MOST_NARROW

ROWS = 512


def loop(dtype=torch.bfloat16):
    torch.manual_seed(0)
    model = nn.Linear(4, 3).to(dtype)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def batch(rows=ROWS):
    generator = torch.Generator().manual_seed(1)
    return torch.rand(rows, 4, generator=generator)


def loss_fn(model, rows):
    return model(rows.to(model.weight.dtype)).float().square().sum(1).mean()


def piecewise(model, rows, micro_batch, dtype):
    """Return the gradient of every parameter, summed over micro-batches in a dtype."""
    sums = [torch.zeros_like(p, dtype=dtype) for p in model.parameters()]
    for piece in rows.split(micro_batch):
        loss = loss_fn(model, piece) * (len(piece) / len(rows))
        for total, each in zip(sums, torch.autograd.grad(loss, list(model.parameters())), strict=True):
            total += each
    return [total.to(p.dtype) for total, p in zip(sums, model.parameters(), strict=True)]


def gradients(plan, rows, dtype=torch.bfloat16):
    """Return the gradients that the optimizer steps with."""
    model, optimizer = loop(dtype)
    found = []
    optimizer.register_step_pre_hook(lambda *_: found.extend(p.grad.clone() for p in model.parameters()))
    with trimtab.start(model, optimizer, plan) as run:
        run.train_step(run.window(rows), loss_fn)
    assert {p.grad_dtype for p in model.parameters()} == {dtype}
    return found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("micro_batch", [1, 2, ROWS // MOST_NARROW // 2])
def test_many_micro_batches_are_summed_in_fp32_and_rounded_once(micro_batch, dtype):
    expected = piecewise(loop(dtype)[0], batch(), micro_batch, torch.float32)
    found = gradients(trimtab.Plan.fixed(ROWS, micro_batch), batch(), dtype)
    assert all(torch.equal(ours, wide) for ours, wide in zip(found, expected, strict=True))


def test_few_micro_batches_are_summed_as_in_a_plain_loop():
    rows, micro_batch = batch(), ROWS // MOST_NARROW
    expected = piecewise(loop()[0], rows, micro_batch, torch.bfloat16)
    found = gradients(trimtab.Plan.fixed(ROWS, micro_batch), rows)
    assert all(torch.equal(ours, plain) for ours, plain in zip(found, expected, strict=True))


def test_the_accumulation_of_the_users_own_loop_is_unchanged():
    rows, micro_batch = batch(), 4
    expected = piecewise(loop()[0], rows, micro_batch, torch.bfloat16)
    plan = replace(trimtab.Plan.fixed(ROWS, micro_batch), reference=trimtab.Reference(accumulate=ROWS // micro_batch))
    found = gradients(plan, rows)
    assert all(torch.equal(ours, plain) for ours, plain in zip(found, expected, strict=True))


def test_small_gradients_are_not_lost_in_a_long_sum():
    rows = batch()
    model, _ = loop(torch.float32)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(p.bfloat16())
    exact = piecewise(model, rows, ROWS, torch.float32)
    plain = piecewise(loop()[0], rows, 1, torch.bfloat16)
    found = gradients(trimtab.Plan.fixed(ROWS, 1), rows)
    for ours, narrow, true in zip(found, plain, exact, strict=True):
        assert (ours - true).norm() < 0.01 * true.norm()
        assert (narrow - true).norm() > 0.05 * true.norm()


@pytest.mark.parametrize("leave", ["discard", "close"])
def test_a_dropped_window_leaves_the_parameters_as_they_were(leave):
    model, optimizer = loop()
    run = trimtab.start(model, optimizer, trimtab.Plan.fixed(ROWS, 1))
    for number, micro in enumerate(run.window(batch())):
        run.backward(loss_fn(run.model, micro))
        if number == 3:
            assert model.weight.grad.dtype == torch.float32
            break
    getattr(run, leave)()
    run.close()
    assert all(p.grad is None and p.grad_dtype == p.dtype for p in model.parameters())


class Zeroing(torch.optim.SGD):
    """Keeps gradients of zero between steps."""

    def zero_grad(self, set_to_none=True):
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                parameter.grad.zero_()


def test_an_optimizer_may_keep_zeros_as_gradients():
    trained = []
    for kind in (torch.optim.SGD, Zeroing):
        model, _ = loop()
        with trimtab.start(model, kind(model.parameters(), lr=0.1), trimtab.Plan.fixed(ROWS, 16)) as run:
            for window in run.windows([batch(), batch()]):
                run.train_step(window, loss_fn)
        trained.append(model.weight)
    assert torch.equal(*trained)
