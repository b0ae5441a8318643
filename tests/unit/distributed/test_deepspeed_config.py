"""DeepSpeed's own configuration of a plan."""

from __future__ import annotations

import json

import pytest
from raising import raises

from trimtab.core.batch_rule import BatchRule
from trimtab.core.errors import UsageError
from trimtab.core.plan import Plan
from trimtab.distributed.deepspeed_backend import BUCKET_BYTES, config_of


def planned(**values) -> Plan:
    return Plan.fixed(8, num_ranks=2, engine="deepspeed", **({"zero_stage": 2} | values))


def test_it_says_what_the_plan_does_and_is_json():
    found = config_of(planned(zero_stage=3, reduce_dtype="bf16", bucket_bytes=2**20), 10**9)
    assert json.loads(json.dumps(found)) == found
    assert found["zero_optimization"]["stage"] == 3
    assert found["zero_optimization"]["reduce_bucket_size"] == 2**20 // 4
    assert found["communication_data_type"] == "bf16"


def test_no_buffer_is_larger_than_the_model():
    assert config_of(planned(), 1001)["zero_optimization"]["reduce_bucket_size"] == 1002
    assert config_of(planned(), 10**9)["zero_optimization"]["reduce_bucket_size"] == BUCKET_BYTES // 4


@pytest.mark.parametrize(
    ("plan", "field"),
    [
        (Plan.fixed(8), "engine"),
        (planned(precision="fp16"), "precision"),
        (planned(compiled=True), "compiled"),
        (planned(batch_rule=BatchRule()), "batch_rule"),
    ],
)
def test_what_it_does_not_go_with_is_refused(plan, field):
    with raises(UsageError, code="value.invalid"):
        config_of(plan, 100)
