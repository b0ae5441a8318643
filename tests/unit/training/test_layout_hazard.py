"""A convolution that oneDNN's channels_last backward corrupts memory on is never laid out so."""

from __future__ import annotations

import pytest
import torch
from raising import raises
from torch import nn

import trimtab
from trimtab.core.errors import ModelError
from trimtab.techniques.memory_format import channels_last_hazard


def convolution(channels: int, *, kernel: int = 1, stride: int = 2) -> nn.Sequential:
    conv = nn.Conv2d(channels, 8, kernel, stride=stride, padding=kernel // 2)
    return nn.Sequential(conv, nn.Flatten(), nn.LazyLinear(2))


def test_only_strided_1x1_convolutions_over_few_channels_are_a_hazard() -> None:
    assert "4 input channels" in channels_last_hazard(convolution(4))
    for safe in (convolution(16), convolution(1), convolution(4, kernel=3), convolution(4, stride=1)):
        assert channels_last_hazard(safe) == ""


@pytest.mark.filterwarnings("ignore:Lazy modules")
@pytest.mark.usefixtures("brief_trials")
def test_a_plan_by_hand_is_refused_and_planning_does_not_try_it() -> None:
    torch.manual_seed(0)
    model = convolution(4)
    batch = torch.randn(8, 4, 6, 6), torch.randint(0, 2, (8,))
    model(batch[0])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with raises(ModelError, code="memory_layout.unsafe", field="plan.memory_layout"):
        trimtab.start(model, optimizer, trimtab.Plan.fixed(8, memory_layout="channels_last"))
    profile = trimtab.profile(model, optimizer, lambda m, b: nn.functional.cross_entropy(m(b[0]), b[1]), batch)
    assert all(trial.candidate.memory_layout == "keep" for trial in profile.trials)
    assert profile.loop.layout_hazard
