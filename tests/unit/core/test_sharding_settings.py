"""What is refused of how ranks share a model, and what a plan says of it."""

from __future__ import annotations

import pytest
from raising import raises

from trimtab.core.errors import UsageError
from trimtab.core.plan import Plan
from trimtab.core.serialization import from_json, to_json


@pytest.mark.parametrize(
    ("values", "code", "field", "expected"),
    [
        ({"zero_stage": 4}, "value.invalid", "zero_stage", "0 to 3"),
        ({"zero_stage": 0, "engine": "deepspeed"}, "value.invalid", "zero_stage", "1 to 3"),
        ({"zero_stage": 1, "engine": "colossal"}, "value.invalid", "engine", "deepspeed"),
        ({"zero_stage": 0, "reduce_dtype": "fp8"}, "value.invalid", "reduce_dtype", "bf16"),
        ({"zero_stage": 2, "bucket_bytes": 1024}, "plan.stage_unsupported", "bucket_bytes", "(0, 1)"),
        ({"zero_stage": 1, "powersgd_rank": 2}, "plan.stage_unsupported", "powersgd_rank", "(0,)"),
        ({"zero_stage": 0, "reduces_once": False}, "plan.stage_unsupported", "reduces_once", "(2, 3)"),
        ({"zero_stage": 0, "reduces_once": "no"}, "format.invalid", "reduces_once", "true or false"),
        ({"zero_stage": 0, "bucket_bytes": 0}, "value.invalid", "bucket_bytes", ">= 1"),
        ({"reduce_dtype": "bf16"}, "plan.needs_zero_stage", "reduce_dtype", ""),
        ({"num_ranks": 2}, "plan.needs_zero_stage", "num_ranks", ""),
        ({"num_ranks": 0, "zero_stage": 0}, "value.invalid", "num_ranks", ">= 1"),
    ],
)
def test_what_does_not_fit_together_is_refused(values, code, field, expected):
    with raises(UsageError, code=code, field=f"plan.{field}") as caught:
        Plan.fixed(8, **values)
    assert expected in caught.value.expected


def test_how_ranks_share_is_shown_where_they_do():
    assert "zero stage" not in str(Plan.fixed(8))
    shared = Plan.fixed(8, num_ranks=4, zero_stage=3, reduces_once=False)
    assert "8 samples on each of 4 ranks" in str(shared)
    assert "zero stage           3" in str(shared)
    assert from_json(Plan, to_json(shared)) == shared
