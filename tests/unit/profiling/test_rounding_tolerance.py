"""Weights moved by their last bit are afterwards bit for bit as before."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from trimtab.profiling import rounding_tolerance
from trimtab.profiling.rounding_tolerance import last_bits_moved


def tied_by_storage():
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    model[1].weight.data = model[0].weight.data
    return model


def overlapping_views():
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(3, 6))
    model[1].weight.data = model[0].weight.data[:, 2:5]
    return model


def channels_last():
    return nn.Conv2d(8, 8, 3).to(memory_format=torch.channels_last)


def one_number():
    model = nn.Module()
    model.scale = nn.Parameter(torch.tensor(3.0))
    return model


@pytest.mark.parametrize("part", [7, rounding_tolerance._PART])
@pytest.mark.parametrize("model", [tied_by_storage, overlapping_views, channels_last, one_number])
def test_moved_weights_are_restored(model, part, monkeypatch):
    monkeypatch.setattr(rounding_tolerance, "_PART", part)
    model = model()
    before = [p.detach().clone() for p in model.parameters()]
    with last_bits_moved(model, seed=0, epsilon=0.01):
        for parameter, held in zip(model.parameters(), before, strict=True):
            assert ((parameter - held).abs() >= 0.009 * held.abs()).float().mean() > 0.5
            assert torch.allclose(parameter, held, rtol=0.03)
    assert all(torch.equal(p, held) for p, held in zip(model.parameters(), before, strict=True))
