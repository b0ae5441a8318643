"""A window of several batches holds them all: a loader that writes over what it yielded is refused, and no other."""

from __future__ import annotations

import pytest
import torch
from raising import raises
from small_loops import sgd, train
from torch import nn

import trimtab
from trimtab.core.batch_rule import BatchRule
from trimtab.core.errors import BatchError
from trimtab.plans.plan import Plan

ROWS = 4
FREED = Plan.fixed(ROWS, batch_rule=BatchRule("fixed", k=2, learning_rate="none"))


def refilled(made=lambda buffer: buffer, num=4):
    """Yield one buffer, with other rows in it each time."""
    buffer = torch.empty(ROWS, 3)
    for index in range(num):
        yield made(buffer.fill_(index + 1.0))


STRUCTURES = {
    "alone": lambda buffer: buffer,
    "in a tuple": lambda buffer: (torch.ones(ROWS), buffer),
    "in a dict, as a part": lambda buffer: {"x": {"rows": buffer[:]}, "names": list("abcd")},
}


def rows_of(batch):
    """Return the rows of a batch of any of these structures."""
    if isinstance(batch, dict):
        return batch["x"]["rows"]
    return batch[1] if isinstance(batch, tuple) else batch


def started(plan=None):
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    run = trimtab.start(model, torch.optim.SGD(model.parameters(), lr=0.01), plan or Plan.fixed(ROWS))
    if plan is None:
        run.of_batches(2)
    return run


def trained(run, loader):
    """Train on a loader; returns the first number of each micro-batch."""
    seen = []

    def loss_fn(model, batch):
        seen.append(float(rows_of(batch)[0, 0]))
        return model(rows_of(batch).clone()).square().mean()

    train(run, loader, loss_fn)
    return seen


@pytest.mark.parametrize("plan", [None, FREED], ids=["as the loop says", "as the plan says"])
@pytest.mark.parametrize("made", STRUCTURES.values(), ids=STRUCTURES)
def test_a_buffer_that_is_written_over_within_a_window_is_refused(made, plan):
    with started(plan) as run:
        with raises(BatchError, code="batch.overwritten", field="batch"):
            next(run.windows(refilled(made)))
        assert (run.num_windows, run.applied_steps) == (0, 0)
        assert trained(run, [torch.ones(ROWS, 3), torch.zeros(ROWS, 3)]) == [1.0, 0.0]
        assert run.num_windows == 1


@pytest.mark.parametrize("made", STRUCTURES.values(), ids=STRUCTURES)
def test_copies_of_such_a_buffer_are_trained_on(made):
    with started() as run:
        assert trained(run, refilled(lambda buffer: made(buffer.clone()))) == [1.0, 2.0, 3.0, 4.0]
        assert run.num_windows == 2


def test_a_buffer_is_its_loaders_own_between_windows():
    with started(Plan.fixed(ROWS)) as run:
        assert trained(run, refilled()) == [1.0, 2.0, 3.0, 4.0]
        assert run.num_windows == 4


def made_in_inference_mode():
    with torch.inference_mode():
        return [torch.full((ROWS, 3), value) for value in (1.0, 2.0)]


def of_two_buffers():
    buffers = torch.empty(ROWS, 3), torch.empty(ROWS, 3)
    return (buffers[index % 2].fill_(index + 1.0) for index in range(5))


LOADERS = {
    "two buffers": (of_two_buffers, [1.0, 2.0, 3.0, 4.0, 5.0]),
    "the same batch again": (lambda: [torch.full((ROWS, 3), 5.0)] * 3, [5.0] * 3),
    "inference mode": (made_in_inference_mode, [1.0, 2.0]),
}


@pytest.mark.parametrize(("make", "seen"), LOADERS.values(), ids=LOADERS)
def test_other_batches_are_trained_on(make, seen):
    with started() as run:
        assert trained(run, make()) == seen
        assert run.num_windows == (len(seen) + 1) // 2


def test_batches_without_memory_of_their_own_are_drawn_together():
    sparse = [torch.eye(8).to_sparse() for _ in range(2)]
    model = torch.nn.Linear(8, 1)
    with trimtab.start(model, sgd(model), Plan.fixed(8)) as run:
        run.of_batches(2)
        train(run, sparse, lambda model, batch: model(batch.to_dense()).mean())
        assert run.applied_steps == 1
