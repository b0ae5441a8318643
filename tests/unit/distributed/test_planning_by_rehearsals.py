"""Which plans a job's ranks are asked to rehearse, and which it takes where none did fit, or none can be run."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "planner"))

from simulated_machine import MIB
from test_rank_stages import ACCELERATOR, RANKS, calibration, profile_of, shape, traces_of

from trimtab.core.errors import InfeasibleError
from trimtab.core.plan import Plan
from trimtab.distributed import plan_on_ranks
from trimtab.distributed.zero_stage_inputs import StageMeasurements
from trimtab.planner.dry_run_selection import MOST_REHEARSALS, DryRunResult, by_default, way_of


class Planted:
    """Rehearsals whose outcomes are given: each plan holds so many MiB more than told, or is refused."""

    def __init__(self, *, more=lambda plan: 0, refused=lambda plan: "", refusal: str = "") -> None:
        self.more, self.refused, self.why, self.seen = more, refused, refusal, []

    def refusal(self) -> str:
        return self.why

    def of(self, plan: Plan, *, counts_memory: bool) -> DryRunResult:
        assert counts_memory
        self.seen.append(plan)
        if text := self.refused(plan):
            return DryRunResult(plan, refusal=text, took_s=1.0)
        peaks = (plan.predicted.peak_bytes + self.more(plan) * MIB,) * 5
        return DryRunResult(plan, (plan.predicted.step_s,) * 5, peaks, 1.0, took_s=1.0)


@pytest.fixture
def planned(monkeypatch):
    """Return a job's plan under a limit in MiB, over a link."""
    monkeypatch.setattr(plan_on_ranks.dist, "get_world_size", lambda: RANKS)
    monkeypatch.setattr(plan_on_ranks, "from_first", lambda make: make())

    def plan(rehearsal: Planted, memory: int, *link: float) -> Plan:
        monkeypatch.setattr(plan_on_ranks, "calibrate", lambda device: calibration(*link))
        profile = profile_of(memory=memory, device=ACCELERATOR)
        share = StageMeasurements(profile, traces_of(profile), shape)
        return plan_on_ranks.plan_together(lambda: share, None, lambda: rehearsal)

    return plan


def test_where_no_rehearsal_did_fit_the_best_that_is_told_to_is_taken_and_says_so(planned):
    """Each plan that runs holds more than it was told, by another amount: the job is not called infeasible by four."""
    rehearsal = Planted(refused=lambda plan: "" if plan.micro_batch.value <= 2 else "memory ran out")
    plan = planned(rehearsal, 751)
    assert len(rehearsal.seen) == MOST_REHEARSALS
    assert plan.measured is None
    assert plan.planning_s >= MOST_REHEARSALS
    assert f"none of the first {MOST_REHEARSALS} plans" in plan.zero_stage.reason
    assert plan.predicted.peak_bytes <= 751 * MIB


def test_where_nothing_is_left_that_meets_the_limit_the_job_is_infeasible(planned):
    with pytest.raises(InfeasibleError):
        planned(Planted(more=lambda plan: 10**4), 751)


def test_what_did_fit_is_taken_once_no_more_are_tried(planned):
    rehearsal = Planted()
    plan = planned(rehearsal, 751)
    assert len(rehearsal.seen) == 1
    assert plan.measured.peak_bytes == plan.predicted.peak_bytes


SLOW = 2e6


def test_where_nothing_can_be_rehearsed_gradients_are_sent_as_by_default(planned):
    """As for ranks without a limit: a plan that sends otherwise is taken where it ran alone."""
    told = planned(Planted(), 716, SLOW)
    assert told.reduce_dtype.value == "bf16"
    plan = planned(Planted(refusal="no copies"), 716, SLOW)
    assert (plan.reduce_dtype.value, plan.bucket_bytes.value) == ("fp32", None)
    assert by_default(plan) is None
    assert plan.predicted.step_s > told.predicted.step_s
    assert plan.measured is None
    assert plan.reduce_dtype.code == "dry_run.not_run"
    assert "no copies" in plan.reduce_dtype.reason
    assert "no copies" in plan.zero_stage.reason


def test_what_is_refused_as_it_is_to_be_sent_is_rehearsed_as_it_is_by_default(planned):
    """The way to share the model is not refused with how its gradients were to be sent."""
    rehearsal = Planted(refused=lambda plan: "no bf16 here" if plan.reduce_dtype.value == "bf16" else "")
    plan = planned(rehearsal, 716, SLOW)
    one, other, *rest = rehearsal.seen
    assert not rest
    assert (one.reduce_dtype.value, other.reduce_dtype.value) == ("bf16", "fp32")
    assert replace(other, reduce_dtype=one.reduce_dtype, bucket_bytes=one.bucket_bytes) == one
    assert way_of(plan) == way_of(one)
    assert plan.reduce_dtype.value == "fp32"
    assert plan.reduce_dtype.code == "dry_run.not_run"
    assert "no bf16 here" in plan.reduce_dtype.reason
    assert plan.measured is not None
    assert plan.planning_s >= 2


def test_a_way_that_is_refused_however_it_is_sent_is_left(planned):
    first = way_of(planned(Planted(), 716, SLOW))
    rehearsal = Planted(refused=lambda plan: "no such way" if way_of(plan) == first else "")
    assert way_of(planned(rehearsal, 716, SLOW)) != first
    assert [plan.reduce_dtype.value for plan in rehearsal.seen[:2]] == ["bf16", "fp32"]
