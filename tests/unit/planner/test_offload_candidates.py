"""Activation offload is chosen where memory asks for it, from measured blocks and the bandwidth to the host."""

from __future__ import annotations

from dataclasses import replace

import pytest
from simulated_machine import BLOCKS, CPU, GPU, Machine, candidate_of, measured, planned

from trimtab.core.block_costs import BlockCost
from trimtab.core.choice import SplitCheck
from trimtab.core.errors import InfeasibleError
from trimtab.core.hardware import HostLink
from trimtab.core.objective import Budget, Objective
from trimtab.core.serialization import from_json, to_json
from trimtab.planner.multi_rank_plan import profile_for_stage
from trimtab.planner.offload_cost import predict_offload
from trimtab.planner.plan_choice import choose
from trimtab.planner.recompute_candidates import offloads
from trimtab.planner.recompute_cost import keep_all, predict
from trimtab.planner.search_space import priced_candidates
from trimtab.plans.profile import Candidate, Profile

WHOLE = Machine().peak_bytes(Candidate(64))
FAST, SLOW = HostLink(1e12, 1e12), HostLink(1e8, 1e8)
REFUSED = SplitCheck(False, "rows see each other")
ON_GPU = {"device": GPU, "check": REFUSED, "can_retain": False, "has_convolutions": False, "supports_fused": False}


def limit(share):
    return Budget(memory=int(share * WHOLE))


def plan_of(share, link, forward_s=0.3, **how):
    machine = Machine(forward_s=forward_s, link=link)
    profile = measured(machine, budget=limit(share), **ON_GPU | how)
    return machine, profile, choose(profile, Objective(), limit(share))


def test_it_is_chosen_if_its_copies_are_hidden():
    machine, profile, plan = plan_of(0.8, FAST)
    assert plan.offload.changed
    assert plan.recompute.value is None
    assert plan.recompute_blocks == BLOCKS
    assert machine.peak_bytes(candidate_of(plan)) <= 0.8 * WHOLE
    assert plan.offload.code in ("offload.needed", "offload.faster")
    fitting = [p for p in priced_candidates(profile, limit(0.8)) if p.candidate.offload and p.refusal is None]
    fewest = min(point.candidate.offload for point in fitting)
    assert plan.offload.value in (fewest, fewest + 1)  # One block more is lighter, at the same speed.


def test_recomputation_is_chosen_if_it_is_faster():
    _, _, plan = plan_of(0.8, SLOW)
    assert plan.recompute.changed
    assert plan.offload.value is None
    assert plan.offload.code == "predicted.no_gain"
    assert {each.code for each in plan.offload.rejected} <= {"predicted.worse", "budget.memory"}


def test_it_is_chosen_if_nothing_else_meets_the_limit():
    def fails(stage, candidate):
        return "the block has a side effect" if candidate.recompute else None

    machine = Machine(forward_s=0.3, link=HostLink(5e9, 5e9), fails=fails)
    plan = planned(machine, budget=limit(0.85), **ON_GPU)
    assert plan.offload.changed
    assert plan.recompute.value is None


def test_without_a_measured_bandwidth_it_is_not_tried():
    _, _, plan = plan_of(0.8, None)
    assert (plan.offload.value, plan.offload.code) == (None, "offload.not_measured")


@pytest.mark.parametrize(
    ("device", "budget", "code"),
    [(CPU, limit(0.8), "offload.no_cuda"), (GPU, Budget(), "offload.not_needed")],
)
def test_it_is_refused_with_a_code(device, budget, code):
    plan = planned(Machine(forward_s=0.3, link=FAST), budget=budget, **ON_GPU | {"device": device})
    assert (plan.offload.value, plan.offload.code) == (None, code)


def test_few_numbers_of_blocks_are_considered():
    _, profile, _ = plan_of(0.8, FAST)
    found = offloads(profile, Candidate(64), limit(0.8), 0.02)
    assert len(found) <= 2
    assert set(found) <= {1, 2, 3}
    assert offloads(profile, Candidate(64), limit(2.0), 0.02) == ()  # All activations fit.
    weighed = replace(profile, objective=Objective(time=1, memory=1))
    assert offloads(weighed, Candidate(64), Budget(), 0.02) == (1, 3)


def test_weights_gathered_by_shards_are_not_offloaded():
    _, profile, _ = plan_of(0.8, FAST)
    for stage in (0, 1, 2, 3):
        part = profile_for_stage(profile, "torch", stage)
        assert bool(offloads(part, Candidate(64), limit(0.8), 0.02)) is (stage < 2)


def test_the_bandwidth_survives_a_file():
    _, profile, _ = plan_of(0.8, FAST)
    assert from_json(Profile, to_json(profile)) == profile


BLOCK = BlockCost(0.1, 10, 110, 130, 60, 40, gradient_bytes=5)
LAST = BlockCost(0.0, 0, 30, 30, 30, 10, is_linked=False)
CHAIN = (*[BLOCK] * 6, LAST)


def test_no_offloaded_block_is_the_schedule_that_keeps_all():
    found = predict_offload(CHAIN, 0, FAST)
    assert found.peak_bytes == predict(CHAIN, keep_all(len(CHAIN))).peak_bytes
    assert (found.moved_bytes, found.waiting_s) == (0, 0.0)


def test_every_block_lowers_the_peak_until_two_are_left():
    peaks = [predict_offload(CHAIN, number, FAST).peak_bytes for number in range(6)]
    assert peaks == sorted(peaks, reverse=True)
    # At most two offloaded blocks are on the device, with the work of the one that computes.
    assert peaks[-1] <= 2 * BLOCK.saved_bytes + BLOCK.forward_bytes + 6 * BLOCK.gradient_bytes


def test_copies_take_the_time_that_computation_does_not_hide():
    """A block moves 100 bytes and, after the first, the 10 bytes of its input; the next forward takes 0.1 s."""
    link = HostLink(500.0, 1000.0)
    found = predict_offload(CHAIN, 2, link)
    assert found.moved_bytes == 100 + 110
    assert found.waiting_s == pytest.approx((100 / 500 - 0.1) + (110 / 500 - 0.1))
    # Both directions: the next backward takes about 0.2 s.
    assert predict_offload(CHAIN, 1, HostLink(1e9, 100.0)).waiting_s == pytest.approx(100 / 100 - 0.2)


def test_a_limit_below_every_setting_is_infeasible():
    with pytest.raises(InfeasibleError):
        plan_of(0.2, FAST)
