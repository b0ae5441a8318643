"""What a loop is, by its objects alone."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from trimtab.profiling.loop_facts import loop_facts


@pytest.mark.parametrize(
    ("layer", "has_workspaces", "has_convolutions"),
    [
        (nn.Conv1d(2, 2, 3), True, False),  # no layout of images: its weight has three dimensions
        (nn.Conv2d(2, 2, 3), True, True),
        (nn.Conv3d(2, 2, 3), True, False),
        (nn.ConvTranspose2d(2, 2, 3), True, True),
        (nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Conv1d(2, 2, 3))), True, False),
        (nn.LayerNorm(2), False, False),
    ],
)
def test_convolutions_of_any_dimension_have_workspaces(layer, has_workspaces, has_convolutions):
    facts = loop_facts(layer, torch.optim.SGD(layer.parameters(), 0.1), 4, {})
    assert (facts.has_workspaces, facts.has_convolutions) == (has_workspaces, has_convolutions)


def test_what_is_frozen_is_counted_apart():
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    model[0].requires_grad_(False)
    facts = loop_facts(model, torch.optim.AdamW(model[1].parameters()), 4, {})
    assert (facts.num_parameters, facts.trainable_parameters, facts.parameter_bytes) == (11, 3, 44)
