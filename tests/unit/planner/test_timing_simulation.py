"""Simulated trials on a disturbed machine: coverage of the interval, and changes without a gain (docs/math.md, 8)."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest

from trimtab.planner.statistics import is_gain, paired_ratios, rank_interval, ratio_interval
from trimtab.profiling import trials

pytestmark = pytest.mark.slow
SAMPLE_S, REPEATS = 0.12, 400
Seconds = Callable[[random.Random, float], float]  # The factor on a sample's seconds at a time.


def bursts(draw: random.Random) -> Seconds:
    """Return the noise of other work in bursts of 1 to 5 s, in which samples take up to 4 times as long."""
    begin, spans = 0.0, []
    while begin < 400:
        begin += draw.uniform(1, 6)
        spans.append((begin, begin + draw.uniform(1, 5), draw.uniform(1.5, 4)))
        begin = spans[-1][1]

    def factor(draw: random.Random, at: float) -> float:
        slow = next((times for start, end, times in spans if start <= at < end), None)
        return math.exp(draw.gauss(0, 0.03)) if slow is None else 1 + (slow - 1) * draw.betavariate(2, 2)

    return factor


def drift(draw: random.Random) -> Seconds:
    """Return the noise of a processor that slows down or speeds up by up to 2 % per second."""
    rate = draw.uniform(-0.02, 0.02)
    return lambda draw, at: math.exp(rate * at + draw.gauss(0, 0.04))


def two_speeds(draw: random.Random) -> Seconds:
    """Return the noise of samples that run on a fast or a slow core."""
    slow, share = draw.uniform(1.2, 1.8), draw.uniform(0.2, 0.8)
    return lambda draw, at: math.exp(draw.gauss(0, 0.02)) * (slow if draw.random() < share else 1)


def heavy_tails(draw: random.Random) -> Seconds:
    """Return the noise of delays with a Pareto distribution, a tenth of which more than double a sample's seconds."""
    return lambda draw, at: 1 + 0.1 * draw.paretovariate(1.1)


NOISES = (bursts, drift, two_speeds, heavy_tails)


class SimulatedTrials:
    """Interleaved samples of a baseline, its control and a rival with a known speed."""

    def __init__(self, noise: Callable[[random.Random], Seconds], seed: str, speed: float) -> None:
        self.draw = random.Random(seed)
        self.factor, self.now, self.lap = noise(self.draw), 0.0, 0
        self.speeds = {"baseline": 1.0, "control": 1.0, "rival": speed}
        self.seconds: dict[str, list[float]] = {name: [] for name in self.speeds}

    def run(self, rounds: int) -> None:
        """Run more rounds, each in a random order as the trials do."""
        last = None
        for _ in range(rounds):
            for name in trials.drawn_turns(list(self.speeds), self.lap, self.draw, last):
                taken = SAMPLE_S / self.speeds[name] * self.factor(self.draw, self.now)
                self.seconds[name].append(taken)
                self.now, last = self.now + taken, name
            self.lap += 1

    def interval(self, name: str):
        return rank_interval(paired_ratios(self.seconds[name], self.seconds["baseline"]))


@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("rounds", [6, 12, 24])
def test_the_interval_covers_the_true_speed_in_93_of_100_trials(noise, rounds):
    covered = 0
    for repeat in range(REPEATS):
        simulated = SimulatedTrials(noise, f"{noise.__name__} {repeat}", speed=1.25)
        simulated.run(rounds)
        found = simulated.interval("rival")
        covered += found.low <= 1.25 <= found.high
    assert covered / REPEATS >= 0.93


@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("rounds", [6, 12, 24])
def test_an_equal_rival_is_chosen_in_at_most_5_of_100_trials(noise, rounds):
    """With the doublings of an undecided final, at every one of which a verdict may end the trial."""
    chosen = 0
    for repeat in range(REPEATS):
        simulated = SimulatedTrials(noise, f"{noise.__name__} {repeat}", speed=1.0)
        simulated.run(rounds)
        for _ in range(trials._DOUBLINGS):
            rival, control = simulated.interval("rival"), simulated.interval("control")
            if is_gain(rival, control) or rival.mean <= trials._WORTH_A_LOOK:
                break
            simulated.run(len(simulated.seconds["rival"]))
        chosen += is_gain(simulated.interval("rival"), simulated.interval("control"))
    assert chosen / REPEATS <= 0.05


def test_a_speed_of_1_25_is_found_more_often_than_by_means_of_few_blocks():
    """Of the same samples: as many short blocks with ranks, or four long blocks with a t interval of their means."""
    found, by_means = 0, 0
    for noise in NOISES:
        for repeat in range(REPEATS // 4):
            simulated = SimulatedTrials(noise, f"{noise.__name__} {repeat}", speed=1.25)
            simulated.run(24)
            found += is_gain(simulated.interval("rival"), simulated.interval("control"))
            means = {
                name: [sum(all_s[i : i + 6]) for i in range(0, 24, 6)] for name, all_s in simulated.seconds.items()
            }
            effect, control = (
                ratio_interval(paired_ratios(means[name], means["baseline"])) for name in ("rival", "control")
            )
            by_means += effect.low > 1 and effect.mean - 1 > max(control.high, 1 / control.low) - 1
    assert found > 1.2 * by_means
