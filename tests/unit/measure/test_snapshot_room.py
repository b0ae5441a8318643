"""Copies that lie where the tensors do: put back alike, and only where a device has room for them and for trials."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from trimtab.measure import snapshot as module
from trimtab.measure.snapshot import Snapshot, fingerprint

GIB = 2**30


def trained():
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    def step() -> None:
        model(torch.randn(6, 4)).square().mean().backward()
        optimizer.step()

    step()
    return model, optimizer, step


def test_copies_on_the_device_are_put_back_alike():
    model, optimizer, step = trained()
    before = fingerprint(model, optimizer)
    held = Snapshot(model, optimizer, on_device=True)
    for _ in range(2):
        step()
        assert fingerprint(model, optimizer) != before
        held.restore()
        assert fingerprint(model, optimizer) == before


def tensor_of(size: int, device: str, grad=None):
    return SimpleNamespace(is_cuda=True, device=device, numel=lambda: size // 4, element_size=lambda: 4, grad=grad)


@pytest.mark.parametrize(
    ("free", "has_room"),
    [
        ({"cuda:0": 13 * GIB, "cuda:1": 5 * GIB}, True),  # 3 GiB and 1, four times over
        ({"cuda:0": 11 * GIB, "cuda:1": 5 * GIB}, False),
        ({"cuda:0": 13 * GIB, "cuda:1": 3 * GIB}, False),
    ],
)
def test_each_device_has_room_for_what_it_holds_and_for_trials(monkeypatch, free, has_room):
    weights, beside = tensor_of(GIB, "cuda:0", grad=tensor_of(GIB, "cuda:0")), tensor_of(GIB, "cuda:1")
    monkeypatch.setattr(module, "tensors_of", lambda model: [weights, beside])
    monkeypatch.setattr(module, "_tensors", lambda root: [tensor_of(GIB, "cuda:0"), weights])
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free[device], 80 * GIB))
    assert module._has_room(nn.Linear(1, 1), SimpleNamespace(state={})) is has_room
