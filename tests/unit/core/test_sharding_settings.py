"""What is refused of how ranks share a model, and what a plan says of it."""

from __future__ import annotations

import pytest

from trimtab.core.errors import UsageError
from trimtab.core.plan import Plan
from trimtab.core.serialization import from_json, to_json


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"zero_stage": 4}, "from 0 to 3"),
        ({"zero_stage": 0, "engine": "deepspeed"}, "from 1 to 3"),
        ({"zero_stage": 1, "engine": "colossal"}, "deepspeed"),
        ({"zero_stage": 0, "reduce_dtype": "fp8"}, "bf16"),
        ({"zero_stage": 2, "bucket_bytes": 1024}, "a stage of 0, 1"),
        ({"zero_stage": 1, "powersgd_rank": 2}, "a stage of 0"),
        ({"zero_stage": 0, "reduces_once": False}, "a stage of 2, 3"),
        ({"zero_stage": 0, "reduces_once": "no"}, "true or false"),
        ({"zero_stage": 0, "bucket_bytes": 0}, "a whole number >= 1"),
        ({"reduce_dtype": "bf16"}, "which says that the plan shares"),
        ({"num_ranks": 2}, "which says that the plan shares"),
        ({"num_ranks": 0, "zero_stage": 0}, "a whole number >= 1"),
    ],
)
def test_what_does_not_fit_together_is_refused(values, said):
    with pytest.raises(UsageError, match=said):
        Plan.fixed(8, **values)


def test_how_ranks_share_is_shown_where_they_do():
    assert "zero stage" not in str(Plan.fixed(8))
    shared = Plan.fixed(8, num_ranks=4, zero_stage=3, reduces_once=False)
    assert "8 rows on each of 4 ranks" in str(shared)
    assert "zero stage           3" in str(shared)
    assert from_json(Plan, to_json(shared)) == shared
