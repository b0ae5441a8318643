"""Squared norms of each backward's gradient, as the leaves receive it."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from trimtab.measure import gradient_norms
from trimtab.measure.gradient_norms import GradientNorms, squared_norm
from trimtab.measure.timing import AsyncScalar, StepTimer


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(7, 5)
        self.hidden = nn.Linear(5, 5)

    def forward(self, tokens):
        return nn.functional.linear(torch.tanh(self.hidden(self.embedding(tokens))), self.embedding.weight)


def true_norm2(model, loss):
    gradients = torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad])
    return sum(float(g.square().sum()) for g in gradients)


@pytest.mark.parametrize("chunk", [1, 2**20])
def test_each_backward_has_its_own_norm_though_gradients_add_up(monkeypatch, chunk):
    monkeypatch.setattr(gradient_norms, "CHUNK_BYTES", chunk)
    torch.manual_seed(0)
    model = Tied().double()
    model.hidden.bias.requires_grad_(False)
    norms = GradientNorms(model.parameters())
    norms.on()
    for seed in range(4):
        tokens = torch.randint(0, 7, (6,), generator=torch.Generator().manual_seed(seed))

        def loss(tokens=tokens):
            return nn.functional.cross_entropy(model(tokens), tokens.flip(0))

        expected = true_norm2(model, loss())
        norms.take()  # what torch.autograd.grad showed the hooks
        loss().backward()
        assert float(norms.take()) == pytest.approx(expected, rel=1e-12)
    norms.off()
    assert not any(p._backward_hooks for p in model.parameters())


@pytest.mark.parametrize("is_shared", [False, True])
def test_a_gradient_that_comes_in_parts_says_nothing(is_shared):
    """A layer in two segments of reentrant checkpointing: squares of its parts are not that of their sum."""
    first = nn.Linear(5, 5)
    layers = [first, first if is_shared else nn.Linear(5, 5)]
    leaves = list(nn.ModuleList(layers).parameters())
    norms = GradientNorms(leaves)
    norms.on()
    for _ in range(2):
        out = torch.randn(3, 5, requires_grad=True)
        for layer in layers:
            out = checkpoint(layer, out, use_reentrant=True)
        for p in leaves:
            p.grad = None
        out.square().sum().backward()
        found = float(norms.take())
        if is_shared:
            assert math.isnan(found)
        else:
            assert found == pytest.approx(sum(float(p.grad.square().sum()) for p in leaves), rel=1e-6)
    norms.off()


def test_hooks_change_no_gradient_and_copy_none():
    torch.manual_seed(0)
    model, found = Tied(), []
    norms = GradientNorms(model.parameters())
    for watched in (False, True):
        model.zero_grad()
        norms.on() if watched else norms.off()
        for _ in range(3):
            model(torch.arange(7)).square().mean().backward()
            norms.take()
        found.append([p.grad.clone() for p in model.parameters()])
    norms.off()
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    weight = torch.ones(1000, requires_grad=True)
    norms, pointers = GradientNorms([weight]), []
    weight.register_hook(lambda gradient: pointers.append(gradient.data_ptr()))
    norms.on()
    (weight * torch.arange(1000.0)).sum().backward()
    assert weight.grad.data_ptr() == pointers[0]
    norms.off()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_norms_of_halves_do_not_overflow(dtype):
    gradients = [torch.full((300,), 300.0, dtype=dtype), torch.full((2, 2), -2.0, dtype=dtype)]
    assert float(squared_norm(gradients)) == pytest.approx(300 * 300.0**2 + 16.0, rel=1e-3)


def test_norms_of_sparse_and_mixed_gradients():
    embedding = nn.Embedding(10, 3, sparse=True)
    norms = GradientNorms(embedding.parameters())
    norms.on()
    embedding(torch.tensor([1, 1, 2])).sum().backward()
    assert float(norms.take()) == pytest.approx(3 * 2.0**2 + 3 * 1.0)
    norms.off()
    assert float(squared_norm([])) == 0.0
    assert float(GradientNorms([]).take()) == 0.0
    several = [torch.full((4,), 2.0), torch.full((9,), 1.0, dtype=torch.float64), torch.full((1,), 3.0 + 4.0j)]
    assert float(squared_norm(several)) == 16 + 9 + 25
    assert float(squared_norm([torch.full((4,), 2.0, dtype=torch.bfloat16), torch.ones(1)])) == 17
    parameter = torch.nn.Parameter(torch.ones(3))
    norms = GradientNorms([parameter])
    norms.on()
    (parameter.sum() * 5).backward()
    norms.forget()
    (parameter.sum() * 2).backward()
    assert float(norms.take()) == 12.0


def test_late_scalars_are_read_as_they_were():
    values = torch.tensor([1.0, 2.5, float("inf")])
    assert AsyncScalar(values).read() == [1.0, 2.5, float("inf")]
    assert AsyncScalar(torch.tensor(3)).read() == [3.0]


def test_a_windows_clock_tells_its_batches_and_their_drawing_apart(monkeypatch):
    ticks = iter([9.0, 9.25, 9.5, 10.0, 11.0, 13.0, 15.0, 18.0, 20.0, 21.0, 22.0, 23.0])
    monkeypatch.setattr("trimtab.measure.timing.time.perf_counter", lambda: next(ticks))
    clock = StepTimer(torch.device("cpu"))
    with clock.drawing():
        pass
    clock.open()
    for _ in range(3):
        clock.begin()
    with clock.aside():  # 15 to 18 are not the window's
        pass
    found = clock.end().read()
    assert (found.batch_s, found.window_s, found.drawing_s) == ((1.0, 2.0), 7.5, 0.25)
    clock.open()  # nobody saw its batches being drawn
    clock.begin()
    found = clock.end().read()
    assert (found.batch_s, found.window_s, found.drawing_s) == ((), 2.0, 0.0)
