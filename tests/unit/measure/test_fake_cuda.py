"""Fakes on a CPU that behave as tensors on CUDA do: in what attention keeps, and in what autocast computes in fp32."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from trimtab.measure.fake_tensors import FakeCudaMode, FakeTensors
from trimtab.measure.memory_trace import trace_step
from trimtab.tasks.language_modelling import next_token_loss
from trimtab.tasks.models.gpt import GPT, GPTShape

ROWS, CONTEXT, HEADS, LAYERS = 4, 256, 4, 2
SCORES = ROWS * HEADS * CONTEXT**2  # of a layer


def peak(dropout, precision):
    model = GPT(GPTShape(64, CONTEXT, num_layers=LAYERS, num_heads=HEADS, width=32, dropout=dropout)).train()
    autocast = lambda: torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16")  # noqa: E731
    batch = (torch.zeros(ROWS, CONTEXT + 1).long(),)
    return trace_step(model, torch.optim.SGD(model.parameters()), next_token_loss, batch, autocast=autocast)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_attention_keeps_no_scores_with_dropout_either(precision):
    assert peak(0.1, precision) > 2 * LAYERS * SCORES
    with FakeCudaMode():
        kept, dropped = peak(0.0, precision), peak(0.1, precision)
    assert dropped < kept + LAYERS * SCORES


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dropout_keeps_a_byte_for_each_element(dtype, training):
    """A CPU keeps a factor of the values' own kind; `native_dropout` is what CUDA runs."""
    with FakeTensors(), FakeCudaMode():
        layer, x = nn.Dropout(0.1).train(training), torch.empty(64, 64, dtype=dtype, requires_grad=True)
        kept = []
        with torch.autograd.graph.saved_tensors_hooks(lambda each: kept.append(each.nbytes) or each, lambda each: each):
            out = layer(x)
        assert (out.shape, out.dtype) == (x.shape, dtype)
        assert sum(kept) == (x.numel() if training else 0)
        out.sum().backward()
        assert x.grad.shape == x.shape


@pytest.mark.parametrize("how", [{"p": 0.0}, {"p": 1.0}, {"inplace": True}])
def test_dropout_and_attention_without_a_kernel_are_unchanged(how):
    with FakeTensors(), FakeCudaMode():
        assert F.dropout(torch.empty(8, 8), **how).shape == (8, 8)
        assert F.dropout(torch.empty(0), 0.5).shape == (0,)
    with FakeTensors(), FakeCudaMode():
        query, grouped = torch.empty(2, 4, 8, 16), torch.empty(2, 2, 8, 16)
        assert F.scaled_dot_product_attention(query, grouped, grouped, enable_gqa=True).shape == query.shape
        assert F.scaled_dot_product_attention(query[0], query[0], query[0]).shape == query[0].shape


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_has_the_shape_and_the_gradients_that_it_has(dtype, masked):
    with FakeTensors(), FakeCudaMode():
        query = torch.empty(2, 4, 8, 16, dtype=dtype, requires_grad=True)
        both = torch.empty(2, 4, 6, 16, dtype=dtype, requires_grad=True)
        mask = torch.ones(8, 6, dtype=torch.bool) if masked else None
        out = F.scaled_dot_product_attention(query, both, both, mask, dropout_p=0.1)
        assert (out.shape, out.dtype) == (query.shape, dtype)
        assert "DotProduct" in type(out.grad_fn).__name__
        out.sum().backward()
        assert query.grad.shape == query.shape
        assert both.grad.shape == both.shape


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_torchs_own_attention_layer_keeps_no_scores_either(precision):
    def kept(dropout):
        layer = nn.TransformerEncoderLayer(32, HEADS, 64, dropout=dropout, batch_first=True).train()
        autocast = lambda: torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16")  # noqa: E731
        batch = (torch.zeros(ROWS, CONTEXT, 32),)
        loss_fn = lambda model, batch: model(batch[0]).square().mean()  # noqa: E731
        return trace_step(layer, torch.optim.SGD(layer.parameters()), loss_fn, batch, autocast=autocast)

    assert kept(0.1) > 2 * SCORES
    with FakeCudaMode():
        whole, dropped = kept(0.0), kept(0.1)
    assert dropped < whole + SCORES


def test_weights_of_attention_that_are_asked_for_are_in_fp32():
    with FakeTensors(), FakeCudaMode(), torch.autocast("cpu", torch.bfloat16):
        layer = nn.MultiheadAttention(32, HEADS, batch_first=True)
        x = torch.empty(ROWS, CONTEXT, 32)
        out, weights = layer(x, x, x, need_weights=True)
        assert (out.dtype, weights.dtype) == (torch.bfloat16, torch.float32)
        assert layer(x, x, x, need_weights=False)[0].shape == out.shape
    assert F.scaled_dot_product_attention.__name__ == "scaled_dot_product_attention"
    assert F.softmax.__module__ == "torch.nn.functional"


@pytest.mark.parametrize(
    "operator",
    [
        lambda x: F.rms_norm(x, x.shape[-1:]),
        lambda x: F.interpolate(x[None, None], scale_factor=2, mode="bilinear"),
        lambda x: x**2,
        lambda x: 2**x,
        lambda x: x.norm(),
        lambda x: torch.linalg.vector_norm(x),
        F.softplus,
        torch.log1p,
        lambda x: x.reciprocal(),
        lambda x: x.sum(-1),
        lambda x: torch.cumsum(x, 0),
    ],
)
def test_what_autocast_on_cuda_computes_in_fp32(operator):
    with FakeTensors():
        x = torch.empty(8, 8, dtype=torch.bfloat16)
        with FakeCudaMode(), torch.autocast("cpu", torch.bfloat16):
            assert operator(x).dtype is torch.float32
            assert x.sum(dtype=torch.bfloat16).dtype is torch.bfloat16
        with FakeCudaMode():
            assert operator(x).dtype is torch.bfloat16


def test_autocast_computes_norms_and_losses_in_fp32_and_products_not():
    with FakeTensors():
        layer, norm = nn.Linear(8, 8), nn.LayerNorm(8)
        x, y = torch.empty(4, 8), torch.zeros(4).long()
        for mode, expected in ((FakeCudaMode(), torch.float32), (torch.no_grad(), torch.bfloat16)):
            with mode, torch.autocast("cpu", torch.bfloat16):
                hidden = layer(x)
                found = norm(hidden), hidden.softmax(-1), F.log_softmax(hidden, -1)
            assert hidden.dtype is torch.bfloat16
            assert {each.dtype for each in found} == {expected}
        with FakeCudaMode(), torch.autocast("cpu", torch.bfloat16):
            assert F.cross_entropy(layer(x), y).dtype is torch.float32
        with FakeCudaMode():
            assert norm(x.bfloat16().float()).dtype is torch.float32
            assert layer(x).softmax(-1).dtype is torch.float32
