"""From a profile to a plan: what is chosen and what the page says, on a machine that is only arithmetic."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from raising import raises
from simulated_machine import CPU, HEAD, MIB, Machine, candidate_of, measured, planned, values

from trimtab.core.choice import Choice, Effect, SplitCheck
from trimtab.core.errors import InfeasibleError
from trimtab.core.objective import Budget, Objective, Reference
from trimtab.planner.cost_model import CostModel
from trimtab.planner.plan_choice import choose
from trimtab.planner.tuned_plan import RateChoice, adapt_learning_rate
from trimtab.plans.profile import Candidate, Trial

REFUSED = SplitCheck(False, "BatchNorm2d computes over the batch: smaller micro-batches would change its statistics")
FAST = {"bf16": 1.5, "channels_last": 1.2, "retain": 1.3}


def reasons_against(plan, name: str) -> dict[object, str]:
    return {loser.value: loser.reason for loser in getattr(plan, name).rejected}


def codes_against(plan, name: str) -> dict[object, str]:
    return {loser.value: loser.code for loser in getattr(plan, name).rejected}


def test_clear_gains_are_taken_with_their_figures():
    plan = planned(Machine(speed=FAST, fused_speed=3.0, noise=0.01, drift=0.2))
    assert values(plan)[:5] == (64, "bf16", "channels_last", "retain", True)
    assert plan.changes == ("precision", "memory_layout", "allocator", "fused_optimizer")
    assert plan.plan_kind == "equivalent"
    assert "x the speed (95%" in plan.precision.reason
    assert plan.precision.reason.endswith(" of fp32")
    assert (plan.precision.code, plan.fused_optimizer.code) == ("trial.faster", "trial.faster")
    assert "3x the speed (95% " in plan.fused_optimizer.reason
    true_speed = 1.0 / (0.9 / (1.5 * 1.2 * 1.3) + 0.1 / 3)
    assert plan.baseline.step_s / plan.measured.step_s == pytest.approx(true_speed, rel=0.05)
    assert plan.predicted.step_s == pytest.approx(plan.measured.step_s, rel=0.4)  # the machine drifts by a fifth
    assert plan.predicted.peak_bytes == plan.measured.peak_bytes
    text = plan.explain()
    assert text.startswith("Change precision bf16, memory layout channels_last, allocator retain, fused optimizer True")
    assert codes_against(plan, "precision")["fp32"] == "trial.slower"
    assert f"not fp32: {reasons_against(plan, 'precision')['fp32']}" in text


@pytest.mark.parametrize(("modes", "code"), [((0.8, 0.8, 0.8), "trial.faster"), ((0.8, 1.1, 0.9), "trial.together")])
def test_a_change_that_is_not_clear_alone_is_chosen_together(modes, code):
    whole = Candidate(64)
    half, both = replace(whole, precision="bf16"), replace(whole, precision="bf16", allocator="retain")
    trials = (
        Trial("modes", whole, (1.0,) * 3, MIB),
        Trial("modes", half, modes, MIB),
        Trial("final", whole, (1.0,) * 6, MIB),
        Trial("final", both, (0.7,) * 6, MIB),
        Trial("final", whole, (1.0, 0.99, 1.01, 1.0, 1.0, 1.0), control=True),
    )
    found = replace(measured(Machine(), check=REFUSED), trials=trials)
    plan = choose(found, Objective(), Budget())
    assert plan.changes == ("precision", "allocator")
    assert plan.precision.code == code


def kept_precision(bf16, control) -> Choice:
    """Return the reason for keeping fp32 where bf16 took these seconds in the final; the control resolves about 3%."""
    whole = Candidate(64)
    half = replace(whole, precision="bf16")
    trials = (
        Trial("modes", whole, (1.0,) * 3, MIB),
        Trial("modes", half, (0.5,) * 3, MIB),
        Trial("final", whole, (1.0,) * 5, MIB),
        Trial("final", half, bf16, MIB),
        Trial("final", whole, control, control=True),
    )
    profile = replace(measured(Machine(), check=REFUSED), trials=trials)
    return choose(profile, Objective(), Budget()).precision


@pytest.mark.parametrize(
    ("bf16", "code", "figure"),
    [
        ((0.99, 1.0, 0.99, 1.01, 1.0), "trial.no_gain", "2.7%"),
        ((0.6, 1.2, 0.7, 1.1, 0.8), "trial.not_significant", ""),  # 1.19x, but from 0.9 to 1.6
        ((0.5,) * 3, "trial.not_significant", ""),
        ((0.5,) * 5, "trial.no_control", ""),
    ],
)
def test_a_setting_is_kept_for_the_reason_that_holds(bf16, code, figure):
    kept = kept_precision(bf16, () if code == "trial.no_control" else (1.0, 1.03, 0.97, 1.0, 1.0))
    assert kept.code == code
    assert figure in kept.reason


def test_a_setting_that_nothing_was_put_before_was_not_run_against_the_loop():
    plan = planned(Machine(speed={"bf16": 0.9}), can_retain=False)
    assert plan.precision.code == "predicted.no_gain"
    assert codes_against(plan, "precision")["bf16"] == "trial.slower"
    assert "0.909x the speed (95% 0.909 to 0.909, n=3)" in reasons_against(plan, "precision")["bf16"]


def test_a_gain_too_small_to_be_worth_a_change_is_no_noise():
    plan = planned(Machine(fused_speed=1.05, noise=0.001, seed=1), check=REFUSED)
    assert plan.fused_optimizer.value is False
    assert plan.fused_optimizer.code == "trial.small_gain"
    assert all(figure in plan.fused_optimizer.reason for figure in ("0.47%", "1%", "1.05x the speed"))


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("can_retain", [False, True])
def test_noise_alone_changes_nothing(seed, can_retain):
    """Also where nothing is predicted to be worth a run against the loop, and none is made."""
    plan = planned(Machine(noise=0.04, drift=0.2, seed=seed), can_retain=can_retain)
    assert plan.changes == ()


def test_a_loop_that_is_already_good_is_left_alone():
    plan = planned(Machine(split_s=0.2), is_fused=True, layout="channels_last", can_retain=False)
    assert plan.changes == ()
    assert plan.explain().startswith("Change nothing")
    assert plan.fused_optimizer.value is True
    assert plan.fused_optimizer.code == "optimizer.already_fused"
    assert plan.memory_layout.code == "layout.already"
    assert plan.allocator.code == "allocator.unsupported"
    assert plan.predicted.between_s == pytest.approx((plan.measured.step_s / 1.15, plan.measured.step_s / 0.85))
    assert plan.baseline == replace(plan.predicted, between_s=None) == plan.measured


def test_what_does_not_apply_says_why():
    plan = planned(Machine(), has_convolutions=False, supports_fused=False, optimizer="Lion", batch_size=1)
    assert plan.memory_layout.code == "layout.no_convolutions"
    assert plan.fused_optimizer.code == "optimizer.no_fused"
    assert "Lion" in plan.fused_optimizer.reason
    assert plan.micro_batch.code == "batch.one_sample"
    refused = planned(Machine(), supports_fused=False, fused_refusal="planted difference").fused_optimizer
    assert (refused.value, refused.code) == (False, "optimizer.no_fused")
    assert "planted difference" in refused.reason


def test_a_refused_split_keeps_the_users_batch():
    plan = planned(Machine(speed={"bf16": 2.0}, split_s=-0.1), check=REFUSED)
    assert plan.micro_batch.value == 64
    assert plan.micro_batch.code == (REFUSED.code or "plan.unchanged")
    assert REFUSED.reason in plan.micro_batch.reason
    assert f"check: splitting is not allowed: {REFUSED.reason}" in plan.explain()


def test_a_refused_split_leaves_a_memory_budget_to_the_other_settings():
    machine = Machine(speed={"bf16": 0.8}, weight={"bf16": 0.5})  # slower, and half the memory
    plan = planned(machine, budget=Budget(memory=500 * MIB), check=REFUSED)
    assert (plan.micro_batch.value, plan.precision.value) == (64, "bf16")
    assert codes_against(plan, "precision")["fp32"] == "budget.memory"
    assert reasons_against(plan, "precision")["fp32"] == "peak memory 740 MiB is over the budget of 500 MiB"


def test_a_memory_budget_forces_smaller_slices_even_if_slower():
    free, bound = planned(Machine(split_s=0.2)), planned(Machine(split_s=0.2), budget=Budget(memory=300 * MIB))
    assert free.micro_batch.value == 64
    assert (bound.micro_batch.value, bound.num_micro_batches) == (16, 4)
    assert bound.changes == ("micro_batch",)
    assert bound.measured.peak_bytes == 260 * MIB
    assert bound.measured.step_s > bound.baseline.step_s
    assert "(peak memory 740 MiB is over the budget of 300 MiB)" in bound.micro_batch.reason
    assert codes_against(bound, "micro_batch")[32] == "budget.memory"
    assert "peak memory 428 MiB is over the budget" in reasons_against(bound, "micro_batch")[32]
    assert "predicted" in reasons_against(bound, "micro_batch")[32]


def test_a_budget_that_is_met_changes_nothing():
    assert planned(Machine(split_s=0.2), budget=Budget(memory=740 * MIB)).changes == ()


@pytest.mark.parametrize("noise", [0.0, 0.002])
def test_less_memory_at_equal_time_is_taken(noise):
    plan = planned(Machine(split_s=0.0, noise=noise, drift=0.1), can_retain=False)
    assert plan.changes == ("micro_batch",)
    assert plan.micro_batch.value == 16
    assert plan.micro_batch.effect is Effect.BITWISE
    assert plan.micro_batch.code == "trial.less_memory"


@pytest.mark.parametrize(
    ("machine", "budget", "got", "figures"),
    [
        (
            Machine(split_s=0.01),
            Budget(memory=105 * MIB),
            "fp32, micro-batch 1: peak memory 110 MiB is over the budget of 105 MiB",
            ("110 MiB", "1.63 s per step"),
        ),
        (
            Machine(speed={"bf16": 2.0}, split_s=0.2),
            Budget(time=0.3),
            "bf16, micro-batch 64: 550 ms per step is over the budget of 300 ms",
            ("740 MiB", "550 ms per step"),
        ),
    ],
)
def test_an_impossible_budget_names_the_nearest_settings(machine, budget, got, figures):
    with raises(InfeasibleError, code="plan.infeasible", field="budget") as caught:
        planned(machine, budget=budget, can_retain=False)
    assert got in caught.value.got
    assert all(figure in caught.value.hint for figure in figures)


def test_a_time_budget_may_need_two_settings_together():
    machine = Machine(speed={"bf16": 1.3, "retain": 1.3}, split_s=0.2)
    plan = planned(machine, budget=Budget(time=0.7))
    assert (plan.precision.value, plan.allocator.value) == ("bf16", "retain")


@pytest.mark.parametrize("budget", [Budget(), Budget(memory=800 * MIB)])
def test_a_loop_that_never_ran_is_infeasible_and_says_why(budget):
    with raises(InfeasibleError, code="plan.no_trial_ran", field="plan") as caught:
        planned(Machine(fails=lambda stage, candidate: "ValueError: no"), budget=budget)
    assert "ValueError: no" in str(caught.value)


def test_a_failed_trial_becomes_a_loser_with_its_reason():
    machine = Machine(
        speed={"bf16": 9.0, "retain": 1.3},
        fails=lambda stage, c: "RuntimeError: no bf16 kernel" if c.precision == "bf16" else None,
    )
    profile = measured(machine)
    plan = choose(profile, Objective(), Budget())
    assert plan.changes == ("allocator",)
    assert plan.allocator.reason.startswith("1.26x the speed")
    assert codes_against(plan, "precision")["bf16"] == "trial.failed"
    assert reasons_against(plan, "precision")["bf16"] == "RuntimeError: no bf16 kernel"
    assert "not bf16: RuntimeError: no bf16 kernel" in plan.explain()
    assert {trial.candidate.precision for trial in profile.trials if trial.error} == {"bf16"}


def test_a_loop_that_cannot_run_whole_is_planned_in_slices_of_every_mode():
    """The fastest is found although no mode ran on the whole batch; the plan's baseline is not measured."""
    machine = Machine(speed={"bf16": 3.0}, fails=lambda stage, c: "out of memory" if c.micro_batch > 16 else None)
    profile = measured(machine, can_retain=False)
    stages = list(dict.fromkeys(trial.stage for trial in profile.trials))
    assert stages[:4] == ["modes", "sizes", "modes in slices", "optimizer"]
    grid = itertools.product(("fp32", "bf16"), ("keep", "channels_last"))
    assert set(CostModel(profile).modes) == {Candidate(16, precision=mode[0], memory_layout=mode[1]) for mode in grid}
    plan = choose(profile, Objective(), Budget())
    assert (plan.micro_batch.value, plan.precision.value, plan.baseline) == (16, "bf16", None)
    assert "baseline: not measured" in plan.explain()
    assert "(out of memory)" in plan.micro_batch.reason


