"""A plan as a value: tiers follow from marks, every choice is explained, and nothing out of range is held."""

from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from raising import raises

from trimtab.core.choice import Note
from trimtab.core.errors import FormatError, UsageError, ValueGivenError
from trimtab.core.objective import Reference
from trimtab.core.plan import Choice, Effect, MeasuredCost, Plan, Rejected, SplitCheck
from trimtab.core.serialization import from_json, to_json

VALUES = {
    "precision": "bf16",
    "memory_layout": "channels_last",
    "allocator": "retain",
    "fused_optimizer": True,
    "loss_chunk": 128,
    "recompute": "every_block",
    "compiled": True,
    "dropout": 0.2,
    "weight_decay": 0.1,
    "optimizer": "muon",
    "schedule": "warmup_cosine",
    "learning_rate_scale": 3.0,
    "clip_norm": 1.0,
}
SAME_MATHS = {"precision", "memory_layout", "allocator", "fused_optimizer", "loss_chunk", "recompute", "compiled"}
KEPT = {
    "precision": "fp32",
    "memory_layout": "keep",
    "allocator": "keep",
    "fused_optimizer": False,
    "loss_chunk": None,
    "recompute": None,
    "compiled": False,
    "dropout": None,
    "weight_decay": None,
    "optimizer": "user",
    "schedule": "user",
    "learning_rate_scale": 1.0,
    "clip_norm": None,
}


def test_marks_are_the_ones_the_equivalence_tests_are_made_from():
    assert Plan.effects() == {
        "micro_batch": Effect.BITWISE,
        "precision": Effect.ROUNDING,
        "memory_layout": Effect.ROUNDING,
        "allocator": Effect.BITWISE,
        "fused_optimizer": Effect.ROUNDING,
        "loss_chunk": Effect.ROUNDING,
        "recompute": Effect.BITWISE,
        "compiled": Effect.ROUNDING,
        "zero_stage": Effect.ROUNDING,
        "engine": Effect.ROUNDING,
        "reduce_dtype": Effect.ROUNDING,
        "bucket_bytes": Effect.ROUNDING,
        "reduces_once": Effect.ROUNDING,
        "powersgd_rank": Effect.TRAINING,
        "dropout": Effect.TRAINING,
        "weight_decay": Effect.TRAINING,
        "optimizer": Effect.TRAINING,
        "schedule": Effect.TRAINING,
        "warmup_fraction": Effect.TRAINING,
        "learning_rate_scale": Effect.TRAINING,
        "batch_policy": Effect.TRAINING,
        "clip_norm": Effect.TRAINING,
    }


@given(st.sets(st.sampled_from(sorted(VALUES))), st.integers(1, 64))
def test_tier_is_f_exactly_when_dynamics_change(names, micro_batch):
    plan = Plan.fixed(64, micro_batch, **{name: VALUES[name] for name in names})
    assert plan.plan_kind == ("equivalent" if names <= SAME_MATHS else "tuned")
    assert set(plan.changes) == names | ({"micro_batch"} if micro_batch != 64 else set())


def test_a_micro_batch_under_batch_statistics_is_tier_f():
    plan = Plan(64, Choice(16, "batch statistics", Effect.TRAINING, changed=True))
    assert (plan.plan_kind, Plan(64, Choice(64, "whole", Effect.TRAINING)).plan_kind) == ("tuned", "equivalent")


REFUSED, PROVED = SplitCheck(False, "batch statistics in 2 layers"), SplitCheck(True, "an unequal split agrees")


@pytest.mark.parametrize(
    ("micro_batch", "check", "effect", "plan_kind"),
    [
        (4, REFUSED, Effect.TRAINING, "tuned"),
        (4, PROVED, Effect.BITWISE, "equivalent"),
        (4, None, Effect.BITWISE, "equivalent"),
        (8, REFUSED, Effect.BITWISE, "equivalent"),
    ],
)
def test_splitting_against_the_check_is_dynamics(micro_batch, check, effect, plan_kind):
    plan = Plan(8, Choice(micro_batch, "fits", changed=micro_batch != 8), check=check)
    assert (plan.micro_batch.effect, plan.plan_kind) == (effect, plan_kind)
    later = dataclasses.replace(Plan.fixed(8, micro_batch), check=check)
    assert (later.micro_batch.effect, later.plan_kind) == (effect, plan_kind)
    assert from_json(Plan, to_json(plan)) == plan
    assert f"[{effect}] fits" in str(plan)


