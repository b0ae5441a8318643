"""A run that ends itself, and what it says of it."""

from __future__ import annotations

import contextlib
import math

import numpy as np
import pytest
import torch
from raising import raises
from small_loops import linear_loop, train
from small_loops import square_loss as loss

import trimtab
from trimtab.core.errors import UsageError
from trimtab.plans.plan import Plan
from trimtab.training.early_stopping import EarlyStopping


def started(stop, **options):
    return trimtab.start(*linear_loop(4), Plan.fixed(8), stop=stop, **options)


def batches(n):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(8, 4, generator=generator) for _ in range(n)]


def test_a_small_smoothed_gradient_ends_the_run(tmp_path):
    with trimtab.RecordWriter(tmp_path / "run.jsonl", trimtab.Header("test")) as writer:
        run = started(trimtab.Stop(grad_norm=1e-2), record=writer)
        with run:
            windows = 0
            for window in run.windows(batches(2000)):
                run.train_step(window, loss)
                windows += 1
            assert run.stop_reason is trimtab.StopReason.GRAD_NORM
    assert 11 <= windows < 2000
    record = trimtab.read_record(tmp_path / "run.jsonl")
    assert record.end.reason == "grad_norm"
    assert len(record.steps) == windows
    assert record.steps[-1].grad_norm < 2e-2


def test_one_small_gradient_does_not():
    test = EarlyStopping(trimtab.Stop(grad_norm=0.1))
    for norm in [1.0] * 20 + [0.0] + [1.0] * 5 + [math.nan] * 3:
        test.stepped(torch.tensor(norm))
    assert test.reason is None


@pytest.mark.parametrize(("smaller", "values"), [(False, [0.5, 0.7, 0.91]), (True, [3.0, 2.0, 0.9])])
def test_an_evaluation_that_reaches_the_target_ends_the_run(smaller, values, tmp_path):
    with trimtab.RecordWriter(tmp_path / "run.jsonl", trimtab.Header("test")) as writer:
        stop = trimtab.Stop(target=0.9, smaller_is_better=smaller)
        with started(stop, record=writer) as run:
            for window, value in zip(run.windows(batches(50)), values, strict=False):
                run.train_step(window, loss)
                assert run.stop_reason is None
                run.evaluated(value, "accuracy")
            assert run.stop_reason is trimtab.StopReason.TARGET
            assert list(run.windows(batches(3))) == []
    record = trimtab.read_record(tmp_path / "run.jsonl")
    assert record.end.reason == "target"
    assert [each.metrics["accuracy"] for each in record.evaluations] == values


@pytest.mark.parametrize(
    "values", [{}, {"grad_norm": 0.0}, {"grad_norm": math.nan}, {"target": math.inf}, {"grad_norm": "small"}]
)
def test_conditions_that_cannot_be_are_refused(values):
    with raises(UsageError, code="value.invalid"):
        trimtab.Stop(**values)


@pytest.mark.parametrize("value", [torch.tensor(0.5), torch.full((1,), 0.5), np.float32(0.5)])
def test_an_evaluation_may_be_a_tensor(tmp_path, value):
    writer = trimtab.RecordWriter(tmp_path / "run.jsonl", trimtab.Header("test"))
    with writer, started(trimtab.Stop(target=0.4), record=writer) as run:
        run.evaluated(math.nan, "accuracy")
        assert run.stop_reason is None
        with raises(UsageError, code="value.invalid", field="run.evaluated"):
            run.evaluated("good")
        run.evaluated(value, "accuracy")
        assert run.stop_reason is trimtab.StopReason.TARGET
    first, second = trimtab.read_record(tmp_path / "run.jsonl").evaluations
    assert math.isnan(first.metrics["accuracy"])
    assert second.metrics == {"accuracy": 0.5}


def test_an_evaluations_own_time_is_not_trainings(tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr("trimtab.training.step_recorder.time.perf_counter", lambda: now[0])
    writer = trimtab.RecordWriter(tmp_path / "run.jsonl", trimtab.Header("test"))
    with writer, started(None, record=writer) as run:
        for window in run.windows(batches(3)):
            now[0] += 1.0
            run.train_step(window, loss)
            now[0] += 10.0
            run.evaluated(0.5)
    record = trimtab.read_record(tmp_path / "run.jsonl")
    assert [each.train_s for each in record.evaluations] == [1.0, 2.0, 3.0]
    assert [step.wall_s for step in record.steps] == [1.0, 1.0, 1.0]


@pytest.mark.parametrize(("error", "reason"), [(None, "closed"), (ZeroDivisionError("by zero"), "error")])
def test_a_record_says_how_its_run_ended(tmp_path, error, reason):
    writer = trimtab.RecordWriter(tmp_path / "run.jsonl", trimtab.Header("test"))
    with writer, contextlib.suppress(ZeroDivisionError), started(None, record=writer) as run:
        run.train_step(run.window(next(iter(batches(1)))), loss)
        if error is not None:
            raise error
    end = trimtab.read_record(tmp_path / "run.jsonl").end
    assert end.reason == reason
    assert end.detail.get("error") == (None if error is None else "ZeroDivisionError: by zero")


def test_the_average_is_saved():
    test, other = (EarlyStopping(trimtab.Stop(grad_norm=0.1)) for _ in range(2))
    for _ in range(5):
        test.stepped(torch.tensor(1.0))
    other.load_state_dict(test.state_dict())
    assert other.state_dict() == test.state_dict()
    with pytest.raises(UsageError):
        other.load_state_dict(test.state_dict() | {"average": -1.0})


@pytest.mark.parametrize("saved_after", range(1, 40))
def test_a_save_ends_no_run_sooner_nor_does_going_on_from_it(saved_after):
    norms = [1.0] * 20 + [0.0] * 30

    def windows(test: EarlyStopping, begun: int = 0, until: int = len(norms)) -> int:
        for index, norm in enumerate(norms[begun:until], begun):
            if test.reason is not None:
                return index
            test.stepped(torch.tensor(norm))
        return until

    alone, saved, resumed = (EarlyStopping(trimtab.Stop(grad_norm=0.5)) for _ in range(3))
    expected = windows(alone)
    assert 20 < expected < len(norms)
    at = windows(saved, until=min(saved_after, expected))
    resumed.load_state_dict(saved.state_dict())
    assert windows(saved, at) == windows(resumed, at) == expected


@pytest.mark.parametrize("stop", [trimtab.Stop(target=3.0), trimtab.Stop(grad_norm=1e-9, target=1.0), None])
def test_resumed_runs_stop_by_the_conditions_of_their_own(stop):
    with started(trimtab.Stop(target=1.0)) as run:
        run.evaluated(2.0)
        state = run.state_dict()
    with started(trimtab.Stop(target=1.0)) as run:
        run.load_state_dict(state)
        assert run.stop_reason is trimtab.StopReason.TARGET
        assert list(run.windows(batches(3))) == []
    with started(trimtab.Stop(target=1.0)) as run:
        run.evaluated(2.0)
        state = run.state_dict()
    with started(stop) as run:
        run.load_state_dict(state)
        train(run, batches(3), loss)
        assert (run.stop_reason, run.applied_steps) == (None, 3)
        assert (run.grad_norm is None) is (stop is None or stop.grad_norm is None)