def test_a_screened_precision_is_a_loser_that_was_never_tried():
    profile = measured(Machine(speed={"fp16": 9.0}))
    plan = choose(profile, Objective(), Budget())
    assert "fp16" not in {trial.candidate.precision for trial in profile.trials}
    assert codes_against(plan, "precision")["fp16"] == "precision.slow"
    assert "0.01x the speed of fp32" in reasons_against(plan, "precision")["fp16"]
    assert codes_against(plan, "precision")["tf32"] == "precision.unsupported"


@pytest.mark.parametrize(("later", "kept"), [(0.6, True), (0.95, True), (1.0, False), (1.05, False)])
def test_the_final_decides_and_not_what_was_promised(later, kept):
    def step(stage: str, candidate: Candidate) -> float:
        return 1.0 if candidate.precision == "fp32" else (later if stage == "final" else 0.5)

    plan = planned(Machine(step_of=step), check=REFUSED, can_retain=False)
    assert plan.changes == (("precision",) if kept else ())
    assert plan.measured.step_s == pytest.approx(later if kept else 1.0)
    assert plan.predicted.step_s == pytest.approx(0.5 if kept else 1.0)


def test_a_winner_that_fails_in_the_final_is_taken_back():
    machine = Machine(
        speed={"bf16": 2.0}, fails=lambda stage, c: "it died" if stage == "final" and c.precision == "bf16" else None
    )
    assert planned(machine).changes == ()


