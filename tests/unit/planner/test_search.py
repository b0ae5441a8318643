"""What is measured next: on a machine that is only arithmetic."""

from __future__ import annotations

from dataclasses import replace

import pytest
from simulated_machine import CPU, GPU, HEAD, MIB, SPLITTABLE, Machine, measured

from trimtab.core.choice import SplitCheck
from trimtab.core.objective import Budget, Objective, Reference
from trimtab.core.serialization import from_json, to_json
from trimtab.planner.plan_choice import choose
from trimtab.planner.search import (
    STAGES,
    SearchPhase,
    is_hurried,
    next_stage,
    next_traces,
)
from trimtab.plans.profile import Candidate, Profile
from trimtab.settings import SETTINGS
from trimtab.settings.precision import precision_refusal

REFERENCE = Candidate(64)
REFUSED = SplitCheck(False, "BatchNorm2d computes over the batch: smaller micro-batches would change its statistics")
MEMORY = Objective(time=1, memory=1)


def names(machine: Machine) -> list[str]:
    return [stage.name for stage in machine.stages]


def stage_of(machine: Machine, name: str) -> SearchPhase:
    return next(stage for stage in machine.stages if stage.name == name)


def sizes(machine: Machine) -> list[int]:
    return [candidate.micro_batch for candidate in stage_of(machine, "sizes").candidates]


# Memory is neither limited nor weighted. Modules in fp32 are tried only after a proof has refused a half precision: see
# test_modules_in_fp32.py.
ON_A_PROCESSOR = [name for name in STAGES if name not in ("graphs", "step_in_backward", "fp32_modules")]


def test_stages_come_in_order_and_the_final_is_of_what_they_put_first():
    machine = Machine(speed={"bf16": 1.5, "channels_last": 1.2, "retain": 1.3}, fused_speed=3.0, head_speed={2048: 2.0})
    measured(machine, total_steps=2_000, **HEAD)
    assert names(machine) == ON_A_PROCESSOR
    assert [stage.control for stage in machine.stages] == [False, True, False, False, False, True]
    modes, optimizer, head, by_size, compiled, final = machine.stages
    retaining = replace(REFERENCE, allocator="retain")
    assert modes.candidates[0] == retaining
    assert {(c.precision, c.memory_layout, c.allocator) for c in modes.candidates} == {
        (p, layout, "retain") for p in ("fp32", "bf16") for layout in ("keep", "channels_last")
    }
    fast = Candidate(64, precision="bf16", memory_layout="channels_last", allocator="retain")
    assert optimizer.candidates == (fast, replace(fast, fused_optimizer=True))
    assert head.candidates == (fast, replace(fast, loss_chunk=2048), replace(fast, loss_chunk=1024))
    assert by_size.candidates == (fast, replace(fast, micro_batch=16))
    assert compiled.candidates == (fast, replace(fast, compiled=True))
    best = replace(fast, fused_optimizer=True, loss_chunk=2048)
    assert final.candidates[:2] == (REFERENCE, best)
    # Unknown page faults are guessed to be worth little, so that the winner is run without them retained too.
    assert final.candidates[2:] == (replace(best, allocator="keep"),)


@pytest.mark.parametrize(
    ("facts", "check", "left_out"),
    [
        ({"is_fused": True}, SPLITTABLE, "optimizer"),
        ({"supports_fused": False}, SPLITTABLE, "optimizer"),
        ({"head_tokens": None}, SPLITTABLE, "head"),
        ({"head_words": 16}, SPLITTABLE, "head"),
        ({}, REFUSED, "sizes"),
        ({"batch_size": 1}, SPLITTABLE, "sizes"),
        ({"is_compiled": True}, SPLITTABLE, "compile"),
        ({"total_steps": None}, SPLITTABLE, "compile"),
        ({"total_steps": 1_999}, SPLITTABLE, "compile"),  # of a second each, a hundredth is just too little
    ],
)
def test_a_stage_without_alternatives_is_left_out(facts, check, left_out):
    machine = Machine(speed={"bf16": 2.0})
    measured(machine, check=check, **(HEAD | {"total_steps": 2_000} | facts))
    assert names(machine) == [name for name in ON_A_PROCESSOR if name != left_out]


def test_a_hurried_search_leaves_out_what_it_can_do_without():
    fast = {"speed": {"bf16": 1.5, "retain": 1.05}, "fused_speed": 3.0}
    patient, over_time_budget = Machine(**fast), Machine(**fast)
    measured(patient, total_steps=10_000)
    measured(over_time_budget, total_steps=10_000, over_time_budget=True)
    assert names(patient) == ["modes", "optimizer", "sizes", "compile", "final"]
    assert names(over_time_budget) == ["modes", "optimizer", "final"]
    assert stage_of(over_time_budget, "final").candidates == stage_of(patient, "final").candidates[:2]


