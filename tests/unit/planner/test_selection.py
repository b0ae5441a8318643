"""Who wins a final, by hand-made trials."""

from __future__ import annotations

from dataclasses import replace

import pytest
from simulated_machine import CPU, LOOP, MIB, SPLITTABLE

from trimtab.core.choice import Note
from trimtab.core.objective import Budget, Objective, Reference
from trimtab.planner.selection import FinalOutcome, decide
from trimtab.planner.trial_statistics import control_interval, is_free, reason_unfit
from trimtab.plans.profile import Candidate, Profile, Trial

REFERENCE = Candidate(64)
HALF = replace(REFERENCE, precision="bf16")
TOGETHER = replace(HALF, memory_layout="channels_last")
STEADY = (1.0, 1.005, 0.995, 1.0, 1.0)  # resolves about half a percent


def trial(candidate: Candidate, seconds: float | tuple[float, ...], mib: int = 640) -> Trial:
    blocks = seconds if isinstance(seconds, tuple) else (seconds,) * 5
    return Trial("final", candidate, blocks, mib * MIB)


def micro(rows: int, seconds: float | tuple[float, ...], mib: int) -> Trial:
    return trial(replace(REFERENCE, micro_batch=rows), seconds, mib)


def profile_of(*rivals: Trial, reference: Trial | None = None, control: tuple[float, ...] = (1.0,) * 5) -> Profile:
    """Return a profile of a final: the reference at a second a step, its rivals, and the reference again."""
    again = Trial("final", REFERENCE, control, control=True)
    return Profile(CPU, LOOP, SPLITTABLE, Reference(), (reference or trial(REFERENCE, 1.0), *rivals, again))


def decided(
    *rivals: Trial, objective: Objective | None = None, budget: Budget | None = None, **others: object
) -> FinalOutcome:
    found = decide(profile_of(*rivals, **others), "final", objective or Objective(), budget or Budget())
    assert found is not None
    return found


def winner(*rivals: Trial, **others: object) -> Candidate:
    return decided(*rivals, **others).winner.candidate


def test_the_control_is_the_reference_against_itself():
    found = control_interval(profile_of(control=(1.0, 1.1, 0.9, 1.0, 1.0)), "final")
    assert found is not None
    assert found.low < 1 < found.high
    assert control_interval(profile_of(control=(1.0,)), "final") is None
    failed = Trial("final", REFERENCE, error="out of memory")
    assert control_interval(profile_of(reference=failed), "final") is None
    assert control_interval(Profile(CPU, LOOP, SPLITTABLE), "final") is None


@pytest.mark.parametrize(("seconds", "wins"), [(0.90, True), (0.98, False), (1.1, False)])
def test_a_gain_must_be_above_what_the_control_resolves(seconds, wins):
    control = (1.0, 1.03, 0.97, 1.0, 1.0)  # resolves about 3%
    assert (winner(trial(HALF, seconds), control=control) == HALF) is wins


@pytest.mark.parametrize(("both", "layout"), [(0.499, "keep"), (0.45, "channels_last")])
def test_a_setting_that_brings_nothing_beside_another_stays_as_it_was(both, layout):
    """On its own channels_last gains nothing; beside bf16 it gains 0.2%, or a tenth."""
    found = winner(trial(TOGETHER, both), trial(HALF, 0.5), control=STEADY)
    assert found == replace(HALF, memory_layout=layout)


def test_who_was_put_first_leads_until_another_is_clearly_better():
    noisy = (0.70, 0.78, 0.62, 0.70, 0.70)
    first, other = micro(32, 0.72, 640), micro(16, noisy, 640)
    assert winner(first, other, control=STEADY).micro_batch == 32
    assert winner(first, micro(16, 0.5, 640), control=STEADY).micro_batch == 16


@pytest.mark.parametrize(
    ("seconds", "mib", "taken"),
    [
        (1.0, 400, True),  # equal speed
        (1 / 0.995, 400, True),  # within the 1% that memory may cost
        (1 / 0.98, 400, False),
        (1.0, 639, False),  # nothing worth saving
        ((1.0, 1.15, 0.87, 1.0, 1.0), 400, False),  # too noisy to say that it is free
        ((1.0, 1.15, 0.87, 1.0, 1.0), 160, True),  # a saving of 75% is worth the doubt
        (1 / 0.98, 160, False),  # but not a loss that is clear
        ((1.0,) * 4, 400, False),  # too few to say so
    ],
)
def test_less_memory_at_equal_speed_is_taken(seconds, mib, taken):
    assert (winner(micro(32, seconds, mib)).micro_batch == 32) is taken
    assert is_free(micro(32, seconds, mib), micro(64, 1.0, 640)) is taken


def test_the_lightest_of_the_winners_speed_is_taken():
    assert winner(micro(32, 1.0, 400), micro(16, 1.001, 300), micro(8, 1.2, 200)).micro_batch == 16
    assert winner(micro(32, 0.9, 500), micro(16, 1.0, 300)).micro_batch == 32
    assert winner(micro(32, 0.9, 500), micro(16, 0.9, 300)).micro_batch == 16


