"""A plan as a value: tiers follow from marks, every choice is explained, and nothing out of range is held."""

from __future__ import annotations

import dataclasses
import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st
from raising import raises

from trimtab.core.choice import Choice, Effect, MeasuredCost, Note, Rejected, SplitCheck
from trimtab.core.errors import FormatError, UsageError, ValueGivenError
from trimtab.core.hardware import DeviceSpec
from trimtab.core.objective import Reference
from trimtab.core.serialization import from_json, to_json
from trimtab.plans.plan import Plan
from trimtab.plans.profile import Candidate, LoopFacts, Profile, Trial

# Settings: a changed value, and the loop's own.
EQUIVALENT = {
    "precision": ("bf16", "fp32"),
    "memory_layout": ("channels_last", "keep"),
    "allocator": ("retain", "keep"),
    "fused_optimizer": (True, False),
    "loss_chunk": (128, None),
    "recompute": ("every_block", None),
    "compiled": (True, False),
}
TRAINING = {
    "dropout": (0.2, None),
    "weight_decay": (0.1, None),
    "optimizer": ("muon", "user"),
    "schedule": ("warmup_cosine", "user"),
    "learning_rate_scale": (3.0, 1.0),
    "clip_norm": (1.0, None),
}
VALUES, KEPT = ({name: both[i] for name, both in (EQUIVALENT | TRAINING).items()} for i in (0, 1))


def test_numerical_effects_are_those_that_the_equivalence_tests_are_made_from():
    rounding = {"precision", "memory_layout", "fused_optimizer", "loss_chunk", "compiled", "zero_stage", "engine"}
    rounding |= {"fp32_modules", "reduce_dtype", "bucket_bytes", "reduces_once"}
    training = {*TRAINING, "optimizer_state", "powersgd_rank", "warmup_fraction", "batch_policy", "float8"}
    by_effect = {Effect.BITWISE: {"micro_batch", "allocator", "recompute", "offload", "step_in_backward"}}
    by_effect |= {Effect.ROUNDING: rounding, Effect.TRAINING: training}
    assert Plan.effects() == {name: effect for effect, names in by_effect.items() for name in names}


@given(st.sets(st.sampled_from(sorted(VALUES))), st.integers(1, 64))
def test_tier_is_f_exactly_when_dynamics_change(names, micro_batch):
    plan = Plan.fixed(64, micro_batch, **{name: VALUES[name] for name in names})
    assert plan.plan_kind == ("equivalent" if names <= EQUIVALENT.keys() else "tuned")
    assert set(plan.changes) == names | ({"micro_batch"} if micro_batch != 64 else set())


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
    assert f"[{effect}] fits" in plan.explain()


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
        "optimizer_state": "user",
        "step_in_backward": False,
        "offload": None,
        "fp32_modules": None,
        "float8": None,
    } | VALUES
    assert all(choice.effect is Plan.effects()[name] for name, choice in plan.choices())
    assert Plan.fixed(128).micro_batch.value == 128


REFUSED_VALUES = [
    *[("batch_size", value) for value in (0, 8.0, True)],
    *[("micro_batch", value) for value in (9, 0, True)],
    *[("precision", "fp8"), ("precision", None), ("memory_layout", "nhwc"), ("allocator", "jemalloc")],
    *[("schedule", "step"), ("dropout", -0.1), ("dropout", True), ("weight_decay", -0.1), ("weight_decay", math.inf)],
    *[("warmup_fraction", 0.2), ("learning_rate_scale", 0), ("learning_rate_scale", math.inf)],
    *[("learning_rate_scale", True), ("clip_norm", -1.0), ("clip_norm", math.nan), ("loss_chunk", 0)],
    *[("loss_chunk", 2.5), ("compiled", "inductor"), ("compiled", 1), ("fused_optimizer", 1), ("accumulation", 4)],
]


@pytest.mark.parametrize(("name", "value"), REFUSED_VALUES)
def test_an_invalid_value_is_refused_by_field(name, value):
    with pytest.raises(UsageError) as caught:
        Plan.fixed(**{"batch_size": 8} | {name: value})
    assert caught.value.field == f"plan.{name}"
    assert isinstance(caught.value, FormatError) == (name in ("compiled", "fused_optimizer", "accumulation"))


def test_a_warm_up_takes_at_most_nine_tenths_of_a_run():
    with raises(ValueGivenError, code="value.invalid", field="plan.warmup_fraction"):
        Plan.fixed(8, schedule="warmup_linear", warmup_fraction=1.0)


@pytest.mark.parametrize(("way", "without"), [("cuda_graphs", False), ("compiled_cuda_graphs", True)])
def test_graphs_are_of_one_process_and_survive_a_file(way, without):
    plan = Plan.fixed(8, 4, compiled=way)
    assert (plan.plan_kind, plan.changes) == ("equivalent", ("micro_batch", "compiled"))
    assert from_json(Plan, to_json(plan)) == plan
    with raises(ValueGivenError, code="value.invalid", field="plan.compiled") as caught:
        Plan.fixed(8, num_ranks=2, zero_stage=0, compiled=way)
    assert f"compiled={without}" in caught.value.hint