@pytest.mark.parametrize(
    ("machine", "objective", "budget", "measures"),
    [
        (Machine(traces=False), Objective(), Budget(memory=300 * MIB), True),  # to find a size that fits
        (Machine(), MEMORY, Budget(), True),  # untried, the smallest would look as fast as any
        (Machine(speed={"bf16": 1.5}), Objective(), Budget(memory=2**40), False),
    ],
)
def test_a_hurried_search_measures_sizes_only_if_it_needs_them(machine, objective, budget, measures):
    measured(machine, objective=objective, budget=budget, total_steps=10_000, over_time_budget=True)
    assert ("sizes" in names(machine)) is measures
    assert measures or {c.micro_batch for c in stage_of(machine, "final").candidates} == {machine.rows}


@pytest.mark.parametrize(
    ("total_steps", "spent_s", "hurries"),
    [
        (None, 1e6, False),
        *((500, -0.1, False), (500, 0.1, True)),  # a twentieth is more than twenty seconds
        *((2_500, 4.9, False), (2_500, 5.1, True), (10_000, 79.9, False), (10_000, 80.1, True)),
    ],
)
def test_measuring_takes_twenty_seconds_or_a_hundredth_of_the_run(total_steps, spent_s, hurries):
    """A step takes a second, and a final twenty of them."""
    profile = replace(measured(Machine()), total_steps=total_steps)
    assert is_hurried(profile, spent_s) is hurries
    assert is_hurried(profile, spent_s - 30, steps=30) is hurries
    assert is_hurried(profile, spent_s - 30, patient=True) is hurries


def test_what_is_asked_for_beside_a_final_takes_its_time_however_short_the_steps_are():
    """Thirty blocks of 0.15 s, or a hundred steps, beside the final's ten seconds."""
    profile = replace(measured(Machine()), total_steps=40_000, phases_s={"forward": 0.01})
    for spent_s, hurries in ((5.4, False), (5.6, True)):
        assert is_hurried(profile, spent_s, patient=True) is hurries
    for spent_s, hurries in ((8.9, False), (9.1, True)):
        assert is_hurried(profile, spent_s, steps=100) is hurries


FAULTS = 1_000_000  # a step takes a second: each microsecond of a fault is that share of it


@pytest.mark.parametrize(
    ("fault_s", "figures"),
    [(None, None), (3e-7, None), (2e-8, None), (1.9e-8, "1,000,000 page faults take about 1.9% of a step")],
)
def test_memory_is_retained_on_trial_where_page_faults_leave_something_to_gain(fault_s, figures):
    machine = Machine()
    profile = measured(machine, faults_per_step=FAULTS, fault_s=fault_s)
    assert {c.allocator for c in stage_of(machine, "modes").candidates} == {"keep" if figures else "retain"}
    refusal = SETTINGS["allocator"].refusal(profile)
    assert (None if refusal is None else refusal.code) == ("allocator.few_faults" if figures else None)
    choice = choose(profile, Objective(), Budget()).allocator
    assert (choice.value, choice.changed) == ("keep", False)
    assert (figures or "") in choice.reason


def test_waiting_for_data_hides_no_page_faults():
    profile = measured(Machine(), faults_per_step=FAULTS, fault_s=3e-8)
    assert SETTINGS["allocator"].refusal(replace(profile, phases_s={"data": 9.0, "forward": 1.0})) is None
    assert SETTINGS["allocator"].refusal(replace(profile, phases_s={"forward": 10.0})) is not None


def test_there_is_no_final_where_nothing_is_put_before_the_loop():
    machine = Machine()
    measured(machine, can_retain=False)
    assert names(machine) == ["modes", "optimizer", "sizes"]


def test_the_reference_is_run_though_the_modes_were_run_with_memory_retained():
    machine = Machine(speed={"retain": 0.5})
    profile = measured(machine, faults_per_step=FAULTS, fault_s=2e-7)
    assert stage_of(machine, "final").candidates[0] == REFERENCE
    assert choose(profile, Objective(), Budget()).changes == ()


@pytest.mark.parametrize("facts", [{"has_convolutions": False}, {"layout": "channels_last"}])
def test_channels_last_is_tried_only_where_it_is_a_change(facts):
    machine = Machine()
    measured(machine, **facts)
    assert {candidate.memory_layout for stage in machine.stages for candidate in stage.candidates} == {"keep"}


