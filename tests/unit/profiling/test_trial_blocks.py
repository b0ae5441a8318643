"""How many steps a stage runs: what is known is not measured again, and a sure loser is not run to the end."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import nn

from trimtab.core.choice import Note
from trimtab.core.profile import Candidate, Trial
from trimtab.planner.search import SearchPhase
from trimtab.planner.trial_statistics import MIN_BLOCKS, speed_ratio
from trimtab.profiling import trials
from trimtab.profiling.training_loop import TrainingLoop
from trimtab.state import process_state

NO_MEMORY = Note("trial.out_of_memory", "out of memory")
WHOLE = Candidate("fp32", "keep", False, 8)
HALF, QUARTER = replace(WHOLE, micro_batch=4), replace(WHOLE, micro_batch=2)


@pytest.fixture
def subject():
    model = nn.Linear(4, 1)
    return TrainingLoop(model, torch.optim.SGD(model.parameters(), lr=0.1), lambda m, x: m(x).mean(), torch.randn(8, 4))


@pytest.fixture(autouse=True)
def known_order(monkeypatch):
    """Forwards and backwards in turn, so that a clock that is read from a table is read by whom the test means."""
    forwards_and_backwards = lambda arms, lap, draw, last: list(arms) if lap % 2 == 0 else list(arms)[::-1]  # noqa: E731
    monkeypatch.setattr(trials, "drawn_turns", forwards_and_backwards)


@pytest.fixture
def machine(monkeypatch):
    """Replace the clock of a block by a table: candidate -> seconds of its blocks, in order; counts warm-ups."""

    class Machine:
        def __init__(self):
            self.blocks: dict[Candidate, list[float]] = {}
            self.warmed: Counter[Candidate] = Counter()

        def time_block(self, subject, stage, candidate, steps):
            return self.blocks[candidate].pop(0)

        def warm_up(self, subject, arm, *, measure_memory, slowest, paces):
            self.warmed[arm.candidate] += 1
            arm.first_s, arm.peak_bytes = 1.0, 100 if measure_memory else None

    found = Machine()
    monkeypatch.setattr(trials, "_time_block", found.time_block)
    monkeypatch.setattr(trials, "_warm_up", found.warm_up)
    return found


def final(*candidates, **others):
    return SearchPhase("final", candidates, accepts=True, **others)


def run(subject, stage, known=()):
    return trials.run_stage(subject, stage, 5, lambda text: None, known)


def test_a_rival_that_lost_its_first_blocks_is_not_run_further(subject, machine):
    machine.blocks = {WHOLE: [1.0] * 10, HALF: [1.1, 1.2, 1.01], QUARTER: [0.9, 1.1, 1.0, 1.0, 1.0]}
    incumbent, rival, other, control = run(subject, final(WHOLE, HALF, QUARTER, control=True))
    assert rival.block_s == (1.1, 1.2, 1.01)
    assert len(rival.block_s) == MIN_BLOCKS
    assert len(incumbent.block_s) == len(control.block_s) == len(other.block_s) == 5
    assert rival.error is None


@pytest.mark.parametrize("blocks", [[1.1, 1.2, 0.99], [1.0, 1.2, 1.2], [0.5, 0.9, 1.1]])
def test_one_that_won_or_tied_a_block_goes_on(subject, machine, blocks):
    machine.blocks = {WHOLE: [1.0] * 5, HALF: [*blocks, 1.0, 1.0]}
    _, rival = run(subject, final(WHOLE, HALF))
    assert len(rival.block_s) == 5


def test_a_stage_of_long_steps_ends_once_it_has_no_rival_left(subject, machine):
    machine.blocks = {WHOLE: [1.0] * 6, HALF: [1.1] * 3}
    incumbent, rival, control = run(subject, final(WHOLE, HALF, control=True))
    assert len(incumbent.block_s) == len(rival.block_s) == len(control.block_s) == 3


@pytest.mark.parametrize("stage", ["sizes", "final"])
def test_a_gain_takes_all_its_blocks_however_clear_it_looks_before(subject, machine, stage):
    """Clear of 1, and of what the control resolves, after the first three: to end there would be to pick the moment."""
    machine.blocks = {WHOLE: [1.0] * 10, HALF: [0.5, 0.5, 0.51, 0.5, 0.5]}
    incumbent, rival, control = run(subject, SearchPhase(stage, (WHOLE, HALF), control=True, accepts=True))
    assert len(incumbent.block_s) == len(rival.block_s) == len(control.block_s) == 5


WILD = [1.0, 1.2, 1.0, 0.8, 1.0, 1.0] + [1.0] * 24  # of the incumbent and its control, in turn


@pytest.mark.parametrize(("rival_s", "goes_on"), [(0.9, True), (0.97, False)])
def test_a_likely_gain_in_the_noise_is_looked_at_once_more(subject, machine, rival_s, goes_on):
    """1.11x when the control resolves more: three times the blocks, though some fewer would have it clear.
    1.03x would not be worth the time."""
    machine.blocks = {WHOLE: list(WILD), HALF: [rival_s] * 15}
    incumbent, rival, control = run(subject, final(WHOLE, HALF, control=True))
    assert len(incumbent.block_s) == len(rival.block_s) == len(control.block_s)
    assert len(rival.block_s) == (15 if goes_on else 5)


@pytest.mark.parametrize(
    ("rival_s", "run_s", "blocks"),
    [
        (0.9, 20_000.0, 15),  # 1.11x saves 2,000 s: a tenth pays for ten more blocks of three arms, some steps each
        (0.9, 100.0, 5),
        (0.97, 1e9, 5),
        (0.9, 0.0, 5),
    ],
    ids=["it pays", "a short run", "not worth having", "nobody knows how long it is"],
)
def test_with_no_time_left_a_second_look_is_taken_where_it_pays(subject, machine, rival_s, run_s, blocks):
    machine.blocks = {WHOLE: list(WILD), HALF: [rival_s] * 15}
    how = {"patient": False, "run_s": run_s}
    found = trials.run_stage(subject, final(WHOLE, HALF, control=True), 5, lambda text: None, **how)
    assert {len(each.block_s) for each in found} == {blocks}


def test_without_a_control_that_runs_there_is_no_second_look(subject, machine, monkeypatch):
    blocks = iter([1.0, 0.9, RuntimeError("out of memory")] + [0.9, 1.0, 1.0, 0.9] * 9)

    def time_block(subject, stage, candidate, steps):
        found = next(blocks)
        if isinstance(found, Exception):
            raise found
        return found

    monkeypatch.setattr(trials, "_time_block", time_block)
    incumbent, rival, control = run(subject, final(WHOLE, HALF, control=True))
    assert (control.error, control.code) == ("out of memory", "trial.out_of_memory")
    assert len(incumbent.block_s) == len(rival.block_s) == 5


@pytest.mark.parametrize("step_s", [1.0, 0.2])
def test_there_is_an_end_to_more_blocks(subject, machine, monkeypatch, step_s):
    def warm_up(subject, arm, **how):
        arm.first_s = step_s

    monkeypatch.setattr(trials, "_warm_up", warm_up)
    machine.blocks = {WHOLE: [step_s, 1.5 * step_s] * 15, HALF: [step_s] * 15}
    _, rival, _ = run(subject, final(WHOLE, HALF, control=True))
    assert len(rival.block_s) == 15


def test_short_steps_run_all_their_blocks(subject, machine, monkeypatch):
    def warm_up(subject, arm, **how):
        arm.first_s = 0.1

    monkeypatch.setattr(trials, "_warm_up", warm_up)
    machine.blocks = {WHOLE: [0.1] * 15, HALF: [0.05] * 15}
    _, rival = run(subject, final(WHOLE, HALF))
    assert len(rival.block_s) == 15  # three times as many as of long ones


@pytest.mark.parametrize(("allocators", "modes"), [(("retain", "retain"), {"retain"}), (("keep", "retain"), {"keep"})])
def test_memory_is_retained_across_a_stage_all_of_which_retains_it(subject, monkeypatch, allocators, modes):
    if not process_state.can_retain():
        pytest.skip("needs glibc")
    before, seen = process_state.allocator_mode(), set()
    monkeypatch.setattr(trials, "_time_block", lambda *_: seen.add(process_state.allocator_mode()) or 1.0)
    candidates = tuple(replace(c, allocator=a) for c, a in zip((WHOLE, HALF), allocators, strict=True))
    run(subject, final(*candidates))
    assert seen == modes
    assert process_state.allocator_mode() == before


def test_where_a_loser_may_have_to_win_it_runs_to_its_end(subject, machine):
    machine.blocks = {WHOLE: [1.0] * 5, HALF: [2.0] * 5}
    _, rival = run(subject, final(WHOLE, HALF, drops=False))
    assert len(rival.block_s) == 5


def test_a_stage_that_accepts_nothing_runs_few_blocks(subject, machine):
    machine.blocks = {WHOLE: [1.0] * 5, HALF: [0.9] * 5}
    incumbent, rival = run(subject, SearchPhase("sizes", (WHOLE, HALF)))
    assert len(incumbent.block_s) == len(rival.block_s) == MIN_BLOCKS


THIRD, FOURTH = replace(WHOLE, precision="bf16"), replace(WHOLE, memory_layout="channels_last")
GRAPHS = replace(WHOLE, compiled="cuda_graphs")


@pytest.fixture
def short_steps(machine, monkeypatch):
    """Have blocks be short enough that a stage of a few seconds has up to fifteen of them."""

    def warm_up(subject, arm, **how):
        arm.first_s = 0.15

    monkeypatch.setattr(trials, "_warm_up", warm_up)
    return machine


def blocks_of(*found):
    return [len(trial.block_s) for trial in found]


def test_a_stage_that_orders_ends_once_its_order_is_known(subject, short_steps):
    short_steps.blocks = {WHOLE: [0.27] * 9, THIRD: [0.15] * 9, FOURTH: [0.2] * 9}
    assert blocks_of(*run(subject, SearchPhase("modes", (WHOLE, FOURTH, THIRD)))) == [MIN_BLOCKS] * 3


def test_two_whose_order_is_open_go_on_without_the_others(subject, short_steps):
    short_steps.blocks = {WHOLE: [0.27] * 9, THIRD: [0.15, 0.16] * 5, FOURTH: [0.16, 0.15] * 5}
    assert blocks_of(*run(subject, SearchPhase("modes", (WHOLE, FOURTH, THIRD)))) == [MIN_BLOCKS, 9, 9]


def test_a_stage_whose_candidates_wait_for_the_host_takes_no_more_than_three_laps(subject, short_steps):
    """Who of them is first is noise, however many laps there are."""
    short_steps.blocks = {WHOLE: [0.27] * 9, THIRD: [0.15, 0.16] * 5, FOURTH: [0.16, 0.15] * 5}
    assert blocks_of(*run(subject, SearchPhase("modes", (WHOLE, FOURTH, THIRD), is_brief=True))) == [MIN_BLOCKS] * 3


def test_a_lap_that_was_disturbed_takes_more_of_them_to_tell(subject, short_steps):
    """It lost one of four, and is clear of the noise by the fifth."""
    short_steps.blocks = {WHOLE: [0.15] * 9, THIRD: [0.12, 0.16, 0.12, 0.12, 0.12, 0.12, 0.12, 0.12, 0.12]}
    incumbent, rival = run(subject, SearchPhase("modes", (WHOLE, THIRD)))
    assert MIN_BLOCKS < len(incumbent.block_s) == len(rival.block_s) < 9


def test_an_incumbent_alone_has_no_order_to_be_known(subject, short_steps):
    short_steps.blocks = {WHOLE: [0.15] * 9}
    assert blocks_of(*run(subject, SearchPhase("modes", (WHOLE,)))) == [9]


@pytest.mark.parametrize("stage", ["graphs", "compile"])
def test_what_has_to_be_clearly_faster_to_be_put_first_takes_all_its_blocks(subject, short_steps, stage):
    """By three blocks, of which one of the loop's own was disturbed, its gain would not be clear of the noise."""
    short_steps.blocks = {WHOLE: [0.13, 0.13, 0.2] + [0.13] * 6, GRAPHS: [0.1] * 9}
    incumbent, rival = run(subject, SearchPhase(stage, (WHOLE, GRAPHS)))
    assert speed_ratio(Trial(stage, GRAPHS, rival.block_s[:3]), incumbent).low < 1
    assert speed_ratio(rival, incumbent).low > 1


