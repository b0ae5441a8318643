"""How many steps a stage runs: what is known is not measured again, and a sure loser is not run to the end."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import pytest
import torch
from small_loops import sgd
from torch import nn

from trimtab.core.choice import Note
from trimtab.planner.search import SearchPhase
from trimtab.planner.trial_statistics import MIN_BLOCKS, speed_ratio
from trimtab.plans.profile import Candidate, Trial
from trimtab.profiling import trials
from trimtab.profiling.training_loop import TrainingLoop
from trimtab.state import process_state

NO_MEMORY = Note("trial.out_of_memory", "out of memory")
WHOLE = Candidate(8)
needs_glibc = pytest.mark.skipif(not process_state.can_retain(), reason="needs glibc")
HALF, QUARTER = replace(WHOLE, micro_batch=4), replace(WHOLE, micro_batch=2)


@pytest.fixture
def subject():
    model = nn.Linear(4, 1)
    return TrainingLoop(model, sgd(model), lambda m, x: m(x).mean(), torch.randn(8, 4))


@pytest.fixture(autouse=True)
def known_order(monkeypatch):
    """Forwards and backwards in turn, so that a clock that is read from a table is read by whom the test means."""
    forwards_and_backwards = lambda arms, lap, draw, last: list(arms) if lap % 2 == 0 else list(arms)[::-1]  # noqa: E731
    monkeypatch.setattr(trials, "drawn_turns", forwards_and_backwards)


class Machine:
    """Seconds of blocks by a table, candidate -> in order; and warm-ups of `first_s` seconds, which are counted."""

    def __init__(self):
        self.blocks: dict[Candidate, list[float | Exception]] = {}
        self.first_s, self.failing, self.warmed = 1.0, (), Counter[Candidate]()

    def time_block(self, subject, stage, candidate, steps):
        found = self.blocks[candidate].pop(0)
        if isinstance(found, Exception):
            raise found
        return found

    def warm_up(self, subject, arm, *, measure_memory, slowest, paces):
        self.warmed[arm.candidate] += 1
        arm.first_s, arm.peak_bytes = self.first_s, 100 if measure_memory else None
        arm.error = NO_MEMORY if arm.candidate in self.failing else None


@pytest.fixture
def machine(monkeypatch):
    found = Machine()
    monkeypatch.setattr(trials, "_time_block", found.time_block)
    monkeypatch.setattr(trials, "_warm_up", found.warm_up)
    return found


def final(*candidates, **others):
    return SearchPhase("final", candidates, accepts=True, **others)


def modes(*candidates, **others):
    return SearchPhase("modes", candidates, **others)


def run(subject, stage, known=(), **how):
    return trials.run_stage(subject, stage, 5, lambda text: None, known, **how)


THIRD, FOURTH = replace(WHOLE, precision="bf16"), replace(WHOLE, memory_layout="channels_last")
GRAPHS = replace(WHOLE, compiled="cuda_graphs")
WILD = [1.0, 1.2, 1.0, 0.8, 1.0, 1.0] * 7  # of the incumbent and its control, in turn
CONTROLLED = final(WHOLE, HALF, control=True)
ORDER = modes(WHOLE, FOURTH, THIRD)
OPEN_ORDER = {WHOLE: [0.27] * 9, THIRD: [0.15, 0.16] * 5, FOURTH: [0.16, 0.15] * 5}
HURRIED = {"patient": False}
LIKELY = {WHOLE: WILD, HALF: [0.9] * 20}  # 1.11x, where the control resolves more
SLIGHT = {WHOLE: WILD, HALF: [0.97] * 20}  # 1.03x, which is not worth the time
# Phase, seconds of blocks, number of blocks of each arm, and the seconds of a step: a long one runs five blocks, and a
# short one up to fifteen.
BLOCKS = {
    "a rival that lost its first blocks is dropped": (
        final(WHOLE, HALF, QUARTER, control=True),
        {WHOLE: [1.0] * 10, HALF: [1.1, 1.2, 1.01], QUARTER: [0.9, 1.1, 1.0, 1.0, 1.0]},
        (5, 3, 5, 5),
    ),
    "a rival that won a late block": (final(WHOLE, HALF), {WHOLE: [1.0] * 5, HALF: [1.1, 1.2, 0.99, 1, 1]}, (5, 5)),
    "a rival that tied a block": (final(WHOLE, HALF), {WHOLE: [1.0] * 5, HALF: [1.0, 1.2, 1.2, 1, 1]}, (5, 5)),
    "long steps end without rivals": (CONTROLLED, {WHOLE: [1.0] * 6, HALF: [1.1] * 3}, (3, 3, 3)),
    # Clear of 1 after the first three blocks: to end there would be to pick the moment.
    "a gain takes all its blocks": (CONTROLLED, {WHOLE: [1.0] * 10, HALF: [0.5, 0.5, 0.51, 0.5, 0.5]}, (5, 5, 5)),
    "a gain of other sizes takes all its blocks": (
        SearchPhase("sizes", (WHOLE, HALF), control=True, accepts=True),
        {WHOLE: [1.0] * 10, HALF: [0.5, 0.5, 0.51, 0.5, 0.5]},
        (5, 5, 5),
    ),
    "a likely gain in the noise": (CONTROLLED, LIKELY, (20, 20, 20)),
    "a gain not worth having": (CONTROLLED, SLIGHT, (5, 5, 5)),
    # It saves 2,000 s: a tenth pays for ten more blocks of three arms, some steps each.
    "hurried, but it pays": (CONTROLLED, LIKELY, (20, 20, 20), 1.0, HURRIED | {"run_s": 2e4}),
    "hurried in a short run": (CONTROLLED, LIKELY, (5, 5, 5), 1.0, HURRIED | {"run_s": 100}),
    "hurried for too little": (CONTROLLED, SLIGHT, (5, 5, 5), 1.0, HURRIED | {"run_s": 1e9}),
    "hurried in a run of unknown length": (CONTROLLED, LIKELY, (5, 5, 5), 1.0, HURRIED),
    "an end to more blocks": (CONTROLLED, {WHOLE: [0.2, 0.3] * 30, HALF: [0.2] * 30}, (24, 24, 24), 0.2),
    "short steps run more blocks": (final(WHOLE, HALF), {WHOLE: [0.1] * 20, HALF: [0.05] * 20}, (12, 12), 0.1),
    "a loser may have to win": (final(WHOLE, HALF, drops=False), {WHOLE: [1.0] * 5, HALF: [2.0] * 5}, (5, 5)),
    "nothing is accepted": (SearchPhase("sizes", (WHOLE, HALF)), {WHOLE: [1.0] * 5, HALF: [0.9] * 5}, (3, 3)),
    "an order that is known": (ORDER, {WHOLE: [0.27] * 9, THIRD: [0.15] * 9, FOURTH: [0.2] * 9}, (3, 3, 3), 0.15),
    "two whose order is open": (ORDER, OPEN_ORDER, (3, 8, 8), 0.15),
    # Who of them is first is noise, however many blocks there are.
    "steps that wait for the host": (modes(WHOLE, FOURTH, THIRD, is_brief=True), OPEN_ORDER, (3, 3, 3), 0.15),
    "an incumbent alone": (modes(WHOLE), {WHOLE: [0.15] * 9}, (8,), 0.15),
    "an incumbent runs to the end": (CONTROLLED, {WHOLE: [0.3] * 30, HALF: [0.15] * 15}, (8, 8, 8), 0.15),
}


@pytest.mark.parametrize("case", BLOCKS.values(), ids=BLOCKS)
def test_the_number_of_blocks(subject, machine, case):
    stage, blocks, counts, *others = case
    machine.first_s = others[0] if others else 1.0
    machine.blocks = {candidate: list(seconds) for candidate, seconds in blocks.items()}
    found = run(subject, stage, **(others[1] if len(others) > 1 else {}))
    assert tuple(len(trial.block_s) for trial in found) == counts
    assert {trial.error for trial in found} == {None}


@pytest.mark.parametrize(
    ("stage", "failing", "counts"), [(modes(WHOLE, THIRD), THIRD, (8, 0)), (final(WHOLE, THIRD), WHOLE, (0, 8))]
)
def test_without_a_rival_or_an_incumbent_there_is_no_order(subject, machine, stage, failing, counts):
    machine.first_s, machine.failing = 0.15, (failing,)
    machine.blocks = {WHOLE: [0.15] * 9, THIRD: [0.15] * 15}
    found = run(subject, stage)
    assert tuple(len(trial.block_s) for trial in found) == counts
    assert {trial.code for trial in found} == {"", "trial.out_of_memory"}


def test_an_arm_that_fails_after_its_warm_up_is_a_trial_with_its_error(subject, machine):
    machine.blocks = {WHOLE: [1.0, RuntimeError("out of memory"), *[1.0] * 20], HALF: [0.9] * 20}
    incumbent, rival, control = run(subject, CONTROLLED)
    assert (control.error, control.code) == ("out of memory", "trial.out_of_memory")
    assert len(incumbent.block_s) == len(rival.block_s) == 5
    machine.blocks = {WHOLE: [1.0, RuntimeError("CUDA out of memory")], HALF: [1.0] * 5}
    incumbent, rival = run(subject, final(WHOLE, HALF))
    assert (incumbent.error, incumbent.block_s) == ("out of memory", ())
    assert (rival.error, len(rival.block_s)) == (None, 5)


def test_a_lap_that_was_disturbed_takes_more_of_them_to_tell(subject, machine):
    machine.first_s = 0.15
    machine.blocks = {WHOLE: [0.15] * 9, THIRD: [0.12, 0.16, *[0.12] * 7]}
    incumbent, rival = run(subject, modes(WHOLE, THIRD))
    assert MIN_BLOCKS < len(incumbent.block_s) == len(rival.block_s) < 9


@pytest.mark.parametrize("stage", ["graphs", "compile"])
def test_what_has_to_be_clearly_faster_to_be_put_first_takes_all_its_blocks(subject, machine, stage):
    machine.first_s = 0.15
    machine.blocks = {WHOLE: [0.13, 0.13, 0.2] + [0.13] * 6, GRAPHS: [0.1] * 9}
    incumbent, rival = run(subject, SearchPhase(stage, (WHOLE, GRAPHS)))
    assert speed_ratio(Trial(stage, GRAPHS, rival.block_s[:3]), incumbent).low < 1
    assert speed_ratio(rival, incumbent).low > 1


@needs_glibc
@pytest.mark.parametrize(("allocators", "modes"), [(("retain", "retain"), {"retain"}), (("keep", "retain"), {"keep"})])
def test_memory_is_retained_across_a_stage_all_of_which_retains_it(subject, monkeypatch, allocators, modes):
    before, seen = process_state.allocator_mode(), set()
    monkeypatch.setattr(trials, "_time_block", lambda *_: seen.add(process_state.allocator_mode()) or 1.0)
    candidates = tuple(replace(c, allocator=a) for c, a in zip((WHOLE, HALF), allocators, strict=True))
    run(subject, final(*candidates))
    assert seen == modes
    assert process_state.allocator_mode() == before


def test_what_an_earlier_stage_measured_is_taken_from_it(subject, machine):
    machine.blocks = {WHOLE: [1.0] * 5, HALF: [1.0] * 5}
    known = (Trial("modes", WHOLE, (0.7,) * 5, 640), Trial("optimizer", HALF, (0.1,) * 5))
    incumbent, rival = run(subject, final(WHOLE, HALF), known)
    assert machine.warmed == {HALF: 1}  # the optimizer's step alone says nothing of whole steps
    assert (incumbent.peak_bytes, rival.peak_bytes) == (640, 100)


@pytest.mark.parametrize("known", [Trial("modes", WHOLE, (), 640, "out of memory"), Trial("modes", WHOLE, (0.7,) * 5)])
def test_what_failed_or_has_no_peak_is_tried_again(subject, machine, known):
    machine.blocks = {WHOLE: [1.0] * 5}
    run(subject, final(WHOLE), (known,))
    assert machine.warmed == {WHOLE: 1}


@pytest.fixture
def clock(monkeypatch):
    """Replace the clock of a call by a table of seconds, in order; what is timed still runs."""
    seconds: list[float] = []

    def time_call(step, device, count=1):
        step()
        return seconds.pop(0)

    monkeypatch.setattr(trials, "time_call", time_call)
    monkeypatch.setattr(trials, "peak_bytes", lambda step, device, live: 100)
    return seconds


def test_a_first_step_is_repeated_only_if_it_would_drop_its_candidate(subject, clock):
    clock += [0.9] * 6
    (trial,) = run(subject, SearchPhase("modes", (WHOLE,), accepts=True))
    assert clock == []
    assert trial.block_s == (0.9,) * 5
    """A kernel compiled in the first step of bf16: 9 s, and 0.5 s from then on."""
    bf16 = replace(WHOLE, precision="bf16")
    clock += [1.0, 9.0, 0.5] + [1.0, 0.5, 0.5, 1.0] * 2 + [1.0, 0.5]
    incumbent, rival = run(subject, SearchPhase("modes", (WHOLE, bf16), accepts=True))
    assert rival.error is None
    assert (incumbent.block_s, rival.block_s) == ((1.0,) * 5, (0.5,) * 5)
    bf16 = replace(WHOLE, precision="bf16")
    clock += [1.0, 9.0, 8.0] + [1.0] * 5
    _, rival = run(subject, SearchPhase("modes", (WHOLE, bf16), accepts=True))
    assert rival.code == "trial.too_slow"
    assert all(figure in rival.error for figure in ("8 s", "1 s"))


@needs_glibc
def test_a_slow_first_step_of_every_block_is_no_gain_for_one_that_retains_memory(subject, clock, monkeypatch):
    start, fresh = TrainingLoop.start, []

    def starting(subject, candidate):
        fresh.append(True)
        return start(subject, candidate)

    def time_call(step, device, count=1):
        seconds = 2.0 if len(fresh) and fresh[-1] else 1.0
        step()
        return seconds

    def loss(model, x):
        fresh[-1] = False
        return model(x).mean()

    monkeypatch.setattr(TrainingLoop, "start", starting)
    monkeypatch.setattr(trials, "time_call", time_call)
    monkeypatch.setattr(trials, "time_settled", time_call)
    tried = replace(subject, loss_fn=loss)
    arms = (WHOLE, replace(WHOLE, allocator="retain"))
    incumbent, rival, _ = run(tried, final(*arms, control=True))
    assert set(incumbent.block_s) == set(rival.block_s) == {1.0}


@needs_glibc
def test_a_step_that_asked_for_memory_is_not_counted_of_one_that_retains_it(subject, monkeypatch):
    timed = []
    monkeypatch.setattr(trials, "time_call", lambda step, device, count=1: (step(), 1.0)[1])
    monkeypatch.setattr(trials, "time_settled", lambda step, device: (step(), timed.append(1), 0.5)[2])
    keeping, retaining, control = run(subject, final(WHOLE, replace(WHOLE, allocator="retain"), control=True))
    assert set(keeping.block_s) == set(control.block_s) == {1.0}
    assert set(retaining.block_s) == {0.5}
    assert timed


def test_every_block_begins_with_optimizer_state(monkeypatch):
    model = nn.Linear(4, 1)
    adam = torch.optim.AdamW(model.parameters())
    tried = TrainingLoop(model, adam, lambda m, x: m(x).mean(), torch.randn(8, 4))
    begun = []

    def time_block(subject, stage, candidate, steps):
        begun.append({name: value.clone() for name, value in adam.state[model.weight].items()})
        with subject.start(candidate) as run:
            run.train_step(run.window(subject.batch), subject.loss_fn)
        return 1.0

    monkeypatch.setattr(trials, "_time_block", time_block)
    run(tried, SearchPhase("modes", (WHOLE, replace(WHOLE, precision="bf16")), control=True, accepts=True))
    assert len(begun) >= 5 * 3
    assert all(set(state) == {"step", "exp_avg", "exp_avg_sq"} for state in begun)
    assert all(torch.equal(state["exp_avg"], begun[0]["exp_avg"]) and state["step"] == 1 for state in begun)
    assert not adam.state


def test_the_state_is_made_by_another_where_the_incumbent_does_not_run(monkeypatch):
    model = nn.Linear(4, 1)
    adam = torch.optim.AdamW(model.parameters())

    def small_only(model, x):
        if len(x) > 4:
            raise torch.OutOfMemoryError("out of memory")
        return model(x).mean()

    begun = []
    monkeypatch.setattr(trials, "_time_block", lambda *_: begun.append(len(adam.state)) or 1.0)
    incumbent, rival = run(TrainingLoop(model, adam, small_only, torch.randn(8, 4)), final(WHOLE, HALF))
    assert (incumbent.error, rival.error) == ("out of memory", None)
    assert (incumbent.code, rival.code) == ("trial.out_of_memory", "")
    assert begun == [2] * 5


HALF_PRECISION = replace(WHOLE, precision="fp16")


def test_fp16_steps_until_its_loss_scale_fits_before_its_peak_is_taken(monkeypatch):
    """Gradients of 125 times the scale overflow at 65536, where it starts; a step that is voided makes no moments."""
    model = nn.Linear(4, 1)
    adam = torch.optim.AdamW(model.parameters())
    state_at_peak = []
    monkeypatch.setattr(trials, "peak_bytes", lambda step, device, live: state_at_peak.append(len(adam.state)) or 100)
    tried = TrainingLoop(model, adam, lambda m, x: 1e3 * m(x).float().mean(), torch.ones(8, 4))
    (trial,) = run(tried, SearchPhase("modes", (HALF_PRECISION,), accepts=True))
    assert (trial.error, state_at_peak) == (None, [2])


def test_fp16_that_overflows_at_every_scale_is_no_candidate():
    model = nn.Linear(4, 1)
    tried = TrainingLoop(
        model, torch.optim.AdamW(model.parameters()), lambda m, x: (0 * m(x).float().mean()).sqrt(), torch.ones(8, 4)
    )
    (trial,) = run(tried, SearchPhase("modes", (HALF_PRECISION,), accepts=True))
    assert trial.code == "trial.gradients_overflow"


@pytest.mark.parametrize(("candidates", "lead"), [((WHOLE, HALF), 0), ((WHOLE, GRAPHS), 3)])
def test_blocks_beside_what_is_recorded_begin_after_its_recording(subject, candidates, lead):
    calls: list[int] = []

    def loss_fn(model, rows):
        calls.append(1)
        return model(rows).mean()

    trials._time_block(replace(subject, loss_fn=loss_fn), SearchPhase("graphs", candidates), WHOLE, 2)
    assert len(calls) == 1 + lead + 2


@pytest.mark.parametrize(("way", "took"), [("cuda_graphs", 33 - 3 * 0.5), (True, 30 - 0.5), (False, None)])
def test_what_recording_and_compiling_take_is_of_all_steps_before_it_is_launched(subject, monkeypatch, way, took):
    seconds = iter([30.0, 2.0, 1.0])
    start = TrainingLoop.start
    monkeypatch.setattr(TrainingLoop, "start", lambda its, candidate: start(its, replace(candidate, compiled=False)))
    monkeypatch.setattr(trials, "time_call", lambda step, device: (step(), next(seconds))[1])
    monkeypatch.setattr(trials, "timer", lambda candidate: lambda step, device: 0.5)
    monkeypatch.setattr(trials, "replay_refusal", lambda *_: None)
    left_at_start = []  # The compiler starts before the first step, and its start is no part of the compilation.
    monkeypatch.setattr(trials, "start_compiler", lambda device: left_at_start.append(seconds.__length_hint__()))
    arm = trials._TrialArm(replace(WHOLE, compiled=way))
    trials._warm_up(subject, arm, measure_memory=False, slowest=100.0, paces=False)
    assert arm.error is None
    assert arm.compile_s == took
    assert left_at_start == ([3] if way is True else [])


def test_a_far_slower_arm_runs_fewer_steps_per_block(subject):
    blocks = trials._Blocks(subject, final(WHOLE), 60, 0.002, 5, True, None, lambda text: None)
    steps = {
        first_s: blocks.steps_of(trials._TrialArm(WHOLE, first_s=first_s))
        for first_s in (0.001, 0.004, 0.02, 9, math.inf)
    }
    assert steps == {0.001: 60, 0.004: 60, 0.02: 6, 9: 1, math.inf: 60}


def test_sizes_behind_the_second_that_fits_are_not_run(subject, machine, monkeypatch):
    peaks = {4: 100, 2: 60, 1: 30}
    candidates = [replace(WHOLE, micro_batch=rows) for rows in (4, 2, 1, 1, 1)]

    def warm_up(subject, arm, **how):
        arm.first_s, arm.peak_bytes = 1.0, peaks[arm.candidate.micro_batch]

    monkeypatch.setattr(trials, "_warm_up", warm_up)
    monkeypatch.setattr(trials, "_time_block", lambda *_: 1.0)
    stage = SearchPhase("sizes", tuple(candidates), fits_bytes=70)
    assert [t.candidate.micro_batch for t in trials.run_stage(subject, stage, 3, lambda text: None)] == [4, 2, 1]
