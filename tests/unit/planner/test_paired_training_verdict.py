"""What pairs of short trainings say: crossings by hand, a gain only where it is clear of chance and of the control."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimtab.core.choice import Choice, Effect, MeasuredCost, Rejected
from trimtab.planner.statistics import is_gain, ratio_interval
from trimtab.planner.tuned_plan import (
    PairedTrainingVerdict,
    ShortPair,
    ShortRun,
    adapt_setting,
    is_lost,
    judge_rival,
)
from trimtab.plans.plan import Plan

STEPS = 60


def falling(rate: float, step_s: float = 1.0, steps: int = STEPS, noise: float = 0.0) -> ShortRun:
    """Return a training whose loss falls in a straight line, the faster the higher its rate."""
    losses = tuple(10 - rate * i / steps + noise * (-1) ** i for i in range(steps))
    return ShortRun(losses, step_s)


def pair(speed: float = 2.0, cost: float = 1.0, jitter: float = 1.0) -> ShortPair:
    """Return one whose rival falls so many times as fast, at so many times the seconds a step."""
    return ShortPair(falling(5), falling(5 * speed, cost), falling(5, jitter))


@given(speed=st.floats(1.2, 10))
def test_a_rival_that_falls_so_many_times_as_fast_needs_about_that_many_times_fewer_samples(speed):
    assert 0.55 * speed < pair(speed).samples < 1.05 * speed  # the smoothed loss lags behind: never told too much
    assert pair(speed, cost=2.0).time == pytest.approx(pair(speed).samples / 2)


def test_a_crossing_stays_for_another_step_and_is_interpolated():
    run = ShortRun((4.0, 2.0), 1.0)
    assert run.ended_at == pytest.approx((0.8 * 4 + 2) / 1.8)
    assert run.steps_to(run.ended_at) == pytest.approx(2)
    assert run.steps_to((4 + run.ended_at) / 2) == pytest.approx(1.5)
    assert run.steps_to(5.0) == 1.0
    assert run.steps_to(1.0) == math.inf
    dipping = ShortRun((4.0, -9.0, 40.0, 4.0, 4.0), 1.0)
    assert dipping.steps_to(0.0) == math.inf


def test_never_there_is_no_samples_saved():
    slow = ShortPair(falling(5), falling(2))
    assert (slow.samples, slow.time) == (0, 0)
    assert is_lost(slow)
    for broken in (math.nan, math.inf):
        diverged = ShortRun((*falling(9).losses[:20], *[broken] * 40), 1.0)
        assert is_lost(ShortPair(falling(5), diverged))
        later = ShortRun((*falling(10).losses[:50], *[broken] * 10), 1.0)  # once it was there
        assert ShortPair(falling(5), later).time > 1
        assert is_lost(ShortPair(falling(5), later))
        assert is_lost(ShortPair(diverged, falling(5)))


@given(st.integers(0, 200))
def test_a_rival_that_is_the_plan_itself_never_wins(seed):
    """On a floor a smoothed loss wanders, and is where it ends long before its end: told as steps saved by nobody."""
    draws = random.Random(seed)
    pairs = []
    for _ in range(5):
        losses = [tuple(2 * 0.9**i + draws.gauss(0, 0.05) for i in range(STEPS)) for _ in range(2)]
        same = ShortRun(losses[0], 1.0)
        assert ShortPair(same, same).samples == 1
        pairs.append(ShortPair(same, same, ShortRun(losses[1], 1.0)))
    assert not judge_rival(pairs, "itself").is_gain


def test_a_clear_gain_is_kept_with_its_figures():
    pairs = [pair(2.0, 1.1, jitter) for jitter in (1.0, 1.01, 0.99, 1.02, 0.98)]
    found = judge_rival(pairs, "Muon")
    assert found.is_gain
    assert found.step_ratio == pytest.approx(1.1)
    assert found.code == "paired_run.gain"
    assert all(figure in found.reason for figure in ("60 steps", "5 pairs"))
    assert f"{pairs[0].samples:.2f}x" in found.reason
    assert f"{pairs[0].time:.2f}x" in found.reason


def test_what_the_loop_against_itself_is_apart_is_no_gain():
    found = judge_rival([pair(1.6, 1.1, jitter) for jitter in (1.0, 2.0, 0.5, 2.0, 0.5)], "Muon")
    assert not found.is_gain
    assert found.code == "paired_run.below_control"


def test_pairs_that_differ_too_much_are_not_clear_of_chance():
    found = judge_rival([pair(speed) for speed in (1.35, 9.0, 1.35, 9.0, 1.35)], "Muon")
    assert not found.is_gain
    assert found.code == "paired_run.not_significant"
    found = judge_rival([replace(pair(1.4), again=None)] * 5, "Muon")
    assert not found.is_gain  # without a control nothing can be told
    assert not judge_rival([pair(3.0)] * 4, "Muon").is_gain  # nor from four pairs


def test_the_loop_against_itself_is_held_against_the_rival():
    """A training that ends a tenth higher is reached the sooner: in as many fewer steps as the rival is steep there."""
    above, below = (ShortPair(falling(5), falling(10), falling(5 * factor)) for factor in (0.9, 1 / 0.9))
    assert above.control == pytest.approx(1 / 0.9, rel=0.03)
    assert below.control == pytest.approx(0.9, rel=0.03)
    dearer = replace(above, again=replace(above.again, step_s=2.0))
    assert dearer.control == pytest.approx(2 * above.control)
    pairs = [replace(pair(2.0), again=falling(5 * factor)) for factor in (0.95, 1.0, 1.05, 0.97, 1.03)]
    assert judge_rival(pairs, "Muon").is_gain
    for broken in (falling(20), ShortRun((math.nan,) * STEPS, 1.0)):  # where the rival never was, and no number
        assert replace(pair(), again=broken).control is None
        found = judge_rival([*[pair()] * 4, replace(pair(), again=broken)], "Muon")
        assert (found.is_gain, found.code) == (False, "paired_run.no_control")


def test_a_rival_that_goes_through_a_plateau_is_kept():
    """Muon and a small GPT, as they were raced on two cores: the loop is at 3.2 after ten steps and ends at 2.9 to 3.2,
    Muon ends at 2.4. To the one loss that the loop's trainings both come to they take half or twice as long."""
    raced = json.loads((Path(__file__).parent / "muon_race.json").read_text(encoding="utf-8"))
    runs = [{name: ShortRun(tuple(run["losses"]), run["step_s"]) for name, run in each.items()} for each in raced]
    pairs = [ShortPair(**each) for each in runs]
    found = judge_rival(pairs, "Muon")
    assert found.is_gain
    assert "2.36x (1.99 to 2.79) less time" in found.reason
    common = [max(each.stands.ended_at, each.again.ended_at) for each in pairs]
    apart = [each.stands.steps_to(at) / each.again.steps_to(at) for each, at in zip(pairs, common, strict=True)]
    assert not is_gain(ratio_interval([each.time for each in pairs]), ratio_interval(apart))