def test_a_stage_whose_rivals_were_all_refused_has_no_order_either(subject, machine, monkeypatch):
    def warm_up(subject, arm, **how):
        arm.first_s, arm.error = 0.15, None if arm.candidate == WHOLE else NO_MEMORY

    monkeypatch.setattr(trials, "_warm_up", warm_up)
    machine.blocks = {WHOLE: [0.15] * 9}
    assert blocks_of(*run(subject, SearchPhase("modes", (WHOLE, THIRD)))) == [9, 0]


def test_where_something_is_accepted_the_incumbent_runs_to_the_end(subject, short_steps):
    short_steps.blocks = {WHOLE: [0.3] * 30, HALF: [0.15] * 15}
    found = run(subject, final(WHOLE, HALF, control=True))
    assert len(set(blocks_of(*found))) == 1
    assert len(found[0].block_s) > MIN_BLOCKS


def test_without_an_incumbent_that_runs_no_rival_is_behind(subject, machine, monkeypatch):
    def fail(subject, arm, **how):
        arm.first_s, arm.error = 1.0, None if arm.candidate == HALF else NO_MEMORY

    monkeypatch.setattr(trials, "_warm_up", fail)
    machine.blocks = {HALF: [2.0] * 5}
    incumbent, rival = run(subject, final(WHOLE, HALF))
    assert (incumbent.error, incumbent.block_s) == ("out of memory", ())
    assert len(rival.block_s) == 5


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