def test_a_budget_that_every_final_breaks_is_infeasible():
    machine = Machine(fails=lambda stage, c: "it died" if stage.startswith("final") and c.micro_batch < 64 else None)
    with raises(InfeasibleError, code="plan.infeasible", field="budget") as caught:
        planned(machine, budget=Budget(memory=300 * MIB))
    assert [stage.name for stage in machine.stages][-3:] == ["final", "final 2", "final 3"]
    assert "micro-batch" in caught.value.got
    assert "per step" in caught.value.hint


def test_a_chunked_head_is_chosen_for_its_speed_or_its_memory():
    fast = planned(Machine(head_speed={2048: 1.5, 1024: 1.2}), can_retain=False, **HEAD)
    assert (fast.loss_chunk.value, fast.changes) == (2048, ("loss_chunk",))
    assert fast.loss_chunk.effect is Effect.ROUNDING
    assert fast.loss_chunk.reason.startswith("1.11x the speed")
    assert fast.loss_chunk.code == "trial.faster"
    light = planned(Machine(head_saves={2048: 0.3, 1024: 0.5}), can_retain=False, **HEAD)
    assert light.loss_chunk.value == 1024
    assert light.measured.peak_bytes == 370 * MIB
    slow = planned(Machine(head_speed={2048: 0.5, 1024: 0.5}), can_retain=False, **HEAD)
    assert slow.changes == ()
    assert codes_against(slow, "loss_chunk")[1024] == "trial.slower"
    assert "0.769x the speed" in reasons_against(slow, "loss_chunk")[1024]


