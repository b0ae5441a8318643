"""A task's batches that are gone on with: none is made again, and none of another run is taken for them."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import tiny_task
import torch
from raising import raises

from trimtab.core.errors import FormatError, ValueGivenError
from trimtab.core.progress import silent
from trimtab.experiments.train import ResumableBatches, TrainingOptions, train_whole
from trimtab.plans.plan import Plan
from trimtab.tasks.task import TaskData

DATA = tiny_task.load_data()
OTHER_DATA = replace(DATA, source=replace(DATA.source, sha256="1" * 64))
CPU, ROWS, STEPS = torch.device("cpu"), 96, 20  # an epoch of 512 rows is 5 batches


def batches(data=None, *, seed=3, batch_size=ROWS, steps=STEPS, **more):
    return ResumableBatches(data or DATA, CPU, seed=seed, batch_size=batch_size, steps=steps, **more)


@pytest.mark.parametrize("taken", [0, 1, 4, 5, 7, 19, 20])
def test_what_is_left_is_what_follows(taken):
    whole = [points for points, _ in batches()]
    assert len(whole) == STEPS
    first, second = batches(), batches()
    for _ in itertools.islice(first, taken):
        pass
    second.load_state_dict(first.state_dict())
    rest = [points for points, _ in second]
    assert len(rest) == STEPS - taken
    assert all(map(torch.equal, whole[taken:], rest))
    assert second.state_dict()["drawn"] == STEPS


def test_more_steps_may_follow_than_it_was_begun_with():
    first = batches(steps=4)
    kept = [*first]
    more = batches(steps=9)
    more.load_state_dict(first.state_dict())
    assert all(map(torch.equal, *[[points for points, _ in each] for each in ([*kept, *more], batches(steps=9))]))


@pytest.mark.parametrize(
    ("changes", "field", "given"),
    [
        ({"seed": 4}, "resume: seed", "4"),
        ({"batch_size": 32}, "resume: batch_size", "32"),
        ({"data": OTHER_DATA}, "resume: data", repr("1" * 64)),
    ],
)
def test_batches_of_another_run_are_refused(changes, field, given):
    with raises(ValueGivenError, code=f"resume.{next(iter(changes))}_differs", field=field) as raised:
        batches(**changes).load_state_dict(batches().state_dict())
    assert raised.value.got == given
    if "data" in changes:
        batches(**changes, may_differ=True).load_state_dict(batches().state_dict())


@pytest.mark.parametrize("state", [{}, {"drawn": 1}, {**batches().state_dict(), "drawn": -1}, None])
def test_a_state_that_is_none_is_refused(state):
    with pytest.raises((FormatError, ValueGivenError), match=r"state\.data\.loader"):
        batches().load_state_dict(state)


def test_a_training_that_is_gone_on_with_makes_only_what_is_left(tmp_path, monkeypatch):
    from trimtab.checkpoint.config import Checkpoints

    begun, original = [], TaskData.batches

    def counted(self, seed, batch_size, *, begin=0):
        begun.append(begin)
        return original(self, seed, batch_size, begin=begin)

    monkeypatch.setattr(TaskData, "batches", counted)

    def train(steps, **options):
        asked = TrainingOptions(tiny_task.task, Plan.fixed(tiny_task.BATCH_SIZE, 8), steps, **options)
        return train_whole(asked, silent)

    kept = Checkpoints(tmp_path / "kept", every_steps=4)
    train(6, checkpoints=kept)
    again = train(9, checkpoints=kept)
    assert begun == [0, 6]
    whole = train(9)
    assert (again["loss"], again["accuracy"]) == (whole["loss"], whole["accuracy"])
    assert "loss" not in train(9, checkpoints=kept)  # no step was left
    with raises(ValueGivenError, code="resume.seed_differs", field="resume: seed"):
        train(9, checkpoints=kept, seed=1)
