"""What was rehearsed decides in place of what was predicted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from simulated_machine import CPU, MIB
from test_rank_stages import ACCELERATOR, RANKS, calibration, profile_of, shape, traces_of

from trimtab.core.errors import InfeasibleError
from trimtab.core.parallelism import StepShape
from trimtab.core.serialization import from_json, to_json
from trimtab.experiments.rank_plan_output import stage_figures
from trimtab.planner.multi_rank_plan import (
    CompletedDryRuns,
    DryRunResult,
    by_default,
    plan_for_gradients,
    way_of,
    with_fastest_communication,
)
from trimtab.planner.zero_stage import StageCost, choose_stage
from trimtab.plans.plan import Plan

pytestmark = pytest.mark.slow

SLOW = calibration(2e6)
EVEN = (1.0,) * 7


CHOSEN: dict[str, Any] = {}  # computed once for all tests that ask for the same


def choose(profile, *ran: DryRunResult, link=None, only: bool = False):
    key = repr((profile.budget, profile.device, profile.trials, ran, link, only))
    if key not in CHOSEN:
        given = (profile, traces_of(profile), RANKS, link or calibration(), shape)
        CHOSEN[key] = choose_stage(*given, rehearsed=CompletedDryRuns(ran, only=only))
    return CHOSEN[key]


def ran(plan: Plan, *, slower: float = 1.0, more: int = 0, refusal: str = "") -> DryRunResult:
    """Return a rehearsal by how many times slower than told it was, and by how many MiB more it held."""
    if refusal:
        return DryRunResult(plan, refusal=refusal)
    peaks = (plan.predicted.peak_bytes + more * MIB,) * 5
    return DryRunResult(plan, (slower * plan.predicted.step_s,) * 5, peaks, slower)


def costs(found) -> dict[tuple[int, bool], StageCost]:
    return {each.way: each for each in found if isinstance(each, StageCost)}


# How gradients are sent.


def wanted() -> Plan:
    shape = StepShape(0.01, 0.02, 0.001, (2**20,) * 8, (1.0,) * 8)
    return with_fastest_communication(Plan.fixed(16, num_ranks=2, zero_stage=0), SLOW, shape)


def test_a_plan_that_changes_nothing_of_what_is_sent_has_no_other():
    assert by_default(Plan.fixed(16, num_ranks=2, zero_stage=0)) is None
    usual = by_default(wanted())
    assert (usual.reduce_dtype.value, usual.bucket_bytes.value) == ("fp32", None)
    assert usual.changes == ("zero_stage",)


def test_what_is_measurably_faster_is_kept_and_says_by_how_much():
    plan = wanted()
    kept = plan_for_gradients(plan, by_default(plan), [[0.8] * 7, EVEN, EVEN])
    assert kept.reduce_dtype.value == "bf16"
    assert kept.reduce_dtype.code == "dry_run.faster"
    assert all(figure in kept.reduce_dtype.reason for figure in ("7 pairs", "1.25x the speed of fp32"))


NOT_WORTH_IT, NOTHING = "dry_run.small_gain", "dry_run.not_significant"


@pytest.mark.parametrize(
    ("theirs", "control", "code"),
    [
        ([1.2] * 7, EVEN, NOT_WORTH_IT),  # slower
        ([0.97] * 7, EVEN, NOT_WORTH_IT),  # faster by less than what is worth it
        ([0.5, 1.4] * 3 + [0.8], EVEN, NOTHING),
        ([0.8] * 7, [0.6, 1.5, 0.7, 1.3, 1.0, 0.8, 1.2], NOTHING),  # below what the control tells
        ([0.5] * 4, EVEN, "dry_run.too_few_pairs"),
    ],
)
def test_what_is_not_is_sent_as_by_default_for_that_reason(theirs, control, code):
    plan = wanted()
    kept = plan_for_gradients(plan, by_default(plan), [theirs, EVEN[: len(theirs)], control[: len(theirs)]])
    assert (kept.reduce_dtype.value, kept.bucket_bytes.value, kept.changes) == ("fp32", None, ("zero_stage",))
    assert kept.reduce_dtype.code == code
    assert kept.reduce_dtype.rejected[0].value == "bf16"
    assert kept.reduce_dtype.rejected[0].code == "dry_run.no_gain"


# Which stage.


def test_what_ran_counts_by_what_it_took_and_held():
    profile = profile_of(memory=736)  # stage 2, of 720
    told, _ = choose(profile)
    plan, found = choose(profile, ran(told, slower=1.01, more=3))
    assert way_of(plan) == way_of(told) == (2, True)
    assert plan.predicted == told.predicted
    assert plan.measured.peak_bytes == told.predicted.peak_bytes + 3 * MIB
    assert plan.measured.step_s == pytest.approx(1.01 * told.predicted.step_s)
    assert plan.zero_stage.code == "dry_run.best"
    assert "1% too low" in plan.zero_stage.reason
    assert from_json(Plan, to_json(plan)) == plan
    assert costs(found)[2, True].peak_bytes == plan.measured.peak_bytes


def test_what_held_more_than_the_limit_is_left_for_what_is_told_to_meet_it():
    profile = profile_of(memory=736)
    told, _ = choose(profile)
    plan, found = choose(profile, ran(told, more=30))
    assert way_of(plan) == (3, True)
    assert plan.micro_batch.value == 64
    second = costs(found)[2, True]  # in smaller micro-batches, told with the 30 MiB on top
    assert second.peak_bytes + 30 * MIB <= 736 * MIB
    assert second.plan.micro_batch.value < 64


def test_a_peak_that_is_over_the_limit_is_said_where_nothing_else_is_allowed():
    profile = profile_of(memory=736)
    told, _ = choose(profile)
    with pytest.raises(InfeasibleError):
        choose(profile, ran(told, more=30), only=True)
    other = ran(choose(profile, ran(told, more=30))[0])
    plan, found = choose(profile, ran(told, more=30), other, only=True)
    assert way_of(plan) == (3, True)
    assert found[1].code == "dry_run.not_run"


def test_what_gloo_may_hold_is_not_on_top_of_what_was_counted():
    told = costs(choose(profile_of(memory=300, device=CPU))[1])[3, True].plan
    tight = profile_of(memory=round(1.05 * told.predicted.peak_bytes / MIB) + 2, device=CPU)
    before = costs(choose(tight)[1])[3, True]
    assert before.margin == 0.12
    assert before.plan.micro_batch.value < told.micro_batch.value
    plan, found = choose(tight, ran(told, more=1), only=True)
    assert (way_of(plan), plan.micro_batch.value) == ((3, True), told.micro_batch.value)
    assert costs(found)[3, True].margin == 0
    assert "margin" not in plan.zero_stage.reason


def test_a_way_that_is_slower_than_told_is_left_for_one_that_is_told_to_be_faster():
    profile = profile_of(memory=300, split_s=0.05)
    told, found = choose(profile)
    assert told.zero_stage.value == 0
    # Another engine's plans are corrected by what all ranks take from each other; the same one's by its own.
    second = costs(found)[2, True].plan
    plan, found = choose(profile, ran(told, slower=2.0), ran(second, slower=1.1))
    assert plan.zero_stage.value == 2
    assert costs(found)[1, True].slower == pytest.approx(2.0)
    assert costs(found)[3, True].slower == pytest.approx(1.1)


def test_what_all_are_slower_by_changes_no_stage():
    profile = profile_of(memory=300)
    told, _ = choose(profile)
    plan, found = choose(profile, ran(told, slower=3.0))
    assert way_of(plan) == way_of(told)
    others = [each for way, each in costs(found).items() if way != way_of(told)]
    assert [each.slower for each in others] == [3.0] * len(others)


def test_what_did_not_run_is_refused_with_all_that_hold_as_much():
    profile = profile_of(memory=751)
    told, _ = choose(profile)
    assert way_of(told) == (0, True)
    plan, found = choose(profile, ran(told, refusal="memory ran out"))
    assert plan.zero_stage.value == 1
    assert "memory ran out" not in str(found[1])
    smaller = costs(found)[0, True]
    assert smaller.plan.micro_batch.value < 64
    last = ran(costs(found)[3, True].plan, refusal="no shards")
    _, found = choose(profile, last)
    assert isinstance(found[4], StageCost) or found[4].code == "dry_run.failed"
    assert way_of(last.plan) not in costs(choose(profile, ran(told), last, only=True)[1])


def test_figures_of_stages_are_those_of_the_table():
    """Of a way that ran, what it took; of another, what it is told times what those like it were slower by."""
    profile = profile_of(memory=300)
    told, _ = choose(profile)
    _, found = choose(profile, ran(told, slower=3.0))
    figures = {(each.zero_stage, each.reduces_once): each for each in stage_figures(found)}
    assert figures[way_of(told)].window_s == pytest.approx(3.0 * told.predicted.step_s)
    for way, each in costs(found).items():
        assert figures[way].window_s == each.window_s
        assert each.window_s == pytest.approx(3.0 * each.cost.total_s)


def test_an_unsteady_peak_is_the_median_and_the_largest_is_said():
    profile = profile_of(memory=736)
    told, _ = choose(profile)
    held = told.predicted.peak_bytes
    unsteady = replace(ran(told), peaks=(held, held + 80 * MIB, held, held + 8 * MIB, held + 8 * MIB))
    plan, _ = choose(profile, unsteady)
    assert plan.measured.peak_bytes == held + 8 * MIB
    assert "1% too low for the median of 5 steps, 10% too low for the largest" in plan.zero_stage.reason


def test_in_shards_that_are_sent_as_by_default_after_all_the_plan_says_so():
    profile = profile_of(memory=716, device=ACCELERATOR)
    told = costs(choose(profile, link=SLOW)[1])[3, True].plan
    assert told.reduce_dtype.value == "bf16"
    usual = by_default(told)
    rehearsed = DryRunResult(usual, (told.predicted.step_s,) * 5, (told.predicted.peak_bytes,) * 5)
    plan, _ = choose(profile, rehearsed, link=SLOW, only=True)
    assert (plan.reduce_dtype.value, way_of(plan)) == ("fp32", way_of(told))
    assert plan.predicted.step_s > told.predicted.step_s
