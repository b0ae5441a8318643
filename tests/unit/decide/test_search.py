"""What is measured next, and what a stage decides: on a machine that is only arithmetic."""

from __future__ import annotations

from dataclasses import replace

import pytest
from simulated_machine import CPU, GPU, LOOP, MIB, SPLITTABLE, Machine, measured

from trimtab.core.codec import from_json, to_json
from trimtab.core.objective import Budget, Objective, Reference
from trimtab.core.plan import Check
from trimtab.core.profile import Candidate, Profile, Trial
from trimtab.decide.planner import choose
from trimtab.decide.search import (
    STAGES,
    Stage,
    control_interval,
    decide_stage,
    next_stage,
    precision_refusal,
    retaining_refusal,
    speed_ratio,
    unfit,
)

REFERENCE = Candidate("fp32", "keep", False, 64)
REFUSED = Check(False, "BatchNorm2d computes over the batch: smaller micro-batches would change its statistics")


def names(machine: Machine) -> list[str]:
    return [stage.name for stage in machine.stages]


def stage_of(machine: Machine, name: str) -> Stage:
    return next(stage for stage in machine.stages if stage.name == name)


def profile_of(*trials: Trial, check: Check = SPLITTABLE, control: tuple[float, ...] = (1.0,) * 5) -> Profile:
    """Return a profile of hand-made trials behind an A/A control of the reference."""
    first = (Trial("precision", REFERENCE, (1.0,) * 5, 640 * MIB), Trial("precision", REFERENCE, control, control=True))
    return Profile(CPU, LOOP, check, Reference(), first + trials)


def micro(rows: int, seconds: float | tuple[float, ...], mib: int) -> Trial:
    blocks = seconds if isinstance(seconds, tuple) else (seconds,) * 5
    return Trial("micro_batch", replace(REFERENCE, micro_batch=rows), blocks, mib * MIB)


def test_stages_come_in_order_and_each_starts_from_the_winner_before():
    machine = Machine(speed={"bf16": 1.5, "channels_last": 1.2, "retain": 1.3}, fused_speed=3.0)
    measured(machine)
    assert names(machine) == list(STAGES)
    assert [stage.control for stage in machine.stages] == [True, True, False, True, False]
    allocator, precision, optimizer, micro_batch, verify = machine.stages
    retaining = replace(REFERENCE, allocator="retain")
    assert allocator.candidates == (REFERENCE, retaining)
    assert precision.candidates[0] == retaining
    assert {(c.precision, c.memory_layout) for c in precision.candidates} == {
        (p, layout) for p in ("fp32", "bf16") for layout in ("keep", "channels_last")
    }
    fast = Candidate("bf16", "channels_last", False, 64, "retain")
    assert optimizer.candidates == (fast, replace(fast, fused_optimizer=True))
    fast = replace(fast, fused_optimizer=True)
    assert micro_batch.candidates == (fast, replace(fast, micro_batch=32), replace(fast, micro_batch=16))
    assert verify.candidates == (REFERENCE, fast)


def test_the_search_is_over_when_every_stage_was_measured():
    profile = measured(Machine(speed={"bf16": 2.0}))
    assert next_stage(profile, Objective(), Budget()) is None


def test_no_candidate_of_a_stage_comes_twice():
    machine = Machine(speed={"bf16": 2.0})
    measured(machine, budget=Budget(memory=200 * MIB))
    for stage in machine.stages:
        assert len(set(stage.candidates)) == len(stage.candidates)


@pytest.mark.parametrize(
    ("facts", "check", "left_out"),
    [
        ({"is_fused": True}, SPLITTABLE, "optimizer"),
        ({"supports_fused": False}, SPLITTABLE, "optimizer"),
        ({"can_retain": False}, SPLITTABLE, "allocator"),
        ({"faults_per_step": 10_000, "fault_s": 1e-6}, SPLITTABLE, "allocator"),
        ({}, REFUSED, "micro_batch"),
        ({"batch_rows": 1}, SPLITTABLE, "micro_batch"),
    ],
)
def test_a_stage_without_alternatives_is_left_out(facts, check, left_out):
    machine = Machine(speed={"bf16": 2.0})
    measured(machine, check=check, **facts)
    assert names(machine) == [name for name in STAGES if name != left_out]