@pytest.mark.parametrize(
    ("speed", "total_steps", "compile_s", "code", "figures"),
    [
        (1.25, 10_000, 30.0, "trial.faster", ["1.25x the speed"]),
        (1.25, 2_000, 201.0, "compile.does_not_pay", ["6 min 40 s", "3 min 21 s", "1.25x the speed"]),
        (0.9, 10_000, 30.0, "compile.does_not_pay", ["30 s", "0.9x the speed"]),
        (1.25, 1_999, 30.0, "compile.run_too_short", []),
        (1.25, None, 30.0, "compile.run_length_unknown", ["total_steps"]),
    ],
)
def test_a_model_is_compiled_where_that_saves_twice_what_it_takes(speed, total_steps, compile_s, code, figures):
    machine = Machine(compiled_speed=speed, compile_s=compile_s)
    plan = planned(machine, total_steps=total_steps, can_retain=False)
    assert plan.changes == (("compiled",) if code == "trial.faster" else ())
    (found,) = [each for each in (plan.compiled, *plan.compiled.rejected) if each.code == code]
    assert all(figure in found.reason for figure in figures), found.reason


def test_the_front_holds_whoever_nobody_beats():
    plan = planned(Machine(speed={"bf16": 2.0}, split_s=0.1), objective=Objective(time=3, memory=1), can_retain=False)
    seconds, peaks = ([getattr(point, name) for point in plan.front] for name in ("step_s", "peak_bytes"))
    assert len(plan.front) > 3
    assert seconds == sorted(seconds)
    assert peaks == sorted(peaks, reverse=True)
    assert all("bf16" in point.settings for point in plan.front)
    assert all((point.refusal, point.code) == ("", "") for point in plan.front)