@pytest.mark.parametrize(
    ("micro_batch", "check", "found"),
    [(8, None, 20), (8, REFUSED, 20), (8, PROVED, 8), (4, None, 4), (4, PROVED, 4), (4, REFUSED, 4)],
)
def test_a_larger_batch_is_cut_only_by_a_plan_that_splits_or_has_proved_it_may(micro_batch, check, found):
    plan = Plan(8, Choice(micro_batch, "fits"), check=check)
    assert plan.micro_batch_of(20) == found
    assert plan.micro_batch_of(8) == min(found, 8)


@pytest.mark.parametrize("name", KEPT)
def test_a_value_set_by_hand_to_what_the_loop_has_changes_nothing(name):
    plan = Plan.fixed(8, **{name: KEPT[name]})
    assert (plan.changes, plan.plan_kind) == ((), "equivalent")
    assert getattr(plan, name).code == "plan.by_hand"


def test_fixed_holds_what_was_given():
    plan = Plan.fixed(128, micro_batch=32, **VALUES)
    assert {name: choice.value for name, choice in plan.choices()} == {
        "micro_batch": 32,
        "batch_policy": "user",
        "warmup_fraction": None,
    } | VALUES
    assert all(choice.effect is Plan.effects()[name] for name, choice in plan.choices())
    assert Plan.fixed(128).micro_batch.value == 128


@pytest.mark.parametrize(
    ("arguments", "values", "error", "field"),
    [
        ((0,), {}, ValueGivenError, "plan.batch_size"),
        ((8.0,), {}, ValueGivenError, "plan.batch_size"),
        ((True,), {}, ValueGivenError, "plan.batch_size"),
        ((8, 9), {}, ValueGivenError, "plan.micro_batch"),
        ((8, 0), {}, ValueGivenError, "plan.micro_batch"),
        ((8, True), {}, ValueGivenError, "plan.micro_batch"),
        ((8,), {"precision": "fp8"}, ValueGivenError, "plan.precision"),
        ((8,), {"precision": None}, ValueGivenError, "plan.precision"),
        ((8,), {"memory_layout": "nhwc"}, ValueGivenError, "plan.memory_layout"),
        ((8,), {"allocator": "jemalloc"}, ValueGivenError, "plan.allocator"),
        ((8,), {"schedule": "step"}, ValueGivenError, "plan.schedule"),
        ((8,), {"dropout": -0.1}, ValueGivenError, "plan.dropout"),
        ((8,), {"dropout": True}, ValueGivenError, "plan.dropout"),
        ((8,), {"weight_decay": -0.1}, ValueGivenError, "plan.weight_decay"),
        ((8,), {"weight_decay": math.inf}, ValueGivenError, "plan.weight_decay"),
        ((8,), {"warmup_fraction": 0.2}, ValueGivenError, "plan.warmup_fraction"),
        ((8,), {"schedule": "warmup_linear", "warmup_fraction": 1.0}, ValueGivenError, "plan.warmup_fraction"),
        ((8,), {"learning_rate_scale": 0}, ValueGivenError, "plan.learning_rate_scale"),
        ((8,), {"learning_rate_scale": math.inf}, ValueGivenError, "plan.learning_rate_scale"),
        ((8,), {"learning_rate_scale": True}, ValueGivenError, "plan.learning_rate_scale"),
        ((8,), {"clip_norm": -1.0}, ValueGivenError, "plan.clip_norm"),
        ((8,), {"clip_norm": math.nan}, ValueGivenError, "plan.clip_norm"),
        ((8,), {"loss_chunk": 0}, ValueGivenError, "plan.loss_chunk"),
        ((8,), {"loss_chunk": 2.5}, ValueGivenError, "plan.loss_chunk"),
        ((8,), {"compiled": "inductor"}, FormatError, "plan.compiled"),
        ((8,), {"compiled": 1}, FormatError, "plan.compiled"),
        ((8,), {"fused_optimizer": 1}, UsageError, "plan.fused_optimizer"),
        ((8,), {"fused_optimizer": 0}, UsageError, "plan.fused_optimizer"),
        ((8,), {"accumulation": 4}, FormatError, "plan.accumulation"),
    ],
)
def test_what_is_no_plan_is_refused_by_field(arguments, values, error, field):
    with pytest.raises(error) as caught:
        Plan.fixed(*arguments, **values)
    assert caught.value.field == field


@pytest.mark.parametrize(("way", "without"), [("cuda_graphs", False), ("compiled_cuda_graphs", True)])
def test_graphs_are_of_one_process_and_survive_a_file(way, without):
    plan = Plan.fixed(8, 4, compiled=way)
    assert (plan.plan_kind, plan.changes) == ("equivalent", ("micro_batch", "compiled"))
    assert from_json(Plan, to_json(plan)) == plan
    with raises(ValueGivenError, code="value.invalid", field="plan.compiled") as caught:
        Plan.fixed(8, num_ranks=2, zero_stage=0, compiled=way)
    assert f"compiled={without}" in caught.value.hint


