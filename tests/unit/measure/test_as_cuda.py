"""Fakes on a CPU that behave as tensors on CUDA do: in what attention keeps, and in what autocast computes in fp32."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from trimtab.measure.as_cuda import AsCuda
from trimtab.measure.fakes import Fakes
from trimtab.measure.step_trace import trace_step
from trimtab.tasks.language_modelling import next_token_loss
from trimtab.tasks.models.gpt import GPT, GPTShape

ROWS, CONTEXT, HEADS, LAYERS = 4, 256, 4, 2
SCORES = ROWS * HEADS * CONTEXT**2  # of a layer


def activations(dropout, precision):
    model = GPT(GPTShape(64, CONTEXT, num_layers=LAYERS, num_heads=HEADS, width=32, dropout=dropout)).train()
    autocast = lambda: torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16")  # noqa: E731
    batch = (torch.zeros(ROWS, CONTEXT + 1).long(),)
    step = trace_step(model, torch.optim.SGD(model.parameters()), next_token_loss, batch, autocast=autocast)
    return step.most_bytes["activations"]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_attention_keeps_no_scores_with_dropout_either(precision):
    """A CPU keeps them; what is left of dropout there is a mask of each of the block's other activations."""
    assert activations(0.1, precision) > 2 * LAYERS * SCORES
    with AsCuda():
        kept, dropped = activations(0.0, precision), activations(0.1, precision)
    assert dropped < kept + LAYERS * SCORES


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_has_the_shape_and_the_gradients_that_it_has(dtype, masked):
    with Fakes(), AsCuda():
        query = torch.empty(2, 4, 8, 16, dtype=dtype, requires_grad=True)
        both = torch.empty(2, 4, 6, 16, dtype=dtype, requires_grad=True)
        mask = torch.ones(8, 6, dtype=torch.bool) if masked else None
        out = F.scaled_dot_product_attention(query, both, both, mask, dropout_p=0.1)
        assert (out.shape, out.dtype) == (query.shape, dtype)
        assert "DotProduct" in type(out.grad_fn).__name__
        out.sum().backward()
        assert query.grad.shape == query.shape
        assert both.grad.shape == both.shape


def test_what_has_no_kernel_is_what_it_was():
    with Fakes(), AsCuda():
        query, grouped = torch.empty(2, 4, 8, 16), torch.empty(2, 2, 8, 16)
        assert F.scaled_dot_product_attention(query, grouped, grouped, enable_gqa=True).shape == query.shape
        assert F.scaled_dot_product_attention(query[0], query[0], query[0]).shape == query[0].shape


def test_autocast_computes_norms_and_losses_in_fp32_and_products_not():
    with Fakes():
        layer, norm = nn.Linear(8, 8), nn.LayerNorm(8)
        x, y = torch.empty(4, 8), torch.zeros(4).long()
        for mode, expected in ((AsCuda(), torch.float32), (torch.no_grad(), torch.bfloat16)):
            with mode, torch.autocast("cpu", torch.bfloat16):
                hidden = layer(x)
                found = norm(hidden), hidden.softmax(-1), F.log_softmax(hidden, -1)
            assert hidden.dtype is torch.bfloat16
            assert {each.dtype for each in found} == {expected}
        with AsCuda(), torch.autocast("cpu", torch.bfloat16):
            assert F.cross_entropy(layer(x), y).dtype is torch.float32
        with AsCuda():
            assert norm(x.bfloat16().float()).dtype is torch.float32
            assert layer(x).softmax(-1).dtype is torch.float32