def on_a_floor(decay: float, draws: random.Random, noise: float = 0.03) -> ShortRun:
    """Return a training that falls to a floor, the sooner the lower its decay, and wanders there."""
    return ShortRun(tuple(2 + 3 * decay**i + draws.gauss(0, noise) for i in range(STEPS)), 1.0)


@pytest.mark.parametrize(("decay", "noise"), [(0.95, 0.06), (0.985, 0.06), (0.9, 0.2), (0.95, 0.2)])
def test_a_noisier_training_that_learns_no_sooner_is_hardly_ever_kept(decay, noise):
    """It is below a loss by chance alone, which the pairs it won alone would call clear, and its control does not."""
    draws = random.Random(11)
    clear = kept = 0
    for _ in range(300):
        pairs = []
        while len(pairs) < 5 and not (pairs and is_lost(pairs[-1])):
            runs = on_a_floor(decay, draws), on_a_floor(decay, draws, noise), on_a_floor(decay, draws)
            pairs.append(ShortPair(*runs))
        if not is_lost(pairs[-1]):
            clear += ratio_interval([each.time for each in pairs]).low > 1
            kept += judge_rival(pairs, "noise").is_gain
    assert clear > 3
    assert kept <= 4


@pytest.mark.parametrize(
    ("last", "code", "figures"),
    [
        (ShortPair(falling(5), falling(2, 3.0)), "paired_run.target_not_reached", ["a step took 3"]),
        (ShortPair(falling(5), falling(10, 4.0)), "paired_run.later", ["pair 2", "needed 0.5"]),
        (
            ShortPair(falling(5), ShortRun((*falling(15).losses[:30], *falling(-3).losses[:30]), 1.0)),
            "paired_run.ended_above",
            ["pair 2", "a step took 1.00x"],
        ),
        (ShortPair(falling(-1), falling(5)), "paired_run.no_target", []),
        (ShortPair(falling(0.1, noise=2.0), falling(5)), "paired_run.no_target", []),
    ],
)
def test_a_lost_pair_ends_the_race_and_is_the_reason(last, code, figures):
    assert is_lost(last)
    found = judge_rival([pair(), last], "Muon")
    assert not found.is_gain
    assert found.code == code
    assert all(figure in found.reason for figure in figures)
    assert not is_lost(pair())


def planned() -> tuple[Plan, Plan]:
    cost = MeasuredCost(2.0, 100, (1.0, 3.0), 7.0)
    stands = replace(Plan.fixed(8), predicted=cost, measured=cost, verified=(1.0, 1.5), planning_s=10.0, search_s=1.0)
    rate = Choice(30.0, "a range test", Effect.TRAINING, changed=True)
    rival = replace(stands, optimizer=Choice("muon", "raced", Effect.TRAINING, changed=True), learning_rate_scale=rate)
    return stands, rival


def test_a_rival_that_won_is_the_plan_at_its_own_seconds():
    found = adapt_setting("optimizer", *planned(), PairedTrainingVerdict(True, "so much sooner", 1.25), 4.0)
    assert (found.optimizer.value, found.plan_kind, found.changes) == (
        "muon",
        "tuned",
        ("optimizer", "learning_rate_scale"),
    )
    assert "so much sooner" in found.optimizer.reason
    assert [loser.value for loser in found.optimizer.rejected] == ["user"]
    assert (found.measured, found.predicted) == (MeasuredCost(2.5, 100), MeasuredCost(2.5, 100))
    assert found.verified == (0.8, 1.2)
    assert (found.planning_s, found.search_s) == (14.0, 5.0)


def test_a_rival_that_lost_leaves_the_plan_and_its_reason():
    stands, rival = planned()
    found = adapt_setting(
        "optimizer", stands, rival, PairedTrainingVerdict(False, "later by 2x", code="paired_run.later"), 4.0
    )
    assert (found.optimizer.value, found.optimizer.reason, found.changes) == ("user", "later by 2x", ())
    assert found.optimizer.rejected == (Rejected("muon", "later by 2x", "paired_run.later"),)
    assert (found.measured, found.planning_s, found.search_s) == (stands.measured, 14.0, 5.0)
