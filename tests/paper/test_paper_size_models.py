"""The models at the paper's size: parameters, FLOP, and outputs equal to a plain reference's on their weights."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from raising import raises
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.paper.resnet50 import bottleneck_resnet, resnet50
from benchmarks.paper.tasks import load_task
from trimtab.core.errors import ValueGivenError
from trimtab.losses import parts_of
from trimtab.tasks.models.gpt import GPT, GPTShape
from trimtab.tasks.task import Task

EXPECTED = {
    # By task: parameters, and FLOP of forward and backward of an image or token.
    "cifar10_resnet50": (23_520_842, 7.783e9),
    "cifar10_resnet50_7x7": (23_528_522, 0.496e9),
    "wikitext2_gpt2": (124_439_808, 0.8544e9),
}


def on_meta(task: Task) -> nn.Module:
    with torch.device("meta"):
        return task.make_model()


def step_flops(task: Task, rows: int) -> int:
    """Return FLOP of a step as torch counts them: of matrix products and convolutions, two for each multiply-add."""
    model, batch = on_meta(task), tuple(column.to("meta") for column in task.example(rows))
    with FlopCounterMode(display=False) as counter:
        result = task.loss_fn(model, batch)
        parts_of(result).loss.backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("name", EXPECTED)
def test_parameters_and_flop_are_those_the_tasks_state(name):
    task, (parameters, flops) = load_task(name), EXPECTED[name]
    assert sum(p.numel() for p in on_meta(task).parameters()) == parameters
    assert step_flops(task, 2) / 2 / task.terms_per_sample == pytest.approx(flops, rel=1e-3)


def test_the_flop_convention_by_hand():
    """GPT-2: six for a weight in a product (the tied one in the head), and twelve T D a layer for attention."""
    layers, width, context, vocabulary = 12, 768, 1024, 50_257
    in_products = layers * 12 * width**2 + vocabulary * width
    by_hand = 6 * in_products + 12 * layers * context * width
    assert step_flops(load_task("wikitext2_gpt2"), 1) / context == pytest.approx(by_hand, rel=1e-12)


def test_the_stems_differ_as_the_tables_say():
    ours, theirs = (step_flops(load_task(name), 2) for name in ("cifar10_resnet50", "cifar10_resnet50_7x7"))
    assert ours / theirs == pytest.approx(15.7, abs=0.05)


def test_with_1000_classes_it_is_the_published_resnet_50():
    with torch.device("meta"):
        assert sum(p.numel() for p in resnet50("7x7", num_classes=1000).parameters()) == 25_557_032


def plain_resnet(weights: dict[str, Tensor], images: Tensor, depths: tuple[int, ...], *, training: bool) -> Tensor:
    """ResNet with bottlenecks, written down from the paper and the state's names alone; statistics are not updated."""

    def normed(x: Tensor, name: str) -> Tensor:
        if training:
            mean, variance = x.mean((0, 2, 3)), x.var((0, 2, 3), unbiased=False)
        else:
            mean, variance = weights[f"{name}.running_mean"], weights[f"{name}.running_var"]
        scaled = (x - mean.view(-1, 1, 1)) / (variance.view(-1, 1, 1) + 1e-5).sqrt()
        return scaled * weights[f"{name}.weight"].view(-1, 1, 1) + weights[f"{name}.bias"].view(-1, 1, 1)

    def conv(x: Tensor, name: str, stride: int = 1) -> Tensor:
        kernel = weights[f"{name}.weight"]
        return F.conv2d(x, kernel, stride=stride, padding=kernel.shape[-1] // 2)

    is_large = weights["stem.0.weight"].shape[-1] == 7
    x = normed(conv(images, "stem.0", 2 if is_large else 1), "stem.1").clamp(min=0)
    if is_large:
        x = F.pad(x, (1, 1, 1, 1), value=-math.inf).unfold(2, 3, 2).unfold(3, 3, 2).amax((4, 5))
    for stage, depth in enumerate(depths):
        for block in range(depth):
            name, stride = f"stages.{stage}.{block}", 2 if stage > 0 and block == 0 else 1
            y = normed(conv(x, f"{name}.conv1"), f"{name}.bn1").clamp(min=0)
            y = normed(conv(y, f"{name}.conv2", stride), f"{name}.bn2").clamp(min=0)
            y = normed(conv(y, f"{name}.conv3"), f"{name}.bn3")
            if f"{name}.shortcut.0.weight" in weights:
                x = normed(conv(x, f"{name}.shortcut.0", stride), f"{name}.shortcut.1")
            x = (x + y).clamp(min=0)
    return x.flatten(2).mean(2) @ weights["head.weight"].T + weights["head.bias"]


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("stem", ["3x3", "7x7"])
def test_a_resnet_of_bottlenecks_is_the_plain_reference(stem, training):
    torch.manual_seed(0)
    depths = (2, 1, 2, 1)
    model = bottleneck_resnet(stem, 4, depths, 7).double()
    for name, value in model.state_dict().items():
        if name.rpartition(".")[2] in ("running_mean", "running_var", "bias"):
            value.uniform_(0.5, 1.5)
    images, weights = torch.randn(3, 3, 32, 32).double(), {k: v.clone() for k, v in model.state_dict().items()}
    model.train(training)
    expected = plain_resnet(weights, images, depths, training=training)
    torch.testing.assert_close(model(images), expected, rtol=1e-10, atol=1e-10)


def test_resnet_50_is_that_reference_at_its_own_depths():
    torch.manual_seed(0)
    model = resnet50("7x7").double()
    weights = {key: value.clone() for key, value in model.state_dict().items()}
    images = torch.randn(3, 3, 64, 64).double()  # 32x32 end as single pixels, of which few make no statistics
    with torch.no_grad():
        expected = plain_resnet(weights, images, (3, 4, 6, 3), training=True)
        torch.testing.assert_close(model.train()(images), expected, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("stem", ["5x5", "", None])
def test_a_stem_that_is_none_is_refused(stem):
    with raises(ValueGivenError, code="value.invalid", field="stem"):
        resnet50(stem)


def plain_gpt(weights: dict[str, Tensor], tokens: Tensor, layers: int, heads: int) -> Tensor:
    """GPT-2 written down from its description and the state's names alone: pre-norm, tanh GELU, tied head."""

    def normed(x: Tensor, name: str) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        scaled = centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()
        return scaled * weights[f"{name}.weight"] + weights[f"{name}.bias"]

    def linear(x: Tensor, name: str) -> Tensor:
        return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]

    length = tokens.shape[1]
    x = weights["token_embedding.weight"][tokens] + weights["position_embedding.weight"][:length]
    for layer in range(layers):
        name = f"blocks.{layer}"
        q, k, v = linear(normed(x, f"{name}.norm1"), f"{name}.attention.qkv").chunk(3, dim=-1)
        mixed = []
        for head in range(heads):
            of_head = slice(head * q.shape[-1] // heads, (head + 1) * q.shape[-1] // heads)
            scores = q[..., of_head] @ k[..., of_head].transpose(1, 2) / math.sqrt(q.shape[-1] / heads)
            scores = scores.masked_fill(torch.ones(length, length).triu(1).bool(), -math.inf)
            mixed.append(scores.softmax(-1) @ v[..., of_head])
        x = x + linear(torch.cat(mixed, -1), f"{name}.attention.project")
        y = linear(normed(x, f"{name}.norm2"), f"{name}.expand")
        y = 0.5 * y * (1 + torch.tanh(math.sqrt(2 / math.pi) * (y + 0.044715 * y**3)))
        x = x + linear(y, f"{name}.contract")
    return normed(x, "norm") @ weights["token_embedding.weight"].T


@settings(max_examples=10, deadline=None)
@given(layers=st.integers(1, 3), heads=st.sampled_from([1, 2, 4]), length=st.integers(1, 9))
def test_gpt_2_is_the_plain_reference(layers, heads, length):
    torch.manual_seed(0)
    shape = GPTShape(vocab_size=30, context=9, num_layers=layers, num_heads=heads, width=8, tied_head=True, dropout=0.3)
    model = GPT(shape).double().eval()
    for parameter in model.parameters():  # as drawn, biases are 0 and attention is all but even
        nn.init.normal_(parameter, std=0.5)
    tokens = torch.randint(30, (2, length))
    expected = plain_gpt(model.state_dict(), tokens, layers, heads)
    torch.testing.assert_close(model(tokens), expected, rtol=1e-10, atol=1e-10)


def test_gpt_2_small_is_of_that_shape():
    shape = on_meta(load_task("wikitext2_gpt2")).shape
    assert (shape.num_layers, shape.width, shape.num_heads, shape.context) == (12, 768, 12, 1024)
    assert (shape.vocab_size, shape.tied_head, shape.dropout) == (50_257, True, 0.1)
