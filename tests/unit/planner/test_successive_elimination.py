"""A stage that orders ends once its order is known, and orders as surely as one that runs every lap."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from trimtab.planner.trial_statistics import MIN_BLOCKS, has_lost, ratio_by_longest, still_open
from trimtab.plans.profile import Candidate, Trial

WHOLE = Candidate(8)
NAMES = ("fp32", "tf32", "bf16", "fp16")
LAPS, STAGES = 9, 400


@dataclass
class Arm:
    candidate: Candidate
    block_s: list[float] = field(default_factory=list)
    peak_bytes: int | None = 100
    control: bool = False


def arm(*seconds, precision="fp32", **others):
    return Arm(Candidate(8, precision=precision), list(seconds), **others)


def test_where_a_stage_orders_the_incumbent_may_lose_as_any_other():
    incumbent, fast, slow = arm(1, 1, 1), arm(0.5, 0.6, 0.5, precision="bf16"), arm(2, 2, 2, precision="fp16")
    assert still_open([incumbent, fast, slow], incumbent, orders=True) == [fast]
    assert still_open([incumbent, fast, slow], incumbent, orders=False) == [incumbent, fast]


def test_a_control_is_never_dropped():
    incumbent, control = arm(1, 1, 1), arm(1.1, 1.1, 1.1, control=True)
    assert still_open([incumbent, control], incumbent, orders=True) == [incumbent, control]


def test_one_that_needs_less_memory_loses_where_it_is_clearly_slower():
    first = arm(1, 1, 1)
    assert not has_lost(arm(1.02, 1.03, 1.02, precision="bf16", peak_bytes=50), first)
    assert has_lost(arm(1.02, 1.03, 1.02, precision="bf16"), first)
    assert has_lost(arm(1.2, 1.3, 1.2, precision="bf16", peak_bytes=50), first)


def test_without_an_incumbent_that_runs_there_is_nobody_to_lose_to():
    failed, other = arm(), arm(2, 2, 2, precision="bf16")
    assert still_open([other], failed, orders=False) == still_open([other], failed, orders=True) == [other]


def test_two_that_went_on_are_told_apart_by_all_their_blocks():
    """By the three laps beside the incumbent the one leads; by all nine the other."""
    incumbent = Trial("modes", WHOLE, (2.0,) * 3)
    one = Trial("modes", WHOLE, (1.0,) * 3 + (1.2,) * 6)
    other = Trial("modes", WHOLE, (1.1,) * 9)
    trials = [incumbent, one, other]
    assert ratio_by_longest(one, incumbent, trials) == pytest.approx(2.0)
    assert ratio_by_longest(other, incumbent, trials) == pytest.approx(2.0 * 1.2 / 1.1)
    assert ratio_by_longest(incumbent, incumbent, trials) == 1.0


def test_where_all_ran_to_the_end_each_is_held_against_the_first():
    first, other = Trial("modes", WHOLE, (1.0, 1.1, 1.0)), Trial("modes", WHOLE, (0.5, 0.5, 0.6))
    assert ratio_by_longest(other, first, [first, other]) == pytest.approx(2.0)


def simulate(times, noise, rng, laps=LAPS, *, ends_early=False):
    """Return (what the chosen one takes beyond the best, a part of it, laps of the whole stage that were run).

    One block of twenty is disturbed, up to twice as long.
    """
    arms = [Arm(Candidate(8, precision=name)) for name, _ in zip(NAMES, times, strict=False)]
    running, spent = list(arms), 0.0
    for lap in range(laps):
        drift = rng.lognormvariate(0, 0.05)
        for each in running:
            seconds = times[arms.index(each)]
            spent += seconds
            disturbed = rng.uniform(1.2, 2) if rng.random() < 0.05 else 1.0
            each.block_s.append(seconds * drift * disturbed * rng.lognormvariate(0, noise))
        if ends_early and lap + 1 >= MIN_BLOCKS:
            running = still_open(running, arms[0], orders=True)
            if len(running) == 1:
                break
    trials = [Trial("modes", each.candidate, tuple(each.block_s)) for each in arms]
    ratios = [ratio_by_longest(trial, trials[0], trials) for trial in trials]
    chosen = times[max(range(len(times)), key=ratios.__getitem__)]
    return chosen / min(times) - 1, spent / sum(times)


CASES = {
    "images with bf16": (0.26, 0.205, 0.15, 0.135),
    "images": (0.34, 0.27),
    "text with bf16": (0.4, 0.26),
    "near one another": (0.26, 0.25, 0.25, 0.24),
    "slower rivals": (1.0, 1.05, 1.1),
}


def regret_of(found):
    return sum(regret for regret, _ in found) / STAGES


@pytest.mark.parametrize("noise", [0.03, 0.07, 0.12])
@pytest.mark.parametrize("times", CASES.values(), ids=CASES)
def test_ending_early_orders_as_surely_as_all_laps(times, noise):
    """To what so many stages tell apart; and where the order is plain in about half the laps."""
    rngs = random.Random(1), random.Random(2)
    all_laps = [simulate(times, noise, rngs[0]) for _ in range(STAGES)]
    early = [simulate(times, noise, rngs[1], ends_early=True) for _ in range(STAGES)]
    assert regret_of(early) <= regret_of(all_laps) + 0.004
    is_plain = min(times) < 0.91 * sorted(times)[1]
    assert not is_plain or sum(laps for _, laps in early) / STAGES < 0.55 * LAPS