FAULTS = 1_000_000  # a step takes a second: each microsecond of a fault is that share of it


@pytest.mark.parametrize(
    ("fault_s", "said"),
    [(None, ""), (3e-7, ""), (2e-8, ""), (1.9e-8, "not tried: 1,000,000 page faults take about 1.9% of a step")],
)
def test_memory_is_retained_on_trial_where_page_faults_leave_something_to_gain(fault_s, said):
    machine = Machine()
    profile = measured(machine, faults_per_step=FAULTS, fault_s=fault_s)
    assert ("allocator" in names(machine)) is (said == "")
    assert (retaining_refusal(profile) or "") == said
    choice = choose(profile, Objective(), Budget()).allocator
    assert (choice.value, choice.changed) == ("keep", False)
    assert said in choice.reason


def test_waiting_for_data_hides_no_page_faults():
    profile = measured(Machine(), faults_per_step=FAULTS, fault_s=3e-8)
    assert retaining_refusal(replace(profile, phases_s={"data": 9.0, "forward": 1.0})) is None
    assert retaining_refusal(replace(profile, phases_s={"forward": 10.0})) is not None


def test_nothing_is_verified_when_nothing_won():
    machine = Machine()
    measured(machine)
    assert names(machine) == ["allocator", "precision", "optimizer", "micro_batch"]


@pytest.mark.parametrize("facts", [{"has_convolutions": False}, {"layout": "channels_last"}])
def test_channels_last_is_tried_only_where_it_is_a_change(facts):
    machine = Machine()
    measured(machine, **facts)
    assert {candidate.memory_layout for stage in machine.stages for candidate in stage.candidates} == {"keep"}


def test_a_slow_precision_is_screened_by_its_peak_and_never_run():
    machine = Machine()
    measured(machine)
    assert {c.precision for stage in machine.stages for c in stage.candidates} == {"fp32", "bf16"}
    assert "0.01x the speed of fp32" in (precision_refusal(CPU, "fp16") or "")
    assert "does not exist on cpu" in (precision_refusal(CPU, "tf32") or "")


def test_a_precision_of_unknown_peak_is_tried():
    machine = Machine()
    measured(machine, device=GPU)
    assert {c.precision for c in stage_of(machine, "precision").candidates} == {"fp32", "tf32", "bf16", "fp16"}


@pytest.mark.parametrize(("peak", "is_tried"), [(0.5e11, False), (1.02e11, False), (1.2e11, True)])
def test_a_precision_no_faster_than_fp32_is_not_tried(peak, is_tried):
    refusal = precision_refusal(replace(CPU, peak_flops={"fp32": 1e11, "fp16": peak}), "fp16")
    assert (refusal is None) is is_tried
    assert precision_refusal(CPU, "fp32") is None


def test_the_reference_precision_is_the_incumbent_even_where_it_is_screened():
    machine = Machine()
    measured(machine, reference=Reference("fp16"))
    assert {stage.candidates[0].precision for stage in machine.stages} == {"fp16"}


def test_a_tight_budget_asks_for_ever_smaller_slices():
    loose, tight = Machine(), Machine()
    measured(loose, budget=Budget(memory=800 * MIB))
    measured(tight, budget=Budget(memory=150 * MIB))

    def sizes(machine: Machine) -> list[int]:
        return [c.micro_batch for stage in machine.stages if stage.name == "micro_batch" for c in stage.candidates]

    assert sizes(loose) == [64, 32, 16]
    assert sizes(tight) == [64, 32, 16, 8, 4, 2, 1]


