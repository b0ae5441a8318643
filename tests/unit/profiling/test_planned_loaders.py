"""`trimtab.plan` with a loader in place of a batch: its batches are drawn, and drawn again by the next epoch."""

from __future__ import annotations

from dataclasses import replace

import numpy
import pytest
import torch
from raising import raises
from small_loops import sgd
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, Sampler, TensorDataset

import trimtab
from trimtab.core.errors import BatchError, ValueGivenError
from trimtab.integrations.trainer_rules import accumulation_arguments
from trimtab.profiling import sample_batches
from trimtab.profiling.measurement_notes import Notes
from trimtab.profiling.padding import PaddingCounter
from trimtab.profiling.sample_batches import draw_some, first_batch, loader_of
from trimtab.profiling.training_loop import TrainingLoop

ROWS = TensorDataset(torch.randn(32, 4), torch.randint(0, 3, (32,)))


class Stream(IterableDataset):
    def __iter__(self):
        return iter(torch.arange(32.0).reshape(8, 4))


class Batches:
    """Batches that are neither a container nor an object with tensors."""

    def __iter__(self):
        generator = torch.Generator().manual_seed(0)
        return (torch.randn(8, 4, generator=generator) for _ in range(3))


class Graph:
    """A batch that can be iterated over its parts."""

    def __init__(self):
        self.x = torch.randn(3, 4)

    def __iter__(self):
        return iter([("x", self.x)])

    def keys(self):
        return ["x"]


def loss_fn(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


@pytest.mark.parametrize(
    "batch",
    [torch.ones(2), [torch.ones(2)], (torch.ones(2),), {"x": torch.ones(2)}, numpy.ones((2, 3)), Graph(), "text", 3],
)
def test_a_batch_is_no_loader(batch):
    assert loader_of(batch) is None


@pytest.mark.parametrize("loader", [DataLoader(ROWS, 8), DataLoader(Stream(), 2), Batches()])
def test_a_loader_yields_its_first_batch_again(loader):
    assert loader_of(loader) is loader
    torch.manual_seed(3)
    state = torch.get_rng_state()
    first = first_batch(loader)
    assert torch.equal(torch.get_rng_state(), state)
    again = next(iter(loader))
    assert all(map(torch.equal, *((each,) if isinstance(each, torch.Tensor) else each for each in (first, again))))


def test_iterators_and_empty_loaders_are_refused():
    model = nn.Linear(4, 3)
    with raises(BatchError, code="batch.iterator"):
        trimtab.plan(model, sgd(model), loss_fn, iter(DataLoader(ROWS, 8)))
    with raises(ValueGivenError, code="data.empty"):
        first_batch(DataLoader(TensorDataset(torch.ones(0, 2)), 8))
    broken = DataLoader(Stream(), 2)
    broken.dataset.items = iter([1])
    with raises(ValueGivenError, code="data.one_shot"):
        first_batch(broken)


@pytest.mark.usefixtures("brief_trials")
def test_a_plan_for_a_loader_times_it_and_counts_accumulated_batches():
    model = nn.Linear(4, 3)
    plan = trimtab.plan(model, sgd(model), loss_fn, DataLoader(ROWS, 8), num_blocks=3, memory="1GiB")
    assert plan.batch_size == 8
    with raises(ValueGivenError, code="argument.conflict"):
        trimtab.plan(model, sgd(model), loss_fn, DataLoader(ROWS, 8), memory="1GiB", budget=trimtab.Budget())


KEEPING = trimtab.Reference(declared=False, keeps_gradients=True)  # A trainer's own code may read gradients.


@pytest.mark.parametrize(
    ("planning", "num_batches", "window", "expected"),
    [
        ({}, 1, 1, {"reference": KEEPING}),
        ({}, 1, 4, {"accumulate": 4, "reference": KEEPING}),
        ({}, 4, 4, {"reference": replace(KEEPING, accumulate=4)}),
        (
            {"reference": trimtab.Reference(accumulate=2)},
            1,
            4,
            {"reference": trimtab.Reference(accumulate=2, keeps_gradients=True)},
        ),
    ],
)
def test_a_trainers_batches_of_a_step_are_counted_once(planning, num_batches, window, expected):
    assert accumulation_arguments(planning, num_batches, window) == expected


def test_limits_of_a_step_are_divided_among_its_batches():
    budget = trimtab.Budget("1GiB", time=0.4, energy=8.0)
    assert budget.of_batch(4) == trimtab.Budget("1GiB", time=0.1, energy=2.0)
    assert budget.of_batch(1) is budget


def test_accumulated_batches_are_as_many_steps_of_the_planned_batch(monkeypatch):
    from trimtab import api

    asked = {}

    class Stopped(Exception):
        pass

    def profile(*args, **options):
        asked.update(options)
        raise Stopped

    monkeypatch.setattr(api, "profile", profile)
    model = nn.Linear(4, 3)
    with pytest.raises(Stopped):
        trimtab.plan(model, sgd(model), loss_fn, DataLoader(ROWS, 8), time=0.4, total_steps=10, accumulate=4)
    assert (asked["total_steps"], asked["adapts_batch_size"], asked["budget"].time) == (40, True, 0.1)
    assert isinstance(asked["data"], DataLoader)


class Ending(Sampler):
    """A sampler whose generator changes its state when it ends early."""

    def __init__(self):
        self.num_ended = 0

    def __iter__(self):
        try:
            yield from range(32)
        finally:
            self.num_ended += 1


def subject():
    model = nn.Linear(4, 3)
    return TrainingLoop(model, sgd(model), loss_fn, next(iter(DataLoader(ROWS, 2))))


def test_generators_of_samplers_end_before_the_data_are_restored(monkeypatch):
    monkeypatch.setattr(sample_batches, "_DRAWING_S", 0.0)  # The generator is left suspended.
    loader = DataLoader(ROWS, 2, sampler=Ending())
    assert draw_some(subject(), loader, Notes()).seconds is not None
    assert loader.sampler.num_ended == 0


def test_an_error_in_counting_padding_leaves_the_times(monkeypatch):
    monkeypatch.setattr(PaddingCounter, "add", lambda *given: 1 / 0)
    notes = Notes()
    assert draw_some(subject(), DataLoader(ROWS, 2), notes).seconds is not None
    assert [note.code for note in notes.found] == ["padding.not_counted"]
