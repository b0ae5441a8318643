"""A half precision that a proof refused is tried again with modules in fp32, and chosen only if it pays."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from simulated_machine import GPU, HEAD, MIB, SPLITTABLE, Machine, measured, searched

from trimtab.core.choice import Proof, RefusedByProof, Remedy
from trimtab.core.objective import Budget, Objective
from trimtab.core.serialization import from_json, to_json
from trimtab.planner.cost_model import CostModel
from trimtab.planner.plan_choice import choose, chosen_candidate
from trimtab.planner.search import next_measurement
from trimtab.plans.profile import Profile, ProvedCandidate

REASON = "in bf16 the gradient has an error of 3 (relative), and an error of 0.01 with norm in fp32"
REFUSAL = RefusedByProof(
    "precision", "bf16", "not proved equivalent", "proof.inaccurate", Remedy("fp32_modules", "norm", REASON)
)


def proved(machine, refusals=(REFUSAL,), also=(), **facts):
    """Return the profile of a search with proofs, which refuse bf16 without modules in fp32, or `also` with them."""
    profile = measured(machine, **facts)
    for _ in range(4):
        candidate = chosen_candidate(profile, profile.objective, profile.budget)
        if candidate is None or profile.proof_of(candidate) is not None:
            return profile
        is_remedied = candidate.fp32_modules is not None
        holds = candidate.precision != "bf16" or (is_remedied and not also)
        proof = Proof(holds, "", "proof.holds" if holds else "proof.inaccurate")
        profile = replace(profile, proofs=(*profile.proofs, ProvedCandidate(candidate, proof)))
        if not holds:
            found = refusals + (also if is_remedied else ())
            profile = searched(machine, replace(profile, refused_by_proof=found))
    raise AssertionError("the search does not end")


def plan_of(profile):
    return choose(profile, profile.objective, profile.budget)


def rejected(plan, name):
    return {each.value: each.code for each in getattr(plan, name).rejected}


def test_modules_in_fp32_are_chosen_if_the_precision_is_faster_with_them():
    profile = proved(Machine(speed={"bf16": 2.0, "norm": 0.9}))
    stages = list(dict.fromkeys(trial.stage for trial in profile.trials))
    assert stages[-3:] == ["final", "fp32_modules", "final 2"]
    plan = plan_of(profile)
    assert (plan.precision.value, plan.fp32_modules.value) == ("bf16", "norm")
    assert plan.proof.holds
    assert plan.plan_kind == "equivalent"
    assert plan.precision.code == "trial.faster"
    assert (plan.fp32_modules.code, plan.fp32_modules.reason) == ("proof.remedy", REASON)
    assert rejected(plan, "fp32_modules") == {None: "proof.inaccurate"}
    assert from_json(Profile, to_json(profile)) == profile


def test_a_profile_without_remedies_is_read_as_refused_altogether():
    profile = proved(Machine(speed={"bf16": 2.0, "norm": 0.9}))
    older = json.loads(to_json(replace(profile, refused_by_proof=(replace(REFUSAL, remedy=None),))))
    del older["refused_by_proof"][0]["remedy"]
    found = from_json(Profile, json.dumps(older))
    assert all(found.error_of(t.candidate) for t in found.trials if t.candidate.precision == "bf16")


def test_modules_in_fp32_are_compared_with_the_fastest_precision_that_no_proof_refused():
    profile = proved(Machine(speed={"bf16": 2.0, "norm": 0.9}))
    first, tried = (trial.candidate for trial in profile.stage("fp32_modules"))
    assert first.precision == "fp32"
    assert tried == first.having(precision="bf16", fp32_modules="norm")


@pytest.mark.parametrize("speed", [0.4, 0.5])
def test_modules_in_fp32_that_cost_more_than_the_precision_gains_are_rejected(speed):
    plan = plan_of(proved(Machine(speed={"bf16": 2.0, "norm": speed})))
    assert (plan.precision.value, plan.fp32_modules.value) == ("fp32", None)
    assert plan.precision.code == "proof.inaccurate"
    assert rejected(plan, "precision")["bf16"] == "proof.inaccurate"
    assert rejected(plan, "fp32_modules")["norm"] in ("trial.slower", "predicted.worse", "trial.no_gain")


def test_a_precision_without_a_remedy_is_given_up():
    profile = proved(Machine(speed={"bf16": 2.0}), refusals=(replace(REFUSAL, remedy=None),))
    assert not profile.stage("fp32_modules")
    plan = plan_of(profile)
    assert (plan.precision.value, plan.fp32_modules.value) == ("fp32", None)
    assert plan.fp32_modules.code == "fp32_modules.not_needed"


def test_modules_refused_by_a_proof_too_are_given_up():
    also = RefusedByProof("fp32_modules", "norm", "not proved equivalent", "proof.differs")
    plan = plan_of(proved(Machine(speed={"bf16": 2.0, "norm": 0.9}), also=(also,)))
    assert (plan.precision.value, plan.fp32_modules.value) == ("fp32", None)
    assert rejected(plan, "fp32_modules")["norm"] == "proof.differs"


def test_the_peak_with_modules_in_fp32_is_counted_or_traced():
    machine = Machine(speed={"bf16": 2.0, "norm": 0.9}, weight={"bf16": 0.5, "norm": 1.5})
    profile = proved(machine)
    (ours,) = (t.candidate for t in profile.stage("fp32_modules") if t.candidate.fp32_modules)
    smaller = ours.having(micro_batch=16)
    cost, bare = (CostModel(profile).predict(each) for each in (smaller, smaller.having(fp32_modules=None)))
    assert machine.peak_bytes(smaller) <= cost.peak_bytes
    assert bare.peak_bytes < cost.peak_bytes
    limited = proved(replace(machine, stages=[]), budget=Budget(memory=machine.peak_bytes(smaller) + 20 * MIB))
    traced = {each.candidate for each in limited.traces}
    assert any(each.fp32_modules == "norm" for each in traced)
    found = CostModel(limited).predict(smaller).peak_bytes
    assert found == pytest.approx(machine.peak_bytes(smaller), rel=0.03)


def test_a_smaller_peak_with_modules_in_fp32_may_win_a_plan_for_memory():
    machine = Machine(weight={"bf16": 0.5, "norm": 1.2})
    whole = replace(SPLITTABLE, splittable=False)
    plan = plan_of(proved(machine, objective=Objective(memory=1.0), check=whole))
    assert (plan.precision.value, plan.fp32_modules.value) == ("bf16", "norm")


def test_modules_in_fp32_are_combined_with_a_compiled_model():
    machine = Machine(speed={"bf16": 2.0, "norm": 0.9}, compiled_speed=2.0, compile_s=5.0)
    profile = proved(machine, total_steps=10_000, **HEAD)
    plan = plan_of(profile)
    assert (plan.precision.value, plan.fp32_modules.value, plan.compiled.value) == ("bf16", "norm", True)


def test_modules_are_tried_where_another_mode_is_the_fastest_in_eager_mode():
    """Only compiled, bf16 is the fastest, so that the plan with it is refused although fp32 leads the modes."""
    machine = Machine(
        step_of=lambda stage, each: (0.3 if each.precision == "bf16" else 0.6) if each.compiled else 1.0,
        compile_s=1.0,
    )
    profile = measured(machine, device=replace(GPU, peak_flops={"fp32": 1e11, "bf16": 1e13}), total_steps=100_000)
    profile = searched(machine, replace(profile, refused_by_proof=(REFUSAL,)))
    tried = [trial.candidate for trial in profile.stage("fp32_modules")]
    assert [(each.precision, each.fp32_modules) for each in tried] == [("fp32", None), ("bf16", "norm")]


def test_a_recorded_profile_replays_the_search_after_a_refusal():
    machine = Machine(speed={"bf16": 2.0, "norm": 0.9})
    profile = proved(machine)
    finals = [index for index, trial in enumerate(profile.trials) if trial.stage == "final"]
    replayed = replace(profile, trials=profile.trials[: finals[-1] + 1])
    while (phase := next_measurement(replayed, profile.objective, profile.budget)) is not None:
        assert phase.candidates == tuple(t.candidate for t in profile.stage(phase.name) if not t.control)
        replayed = replayed.with_trials(profile.stage(phase.name))
    assert replayed == profile
