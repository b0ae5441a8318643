"""Blocks are found as a person would name them."""

from __future__ import annotations

from raising import raises
from torch import nn

from trimtab.core.errors import ValueGivenError
from trimtab.measure.blocks import find_blocks
from trimtab.tasks.models.gpt import GPT, GPTShape
from trimtab.tasks.models.resnet import ResNet


class Pair(nn.Module):
    """Two convolutions, as of a U-Net."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(3, 3, 3), nn.ReLU())


class Net(nn.Module):
    """Siblings without a container, and one that is alone of its class."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.middle, self.up = Pair(), Pair(), Pair()
        self.head = nn.Sequential(nn.Linear(2, 2), nn.ReLU())


def test_a_transformers_layers():
    gpt = GPT(GPTShape(vocab_size=16, context=8, num_layers=3, num_heads=2, width=8, dropout=0.0))
    assert find_blocks(gpt) == ("blocks.0", "blocks.1", "blocks.2")
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16), 2, enable_nested_tensor=False)
    assert find_blocks(encoder) == ("layers.0", "layers.1")


def test_stages_are_gone_into_and_blocks_are_not():
    found = find_blocks(ResNet(width=4, depths=(2, 1), in_channels=3, num_classes=10))
    assert len(found) == 3
    assert all("shortcut" not in name and "conv" not in name for name in found)


def test_siblings_of_one_class():
    assert find_blocks(Net()) == ("down", "middle", "up")


def test_a_model_of_layers_has_its_layers():
    assert find_blocks(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))) == ("0", "1", "2")
    assert find_blocks(nn.Linear(2, 2)) == ()


def test_a_person_may_name_them():
    assert find_blocks(Net(), ["down", "up.layers"]) == ("down", "up.layers")
    for wrong in (["nowhere"], [""]):
        with raises(ValueGivenError, code="blocks.unknown_module", field="blocks"):
            find_blocks(Net(), wrong)
    for wrong in (["down", "down.layers"], ["down", "down"]):
        with raises(ValueGivenError, code="blocks.overlap", field="blocks"):
            find_blocks(Net(), wrong)
