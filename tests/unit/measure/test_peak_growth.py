"""Bytes that a call holds at most: without older garbage, without a message, and as torch's newer profiler counts."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

from trimtab.state import peak_memory
from trimtab.state.peak_memory import is_profiled, peak_growth

MIB = 2**20


@pytest.fixture(params=["frozen by nobody", "frozen by somebody"])
def frozen(request):
    """How many objects somebody else has left out of collections."""
    before = gc.get_threshold()
    gc.collect()
    gc.unfreeze()
    if request.param == "frozen by somebody":
        gc.freeze()
    yield gc.get_freeze_count()
    gc.set_threshold(*before)
    gc.freeze()


def held(mib: int) -> torch.Tensor:
    return torch.ones(mib * MIB // 4)


def in_a_cycle(tensor: torch.Tensor) -> list:
    cycle = [tensor]
    cycle.append(cycle)
    return cycle


def counted_beside_garbage() -> int:
    """Return what a call of 5 MiB is counted to hold, in which garbage of an earlier count would be collected."""
    garbage = []
    peak_growth(lambda: garbage.append(in_a_cycle(held(8))))
    garbage.clear()

    def step():
        first = held(2)
        gc.set_threshold(1, 1, 1)
        for _ in range(100):
            in_a_cycle(first)
        return first + held(1)[0]

    return peak_growth(step)


def test_older_garbage_is_not_collected_amid_a_count(frozen):
    assert counted_beside_garbage() == pytest.approx(5 * MIB, abs=MIB // 10)
    assert gc.get_freeze_count() == pytest.approx(frozen, abs=0.01 * frozen)


def test_garbage_that_a_call_makes_is_freed_as_it_is_in_training(frozen):
    def step():
        gc.set_threshold(1, 1, 1)
        for _ in range(20):
            in_a_cycle(held(4))

    assert peak_growth(step) <= 12 * MIB


def test_what_fails_leaves_collections_as_they_were(frozen):
    def step():
        raise ValueError("of the step")

    with pytest.raises(ValueError, match="of the step"):
        peak_growth(step)
    assert gc.get_freeze_count() == pytest.approx(frozen, abs=0.01 * frozen)


OLDER = 1_100  # the allocator warns of every thousandth block that is older than the count


def training_step(model, x):
    def step():
        model(x).square().mean().backward()

    step()
    model.zero_grad(set_to_none=True)
    return step


def convolutions():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(1152, 4))
    return training_step(model, torch.randn(4, 3, 16, 16))


def recurrent():
    layer = nn.LSTM(8, 16, batch_first=True)
    return training_step(lambda_model(layer, lambda x: layer(x)[0]), torch.randn(4, 5, 8))


def checkpointed():
    block = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
    reentrant = lambda x: torch.utils.checkpoint.checkpoint(block, x, use_reentrant=True)  # noqa: E731
    return training_step(lambda_model(block, reentrant), torch.randn(8, 64, requires_grad=True))


def lambda_model(module, forward):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.module = module

        def forward(self, x):
            return forward(x)

    return Model()


@pytest.mark.parametrize("make", [convolutions, recurrent, checkpointed])
def test_every_allocation_is_counted_that_the_newer_profiler_counts(make):
    torch.manual_seed(0)
    step, again = make(), make()
    quiet = [size for _, size in sorted(peak_memory._allocations(step), key=lambda event: event[0])]
    loud = [size for _, size in sorted(peak_memory._allocations_by_kineto(again), key=lambda event: event[0])]
    assert len(quiet) > 20
    assert quiet == loud


def test_nothing_is_written_though_many_older_blocks_are_freed(capfd):
    older = [torch.ones(10) for _ in range(OLDER)]
    peak_growth(older.clear)
    assert capfd.readouterr() == ("", "")


def test_the_level_of_logs_is_as_it_was_after_an_error():
    before = peak_memory._log_level().value

    def step():
        assert peak_memory._log_level().value >= 2
        raise ValueError("of the step")

    with pytest.raises(ValueError, match="of the step"):
        peak_growth(step)
    assert peak_memory._log_level().value == before
    assert not is_profiled()


def test_a_torch_without_its_older_profiler_counts_with_the_newer_one(monkeypatch):
    step = convolutions()
    expected = peak_growth(step)
    monkeypatch.delattr(torch.autograd, "_enable_profiler_legacy")
    assert peak_growth(convolutions()) == expected


def test_memory_is_counted_while_a_session_waits_or_another_thread_is_profiled():
    schedule = torch.profiler.schedule(wait=1, warmup=1, active=1)
    expected = peak_growth(convolutions())
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], schedule=schedule) as session:
        assert peak_growth(convolutions()) == expected
        session.step()
        assert peak_growth(convolutions()) == expected
        session.step()
        torch.ones(3).add(1)
    assert any(event.name == "aten::add" for event in session.events())