def test_nobody_is_kept_off_the_front_by_what_did_not_run():
    """What failed is not on it; what breaks a limit is, and hides nobody who does not."""
    machine = Machine(split_s=0.1, fails=lambda stage, c: "torn" if stage == "final" and c.micro_batch == 64 else None)
    plan = planned(machine, budget=Budget(memory=500 * MIB), can_retain=False, has_convolutions=False)
    settings = [point.settings for point in plan.front if not point.refusal]
    assert any("micro-batch 32" in text for text in settings)
    assert not any("torn" in point.refusal for point in plan.front)


def test_the_last_final_has_the_lightest_of_all_in_it():
    """Before it is said that nothing fits: the fastest three in a row may fail, and the smallest run."""
    machine = Machine(fails=lambda stage, c: "torn" if stage.startswith("final") and c.micro_batch > 2 else None)
    plan = planned(machine, budget=Budget(memory=500 * MIB), can_retain=False, has_convolutions=False)
    finals = [stage for stage in machine.stages if stage.name.startswith("final")]
    assert len(finals) == 3
    assert plan.micro_batch.value == 1


@pytest.mark.parametrize("memory", [0.0, 0.2, 0.5, 0.8])
def test_a_choice_stands_at_the_weights_it_was_made_with(memory):
    objective = Objective(time=1 - memory, memory=memory)
    machine = Machine(split_s=0.05, traces=True)
    profile = measured(machine, objective=objective, can_retain=False, has_convolutions=False, supports_fused=False)
    plan = choose(profile, objective, Budget())
    low, high = plan.stands_between
    assert low <= memory <= high
    for weight in (low, high):  # at the ends another is as good; well beyond them, better
        beyond = weight + (0.1 if weight == high else -0.1)
        if 0 <= beyond <= 1:
            assert choose(profile, Objective(time=1 - beyond, memory=beyond), Budget()).micro_batch != plan.micro_batch