def test_a_precision_of_unknown_peak_is_tried():
    machine = Machine()
    measured(machine, device=GPU)
    assert {c.precision for c in stage_of(machine, "modes").candidates} == {"fp32", "tf32", "bf16", "fp16"}


@pytest.mark.parametrize(("peak", "is_tried"), [(0.5e11, False), (1.02e11, False), (1.2e11, True)])
def test_a_precision_no_faster_than_fp32_is_not_tried(peak, is_tried):
    refusal = precision_refusal(replace(CPU, peak_flops={"fp32": 1e11, "fp16": peak}), "fp16")
    assert (refusal is None) is is_tried
    assert precision_refusal(CPU, "fp32") is None


def test_the_reference_precision_is_tried_even_where_it_is_screened():
    machine = Machine()
    measured(machine, reference=Reference("fp16"))
    assert stage_of(machine, "modes").candidates[0].precision == "fp16"


def test_the_loss_head_is_tried_in_chunks_where_its_logits_weigh():
    profile = measured(Machine(), **HEAD)
    assert SETTINGS["loss_chunk"].refusal(profile) is None
    assert SETTINGS["loss_chunk"].refusal(measured(Machine())).code == "head.missing"
    few = measured(Machine(), **(HEAD | {"head_words": 256}))
    assert SETTINGS["loss_chunk"].refusal(few).code == "head.small_logits"
    assert "2.2%" in SETTINGS["loss_chunk"].refusal(few).text


@pytest.mark.parametrize(
    ("tokens", "chunks"), [(64 * 128, [2048, 1024]), (64 * 7, [64]), (64 * 3, []), (1000, [128, 64])]
)
def test_chunks_are_powers_of_two_below_a_quarter_of_the_tokens(tokens, chunks):
    machine = Machine()
    measured(machine, head_tokens=tokens, head_words=10**6, can_retain=False)
    tried = [stage for stage in machine.stages if stage.name == "head"]
    assert [c.loss_chunk for stage in tried for c in stage.candidates[1:]] == chunks


def test_a_limit_that_makes_micro_batches_small_leaves_the_whole_head_to_chunks():
    """Of four rows a chunk is all there is; in chunks the whole batch fits, and is faster."""
    machine = Machine(split_s=0.1, head_saves={2048: 0.5, 1024: 0.5}, head_speed={2048: 1.0, 1024: 0.9})
    budget = Budget(memory=400 * MIB)
    facts = {"head_tokens": 64 * 128, "head_words": 10**6}
    machine.fixed_bytes, machine.row_bytes = 300 * MIB, 7 * MIB  # 748 MiB whole, half of that in chunks
    profile = measured(machine, budget=budget, **facts)
    head = stage_of(machine, "head")
    assert [c.loss_chunk for c in head.candidates] == [None, 2048, 1024]
    assert {c.micro_batch for c in head.candidates} == {64}
    plan = choose(profile, Objective(), budget)
    assert (plan.micro_batch.value, plan.loss_chunk.value) == (64, 2048)


@pytest.mark.parametrize(("memory", "rows"), [(700 * MIB, 32), (800 * MIB, 64), (None, 64)])
def test_a_whole_head_that_the_device_has_no_memory_for_is_not_run(memory, rows):
    """It takes 748 MiB, as it is traced; half of it is run instead, and what its chunks save the whole takes too."""
    machine = Machine(split_s=0.1, head_saves={2048: 0.5, 1024: 0.5}, head_speed={2048: 1.0, 1024: 0.9})
    machine.fixed_bytes, machine.row_bytes, budget = 300 * MIB, 7 * MIB, Budget(memory=400 * MIB)
    facts = {"head_tokens": 64 * 128, "head_words": 10**6, "device": replace(CPU, memory_bytes=memory)}
    plan = choose(measured(machine, budget=budget, **facts), Objective(), budget)
    assert stage_of(machine, "head").candidates[0].micro_batch == rows
    assert (plan.micro_batch.value, plan.loss_chunk.value) == (64, 2048)


def test_modes_are_tried_at_the_largest_size_that_is_traced_to_fit():
    machine = Machine(weight={"bf16": 0.5})
    measured(machine, budget=Budget(memory=300 * MIB))  # fp32 takes 100 MiB + 10 a row
    assert {(c.precision, c.micro_batch) for c in stage_of(machine, "modes").candidates} == {("fp32", 16), ("bf16", 32)}


def test_without_traces_a_tight_budget_asks_for_every_size():
    loose, tight, traced = Machine(traces=False), Machine(traces=False), Machine()
    measured(loose, budget=Budget(memory=800 * MIB))
    measured(tight, budget=Budget(memory=150 * MIB))
    measured(traced, budget=Budget(memory=150 * MIB))
    assert sizes(loose) == [64, 16]
    assert sizes(tight) == [64, 32, 16, 8, 4, 2, 1]
    assert sizes(traced) == [4, 1]


