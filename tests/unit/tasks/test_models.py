"""The models: shapes, parameter counts by formula, causality, initialisation."""

from __future__ import annotations

import math

import pytest
import torch
from raising import raises
from torch import nn

from benchmarks.paper.tasks import load_task
from trimtab.core.errors import ValueGivenError
from trimtab.tasks.models.gpt import GPT, GPTShape
from trimtab.tasks.models.resnet import ResNet

TINY = GPTShape(vocab_size=50, context=16, num_layers=3, num_heads=2, width=8)


def num_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def gpt_parameters(shape: GPTShape) -> int:
    """By hand: embeddings; per block 4D^2+4D (attention), 8D^2+5D (MLP), 4D (two norms); last norm; head."""
    d = shape.width
    embeddings = (shape.vocab_size + shape.context) * d
    head = 0 if shape.tied_head else shape.vocab_size * d
    return embeddings + shape.num_layers * (12 * d * d + 13 * d) + 2 * d + head


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("digits_resnet", 77_754),
        ("source_gpt", 3_356_160),
        ("cifar10_resnet", 701_466),
        ("wikitext2_gpt", 7_242_624),
    ],
)
def test_parameter_count_of_built_in_models(name, count):
    model = load_task(name).make_model()
    assert num_parameters(model) == count
    if isinstance(model, GPT):
        assert count == gpt_parameters(model.shape)


def test_width_64_is_the_published_resnet_18():
    assert num_parameters(ResNet()) == 11_173_962  # He et al.'s 18 layers with a 3x3 stem and 10 classes


@pytest.mark.parametrize(
    ("options", "images", "last"),
    [
        ({"width": 4}, (2, 3, 32, 32), (32, 4, 4)),
        ({"width": 4, "depths": (1, 1, 1), "in_channels": 1}, (2, 1, 8, 8), (16, 2, 2)),
        ({"width": 4, "depths": (3,), "num_classes": 7}, (2, 3, 9, 11), (4, 9, 11)),
    ],
)
def test_resnet_shapes(options, images, last):
    model = ResNet(**options)
    x = torch.randn(images)
    assert model(x).shape == (2, options.get("num_classes", 10))
    assert model.stages(model.stem(x)).shape[1:] == last


@pytest.mark.parametrize(
    "options",
    [{"width": 0}, {"width": 1.5}, {"depths": ()}, {"depths": (2, 0)}, {"in_channels": 0}, {"num_classes": -1}],
)
def test_resnet_refuses(options):
    with pytest.raises(ValueGivenError):
        ResNet(**options)


@pytest.mark.parametrize("tied", [True, False])
def test_gpt_shapes_and_head(tied):
    shape = GPTShape(vocab_size=50, context=16, num_layers=3, num_heads=2, width=8, tied_head=tied)
    model = GPT(shape)
    tokens = torch.randint(50, (2, 16))
    assert model(tokens).shape == (2, 16, 50)
    assert model.features(tokens[:, :5]).shape == (2, 5, 8)
    assert (model.head.weight is model.token_embedding.weight) == tied
    assert num_parameters(model) == gpt_parameters(shape)
    assert torch.equal(model(tokens), model.head(model.features(tokens)))


def test_gpt_sees_no_later_token_and_no_row_longer_than_its_context():
    model = GPT(TINY).eval()
    tokens = torch.randint(50, (1, 16))
    changed = tokens.clone()
    changed[0, 10] = (changed[0, 10] + 1) % 50
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[0, :10], after[0, :10])
    assert not torch.allclose(before[0, 10:], after[0, 10:])
    with raises(ValueGivenError, code="value.invalid", field="tokens"):
        GPT(TINY)(torch.zeros(1, 17, dtype=torch.long))
    model = GPT(GPTShape(vocab_size=50, context=16, num_layers=1, num_heads=2, width=8, dropout=0.5))
    tokens = torch.randint(50, (1, 16))
    assert not torch.equal(model(tokens), model(tokens))
    model.eval()
    assert torch.equal(model(tokens), model(tokens))


def test_gpt_starts_as_gpt_2_does():
    torch.manual_seed(0)
    model = GPT(GPTShape(vocab_size=500, context=64, num_layers=4, num_heads=4, width=128, tied_head=True))
    for embedding in (model.token_embedding, model.position_embedding):
        assert embedding.weight.std().item() == pytest.approx(0.02, rel=0.05)
    for block in model.blocks:
        assert block.expand.weight.std().item() == pytest.approx(0.02, rel=0.05)
        assert block.contract.weight.std().item() == pytest.approx(0.02 / math.sqrt(8), rel=0.05)
        assert block.attention.project.weight.std().item() == pytest.approx(0.02 / math.sqrt(8), rel=0.05)
        assert not block.attention.qkv.bias.any()
    tokens = torch.randint(500, (4, 65))
    loss = nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    assert loss.item() == pytest.approx(math.log(500), rel=0.02)


@pytest.mark.parametrize(
    "options",
    [{"width": 9}, {"num_heads": 3}, {"num_layers": 0}, {"vocab_size": 0}, {"context": True}, {"dropout": 1.5}],
)
def test_gpt_shape_refuses(options):
    with pytest.raises(ValueGivenError):
        GPTShape(**{"vocab_size": 50, "context": 16, "num_heads": 2, "width": 8} | options)