def test_a_fast_setting_that_needs_more_memory_is_sliced_as_far_as_it_needs():
    """The peak that counts is that of the settings so far, not of the reference."""
    machine = Machine(speed={"bf16": 3.0}, fused_speed=2.0, fixed_bytes=10 * MIB, split_s=0.001, weight={"bf16": 8.0})
    profile = measured(machine, budget=Budget(memory=700 * MIB), can_retain=False)  # the reference needs 650
    micro_batch = decide_stage(profile, "micro_batch", Objective(), Budget(memory=700 * MIB))
    assert micro_batch.winner == Candidate("bf16", "keep", True, 4)


def test_an_odd_batch_is_halved_upwards():
    machine = Machine()
    measured(machine, batch_rows=7, budget=Budget(memory=1))
    assert [c.micro_batch for c in machine.stages[-1].candidates] == [7, 4, 2, 1]


def test_replaying_a_recorded_profile_asks_for_the_same_stages():
    machine = Machine(speed={"bf16": 1.5}, fused_speed=2.0, noise=0.01, drift=0.1)
    recorded = from_json(Profile, to_json(measured(machine)))
    replayed = replace(recorded, trials=())
    asked = []
    while (stage := next_stage(replayed, Objective(), Budget())) is not None:
        asked.append(stage)
        replayed = replayed.with_trials(recorded.stage(stage.name))
    assert asked == machine.stages
    assert replayed == recorded


def test_speed_is_paired_by_block():
    drift = (1.0, 3.0, 0.5, 2.0, 1.0)
    found = speed_ratio(micro(32, tuple(0.8 * d for d in drift), 1), micro(64, drift, 1))
    assert (found.low, found.mean, found.high) == pytest.approx((1.25, 1.25, 1.25))


def test_the_control_is_the_reference_against_itself():
    found = control_interval(profile_of(control=(1.0, 1.1, 0.9, 1.0, 1.0)), "precision")
    assert found is not None
    assert found.low < 1 < found.high
    assert control_interval(profile_of(control=(1.0,)), "precision") is None
    failed = Trial("allocator", REFERENCE, error="out of memory")
    again = Trial("allocator", REFERENCE, (1.0,) * 5, control=True)
    assert control_interval(profile_of(failed, again), "allocator") is None
    assert control_interval(Profile(CPU, LOOP, SPLITTABLE), "precision") is None


@pytest.mark.parametrize(("seconds", "wins"), [(0.90, True), (0.98, False), (1.1, False)])
def test_a_gain_must_be_above_what_the_control_resolves(seconds, wins):
    control = (1.0, 1.03, 0.97, 1.0, 1.0)  # resolves about 3%
    profile = profile_of(
        Trial("allocator", REFERENCE, (1.0,) * 5),
        Trial("allocator", replace(REFERENCE, allocator="retain"), (seconds,) * 5),
        control=control,
    )
    outcome = decide_stage(profile, "allocator", Objective(), Budget())
    assert (outcome.winner.allocator == "retain") is wins
    text = outcome.reasons[replace(REFERENCE, allocator="retain")]
    assert text.startswith({0.90: "1.11x the speed", 0.98: "no gain: 1.02x", 1.1: "slower: 0.909x"}[seconds])


@pytest.mark.parametrize(("both", "layout"), [(0.499, "keep"), (0.45, "channels_last")])
def test_a_setting_that_brings_nothing_beside_another_stays_as_it_was(both, layout):
    """On its own channels_last gains nothing; beside bf16 it gains 0.2%, or a tenth. The control resolves 0.5%."""
    fast = replace(REFERENCE, precision="bf16")
    together = replace(fast, memory_layout="channels_last")
    profile = profile_of(
        Trial("precision", fast, (0.5,) * 5, 1), Trial("precision", together, (both,) * 5, 1),
        control=(1.0, 1.005, 0.995, 1.0, 1.0),
    )  # fmt: skip
    outcome = decide_stage(profile, "precision", Objective(), Budget())
    assert outcome.winner == replace(fast, memory_layout=layout)
    assert ("no gain beside bf16, micro-batch 64: 1x of it" in outcome.reasons[together]) is (layout == "keep")