def test_a_recorded_profile_can_be_decided_under_another_budget():
    """By what its trials predict; nobody ran it."""
    recorded = measured(Machine(speed={"bf16": 1.5}, split_s=0.1), can_retain=False, always=True)
    loose = choose(recorded, Objective(), Budget())
    tight = choose(recorded, Objective(), Budget(memory=450 * MIB))
    assert (loose.micro_batch.value, tight.micro_batch.value) == (64, 32)
    assert tight.precision.value == "bf16"
    assert tight.verified is None
    with raises(InfeasibleError, code="plan.infeasible", field="budget"):
        choose(recorded, Objective(), Budget(memory=100 * MIB))


@pytest.mark.parametrize("limit", [2**60, 750 * MIB])
def test_who_won_the_final_stays_under_tighter_limits_that_it_meets(limit):
    """In the final bf16 is slower than it was before; in half a batch, of which there was no final, it would be too."""

    def step(stage: str, candidate: Candidate) -> float:
        told = 0.8 if stage.startswith("final") else 1.5
        return 1 / told if candidate.precision == "bf16" else 1.0

    asked = Budget(memory=2**61)
    recorded = measured(Machine(step_of=step), budget=asked, can_retain=False, has_convolutions=False)
    assert recorded.stage("final")
    assert choose(recorded, Objective(), asked).changes == ()
    assert choose(recorded, Objective(), Budget(memory=limit)).changes == ()
    assert choose(recorded, Objective(), Budget(memory=500 * MIB)).precision.value == "bf16"


class Surprising(Machine):
    """In the first final half a batch takes more than before."""

    def run(self, stage):
        found = super().run(stage)
        if stage.name != "final":
            return found
        return tuple(replace(t, peak_bytes=480 * MIB) if t.candidate.micro_batch == 32 else t for t in found)


def test_who_broke_a_tight_limit_in_a_final_may_win_under_a_looser_one():
    """There was another final without it."""
    facts = {"can_retain": False, "supports_fused": False, "has_convolutions": False}
    tight = Budget(memory=430 * MIB)
    recorded = measured(Surprising(speed={"bf16": 1.5}, split_s=0.1), budget=tight, **facts)
    (broke,) = {trial.candidate for trial in recorded.stage("final")} - {recorded.reference_candidate}
    assert candidate_of(choose(recorded, Objective(), tight)).micro_batch == 16
    loose = choose(recorded, Objective(), Budget(memory=600 * MIB))
    assert candidate_of(loose) == broke
    assert loose.verified is not None


def test_a_plan_that_was_never_run_says_so():
    recorded = measured(Machine(split_s=0.1), objective=Objective(time=1, memory=1), can_retain=False)
    plan = choose(recorded, Objective(), Budget(memory=125 * MIB))
    assert (plan.micro_batch.value, plan.measured, plan.verified) == (2, None, None)
    assert ": 0.24x the speed, predicted and not run" in plan.explain()


def test_what_a_final_rejected_is_not_taken_under_another_limit():
    def step(stage: str, candidate: Candidate) -> float:
        return 0.96 if candidate.precision == "bf16" and not stage.startswith("final") else 1.0

    recorded = measured(Machine(step_of=step), can_retain=False, check=REFUSED, has_convolutions=False)
    assert recorded.stage("final")
    assert choose(recorded, Objective(), Budget(memory=2**60)).changes == ()


def test_a_neutral_change_does_not_ride_on_a_real_one():
    """In the trials of parts channels_last looked 6% faster; in the final it is worth nothing."""

    def step(stage: str, candidate: Candidate) -> float:
        layout = 1 / 1.06 if candidate.memory_layout != "keep" and not stage.startswith("final") else 1.0
        return (0.6 if candidate.precision == "bf16" else 1.0) * layout

    plan = planned(Machine(step_of=step, noise=0.002), can_retain=False, check=REFUSED, supports_fused=False)
    assert plan.changes == ("precision",)


