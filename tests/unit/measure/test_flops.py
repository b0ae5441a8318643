"""Counted FLOP against hand counts: products, convolutions, attention, and what checkpointing computes twice."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from trimtab.measure import flops
from trimtab.measure.flops import OWN_FORMULAS, count_flops, flops_of

ROWS, WIDTH = 5, 16


def test_products_and_convolutions_cost_two_flop_a_weight_and_position():
    layer = nn.Linear(WIDTH, 8)
    rows = torch.randn(ROWS, WIDTH, requires_grad=True)
    forward = 2 * ROWS * WIDTH * 8
    assert count_flops(lambda: layer(rows)) == forward
    assert count_flops(lambda: layer(rows).sum().backward()) == 3 * forward
    layer = nn.Conv2d(3, 4, 3, padding=1, bias=False)
    images = torch.randn(2, 3, 6, 6)
    assert count_flops(lambda: layer(images)) == 2 * 2 * 4 * 3 * 9 * 6 * 6


@pytest.mark.parametrize("groups", [1, 4, 8])
@pytest.mark.parametrize("kind", [nn.Conv2d, nn.ConvTranspose2d])
def test_a_convolutions_gradients_cost_as_its_forward_each_in_groups_too(kind, groups):
    layer = kind(8, 16, 3, stride=2, padding=1, groups=groups)
    images = torch.randn(2, 8, 6, 6)
    positions = 3 * 3 if kind is nn.Conv2d else 6 * 6
    forward = 2 * 2 * positions * layer.weight.numel()
    assert count_flops(lambda: layer(images)) == forward
    assert count_flops(lambda: layer(images).sum().backward()) == 2 * forward
    assert count_flops(lambda: layer(images.clone().requires_grad_()).sum().backward()) == 3 * forward
    given = (torch.ones_like(layer(images)), images, layer.weight, None, [2, 2], [1, 1], [1, 1])
    options = (kind is nn.ConvTranspose2d, [0, 0], groups, [True, True, False])
    operator = torch.ops.aten.convolution_backward.default
    assert flops_of(operator, (*given, *options), {}, operator(*given, *options)) == 2 * forward


@pytest.mark.parametrize("options", [{}, {"num_layers": 2}, {"bidirectional": True}, {"bias": False}])
def test_a_recurrent_layer_costs_two_flop_a_weight_and_step(options):
    layer, rows = nn.LSTM(WIDTH, 8, batch_first=True, **options), torch.randn(ROWS, 7, WIDTH)
    forward = 2 * ROWS * 7 * sum(p.numel() for p in layer.parameters() if p.dim() == 2)
    assert count_flops(lambda: layer(rows)) == forward
    assert count_flops(lambda: layer(rows.requires_grad_())[0].sum().backward()) == 3 * forward


def test_recurrent_layers_of_a_gpu_are_counted_by_their_shapes():
    weights = [(32, 16), (32, 8), (32,), (32,), (32, 8), (32, 8), (32,), (32,)]
    formula = OWN_FORMULAS
    forward = 2 * 7 * ROWS * (32 * 16 + 3 * 32 * 8)
    assert formula[torch.ops.aten._cudnn_rnn]((7, ROWS, 16), weights, 4) == forward
    assert formula[torch.ops.aten._cudnn_rnn_backward]((7, ROWS, 16), weights, 4) == 2 * forward


def test_attention_on_this_device_is_counted():
    query, key, value = (torch.randn(1, 2, 7, 4, requires_grad=True) for _ in range(3))
    forward = 2 * (2 * 2 * 7 * 7 * 4)  # two products of 7 x 7 x 4 in each of two heads
    assert count_flops(lambda: F.scaled_dot_product_attention(query, key, value)) == forward
    assert count_flops(lambda: F.scaled_dot_product_attention(query, key, value).sum().backward()) > 2 * forward


def test_recomputation_and_gradients_within_a_loss_are_counted():
    block = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH), nn.GELU())
    rows = torch.randn(ROWS, WIDTH, requires_grad=True)
    forward = 2 * 2 * ROWS * WIDTH * WIDTH
    assert count_flops(lambda: block(rows).sum().backward()) == 3 * forward
    assert count_flops(lambda: checkpoint(block, rows, use_reentrant=False).sum().backward()) == 4 * forward
    layer, rows = nn.Linear(WIDTH, 1, bias=False), torch.randn(ROWS, WIDTH, requires_grad=True)

    def penalised():
        (slope,) = torch.autograd.grad(layer(rows).sum(), rows, create_graph=True)
        slope.square().sum().backward()

    product = 2 * ROWS * WIDTH
    assert count_flops(penalised) >= 3 * product


def test_calls_that_cannot_be_counted_are_unknown(monkeypatch):
    def refuses() -> None:
        raise NotImplementedError("not under a dispatch mode")

    assert count_flops(refuses) is None
    with pytest.raises(RuntimeError, match="its own"):
        count_flops(lambda: (_ for _ in ()).throw(RuntimeError("its own")))
    """Up to torch 2.11 that of attention asserts as many heads of keys as of queries."""

    def asserts(*args, **kwargs):
        raise AssertionError

    def product():
        torch.ones(2, 3) @ torch.ones(3, 2)

    assert count_flops(product)
    for name in (torch.ops.aten.mm, torch.ops.aten.addmm):
        monkeypatch.setitem(flops.flop_registry, name, asserts)
    assert count_flops(product) is None
    assert flops_of(torch.ops.aten.mm.default, (torch.ones(2, 3), torch.ones(3, 2)), {}, torch.ones(2, 2)) == 0