def test_the_fastest_of_two_gains_wins():
    profile = profile_of(micro(64, 1.0, 640), micro(32, 0.8, 630), micro(16, 0.9, 620))
    assert decide_stage(profile, "micro_batch", Objective(), Budget()).winner.micro_batch == 32


@pytest.mark.parametrize(
    ("seconds", "mib", "taken"),
    [
        (1.0, 400, True),  # equal speed
        (1 / 0.995, 400, True),  # within the 1% that memory may cost
        (1 / 0.98, 400, False),
        (1.0, 639, False),  # nothing worth saving
        ((1.0, 1.06, 0.94, 1.0, 1.0), 400, False),  # too noisy to say that it is free
    ],
)
def test_less_memory_at_equal_speed_is_taken(seconds, mib, taken):
    profile = profile_of(micro(64, 1.0, 640), micro(32, seconds, mib))
    outcome = decide_stage(profile, "micro_batch", Objective(), Budget())
    assert outcome.winner.micro_batch == (32 if taken else 64)
    assert ("38% less peak memory" in outcome.reasons[replace(REFERENCE, micro_batch=32)]) is taken


def test_the_lightest_of_equal_speed_is_taken():
    profile = profile_of(micro(64, 1.0, 640), micro(32, 1.0, 400), micro(16, 1.001, 300), micro(8, 1.2, 200))
    assert decide_stage(profile, "micro_batch", Objective(), Budget()).winner.micro_batch == 16


def test_a_gain_goes_before_memory():
    profile = profile_of(micro(64, 1.0, 640), micro(32, 0.9, 500), micro(16, 1.0, 300))
    assert decide_stage(profile, "micro_batch", Objective(), Budget()).winner.micro_batch == 32


def test_under_a_budget_the_fastest_that_fits_is_taken_though_slower():
    profile = profile_of(micro(64, 1.0, 640), micro(32, 1.5, 400), micro(16, 1.2, 300), micro(8, 2.0, 200))
    outcome = decide_stage(profile, "micro_batch", Objective(), Budget(memory=450 * MIB))
    assert outcome.winner.micro_batch == 16
    reason = outcome.reasons[outcome.winner]
    assert "micro-batch 64 cannot stay" in reason
    assert "over the budget of 450 MiB" in reason
    assert "0.833x the speed" in reason


def test_memory_binds_only_once_splitting_can_no_longer_lower_it():
    fast = replace(REFERENCE, precision="bf16")
    trials = (Trial("precision", fast, (0.5,) * 5, 500 * MIB),)
    budget = Budget(memory=200 * MIB)
    early = decide_stage(profile_of(*trials), "precision", Objective(), budget)
    assert early.winner == fast
    refused = decide_stage(
        profile_of(Trial("precision", fast, (2.0,) * 5, 150 * MIB), check=REFUSED), "precision", Objective(), budget
    )
    assert refused.winner == fast  # slower, yet the only one that fits


def test_where_nothing_fits_the_stage_is_decided_without_the_budget():
    """A time limit that only two settings together can meet."""
    fast = replace(REFERENCE, precision="bf16")
    profile = profile_of(Trial("precision", fast, (0.8,) * 5, 500 * MIB))
    assert decide_stage(profile, "precision", Objective(), Budget(time=0.7)).winner == fast


def test_when_the_reference_cannot_run_the_best_that_runs_is_taken():
    broken = Trial("precision", REFERENCE, error="out of memory")
    half, layout = replace(REFERENCE, precision="bf16"), replace(REFERENCE, memory_layout="channels_last")
    trials = (broken, Trial("precision", half, (2.0,) * 5, 1), Trial("precision", layout, (1.0,) * 5, 1))
    profile = Profile(CPU, LOOP, SPLITTABLE, Reference(), trials)
    outcome = decide_stage(profile, "precision", Objective(), Budget())
    assert outcome.winner == layout
    assert "cannot stay (out of memory)" in outcome.reasons[layout]


