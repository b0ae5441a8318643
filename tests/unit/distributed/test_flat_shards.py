"""A loop's own FSDP1: no rank of several knows another's part of a gradient there."""

from __future__ import annotations

import pytest
import torch
from raising import raises
from torch import nn

import trimtab
from trimtab.core.errors import ValueGivenError
from trimtab.distributed import backend_selection


class FullyShardedDataParallel(nn.Linear):
    """Known by its name."""


def parts() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(FullyShardedDataParallel(3, 2), nn.Linear(2, 1))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.fixture
def on_ranks(monkeypatch):
    """A process that has others beside it, as far as can be seen."""
    monkeypatch.setattr(backend_selection, "has_peers", lambda: True)


@pytest.mark.parametrize("how", [{}, {"num_ranks": 2, "zero_stage": 0}])
def test_it_is_not_started_on_ranks(on_ranks, how):
    with raises(ValueGivenError, code="model.fsdp1", field="model"):
        trimtab.start(*parts(), trimtab.Plan.fixed(8, **how))


def test_nor_is_it_planned_there(on_ranks):
    with raises(ValueGivenError, code="model.fsdp1", field="model"):
        backend_selection.require_plannable(parts()[0])


def test_in_one_process_it_holds_all_of_a_gradient():
    with trimtab.start(*parts(), trimtab.Plan.fixed(8, 4), clip_norm=1.0) as run:
        run.train_step(run.window(torch.ones(8, 3)), lambda model, batch: model(batch).square().mean())
        assert run.applied_steps == 1
