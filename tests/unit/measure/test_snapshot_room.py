"""Copies that lie where the tensors do: put back alike, and only where a device has room for them beside a trial."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from state_digest import fingerprint
from torch import nn

from trimtab.state import loop_state as module
from trimtab.state.loop_state import LoopState
from trimtab.state.peak_memory import forget_peak
from trimtab.state.process_state import ProcessState

GIB = 2**30


def trained():
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    def step() -> None:
        model(torch.randn(6, 4)).square().mean().backward()
        optimizer.step()

    step()
    return model, optimizer, step


@pytest.mark.parametrize(
    ("peak_bytes", "has_room", "where"), [(None, True, "host"), (GIB, False, "host"), (GIB, True, "device")]
)
def test_copies_lie_where_there_is_room_and_are_put_back_alike(monkeypatch, peak_bytes, has_room, where):
    copied = {"host": [], "device": []}

    def copying(name):
        def copy(tensor):
            copied[name].append(tensor)
            return tensor.data.clone()

        return copy

    for name in copied:
        monkeypatch.setattr(module, f"{name}_copy", copying(name))
    monkeypatch.setattr(module, "_has_room", lambda model, optimizer, peak: has_room)
    model, optimizer, step = trained()
    before = fingerprint(model, optimizer)
    held = LoopState(model, optimizer, peak_bytes=peak_bytes)
    (other,) = copied.keys() - {where}
    assert (len(copied[where]) > 10, copied[other]) == (True, [])  # weights, gradients, states, statistics
    for _ in range(2):
        step()
        assert fingerprint(model, optimizer) != before
        held.restore()
        assert fingerprint(model, optimizer) == before


def tensor_of(size: int, device: str, grad=None):
    return SimpleNamespace(is_cuda=True, device=device, numel=lambda: size // 4, element_size=lambda: 4, grad=grad)


@pytest.mark.parametrize(
    ("free", "own", "share", "has_room"),
    [
        ({"cuda:0": 11 * GIB, "cuda:1": 6 * GIB}, 4 * GIB, 1.0, True),  # a peak of 5 GiB, and three times 3 and 1
        ({"cuda:0": 9 * GIB, "cuda:1": 6 * GIB}, 4 * GIB, 1.0, False),
        ({"cuda:0": 11 * GIB, "cuda:1": 3 * GIB}, 4 * GIB, 1.0, False),
        ({"cuda:0": 60 * GIB, "cuda:1": 60 * GIB}, 4 * GIB, 0.15, False),  # 12 GiB are all that it may have
    ],
)
def test_each_device_has_room_for_what_it_holds_and_for_a_trial(monkeypatch, free, own, share, has_room):
    weights, beside = tensor_of(GIB, "cuda:0", grad=tensor_of(GIB, "cuda:0")), tensor_of(GIB, "cuda:1")
    alive = [weights, beside, tensor_of(GIB, "cuda:0"), weights]
    monkeypatch.setattr(module, "alive_between_steps", lambda model, optimizer: alive)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free[device], 80 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: own)
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device: share)
    assert module._has_room(nn.Linear(1, 1), None, 5 * GIB) is has_room


def test_holding_a_model_on_the_host_does_not_initialise_cuda(monkeypatch):
    def initialises():
        raise AssertionError("CUDA was initialised")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state_all", initialises)
    model, optimizer, step = trained()
    before = fingerprint(model, optimizer)
    with LoopState(model, optimizer):
        step()
    assert fingerprint(model, optimizer) == before
    with pytest.raises(AssertionError, match="initialised"):
        ProcessState.capture()


def test_what_trials_reserved_on_a_gpu_is_given_back_before_its_peak_begins_anew(monkeypatch):
    done = []
    for name in ("empty_cache", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda *_, name=name: done.append(name))
    forget_peak(torch.device("cpu"))
    assert not done
    forget_peak(torch.device("cuda"))
    assert done == ["empty_cache", "reset_peak_memory_stats"]