def test_a_long_first_step_is_not_repeated(subject, clock):
    clock += [0.9] * 6
    (trial,) = run(subject, SearchPhase("modes", (WHOLE,), accepts=True))
    assert clock == []
    assert trial.block_s == (0.9,) * 5


def test_a_first_step_that_would_drop_its_candidate_is_repeated(subject, clock):
    """A kernel compiled in the first step of bf16: 9 s, and 0.5 s from then on."""
    bf16 = replace(WHOLE, precision="bf16")
    clock += [1.0, 9.0, 0.5] + [1.0, 0.5, 0.5, 1.0] * 2 + [1.0, 0.5]
    incumbent, rival = run(subject, SearchPhase("modes", (WHOLE, bf16), accepts=True))
    assert rival.error is None
    assert (incumbent.block_s, rival.block_s) == ((1.0,) * 5, (0.5,) * 5)


def test_one_that_stays_far_slower_is_dropped(subject, clock):
    bf16 = replace(WHOLE, precision="bf16")
    clock += [1.0, 9.0, 8.0] + [1.0] * 5
    _, rival = run(subject, SearchPhase("modes", (WHOLE, bf16), accepts=True))
    assert rival.code == "trial.too_slow"
    assert all(figure in rival.error for figure in ("8 s", "1 s"))


