"""Buffers that are in no `state_dict()`: put back as they were saved, also those that grew or came late."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from raising import raises
from torch import nn

import trimtab
from trimtab.checkpoint.atomic_directory import prefix_of
from trimtab.checkpoint.manager import RankCommunication
from trimtab.checkpoint.state_files import read_state, write_state
from trimtab.checkpoint.train_state import hidden_of, loading_hidden
from trimtab.core.errors import FormatError, ModelError
from trimtab.core.record import Header, read_record

BATCHES = list(torch.arange(48.0).reshape(12, 4).split(4))


class Net(nn.Module):
    """One that grows, one that is made in the first forward, one whose place waits for it, and one that is dropped."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 1)
        self.register_buffer("grown", torch.zeros(1), persistent=False)
        self.register_buffer("late", None, persistent=False)
        self.register_buffer("dropped", torch.ones(2), persistent=False)
        self.register_buffer("counted", torch.zeros(()), persistent=False)

    def forward(self, x):
        if not hasattr(self, "made"):
            self.register_buffer("made", torch.zeros(3, dtype=torch.float64), persistent=False)
        self.late = torch.full((2,), 0.5) if self.late is None else self.late * 0.9
        self.grown, self.dropped = torch.cat([self.grown, x.mean().detach()[None]]), None
        self.made += 0.1
        self.counted += 1
        hidden = self.grown.mean() + self.made.sum() + self.late.sum() + self.counted
        return self.layer(x / 48) * (1 + 0.01 * hidden.float())


def trained(folder, windows):
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    checkpoints, losses = trimtab.Checkpoints(folder, every_steps=1, every_s=None), []
    record = trimtab.RecordWriter(folder.with_suffix(".jsonl"), Header("net"), continues=True)
    with record, trimtab.start(model, optimizer, trimtab.Plan.fixed(4), record=record, checkpoints=checkpoints) as run:
        while run.num_windows < windows:
            for window in run.windows(BATCHES):
                losses.append(float(run.train_step(window, lambda model, batch: model(batch).square().mean())))
                if run.num_windows == windows:
                    run.checkpoint()
                    break
    return losses, model


def test_a_run_whose_hidden_buffers_grow_and_come_late_goes_on_to_the_bit(tmp_path):
    first, _ = trained(tmp_path / "run", 4)
    rest, model = trained(tmp_path / "run", 8)
    whole, other = trained(tmp_path / "whole", 8)
    assert first + rest == whole
    (resumed,) = (event for event in read_record(tmp_path / "run.jsonl").events if event.name == "resumed")
    assert sorted(resumed.detail["buffers"]) == ["dropped", "grown", "late", "made"]
    found, expected = hidden_of(model), hidden_of(other)
    assert found.keys() == expected.keys()
    assert found.pop("dropped") is expected.pop("dropped") is None
    assert all(found[name].dtype == expected[name].dtype for name in found)
    assert all(torch.equal(found[name], expected[name]) for name in found)
    assert model.state_dict().keys() == {"layer.weight", "layer.bias"}


def written(tmp_path, hidden):
    write_state(tmp_path, {"hidden": hidden})
    return read_state(tmp_path)["hidden"]


def two():
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    shared = torch.zeros(2)
    for each in model:
        each.register_buffer("cache", shared, persistent=False)
    return model


@pytest.mark.parametrize("size", [2, 5])
def test_what_modules_share_they_share_again(tmp_path, size):
    model, fresh = two(), two()
    model[0].cache = model[1].cache = torch.arange(float(size))
    before = fresh[0].cache
    loading_hidden(fresh, written(tmp_path, hidden_of(model)))()
    assert fresh[0].cache is fresh[1].cache
    assert torch.equal(fresh[1].cache, torch.arange(float(size)))
    assert (fresh[0].cache is before) is (size == 2)


def test_what_modules_shared_and_no_more_do_has_its_own_values(tmp_path):
    model, fresh = two(), two()
    model[0].cache, model[1].cache = torch.ones(2), torch.full((2,), 2.0)
    loading_hidden(fresh, written(tmp_path, hidden_of(model)))()
    assert [fresh[0].cache.tolist(), fresh[1].cache.tolist()] == [[1, 1], [2, 2]]


def test_a_checkpoint_that_names_what_is_shared_once_is_one():
    """As they were written before."""
    fresh = two()
    loading_hidden(fresh, {"0.cache": torch.ones(2)})()
    assert fresh[1].cache.tolist() == [1, 1]


@pytest.mark.parametrize(
    ("saved", "code", "got", "expected"),
    [
        ({}, "model.names_differ", "0.cache", ""),
        ({"0.cache": torch.ones(2), "2.cache": torch.ones(2)}, "model.names_differ", "2.cache", ""),
        ({"0.cache": torch.ones(2), "0.weight": torch.ones(2)}, "model.names_differ", "0.weight", ""),
        ({"0.cache": torch.ones(2), "1.training": torch.ones(2)}, "model.names_differ", "1.training", ""),
        ({"0.cache": torch.ones(1)}, "model.buffer_differs", "0.cache: float32 of shape [2]", "float32 of shape [1]"),
        (
            {"0.cache": torch.ones(2, 2)},
            *("model.buffer_differs", "0.cache: float32 of shape [2]", "float32 of shape [2, 2]"),
        ),
        (
            {"0.cache": torch.ones(2).double()},
            *("model.buffer_differs", "0.cache: float32 of shape [2]", "float64 of shape [2]"),
        ),
    ],
)
def test_another_model_is_refused_and_nothing_is_changed(saved, code, got, expected):
    fresh = two()
    with raises(ModelError, code=code, field="model's buffers") as refused:
        loading_hidden(fresh, saved)
    assert refused.value.got == got
    assert expected in refused.value.expected
    assert fresh[0].cache.tolist() == [0, 0]
    with raises(FormatError, code="format.invalid", field="state.model.hidden"):
        loading_hidden(fresh, {"0.cache": 3})


def test_one_that_cannot_be_written_where_it_is_has_another_put_in_its_place():
    fresh = nn.Module()
    fresh.register_buffer("scale", torch.ones(1).expand(4), persistent=False)
    fresh.weight = nn.Parameter(torch.ones(1))
    loading_hidden(fresh, {"scale": torch.arange(4.0)})()
    assert fresh.scale.tolist() == [0, 1, 2, 3]


def test_a_rank_has_those_that_it_had_and_not_another_s(tmp_path):
    ranks = RankCommunication(SimpleNamespace(num_ranks=1))
    ranks.num, ranks.rank = 2, 1
    model = {
        "own": {"w": torch.ones(1), "mean": torch.ones(1)},
        "hidden": {"late": torch.ones(2), "more": torch.ones(2)},
    }
    own = {"own": {"mean": torch.zeros(1)}, "hidden": {"late": None}}
    write_state(tmp_path, {"model": model, "data": {}})
    write_state(tmp_path, {"buffers": own, "data": {}}, prefix_of(1))
    found = ranks.read(tmp_path, 2)["model"]
    assert found["hidden"] == {"late": None}
    assert [found["own"][name].item() for name in ("w", "mean")] == [1, 0]
