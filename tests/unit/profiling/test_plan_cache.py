"""Plans that are kept between starts: found for the same loop, not for another, and never in the way of planning."""

from __future__ import annotations

import functools
import importlib
import json
import sys
from dataclasses import replace

import pytest
import torch
from raising import raises
from small_loops import sgd
from torch import nn

import trimtab
from trimtab import api
from trimtab.core.errors import FormatError, ValueGivenError
from trimtab.plans.plan import Plan
from trimtab.profiling.plan_cache import CachedPlan, default_folder, parts_of_key

PLAN = Plan.fixed(8, fused_optimizer=True)


def make_model(width=4, dropout=0.1):
    return nn.Sequential(nn.Linear(4, width), nn.Dropout(dropout), nn.Linear(width, 3))


def loss_fn(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def other_loss(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1], label_smoothing=0.1)


def batch_of(rows=8):
    return torch.randn(rows, 4), torch.zeros(rows, dtype=torch.long)


@pytest.fixture
def made(monkeypatch):
    """Plans that were made rather than found."""
    found = []
    monkeypatch.setattr(api, "_planned", lambda *args, **kwargs: found.append(1) or replace(PLAN, planning_s=12.0))
    return found


def planned(folder, model=None, loss=loss_fn, batch=None, lr=0.1, **options):
    model = model or make_model()
    return trimtab.plan(model, sgd(model, lr=lr), loss, batch or batch_of(), cache=folder, **options)


def test_a_second_start_reads_the_plan_and_says_so(tmp_path, made):
    first, second = planned(tmp_path), planned(tmp_path, lr=0.05)
    assert len(made) == 1
    assert second.values == first.values
    assert [note.code for note in second.notes] == ["plan.cached"]
    assert second.planning_s == 0


def chunked(model, batch, chunk=1):
    return loss_fn(model, batch)


class Heads(nn.Module):
    """A module whose `repr` does not show its attribute."""

    def __init__(self, heads):
        super().__init__()
        self.heads, self.linear = heads, nn.Linear(4, 3)

    def forward(self, x):
        return self.linear(x) / self.heads


def test_loops_that_differ_in_a_value_only_have_other_keys():
    def key(model, loss):
        return json.dumps(parts_of_key(model, sgd(model), loss, batch_of(), {}), sort_keys=True, default=str)

    model = make_model()
    keys = [
        key(model, each) for each in (chunked, functools.partial(chunked, chunk=1), functools.partial(chunked, chunk=2))
    ]
    keys += [key(Heads(heads), loss_fn) for heads in (2, 4)]
    assert len(set(keys)) == len(keys)
    assert key(model, chunked) == keys[0]


def test_a_folder_that_cannot_be_written_costs_no_plan(tmp_path, made):
    (tmp_path / "file").write_text("")
    with pytest.warns(UserWarning, match="not cached"):
        assert planned(tmp_path / "file" / "cache").values == PLAN.values


OTHERS = {
    "width": {"model": make_model(8)},
    "dropout": {"model": make_model(dropout=0.2)},
    "frozen": {"model": make_model()[:1].requires_grad_(True) and nn.Sequential(make_model(), nn.Identity())},
    "loss": {"loss": other_loss},
    "batch": {"batch": batch_of(16)},
    "budget": {"memory": "1GiB"},
    "reference": {"reference": trimtab.Reference("bf16")},
    "length": {"total_steps": 100},
    "accumulation": {"accumulate": 2},
}


@pytest.mark.parametrize("changes", OTHERS.values(), ids=OTHERS)
def test_another_loop_is_planned_again(tmp_path, made, changes):
    planned(tmp_path)
    planned(tmp_path, **changes)
    assert len(made) == 2


def test_a_change_of_an_imported_source_file_is_planned_again(tmp_path, made, monkeypatch):
    """A helper of the loss decides what a plan may do, and is no part of the loss's own code."""
    file = tmp_path / "user_helper_of_loss.py"
    file.write_text("scale = 1.0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.import_module(file.stem)
    try:
        planned(tmp_path / "cache")
        planned(tmp_path / "cache")
        assert len(made) == 1
        file.write_text("scale = 2.0\n")
        planned(tmp_path / "cache")
        assert len(made) == 2
    finally:
        del sys.modules[file.stem]


def test_a_damaged_file_is_planned_again(tmp_path, made):
    planned(tmp_path)
    (file,) = tmp_path.iterdir()
    file.write_text("{")
    assert planned(tmp_path).values == PLAN.values
    assert len(made) == 2
    assert Plan.load(file).values == PLAN.values


def test_tuned_plans_are_not_kept(tmp_path, made):
    with raises(ValueGivenError, code="cache.unsupported", field="cache"):
        planned(tmp_path, adapt="learning_rate")
    assert not made


def test_the_folder_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("TRIMTAB_CACHE", str(tmp_path))
    assert default_folder() == tmp_path
    monkeypatch.delenv("TRIMTAB_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_folder() == tmp_path / "trimtab" / "plans"


def test_a_plan_is_saved_and_loaded(tmp_path):
    path = PLAN.save(tmp_path / "plan.json")
    assert Plan.load(path) == PLAN
    assert CachedPlan(tmp_path, {"a": 1}).read() is None
    with pytest.raises(FormatError):
        Plan.load(tmp_path / "none.json")