def test_a_recorded_profile_is_decided_by_the_objective_that_is_given():
    """The reference won on memory and time together, so there was no final; nothing else may come out of it."""
    both = Objective(time=1, memory=4)
    machine = Machine(speed={"bf16": 1.5}, weight={"bf16": 3.0})
    profile = measured(machine, objective=both, check=REFUSED, is_fused=True, can_retain=False)
    assert profile.stage("final") == ()
    assert choose(profile, both, Budget()).changes == ()
    assert choose(profile, Objective(), Budget()).changes == ()  # at three times the memory, which nobody allowed
    assert choose(profile, Objective(), Budget(memory="1TiB")).changes == ("precision",)


def test_the_plan_carries_reference_check_and_cost_of_planning():
    reference = Reference("bf16", clip_norm=1.5)
    plan = planned(Machine(), reference=reference, check=REFUSED)
    assert (plan.reference, plan.check, plan.planning_s, plan.search_s) == (reference, REFUSED, 12.5, 0.0)
    assert plan.precision.value == "bf16"
    assert "precision" not in plan.changes
    assert (plan.clip_norm.value, plan.clip_norm.changed) == (1.5, False)
    assert "baseline: declared bf16 eager, clip 1.5 loop, 64 samples per step" in plan.explain()


def test_scores_that_are_kept_are_the_users_to_leave_to_torch():
    (said,) = planned(Machine(), scores_bytes=74 * MIB).advice  # of 740
    assert said.code == "attention.unfused"
    assert "74 MiB, 10% of the peak" in said.text
    assert planned(Machine(), scores_bytes=30 * MIB).advice == ()


def test_a_vocabulary_is_padded_by_the_user_where_that_was_timed_to_pay():
    logits = (640, 50_257)
    (said,) = planned(Machine(), logits=logits, padding_saves_s=0.02 * planned(Machine()).measured.step_s).advice
    assert said.code == "vocabulary.unpadded"
    assert all(figure in said.text for figure in ("50,257", "50,304", "64", "2.0% of a step"))
    assert planned(Machine(), logits=logits, padding_saves_s=0.0).advice == ()
    assert planned(Machine(), logits=logits).advice == ()


@pytest.mark.parametrize(("share", "said"), [(0.08, 0), (0.12, 1), (None, 0)])
def test_memory_in_pieces_is_the_users_to_join(share, said):
    """Where what is planned has so much of it, whatever others had; on a CPU nobody has."""
    profile = measured(Machine(speed={"bf16": 1.5}, weight={"fp32": 2.0}))
    trials = [
        replace(t, unused_bytes=share and int((share if t.candidate.precision == "bf16" else 0.5) * t.peak_bytes))
        if t.peak_bytes
        else t
        for t in profile.trials
    ]
    advice = choose(replace(profile, trials=tuple(trials)), Objective(), Budget()).advice
    assert len(advice) == said
    assert all(each.code == "memory.fragmented" for each in advice)
    assert all("(12%)" in each.text and "expandable_segments" in each.text for each in advice)


def test_waiting_for_data_is_the_users_to_change():
    profile = replace(measured(Machine()), phases_s={"data": 0.1, "forward": 0.4, "backward": 0.5})
    (waits,) = choose(profile, Objective(), Budget()).advice
    assert waits.code == "data.waiting"
    assert "10%" in waits.text
    quick = replace(profile, phases_s={"data": 0.01, "forward": 0.99})
    assert choose(quick, Objective(), Budget()).advice == ()


@pytest.mark.parametrize("scale", [1.0, 4.0])
def test_a_range_test_is_charged_and_a_higher_rate_makes_a_tuned_plan(scale):
    base = planned(Machine(speed={"bf16": 2.0}))
    plan = adapt_learning_rate(base, RateChoice(scale, "by its loss"), 7.5)
    is_tuned = scale > 1
    assert (plan.learning_rate_scale.value, plan.learning_rate_scale.changed) == (scale, is_tuned)
    assert plan.plan_kind == ("tuned" if is_tuned else "equivalent")
    assert (plan.schedule.value, plan.schedule.changed) == ("warmup_cosine" if is_tuned else "user", is_tuned)
    assert [loser.code for loser in plan.schedule.rejected] == ["setting.not_tried"] * is_tuned
    assert (plan.planning_s, plan.search_s) == (20.0, 7.5)
    assert values(plan)[:6] == values(base)[:6]
    assert all(words in plan.explain() for words in ("by its loss", "7.5 s of search"))


