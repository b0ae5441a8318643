"""The task's ResNet-50 is the one of the transformers library: parameters, FLOP, logits, gradients, statistics."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode
from transformers import ResNetConfig, ResNetForImageClassification

from benchmarks.paper.resnet50 import bottleneck_resnet, resnet50
from benchmarks.paper.tasks import load_task
from trimtab.tasks.models.resnet import ResNet

DEPTHS, WIDTH, CLASSES = (2, 1, 2, 1), 4, 7
OURS = (  # a pattern of the library's names, and what the task's model has for it
    (r"resnet\.embedder\.embedder\.convolution\.", "stem.0."),
    (r"resnet\.embedder\.embedder\.normalization\.", "stem.1."),
    (r"resnet\.encoder\.stages\.(\d+)\.layers\.(\d+)\.", r"stages.\1.\2."),
    (r"shortcut\.convolution\.", "shortcut.0."),
    (r"shortcut\.normalization\.", "shortcut.1."),
    (r"classifier\.1\.", "head."),
)


def our_name(name: str) -> str:
    """Return what the task's model calls a tensor of the library's."""
    for pattern, ours in OURS:
        name = re.sub(pattern, ours, name)
    kinds = {"convolution": "conv", "normalization": "bn"}
    return re.sub(r"layer\.(\d)\.(\w+)\.", lambda found: f"{kinds[found[2]]}{int(found[1]) + 1}.", name)


def library_resnet(width: int, depths: tuple[int, ...], classes: int, stem: str) -> ResNetForImageClassification:
    """Return the library's model; of a 3x3 stem, which it has not, its first convolution and pooling are exchanged."""
    sizes = [4 * width * 2**stage for stage in range(len(depths))]
    config = ResNetConfig(embedding_size=width, hidden_sizes=sizes, depths=list(depths), num_labels=classes)
    model = ResNetForImageClassification(config)
    if stem == "3x3":
        first = model.resnet.embedder
        first.embedder.convolution = nn.Conv2d(3, width, 3, padding=1, bias=False)
        first.pooler = nn.Identity()
    return model


def pair_of(stem: str) -> tuple[ResNet, ResNetForImageClassification]:
    """Return both models on the same state, which is far from how it is drawn."""
    torch.manual_seed(0)
    theirs = library_resnet(WIDTH, DEPTHS, CLASSES, stem).double()
    for name, value in theirs.state_dict().items():
        if value.is_floating_point() and value.dim() == 1:
            value.uniform_(0.5, 1.5) if "running" in name or "weight" in name else value.normal_()
    ours = bottleneck_resnet(stem, WIDTH, DEPTHS, CLASSES).double()
    copied = {our_name(name): value for name, value in theirs.state_dict().items()}
    ours.load_state_dict(copied)  # strictly: every tensor of the one is one of the other
    return ours, theirs


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("stem", ["3x3", "7x7"])
def test_on_the_same_state_logits_gradients_and_statistics_are_the_librarys(stem, training):
    ours, theirs = (model.train(training) for model in pair_of(stem))
    images, labels = torch.randn(6, 3, 64, 64).double(), torch.randint(CLASSES, (6,))
    expected = theirs(images).logits
    found = ours(images)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    F.cross_entropy(expected, labels).backward()
    F.cross_entropy(found, labels).backward()
    gradients = {our_name(name): value.grad for name, value in theirs.named_parameters()}
    assert gradients.keys() == dict(ours.named_parameters()).keys()
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-8, atol=1e-10)
    state: dict[str, Tensor] = ours.state_dict()
    for name, value in theirs.state_dict().items():
        torch.testing.assert_close(state[our_name(name)], value, rtol=1e-12, atol=1e-12)


def flops(model: nn.Module) -> int:
    with FlopCounterMode(display=False) as counter:
        found = model(torch.empty(2, 3, 32, 32, device="meta"))
        getattr(found, "logits", found).sum().backward()
    return counter.get_total_flops()


@pytest.mark.parametrize(("task", "stem"), [("cifar10_resnet50", "3x3"), ("cifar10_resnet50_7x7", "7x7")])
def test_at_the_papers_size_it_has_the_librarys_parameters_and_flop(task, stem):
    with torch.device("meta"):
        ours, theirs = load_task(task).make_model(), library_resnet(64, (3, 4, 6, 3), 10, stem)
    sizes = {name: value.shape for name, value in ours.state_dict().items()}
    assert {our_name(name): value.shape for name, value in theirs.state_dict().items()} == sizes
    assert flops(ours) == flops(theirs) > 0


def test_with_1000_classes_it_is_what_the_librarys_defaults_build():
    with torch.device("meta"):
        ours, theirs = resnet50("7x7", num_classes=1000), ResNetForImageClassification(ResNetConfig(num_labels=1000))
    assert sum(p.numel() for p in theirs.parameters()) == sum(p.numel() for p in ours.parameters()) == 25_557_032