def test_under_a_budget_who_fits_wins_though_slower():
    found = decided(micro(32, 1.5, 400), micro(16, 2.0, 300), budget=Budget(memory=450 * MIB))
    assert found.winner.candidate.micro_batch == 32
    assert found.must_leave == Note("budget.memory", "peak memory 640 MiB is over the budget of 450 MiB")
    assert found.speed is not None
    assert found.speed.mean == pytest.approx(1 / 1.5)


def test_where_nobody_fits_there_is_no_outcome():
    assert decide(profile_of(micro(32, 1.0, 400)), "final", Objective(), Budget(memory=MIB)) is None


def test_where_the_reference_cannot_run_who_was_put_first_wins():
    broken = Trial("final", REFERENCE, error="out of memory")
    found = decided(trial(HALF, 2.0), trial(TOGETHER, 2.0), reference=broken)
    assert found.winner.candidate == HALF
    assert (found.must_leave, found.speed) == (Note("trial.out_of_memory", "out of memory"), None)


def test_why_a_trial_cannot_be_chosen():
    whole, budget = micro(32, 0.4, 50), Budget(memory=100 * MIB, time=0.5)

    def why(found: Trial) -> Note | None:
        return reason_unfit(profile_of(found), found, budget)

    assert why(whole) is None
    assert why(replace(whole, error="RuntimeError: no")) == Note("trial.failed", "RuntimeError: no")
    stopped = why(replace(whole, block_s=(9.0, 9.0)))
    assert stopped.code == "trial.stopped_early"
    assert all(figure in stopped.text for figure in ("2 blocks", "9 s per step"))
    assert why(micro(32, 0.4, 200)) == Note("budget.memory", "peak memory 200 MiB is over the budget of 100 MiB")
    assert why(micro(32, 0.6, 50)) == Note("budget.time", "600 ms per step is over the budget of 500 ms")


def test_memory_may_be_weighed_against_time():
    slower = micro(32, 1.2, 64)
    assert winner(slower) == REFERENCE
    balanced = decided(slower, objective=Objective(time=1, memory=1))
    assert balanced.winner.candidate.micro_batch == 32  # C falls from 1 to (1.2 + 0.1) / 2


def test_the_control_is_of_what_is_weighed():
    """Speeds that are 12% apart by chance say less of C where half of it is memory, and nothing where all of it is."""
    noisy = (1.0, 1.12, 0.9, 1.0, 1.0)
    lighter = trial(HALF, 1.05, 580)
    assert winner(lighter, control=noisy, objective=Objective(0.0, 1.0)) == HALF
    assert winner(lighter, control=noisy, objective=Objective()) == REFERENCE


def test_memory_is_weighed_in_a_rivals_units_where_the_reference_did_not_run():
    broken = Trial("final", REFERENCE, error="out of memory")
    again = Trial("final", HALF, STEADY, control=True)
    light = trial(replace(HALF, micro_batch=32), 1.2, 64)
    profile = Profile(CPU, LOOP, SPLITTABLE, Reference(), (broken, trial(HALF, 1.0), light, again))
    found = decide(profile, "final", Objective(time=1, memory=1), Budget())
    assert found is not None
    assert found.winner.candidate.micro_batch == 32


@pytest.mark.parametrize("blocks", [3, 4])
def test_fewer_than_five_blocks_accept_nothing(blocks):
    assert winner(trial(HALF, (0.5,) * blocks)) == REFERENCE


def test_without_a_control_that_ran_nothing_is_a_gain():
    assert winner(trial(HALF, 0.5), control=()) == REFERENCE


@pytest.mark.parametrize(("slower", "winner_is"), [(1.3, "retain"), (1.0, "keep")])
def test_where_the_reference_cannot_run_fewer_changes_win_unless_they_are_clearly_slower(slower, winner_is):
    broken = Trial("final", REFERENCE, error="out of memory")
    half = replace(REFERENCE, micro_batch=32)
    found = decided(trial(replace(half, allocator="retain"), 1.0), trial(half, slower), reference=broken, control=())
    assert found.winner.candidate.allocator == winner_is


def test_a_fused_step_alone_takes_as_many_blocks_as_any_verdict():
    fused = replace(REFERENCE, fused_optimizer=True)
    assert winner(trial(fused, (1.08, 1.081, 1.079)), control=STEADY) == REFERENCE


@pytest.mark.parametrize(("later", "kept"), [(1.001, True), (1.0, True), (1.05, False)])
def test_a_fused_step_alone_is_rejected_only_where_it_is_clearly_slower(later, kept):
    """Its gain is clear in the optimizer's step, and drowns in that of the whole: whose mean is a coin's flip."""
    fused = replace(REFERENCE, fused_optimizer=True)
    noise = (1.0, 1.02, 0.98, 1.01, 0.99)
    assert (winner(trial(fused, tuple(later * n for n in noise)), control=STEADY) == fused) is kept