@pytest.mark.parametrize(
    ("rising", "steps", "rise", "figures"),
    [
        (None, 100, None, ""),
        (24, None, None, ""),
        (24, 476, None, ""),  # as many steps after rounding
        (24, 465, 0.052, "24 of 465 steps"),
        (24, 100, 0.24, "24 of 100 steps"),
        (31, 100, 0.3, "30% of the run"),
    ],
)
def test_a_rate_rises_for_as_many_steps_as_in_its_range_test(rising, steps, rise, figures):
    base = planned(Machine(speed={"bf16": 2.0}))
    plan = adapt_learning_rate(base, RateChoice(4.0, "so", rising_steps=rising), 7.5, run_steps=steps)
    assert plan.warmup_fraction.value == rise
    assert plan.warmup_fraction.code == ("plan.unchanged" if rise is None else "warmup.of_range_test")
    assert figures in plan.warmup_fraction.reason
    assert ("warmup_fraction" in plan.changes) is (rise is not None)
    kept = adapt_learning_rate(base, RateChoice(1.0, "so", rising_steps=rising), 7.5, run_steps=steps)
    assert kept.warmup_fraction.value is None


@pytest.mark.parametrize(
    ("scale", "norm", "may_clip", "own", "clips"),
    [
        (4.0, 1.234, True, None, 1.2),
        (4.0, 1.234, False, None, None),  # of an optimizer whose steps are as long as gradients are
        (4.0, None, True, None, None),
        (1.0, 1.234, True, None, None),  # the loop's own rate, which it trained at without
        (4.0, 1.234, True, 0.5, 0.5),  # the loop's own limit
    ],
)
def test_a_plan_with_a_rate_of_its_own_clips_at_the_norm_that_is_typical_there(scale, norm, may_clip, own, clips):
    base = planned(Machine(speed={"bf16": 2.0}), reference=Reference(clip_norm=own))
    plan = adapt_learning_rate(base, RateChoice(scale, "a third of 12x", norm=norm), 7.5, may_clip=may_clip)
    assert plan.clip_norm.value == clips
    assert plan.clip_norm.changed is (clips == 1.2)
    assert clips != 1.2 or (plan.plan_kind == "tuned" and plan.clip_norm.code == "clip.median_norm")


def test_the_screen_reads_the_device_of_the_profile():
    fast = replace(CPU, peak_flops={"fp32": 1e11, "bf16": 1e10, "fp16": 2e11})
    plan = planned(Machine(speed={"fp16": 2.0}), device=fast)
    assert plan.precision.value == "fp16"
    assert codes_against(plan, "precision")["bf16"] == "precision.slow"


def test_a_busy_machine_is_told_of_where_it_hides_a_gain():
    busy = planned(Machine(speed={"channels_last": 1.15}, noise=0.08))
    assert busy.changes == ()
    (said,) = [each for each in busy.advice if each.code == "machine.busy"]
    assert "Plan again" in said.text
    still = planned(Machine(speed={"channels_last": 1.15}, noise=0.01))
    assert still.changes == ("memory_layout",)
    assert not any(each.code == "machine.busy" for each in still.advice)
    alike = planned(Machine(noise=0.01))
    assert not any(each.code == "machine.busy" for each in alike.advice)


def test_a_loop_with_gradient_hooks_keeps_all_but_what_changes_no_bit():
    hooks = "not tried: the model has a tensor hook"
    unsplit = replace(REFUSED, reason="the model has a tensor hook")
    plan = planned(Machine(), supports_fused=False, bitwise_only=hooks, check=unsplit)
    assert set(plan.changes) <= {"allocator", "recompute"}
    for name in ("precision", "memory_layout", "fused_optimizer", "loss_chunk", "compiled", "micro_batch"):
        assert "a tensor hook" in getattr(plan, name).reason