def test_another_schema_is_refused():
    for value, field in ((Plan.fixed(8), "plan.schema"), (PROFILE, "profile.schema")):
        with raises(FormatError, code="format.invalid", field=field):
            dataclasses.replace(value, schema=value.schema + 1)


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
    lines = plan.explain().splitlines()
    for name, choice in choices.items():
        title = f"{name.replace('_', ' '):<20} "  # "optimizer" begins the title of another setting too
        (at,) = (i for i, line in enumerate(lines) if line[2:].startswith(title))
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
    page = plan.explain()
    for words in (
        "Change micro batch 4 (tuned plan): 2.00x the speed of the declared tf32 eager loop in trials "
        "(95% 1.90 to 2.10).",
        "baseline: declared tf32 eager loop, 8 samples per step",
        "baseline, measured: 500 ms per step, peak memory 2 GiB",
        "this plan, predicted: 200 ms per step (180 ms to 230 ms), peak memory 1 GiB",
        "this plan, measured: 250 ms per step, peak memory 1 GiB",
        "splitting is not allowed: batch statistics in 2 layers",
        "advice: use the fused head",
        "planning took 90 s, including 30 s of search for the tuned plan",
    ):
        assert words in page.splitlines() or f"check: {words}" in page.splitlines()


def test_a_speed_that_is_not_significant_says_so():
    cost = {"baseline": MeasuredCost(0.5), "measured": MeasuredCost(0.25), "verified": (0.9, 1.2)}
    plan = dataclasses.replace(Plan.fixed(8, precision="bf16"), **cost)
    assert (
        plan.explain()
        .splitlines()[0]
        .endswith("1.04x the speed of the assumed fp32 eager loop in trials (95% 0.90 to 1.20, not significant).")
    )


def test_a_split_set_by_hand_is_not_said_to_be_proved():
    assert Plan.fixed(8, 4).micro_batch.code == "plan.by_hand"
    assert "not proved" in Plan.fixed(8, 4).micro_batch.reason
    assert "not proved" in Plan.fixed(8, 4).explain().splitlines()[0]
    proved = dataclasses.replace(Plan.fixed(8, 4), check=SplitCheck(True, "proved"))
    assert "not proved" not in proved.explain().splitlines()[0]
    assert "not proved" not in Plan.fixed(8).explain()


def test_the_page_says_when_nothing_changes_and_what_was_not_measured():
    page = Plan.fixed(8).explain()
    assert page.startswith("Change nothing: ")
    assert "baseline: not measured" in page
    assert "x the speed" not in page


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
def test_sharding_settings_that_do_not_fit_together_are_refused(values, code, field, expected):
    with raises(UsageError, code=code, field=f"plan.{field}") as caught:
        Plan.fixed(8, **values)
    assert expected in caught.value.expected


def test_sharding_is_shown_for_several_ranks_only():
    assert "zero stage" not in Plan.fixed(8).explain()
    shared = Plan.fixed(8, num_ranks=4, zero_stage=3, reduces_once=False)
    assert "8 samples on each of 4 ranks" in shared.explain()
    assert "zero stage           3" in shared.explain()
    assert from_json(Plan, to_json(shared)) == shared


# Profiles.


BASE = Candidate(8)
PROFILE = Profile(
    DeviceSpec("cpu", "cpu"),
    LoopFacts(10, 10, 40, "AdamW", 8, 8.0, "samples", None, False, True, False, "contiguous"),
    SplitCheck(True, "per-sample loss"),
)


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=9))
def test_a_trial_costs_its_median_block(blocks):
    assert Trial("stage", BASE, tuple(blocks)).step_s == statistics.median(blocks)


def test_a_trial_that_could_not_run_has_no_cost():
    assert Trial("stage", BASE, error="out of memory").step_s is None


@given(st.sets(st.sampled_from([field.name for field in dataclasses.fields(Candidate)])))
def test_differences_name_the_fields_that_differ(names):
    other = Candidate(
        4,
        precision="bf16",
        memory_layout="channels_last",
        fused_optimizer=True,
        allocator="retain",
        loss_chunk=64,
        compiled=True,
        recompute="(0) 1",
        fp32_modules="head",
        step_in_backward=True,
        offload=2,
    )
    mixed = dataclasses.replace(BASE, **{name: getattr(other, name) for name in names})
    assert set(BASE.differences(mixed)) == set(mixed.differences(BASE)) == names
    assert BASE.alike(mixed, *names)
    assert BASE.alike(mixed) is (not names)


@pytest.mark.parametrize(
    ("candidate", "label"),
    [
        (BASE, "fp32, micro-batch 8"),
        (
            Candidate(4, precision="bf16", memory_layout="channels_last", fused_optimizer=True),
            "bf16, channels_last, fused, micro-batch 4",
        ),
        (Candidate(4, allocator="retain"), "fp32, freed memory kept, micro-batch 4"),
        (Candidate(4, loss_chunk=64), "fp32, loss in chunks of 64 tokens, micro-batch 4"),
        (Candidate(4, precision="bf16", compiled=True), "bf16, compiled, micro-batch 4"),
    ],
)
def test_a_candidate_is_described_by_what_it_changes(candidate, label):
    assert candidate.describe() == label


def test_trials_are_added_in_order_and_found_by_stage():
    first, second, third = (Trial(stage, BASE, (float(i),)) for i, stage in enumerate(("a", "b", "a")))
    grown = PROFILE.with_trials((first, second)).with_trials((third,))
    assert grown.stage("a") == (first, third)
    assert grown.stage("c") == ()
    assert PROFILE.trials == ()
