"""Trials and candidates: the small arithmetic the planner leans on."""

from __future__ import annotations

import dataclasses
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st
from raising import raises

from trimtab.core.errors import FormatError
from trimtab.core.hardware import DeviceSpec
from trimtab.core.plan import SplitCheck
from trimtab.core.profile import Candidate, LoopFacts, Profile, Trial

BASE = Candidate("fp32", "keep", False, 8)
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
    other = Candidate("bf16", "channels_last", True, 4, "retain", 64, compiled=True, recompute="(0) 1")
    mixed = dataclasses.replace(BASE, **{name: getattr(other, name) for name in names})
    assert set(BASE.differences(mixed)) == set(mixed.differences(BASE)) == names
    assert BASE.alike(mixed, *names)
    assert BASE.alike(mixed) is (not names)


@pytest.mark.parametrize(
    ("candidate", "label"),
    [
        (BASE, "fp32, micro-batch 8"),
        (Candidate("bf16", "channels_last", True, 4), "bf16, channels_last, fused, micro-batch 4"),
        (Candidate("fp32", "keep", False, 4, "retain"), "fp32, freed memory kept, micro-batch 4"),
        (Candidate("fp32", "keep", False, 4, loss_chunk=64), "fp32, loss in chunks of 64 tokens, micro-batch 4"),
        (Candidate("bf16", "keep", False, 4, compiled=True), "bf16, compiled, micro-batch 4"),
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


def test_another_schema_is_refused():
    with raises(FormatError, code="format.invalid", field="profile.schema"):
        dataclasses.replace(PROFILE, schema=PROFILE.schema + 1)