def test_a_slow_first_step_of_every_block_is_no_gain_for_one_that_retains_memory(subject, clock, monkeypatch):
    """What a block's first step pays is paid by all arms alike: in the time, or before it."""
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
    if not process_state.can_retain():
        pytest.skip("needs glibc")
    incumbent, rival, _ = run(tried, final(*arms, control=True))
    assert set(incumbent.block_s) == set(rival.block_s) == {1.0}


def test_a_step_that_asked_for_memory_is_not_counted_of_one_that_retains_it(subject, monkeypatch):
    """Where a block is one step, its heap may grow in it: a run's does at first, and then no more."""
    if not process_state.can_retain():
        pytest.skip("needs glibc")
    timed = []
    monkeypatch.setattr(trials, "time_call", lambda step, device, count=1: (step(), 1.0)[1])
    monkeypatch.setattr(trials, "time_settled", lambda step, device: (step(), timed.append(1), 0.5)[2])
    keeping, retaining, control = run(subject, final(WHOLE, replace(WHOLE, allocator="retain"), control=True))
    assert set(keeping.block_s) == set(control.block_s) == {1.0}
    assert set(retaining.block_s) == {0.5}
    assert timed


def test_every_block_begins_with_optimizer_state(monkeypatch):
    """Made in one arm's timed step, it would count as that arm's; and the loop has none before its first step."""
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


def test_one_that_fails_after_its_warm_up_is_a_trial_with_its_error(subject, machine, monkeypatch):
    blocks = iter([1.0] * 3 + [RuntimeError("CUDA out of memory")] + [1.0] * 9)

    def time_block(subject, stage, candidate, steps):
        found = next(blocks)
        if isinstance(found, Exception):
            raise found
        return found

    monkeypatch.setattr(trials, "_time_block", time_block)
    incumbent, rival = run(subject, final(WHOLE, HALF))  # whole, half, half, whole: the fourth
    assert (incumbent.error, incumbent.block_s) == ("out of memory", ())
    assert (rival.error, len(rival.block_s)) == (None, 5)


@pytest.mark.parametrize(("candidates", "lead"), [((WHOLE, HALF), 0), ((WHOLE, GRAPHS), 3)])
def test_blocks_beside_what_is_recorded_begin_after_its_recording(subject, candidates, lead):
    """Each run records anew, in its third call: all arms step as often before the clock."""
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
    arm = trials._TrialArm(replace(WHOLE, compiled=way))
    trials._warm_up(subject, arm, measure_memory=False, slowest=100.0, paces=False)
    assert arm.error is None
    assert arm.compile_s == took


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
