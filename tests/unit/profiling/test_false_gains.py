"""A stage of identical arms, hundreds of times: how often does one of them come out as a gain?"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from trimtab.core.choice import SplitCheck
from trimtab.core.hardware import DeviceSpec
from trimtab.core.objective import Budget, Objective
from trimtab.planner.search import SearchPhase
from trimtab.planner.selection import decide
from trimtab.plans.profile import Candidate, LoopFacts, Profile
from trimtab.profiling import trials

CPU = DeviceSpec("a processor", "cpu", None, {}, None, "made up", 4)
FACTS = LoopFacts(10, 10, 40, "SGD", 64, 64, "rows", None, True, True, False, "contiguous")
WHOLE = Candidate(64)
RIVALS = (
    replace(WHOLE, precision="bf16"),
    replace(WHOLE, memory_layout="channels_last"),
    replace(WHOLE, precision="bf16", memory_layout="channels_last"),
)
REPEATS = 400


class Still:
    """A state that nothing changes."""

    def restore(self):
        pass


def stage_of(rng, monkeypatch, *, noise, step_s, rivals, speed=1.0, num_blocks=5, patient=True):
    """Run one stage on a clock of nothing but noise, and `speed` of the rivals; returns its winner."""
    stage = SearchPhase("final", (WHOLE, *rivals), control=True, accepts=True)

    def time_block(subject, stage, candidate, steps):
        return step_s * rng.lognormvariate(0, noise) / (1.0 if candidate == WHOLE else speed)

    monkeypatch.setattr(trials, "_time_block", time_block)
    arms = [trials._TrialArm(candidate, first_s=step_s) for candidate in stage.candidates]
    arms.append(trials._TrialArm(WHOLE, control=True, first_s=step_s))
    steps = max(1, round(trials.BLOCK_S / step_s))
    run_s = 0.0 if patient else 1e9  # a run so long that every second look pays
    blocks = trials._Blocks(None, stage, steps, step_s, num_blocks, patient, Still(), lambda text: None, run_s)
    trials._run_blocks(blocks, arms, list(arms))
    found = tuple(trials._trial(stage, arm, step_s) for arm in arms)
    profile = Profile(CPU, FACTS, SplitCheck(False, "one row"), trials=found)
    outcome = decide(profile, "final", Objective(), Budget())
    assert outcome is not None
    return outcome.winner.candidate


@pytest.mark.parametrize(
    ("num_blocks", "step_s", "noise"), [(3, 1.0, 0.1), (5, 1.0, 0.05), (5, 0.01, 0.1), (3, 0.01, 0.05)]
)
@pytest.mark.parametrize("rivals", [RIVALS[:1], RIVALS], ids=["one rival", "three rivals"])
@pytest.mark.parametrize("patient", [True, False], ids=["patient", "where it pays"])
def test_identical_arms_seldom_make_a_gain(monkeypatch, rivals, noise, step_s, num_blocks, patient):
    """In at most 5% of stages, however its blocks are extended, or its losers dropped."""
    rng = random.Random(f"{len(rivals)} {noise} {step_s} {num_blocks}")
    found = [
        stage_of(rng, monkeypatch, noise=noise, step_s=step_s, rivals=rivals, num_blocks=num_blocks, patient=patient)
        for _ in range(REPEATS)
    ]
    assert sum(winner != WHOLE for winner in found) <= 0.05 * REPEATS


@pytest.mark.parametrize(("noise", "speed"), [(0.02, 1.15), (0.08, 1.6)])
def test_a_true_gain_is_still_found(monkeypatch, noise, speed):
    rng = random.Random(7)
    found = [stage_of(rng, monkeypatch, noise=noise, step_s=1.0, rivals=RIVALS[:1], speed=speed) for _ in range(200)]
    assert sum(winner != WHOLE for winner in found) > 0.9 * len(found)