def test_why_a_trial_cannot_be_chosen():
    whole, budget = micro(32, 0.4, 50), Budget(memory=100 * MIB, time=0.5)

    def why(trial: Trial) -> str:
        return unfit(profile_of(), trial, trial.stage, budget) or ""

    assert why(whole) == ""
    assert why(replace(whole, error="RuntimeError: no")) == "RuntimeError: no"
    assert why(replace(whole, block_s=(9.0, 9.0))).startswith("stopped after 2 blocks: 9 s per step")
    assert why(micro(32, 0.4, 200)) == "peak memory 200 MiB is over the budget of 100 MiB"
    assert why(micro(32, 0.6, 50)) == "600 ms per step is over the budget of 500 ms"
    assert why(Trial("optimizer", REFERENCE, (0.6,) * 5)) == ""  # not a whole step


def test_memory_may_be_weighed_against_time():
    profile = profile_of(micro(64, 1.0, 640), micro(32, 1.2, 64))
    assert decide_stage(profile, "micro_batch", Objective(), Budget()).winner.micro_batch == 64
    balanced = decide_stage(profile, "micro_batch", Objective(time=1, memory=1), Budget())
    assert balanced.winner.micro_batch == 32  # C falls from 1 to (1.2 + 0.1) / 2


def test_memory_is_weighed_in_the_incumbents_units_where_the_reference_did_not_run():
    """The first stage's reference ran out of memory, and its cost is what a score is measured by."""
    half = replace(REFERENCE, precision="bf16")
    trials = (
        Trial("precision", REFERENCE, error="out of memory"),
        Trial("precision", REFERENCE, error="out of memory", control=True),
        Trial("precision", half, (1.0,) * 5, 640 * MIB),
        Trial("micro_batch", half, (1.0,) * 5, 640 * MIB),
        Trial("micro_batch", replace(half, micro_batch=32), (1.2,) * 5, 64 * MIB),
        Trial("micro_batch", half, (1.0, 1.001, 0.999, 1.0, 1.0), control=True),
    )
    profile, balanced = Profile(CPU, LOOP, SPLITTABLE, Reference(), trials), Objective(time=1, memory=1)
    assert decide_stage(profile, "precision", balanced, Budget()).winner == half
    assert decide_stage(profile, "micro_batch", balanced, Budget()).winner.micro_batch == 32


@pytest.mark.parametrize("blocks", [3, 4])
def test_fewer_than_five_blocks_drop_a_loser_and_accept_nothing(blocks):
    profile = profile_of(
        Trial("micro_batch", REFERENCE, (1.0,) * 5, 640 * MIB),
        Trial("micro_batch", replace(REFERENCE, micro_batch=32), (0.5,) * blocks, 600 * MIB),
        Trial("micro_batch", replace(REFERENCE, micro_batch=16), (1.0,) * blocks, 300 * MIB),
    )
    outcome = decide_stage(profile, "micro_batch", Objective(), Budget())
    assert outcome.winner == REFERENCE
    assert all(text.endswith("it takes 5 blocks to tell one") for text in outcome.reasons.values())


def test_without_a_control_that_ran_nothing_is_a_gain():
    trials = (
        Trial("precision", REFERENCE, (1.0,) * 5, 1),
        Trial("precision", replace(REFERENCE, precision="bf16"), (0.5,) * 5, 1),
        Trial("precision", REFERENCE, error="out of memory", control=True),
    )
    outcome = decide_stage(Profile(CPU, LOOP, SPLITTABLE, Reference(), trials), "precision", Objective(), Budget())
    assert outcome.winner == REFERENCE
    (reason,) = outcome.reasons.values()
    assert reason.startswith("no gain: 2x the speed")
    assert reason.endswith("without an A/A control nothing can be resolved")


