"""A loop's own FSDP1, in which no rank of several knows another's part of a gradient; and DeepSpeed's configuration."""

from __future__ import annotations

import json

import pytest
import torch
from raising import raises
from small_loops import sgd
from torch import nn

import trimtab
from trimtab.core.batch_rule import BatchRule
from trimtab.core.choice import COMPILED_BLOCKS
from trimtab.core.errors import TrimtabError, UsageError, ValueGivenError
from trimtab.distributed import backend_selection
from trimtab.distributed.deepspeed_backend import BUCKET_BYTES, config_of
from trimtab.plans.plan import Plan


class FullyShardedDataParallel(nn.Linear):
    """Known by its name."""


def parts() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(FullyShardedDataParallel(3, 2), nn.Linear(2, 1))
    return model, sgd(model)


@pytest.fixture
def on_ranks(monkeypatch):
    """A process that has others beside it, as far as can be seen."""
    monkeypatch.setattr(backend_selection, "has_peers", lambda: True)


@pytest.mark.parametrize("how", [{}, {"num_ranks": 2, "zero_stage": 0}])
def test_fsdp1_is_neither_started_nor_planned_on_ranks(on_ranks, how):
    with raises(ValueGivenError, code="model.fsdp1", field="model"):
        trimtab.start(*parts(), trimtab.Plan.fixed(8, **how))
    with raises(ValueGivenError, code="model.fsdp1", field="model"):
        backend_selection.require_plannable(parts()[0])


def test_fsdp1_trains_in_one_process():
    with trimtab.start(*parts(), trimtab.Plan.fixed(8, 4), clip_norm=1.0) as run:
        run.train_step(run.window(torch.ones(8, 3)), lambda model, batch: model(batch).square().mean())
        assert run.applied_steps == 1


def planned(**values) -> Plan:
    return Plan.fixed(8, num_ranks=2, engine="deepspeed", **({"zero_stage": 2} | values))


def test_deepspeeds_configuration_says_what_the_plan_does():
    found = config_of(planned(zero_stage=3, reduce_dtype="bf16", bucket_bytes=2**20), 10**9)
    assert json.loads(json.dumps(found)) == found
    assert found["zero_optimization"]["stage"] == 3
    assert found["zero_optimization"]["reduce_bucket_size"] == 2**20 // 4
    assert found["communication_data_type"] == "bf16"
    assert config_of(planned(), 1001)["zero_optimization"]["reduce_bucket_size"] == 1002
    assert config_of(planned(), 10**9)["zero_optimization"]["reduce_bucket_size"] == BUCKET_BYTES // 4


@pytest.mark.parametrize(
    ("plan", "field"),
    [
        (Plan.fixed(8), "engine"),
        (planned(precision="fp16"), "precision"),
        (planned(compiled=True), "compiled"),
        (planned(compiled=COMPILED_BLOCKS), "compiled"),
        (planned(batch_rule=BatchRule()), "batch_rule"),
    ],
)
def test_what_it_does_not_go_with_is_refused(plan, field):
    with raises(UsageError, code="value.invalid"):
        config_of(plan, 100)


def test_a_plan_for_another_number_of_ranks_is_refused():
    with raises(TrimtabError, code="plan.ranks_differ"):
        backend_selection.backend_of(nn.Linear(2, 1), Plan.fixed(8, num_ranks=4, zero_stage=1), {})