def test_an_odd_batch_is_halved_upwards():
    machine = Machine(traces=False)
    measured(machine, batch_size=7, budget=Budget(memory=1))
    assert sizes(machine) == [7, 4, 2, 1]


@pytest.mark.parametrize(("objective", "budget"), [(MEMORY, Budget()), (Objective(), Budget(memory=400 * MIB))])
def test_traces_are_asked_for_where_memory_counts(objective, budget):
    empty = replace(measured(Machine()), trials=())
    assert next_traces(empty, Objective(), Budget()) == ()
    wanted = next_traces(empty, objective, budget)
    assert {(c.precision, c.memory_layout) for c in wanted} == {
        (p, layout) for p in ("fp32", "bf16") for layout in ("keep", "channels_last")
    }
    profile = measured(Machine(head_speed={2048: 2.0}), objective=objective, budget=budget, **HEAD)
    assert {traced.candidate.loss_chunk for traced in profile.traces} == {
        None,
        1024,
        *(() if budget.memory else (2048,)),
    }
    assert next_traces(profile, objective, budget) == ()


def test_a_final_that_finds_its_limit_broken_has_learned_for_another():
    """bf16 is faster alone than it turns out to be: at last it is over the limit, and channels_last is not."""

    def step(stage: str, candidate: Candidate) -> float:
        half = 2.0 if stage.startswith("final") else 0.5
        return (half if candidate.precision == "bf16" else 1.2) * (0.6 if candidate.memory_layout != "keep" else 1.0)

    machine = Machine(step_of=step)
    budget = Budget(time=0.75)
    profile = measured(machine, budget=budget, can_retain=False, supports_fused=False, check=REFUSED)
    assert profile.finals == ("final", "final 2", "final 3")
    plan = choose(profile, Objective(), budget)
    assert (plan.precision.value, plan.memory_layout.value) == ("fp32", "channels_last")
    assert plan.measured.step_s == pytest.approx(0.72)


def test_what_a_trace_missed_is_known_before_the_final():
    """Steps take a tenth more than is traced: the miss of those that ran becomes the margin of those that did not."""
    machine = Machine(traced=0.9, split_s=0.01)
    profile = measured(machine, budget=Budget(memory=255 * MIB), can_retain=False)  # 16 rows take 260, traced 234
    assert profile.finals == ("final",)
    plan = choose(profile, Objective(), Budget(memory=255 * MIB))
    assert plan.micro_batch.value == 8


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


LARGEST_THAT_FITS = [(2**30, 64), (100 * MIB + 10 * MIB * 33, 32), (100 * MIB + 10 * MIB * 9, 8), (112 * MIB, 1)]


@pytest.mark.parametrize(("limit", "rows"), LARGEST_THAT_FITS)
def test_sizes_of_a_step_that_cannot_be_traced_are_run_until_one_fits(limit, rows):
    """And one more, by which it is known what a smaller one costs."""
    machine, budget = Machine(traces=False, split_s=0.05), Budget(memory=limit)
    profile = measured(machine, budget=budget, can_retain=False, supports_fused=False)
    assert choose(profile, Objective(), budget).micro_batch.value == rows
    if rows < 64:
        ran = [trial.candidate.micro_batch for trial in profile.stage("sizes")]
        assert ran == [size for size in (64, 32, 16, 8, 4, 2, 1) if 2 * size >= rows]
    again = from_json(Profile, to_json(profile))
    assert next_stage(again, Objective(), budget) is None
    assert choose(again, Objective(), budget) == choose(profile, Objective(), budget)


def test_all_are_run_where_memory_is_weighed():
    machine, budget = Machine(traces=False), Budget(memory=100 * MIB + 10 * MIB * 33)
    profile = measured(machine, budget=budget, objective=MEMORY, can_retain=False)
    assert len(profile.stage("sizes")) == 7


@pytest.mark.parametrize("over_time_budget", [False, True])
def test_sizes_that_were_not_tried_are_not_called_impossible(over_time_budget):
    profile = measured(Machine(), supports_fused=False, can_retain=False)
    tried = {"sizes", *profile.finals}
    bare = replace(
        profile, trials=tuple(t for t in profile.trials if t.stage not in tried), over_time_budget=over_time_budget
    )
    kept = choose(bare, Objective(), Budget()).micro_batch
    assert kept.code == ("search.over_time" if over_time_budget else "setting.not_tried")
    assert "not tried" in kept.reason