def test_a_stage_without_a_control_reads_another_stages_where_the_firsts_failed():
    failed = tuple(Trial("precision", REFERENCE, error="out of memory", control=c) for c in (False, True))
    half = replace(REFERENCE, precision="bf16")
    ran = (Trial("allocator", half, (1.0,) * 5, 1), Trial("allocator", half, (1.0, 1.1, 0.9, 1.0, 1.0), control=True))
    profile = Profile(CPU, LOOP, SPLITTABLE, Reference(), failed + ran)
    assert control_interval(profile, "optimizer") == control_interval(profile, "allocator") is not None
    assert control_interval(profile, "precision") is None


def test_a_loop_that_fails_as_it_is_asks_for_ever_smaller_slices_without_any_budget():
    machine = Machine(fails=lambda stage, c: "out of memory" if c.micro_batch > 4 and stage != "optimizer" else None)
    measured(machine)
    sizes = next([c.micro_batch for c in s.candidates] for s in machine.stages if s.name == "micro_batch")
    assert sizes == [64, 32, 16, 8, 4, 2, 1]


def test_the_optimizers_step_is_judged_by_time_alone():
    fused = replace(REFERENCE, fused_optimizer=True)
    profile = profile_of(Trial("optimizer", REFERENCE, (0.2,) * 5), Trial("optimizer", fused, (0.1,) * 5))
    outcome = decide_stage(profile, "optimizer", Objective(time=0, memory=1), Budget(time=0.01))
    assert outcome.winner == fused
    assert outcome.reasons[fused].startswith("the optimizer's step alone at 2x the speed")


def test_a_faster_optimizer_has_to_save_a_hundredth_of_a_whole_step():
    fused = replace(REFERENCE, fused_optimizer=True)
    alone = Trial("optimizer", REFERENCE, (2.0,) * 5), Trial("optimizer", fused, (1.0,) * 5)

    def winner(step_s: float) -> Candidate:
        whole = Trial("precision", REFERENCE, (step_s,) * 5), Trial("precision", REFERENCE, (step_s,) * 5, control=True)
        return decide_stage(profile_of(*whole, *alone), "optimizer", Objective(), Budget()).winner

    assert winner(99.0) == fused
    assert winner(101.0) == REFERENCE
    little = decide_stage(
        profile_of(Trial("precision", REFERENCE, (250.0,) * 5), *alone), "optimizer", Objective(), Budget()
    )
    assert little.reasons[fused].startswith("too little of a whole step, below 1%: the optimizer's step alone at 2x")
    assert little.reasons[fused].endswith("0.4% of a whole step")


@pytest.mark.parametrize("later_s", [50.0, 400.0])
def test_what_a_later_stage_times_changes_no_decision_on_the_optimizer(later_s):
    fused = replace(REFERENCE, fused_optimizer=True)
    alone = Trial("optimizer", REFERENCE, (2.0,) * 5), Trial("optimizer", fused, (1.0,) * 5)
    for step_s in (95.0, 105.0):
        found = profile_of(Trial("precision", REFERENCE, (step_s,) * 5), *alone)
        later = [Trial(stage, REFERENCE, (later_s,) * 5) for stage in ("micro_batch", "verify")]
        before, after = (
            decide_stage(p, "optimizer", Objective(), Budget()) for p in (found, found.with_trials(tuple(later)))
        )
        assert before == after


def test_the_reference_is_not_run_alone_where_another_stage_ran_it():
    slow_halves = replace(CPU, peak_flops={"fp32": 1e11, "bf16": 1e9, "fp16": 1e9})
    machine = Machine()
    profile = measured(machine, has_convolutions=False, device=slow_halves)
    assert names(machine) == ["allocator", "optimizer", "micro_batch"]
    assert machine.stages[0].candidates[0] == REFERENCE
    assert control_interval(profile, "optimizer") == control_interval(profile, "allocator")
    alone = Machine()
    measured(alone, has_convolutions=False, can_retain=False, device=slow_halves)
    assert names(alone) == ["precision", "optimizer", "micro_batch"]
