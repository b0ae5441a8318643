"""Blocks of a model: found as a person would name them, and linked whatever the model computes between them."""

from __future__ import annotations

import pytest
import torch
from raising import raises
from torch import nn

from trimtab.core.errors import ModelError, ValueGivenError
from trimtab.measure.blocks import BlockGraph, blocks_of, find_blocks, same_arguments
from trimtab.tasks.models.gpt import GPT, GPTShape
from trimtab.tasks.models.resnet import ResNet

L = 4


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.one = nn.Sequential(nn.Linear(8, 8), nn.Tanh())

    def forward(self, x, scale=1.0):
        return x + scale * self.one(x)


class Net(nn.Module):
    def __init__(self, run):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(L))
        self.run = run

    def forward(self, x):
        return self.run(self.blocks, x)


def chain_of(run):
    model = Net(run)
    return blocks_of(model, lambda m, batch: m(batch).square().mean(), torch.randn(3, 8))


def in_turn(blocks, x):
    for block in blocks:
        x = block(x)
    return x


def with_argument(blocks, x):
    for block in blocks:
        x = block(x, scale=0.5)
    return x


def with_new_argument(blocks, x):
    for index, block in enumerate(blocks):
        x = block(x, scale=1.0 + (index > 1))
    return x


def with_skip(blocks, x):
    x = first = blocks[0](x)
    for block in blocks[1:]:
        x = block(x)
    return x + first


def with_view_kept(blocks, x):
    kept = []
    for block in blocks:
        x = block(x)
        kept.append(x[:, :2])
    return x


def with_all_returned(blocks, x):
    hidden = []
    for block in blocks:
        x = block(x)
        hidden.append(x)
    return torch.stack(hidden)


def with_device_looked_at(blocks, x):
    for block in blocks:
        x = block(x.to(x.device))
        assert x.shape[1] == 8
    return x


def with_something_between(blocks, x):
    for index, block in enumerate(blocks):
        x = block(x if index != 2 else x * 2)
    return x


def twice(blocks, x):
    return in_turn(blocks, blocks[1](x))


NAMES = tuple(f"blocks.{index}" for index in range(L))


@pytest.mark.parametrize(
    ("run", "links"),
    [
        (in_turn, (True, True, True)),
        (with_argument, (True, True, True)),
        (with_new_argument, (True, False, True)),
        (with_skip, (False, True, True)),
        (with_view_kept, (False, False, False)),
        (with_all_returned, (False, False, False)),
        (with_device_looked_at, (True, True, True)),
        (with_something_between, (True, False, True)),
    ],
)
def test_a_link_is_there_where_nobody_else_looks_at_what_a_block_returns(run, links):
    assert chain_of(run) == BlockGraph(NAMES, links)


def test_blocks_are_in_the_order_they_run_in_without_those_that_run_twice():
    found = chain_of(twice)
    assert found.names == ("blocks.0", "blocks.2", "blocks.3")
    assert found.links == (False, True)
    assert chain_of(lambda blocks, x: in_turn(reversed(blocks), x)).names == NAMES[::-1]


def test_a_hidden_state_that_the_model_hands_out_is_no_link():
    class Both(Net):
        def forward(self, x):
            middle = in_turn(self.blocks[:2], x)
            return in_turn(self.blocks[2:], middle), middle

    model = Both(None)
    found = blocks_of(model, lambda m, batch: m(batch)[0].mean(), torch.randn(3, 8))
    assert found.links == (True, False, True)


def test_a_forward_that_looks_at_values_is_refused_with_the_reason():
    with raises(ModelError, code="model.not_traceable", field="model"):
        chain_of(lambda blocks, x: in_turn(blocks, x) if x.sum() > 0 else x)


def test_nothing_of_the_model_is_changed():
    model = Net(in_turn)
    before = [p.clone() for p in model.parameters()]
    blocks_of(model, lambda m, batch: m(batch).square().mean(), torch.randn(3, 8))
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize(
    ("theirs", "same"),
    [
        (((1, "a"), {}), True),
        (((2, "a"), {}), False),
        (((1,), {}), False),
        (((1, "a"), {"b": 1}), False),
        (((1.0, "a"), {}), False),
    ],
)
def test_arguments_that_are_the_same(theirs, same):
    assert same_arguments(((1, "a"), {}), theirs) is same
    tensor = torch.ones(2)
    assert same_arguments(((tensor,), {"mask": tensor}), ((tensor,), {"mask": tensor}))
    assert not same_arguments(((tensor,), {}), ((tensor.clone(),), {}))


class Pair(nn.Module):
    """Two convolutions, as of a U-Siblings."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(3, 3, 3), nn.ReLU())


class Siblings(nn.Module):
    """Siblings without a container, and one that is alone of its class."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.middle, self.up = Pair(), Pair(), Pair()
        self.head = nn.Sequential(nn.Linear(2, 2), nn.ReLU())


def test_blocks_are_layers_stages_or_siblings():
    gpt = GPT(GPTShape(vocab_size=16, context=8, num_layers=3, num_heads=2, width=8, dropout=0.0))
    assert find_blocks(gpt) == ("blocks.0", "blocks.1", "blocks.2")
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16), 2, enable_nested_tensor=False)
    assert find_blocks(encoder) == ("layers.0", "layers.1")
    found = find_blocks(ResNet(width=4, depths=(2, 1), in_channels=3, num_classes=10))
    assert len(found) == 3
    assert all("shortcut" not in name and "conv" not in name for name in found)
    assert find_blocks(Siblings()) == ("down", "middle", "up")
    assert find_blocks(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))) == ("0", "1", "2")
    assert find_blocks(nn.Linear(2, 2)) == ()


def test_a_person_may_name_them():
    assert find_blocks(Siblings(), ["down", "up.layers"]) == ("down", "up.layers")
    for wrong in (["nowhere"], [""]):
        with raises(ValueGivenError, code="blocks.unknown_module", field="blocks"):
            find_blocks(Siblings(), wrong)
    for wrong in (["down", "down.layers"], ["down", "down"]):
        with raises(ValueGivenError, code="blocks.overlap", field="blocks"):
            find_blocks(Siblings(), wrong)
