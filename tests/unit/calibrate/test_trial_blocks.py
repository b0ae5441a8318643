"""How many steps a stage runs: what is known is not measured again, and a sure loser is not run to the end."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import nn

from trimtab.calibrate import trials
from trimtab.calibrate.subject import Subject
from trimtab.core.profile import Candidate, Trial
from trimtab.decide.search import MIN_BLOCKS, Stage
from trimtab.measure import allocator

WHOLE = Candidate("fp32", "keep", False, 8)
HALF, QUARTER = replace(WHOLE, micro_batch=4), replace(WHOLE, micro_batch=2)


@pytest.fixture
def subject():
    model = nn.Linear(4, 1)
    return Subject(model, torch.optim.SGD(model.parameters(), lr=0.1), lambda m, x: m(x).mean(), torch.randn(8, 4))


@pytest.fixture
def machine(monkeypatch):
    """Replace the clock of a block by a table: candidate -> seconds of its blocks, in order; counts warm-ups."""

    class Machine:
        def __init__(self):
            self.blocks: dict[Candidate, list[float]] = {}
            self.warmed: Counter[Candidate] = Counter()

        def time_block(self, subject, stage, candidate, steps):
            return self.blocks[candidate].pop(0)

        def warm_up(self, subject, arm, *, measure_memory):
            self.warmed[arm.candidate] += 1
            arm.first_s, arm.peak_bytes = 1.0, 100 if measure_memory else None

    found = Machine()
    monkeypatch.setattr(trials, "_time_block", found.time_block)
    monkeypatch.setattr(trials, "_warm_up", found.warm_up)
    return found


def run(subject, stage, known=()):
    return trials.run_stage(subject, stage, 5, lambda text: None, known)


def test_a_rival_that_lost_its_first_blocks_is_not_run_further(subject, machine):
    machine.blocks = {WHOLE: [1.0] * 10, HALF: [1.1, 1.2, 1.01], QUARTER: [0.9, 1.1, 1.0, 1.0, 1.0]}
    incumbent, rival, other, control = run(subject, Stage("micro_batch", (WHOLE, HALF, QUARTER), control=True))
    assert rival.block_s == (1.1, 1.2, 1.01)
    assert len(rival.block_s) == MIN_BLOCKS
    assert len(incumbent.block_s) == len(control.block_s) == len(other.block_s) == 5
    assert rival.error is None


@pytest.mark.parametrize("blocks", [[1.1, 1.2, 0.99], [1.0, 1.2, 1.2], [0.5, 0.9, 1.1]])
def test_one_that_won_or_tied_a_block_goes_on(subject, machine, blocks):
    machine.blocks = {WHOLE: [1.0] * 5, HALF: [*blocks, 1.0, 1.0]}
    _, rival = run(subject, Stage("micro_batch", (WHOLE, HALF)))
    assert len(rival.block_s) == 5


@pytest.mark.parametrize(("stage", "blocks"), [("micro_batch", [1.1] * 3), ("verify", [0.5, 0.5, 0.51])])
def test_a_stage_of_long_steps_ends_once_it_is_decided(subject, machine, stage, blocks):
    """Every rival lost all its blocks, or is clear of 1 and of what the control resolves."""
    machine.blocks = {WHOLE: [1.0] * 6, HALF: blocks}
    incumbent, rival, control = run(subject, Stage(stage, (WHOLE, HALF), control=True))
    assert len(incumbent.block_s) == len(rival.block_s) == len(control.block_s) == 3


WILD = [1.0, 1.2, 1.0, 0.8, 1.0, 1.0] + [1.0] * 24  # of the incumbent and its control, in turn


@pytest.mark.parametrize(("rival_s", "goes_on"), [(0.9, True), (0.97, False)])
def test_a_likely_gain_in_the_noise_gets_more_blocks(subject, machine, rival_s, goes_on):
    """1.11x when the control resolves more: some more blocks settle it. 1.03x would not be worth the time."""
    machine.blocks = {WHOLE: list(WILD), HALF: [rival_s] * 15}
    incumbent, rival, control = run(subject, Stage("micro_batch", (WHOLE, HALF), control=True))
    assert len(incumbent.block_s) == len(rival.block_s) == len(control.block_s)
    assert (5 < len(rival.block_s) < 15) if goes_on else len(rival.block_s) == 5


def test_there_is_an_end_to_more_blocks(subject, machine):
    machine.blocks = {WHOLE: [1.0, 1.5] * 15, HALF: [1.0] * 15}
    _, rival, _ = run(subject, Stage("micro_batch", (WHOLE, HALF), control=True))
    assert len(rival.block_s) == 15


def test_short_steps_run_all_their_blocks(subject, machine, monkeypatch):
    def warm_up(subject, arm, *, measure_memory):
        arm.first_s = 0.1

    monkeypatch.setattr(trials, "_warm_up", warm_up)
    machine.blocks = {WHOLE: [0.1] * 15, HALF: [0.05] * 15}
    _, rival = run(subject, Stage("micro_batch", (WHOLE, HALF)))
    assert len(rival.block_s) == 15  # three times as many as of long ones


@pytest.mark.parametrize(("allocators", "modes"), [(("retain", "retain"), {"retain"}), (("keep", "retain"), {"keep"})])
def test_memory_is_retained_across_a_stage_all_of_which_retains_it(subject, monkeypatch, allocators, modes):
    if not allocator.can_retain():
        pytest.skip("needs glibc")
    before, seen = allocator.mode(), set()
    monkeypatch.setattr(trials, "_time_block", lambda *_: seen.add(allocator.mode()) or 1.0)
    candidates = tuple(replace(c, allocator=a) for c, a in zip((WHOLE, HALF), allocators, strict=True))
    run(subject, Stage("allocator", candidates))
    assert seen == modes
    assert allocator.mode() == before


def test_the_verification_runs_to_its_end(subject, machine):
    machine.blocks = {WHOLE: [1.0] * 5, HALF: [2.0] * 5}
    _, rival = run(subject, Stage("verify", (WHOLE, HALF)))
    assert len(rival.block_s) == 5


def test_without_an_incumbent_that_runs_no_rival_is_behind(subject, machine, monkeypatch):
    def fail(subject, arm, *, measure_memory):
        arm.first_s, arm.error = 1.0, None if arm.candidate == HALF else "out of memory"

    monkeypatch.setattr(trials, "_warm_up", fail)
    machine.blocks = {HALF: [2.0] * 5}
    incumbent, rival = run(subject, Stage("micro_batch", (WHOLE, HALF)))
    assert (incumbent.error, incumbent.block_s) == ("out of memory", ())
    assert len(rival.block_s) == 5


def test_what_an_earlier_stage_measured_is_taken_from_it(subject, machine):
    machine.blocks = {WHOLE: [1.0] * 5, HALF: [1.0] * 5}
    known = (Trial("allocator", WHOLE, (0.7,) * 5, 640), Trial("optimizer", HALF, (0.1,) * 5))
    incumbent, rival = run(subject, Stage("micro_batch", (WHOLE, HALF)), known)
    assert machine.warmed == {HALF: 1}  # the optimizer's step alone says nothing of whole steps
    assert (incumbent.peak_bytes, rival.peak_bytes) == (640, 100)


@pytest.mark.parametrize(
    "known", [Trial("allocator", WHOLE, (), 640, "out of memory"), Trial("precision", WHOLE, (0.7,) * 5)]
)
def test_what_failed_or_has_no_peak_is_tried_again(subject, machine, known):
    machine.blocks = {WHOLE: [1.0] * 5}
    run(subject, Stage("micro_batch", (WHOLE,)), (known,))
    assert machine.warmed == {WHOLE: 1}


def test_a_long_first_step_is_not_repeated(subject, monkeypatch):
    steps = []

    def time_call(step, device, count=1):
        step()
        steps.append(count)
        return 0.9

    monkeypatch.setattr(trials, "time_call", time_call)
    monkeypatch.setattr(trials, "peak_bytes", lambda step, device, live: 100)
    (trial,) = run(subject, Stage("precision", (WHOLE,)))
    assert steps == [1] * (1 + 5)
    assert trial.block_s == (0.9,) * 5


def test_one_that_fails_after_its_warm_up_is_a_trial_with_its_error(subject, machine, monkeypatch):
    blocks = iter([1.0] * 3 + [RuntimeError("CUDA out of memory")] + [1.0] * 9)

    def time_block(subject, stage, candidate, steps):
        found = next(blocks)
        if isinstance(found, Exception):
            raise found
        return found

    monkeypatch.setattr(trials, "_time_block", time_block)
    incumbent, rival = run(subject, Stage("micro_batch", (WHOLE, HALF)))  # whole, half, half, whole: the fourth
    assert (incumbent.error, incumbent.block_s) == ("out of memory", ())
    assert (rival.error, len(rival.block_s)) == (None, 5)