def test_another_schema_is_refused():
    with raises(FormatError, code="format.invalid", field="plan.schema"):
        dataclasses.replace(Plan.fixed(8), schema=1)


def test_a_plan_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Plan.fixed(8).batch_size = 16


@given(st.integers(1, 10**6), st.data())
def test_micro_batches_cover_the_batch_and_no_more(rows, data):
    micro = data.draw(st.integers(1, rows))
    k = Plan.fixed(rows, micro).num_micro_batches
    assert (k - 1) * micro < rows <= k * micro


LETTERS = st.text("abcdefghij", min_size=4, max_size=10)


@st.composite
def explained_choices(draw, value):
    rejected = st.builds(Rejected, st.integers(1, 999), LETTERS)
    return Choice(
        value, draw(LETTERS), Effect.ROUNDING, draw(st.booleans()), tuple(draw(st.lists(rejected, max_size=3)))
    )


@given(st.data())
def test_the_page_shows_every_choice_and_every_loser(data):
    choices = {name: data.draw(explained_choices(value)) for name, value in ({"micro_batch": 4} | VALUES).items()}
    plan = Plan(8, **choices)
    lines = str(plan).splitlines()
    for name, choice in choices.items():
        (at,) = (i for i, line in enumerate(lines) if line[2:].startswith(name.replace("_", " ") + " "))
        assert lines[at].startswith("*" if choice.changed else " ")
        for word in (str(choice.value), f"[{choice.effect}]", choice.reason):
            assert word in lines[at]
        shown = [line.strip() for line in lines[at + 1 : at + 1 + len(choice.rejected)]]
        assert shown == [f"not {loser.value}: {loser.reason}" for loser in choice.rejected]


def test_the_page_shows_costs_check_and_advice():
    plan = Plan(
        8,
        Choice(4, "fits", changed=True),
        check=SplitCheck(False, "batch statistics in 2 layers"),
        reference=Reference("tf32"),
        baseline=MeasuredCost(0.5, 2 * 2**30),
        predicted=MeasuredCost(0.2, 2**30, (0.18, 0.23)),
        measured=MeasuredCost(0.25, 2**30),
        verified=(1.9, 2.1),
        planning_s=90.0,
        search_s=30.0,
        advice=(Note("head.unfused", "use the fused head"),),
    )
    page = str(plan)
    for words in (
        "Change micro batch 4 (tuned plan): 2.00x the speed in trials (95% 1.90 to 2.10).",
        "baseline: declared tf32 eager loop, 8 samples per step",
        "baseline, measured: 500 ms per step, peak memory 2 GiB",
        "this plan, predicted: 200 ms per step (180 ms to 230 ms), peak memory 1 GiB",
        "this plan, measured: 250 ms per step, peak memory 1 GiB",
        "splitting is not allowed: batch statistics in 2 layers",
        "advice: use the fused head",
        "planning took 90 s, including 30 s of search for the tuned plan",
    ):
        assert words in page.splitlines() or f"check: {words}" in page.splitlines()


@pytest.mark.parametrize(
    ("verified", "said"),
    [((1.5, 2.5), " (95% 1.50 to 2.50)."), ((0.9, 1.2), " (95% 0.90 to 1.20, not significant).")],
)
def test_the_verdict_says_how_sure_its_speed_is(verified, said):
    plan = dataclasses.replace(
        Plan.fixed(8, precision="bf16"), baseline=MeasuredCost(0.5), measured=MeasuredCost(0.25), verified=verified
    )
    assert str(plan).splitlines()[0].endswith("2.00x the speed in trials" + said)


def test_a_split_set_by_hand_is_not_said_to_be_proved():
    assert Plan.fixed(8, 4).micro_batch.code == "plan.by_hand"
    assert "not proved" in Plan.fixed(8, 4).micro_batch.reason
    assert "not proved" in str(Plan.fixed(8, 4)).splitlines()[0]
    proved = dataclasses.replace(Plan.fixed(8, 4), check=SplitCheck(True, "proved"))
    assert "not proved" not in str(proved).splitlines()[0]
    assert "not proved" not in str(Plan.fixed(8))


def test_the_page_says_when_nothing_changes_and_what_was_not_measured():
    page = str(Plan.fixed(8))
    assert page.startswith("Change nothing: ")
    assert "baseline: not measured" in page
    assert "x the speed" not in page
