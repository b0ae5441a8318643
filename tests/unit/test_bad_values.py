"""Values set by hand, and plans read from JSON, are whole or refused by the name of what is wrong."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from raising import raises
from refusals import INF, NAN, NO_COUNT, NO_POSITIVE

import trimtab
from trimtab.core import serialization
from trimtab.core.errors import FormatError, TrimtabError, ValueGivenError
from trimtab.plans.plan import Plan

VALUES = [
    *(("plan.batch_size", value, lambda v: Plan.fixed(v)) for value in NO_COUNT),
    *(
        ("plan.micro_batch", value, lambda v: Plan.fixed(8, v))
        for value in [9, *(v for v in NO_COUNT if v is not None)]
    ),
    *(("plan.precision", value, lambda v: Plan.fixed(8, precision=v)) for value in ["int8", "FP32", 16, None, []]),
    *(("plan.memory_layout", value, lambda v: Plan.fixed(8, memory_layout=v)) for value in ["nhwc", None, 1]),
    *(("plan.allocator", value, lambda v: Plan.fixed(8, allocator=v)) for value in ["jemalloc", None, True]),
    *(("plan.schedule", value, lambda v: Plan.fixed(8, schedule=v)) for value in ["cosine", None, 0.5]),
    *(
        ("plan.learning_rate_scale", value, lambda v: Plan.fixed(8, learning_rate_scale=v))
        for value in [*NO_POSITIVE, None]
    ),
    *(("plan.clip_norm", value, lambda v: Plan.fixed(8, clip_norm=v)) for value in NO_POSITIVE),
    *(("memory", value, lambda v: trimtab.Budget(memory=v)) for value in [-1, NAN, INF, "lots", "8 parsecs", [], True]),
    *(("time", value, lambda v: trimtab.Budget(time=v)) for value in NO_POSITIVE),
    *(("energy", value, lambda v: trimtab.Budget(energy=v)) for value in NO_POSITIVE),
    *(("time", value, lambda v: trimtab.Objective(time=v)) for value in [-1, NAN, INF, "1", None]),
    *(("memory", value, lambda v: trimtab.Objective(memory=v)) for value in [-1e-9, NAN, True]),
    ("objective", 0, lambda v: trimtab.Objective(time=v)),
    *(("reference.precision", value, lambda v: trimtab.Reference(v)) for value in ["int8", None, 32]),
    *(("reference.clip_norm", value, lambda v: trimtab.Reference(clip_norm=v)) for value in NO_POSITIVE),
]


@pytest.mark.parametrize(("field", "value", "make"), VALUES, ids=[f"{f} {v!r:.12}" for f, v, _ in VALUES])
def test_a_value_out_of_range_is_refused(field, value, make):
    with pytest.raises(ValueGivenError) as caught:
        make(value)
    assert caught.value.field == field
    assert caught.value.expected


@pytest.mark.parametrize("value", [1, 0, "yes", None, NAN])
def test_fused_is_yes_or_no(value):
    with raises(FormatError, code="format.invalid", field="plan.fused_optimizer"):
        Plan.fixed(8, fused_optimizer=value)


@pytest.mark.parametrize("name", ["microbatch", "lr", "batch_rows_", "reference", "check"])
def test_an_unknown_setting_is_refused_and_the_known_ones_named(name):
    with raises(FormatError, code="plan.unknown_setting", field=f"plan.{name}") as caught:
        Plan.fixed(8, **{name: 1})
    assert "precision" in caught.value.expected


anything = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=5),
    st.binary(max_size=3),
    st.complex_numbers(),
)
anything = st.one_of(
    anything, st.lists(anything, max_size=2), st.dictionaries(st.text(max_size=2), anything, max_size=2)
)


def outcome(make: Any) -> Any:
    try:
        return make()
    except TrimtabError as error:
        return error


def assert_names(error: TrimtabError, field: str) -> None:
    assert error.field == field
    assert error.expected


def assert_whole(plan: Plan) -> None:
    assert serialization.from_json(Plan, serialization.to_json(plan)) == plan


@given(st.sampled_from(sorted(Plan.effects())), anything)
@example("recompute", "")
@example("recompute", "5")
@example("recompute", "0-99999999999")
def test_any_value_of_any_setting_makes_a_plan_or_a_typed_error(name, value):
    made = outcome(lambda: Plan.fixed(8, **{name: value}))
    assert_whole(made) if isinstance(made, Plan) else assert_names(made, f"plan.{name}")


TEXT = serialization.to_json(Plan.fixed(8, 4, precision="bf16"))


def damaged(**changes: Any) -> str:
    return json.dumps(json.loads(TEXT) | changes)


def without(key: str) -> str:
    return json.dumps({k: v for k, v in json.loads(TEXT).items() if k != key})


CHOICE = json.loads(TEXT)["micro_batch"]
JSON = {
    "cut off": (TEXT[:-20], "Plan"),
    "empty": ("", "Plan"),
    "a list": ("[]", "Plan"),
    "null": ("null", "Plan"),
    "an unknown key": (damaged(micro=3), "Plan.micro"),
    "a missing key": (without("batch_size"), "Plan.batch_size"),
    "a newer schema": (damaged(schema=99), "plan.schema"),
    "rows as text": (damaged(batch_size="8"), "Plan.batch_size"),
    "rows missing a value": (damaged(batch_size=None), "Plan.batch_size"),
    "negative rows": (damaged(batch_size=-8), "plan.batch_size"),
    "a bare value": (damaged(micro_batch=4), "Plan.micro_batch"),
    "a micro-batch above the batch": (damaged(micro_batch=CHOICE | {"value": 9}), "plan.micro_batch"),
    "a mark of its own": (damaged(micro_batch=CHOICE | {"effect": "free"}), "Plan.micro_batch.effect"),
    "a choice without reason": (damaged(micro_batch={"value": 4}), "Plan.micro_batch.reason"),
    "an infinite rate": (damaged(learning_rate_scale=CHOICE | {"value": "inf"}), "plan.learning_rate_scale"),
}


@pytest.mark.parametrize(("text", "field"), JSON.values(), ids=JSON)
def test_a_damaged_plan_is_refused_by_the_path_of_the_damage(text, field):
    with pytest.raises((FormatError, ValueGivenError)) as caught:
        serialization.from_json(Plan, text)
    assert caught.value.field == field


@given(st.integers(0, len(TEXT) - 1), st.sampled_from(["", "0", '"', "}", "null", "NaN", "-"]))
def test_any_damage_to_a_plan_is_seen_or_harmless(index, character):
    made = outcome(lambda: serialization.from_json(Plan, TEXT[:index] + character + TEXT[index + 1 :]))
    assert_whole(made) if isinstance(made, Plan) else assert_names(made, made.field)
