"""A new setting in the search: values tried, predicted cost and peak, invalid combinations. No other file knows it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

# Runs without torch, in a process that lists the setting `slim` before plans are imported: half the time of a step, and
# `slope` MiB per sample less memory, or `fixed` MiB more.
PROGRAM = """
import sys, types
from dataclasses import replace

package = types.ModuleType("trimtab")
package.__path__ = [{source!r}]
sys.modules["trimtab"] = package
import trimtab.settings as settings
from trimtab.settings import conflicts
from trimtab.core.choice import Effect, SplitCheck
from trimtab.settings.base import Setting, true_or_false


class Slim(Setting):
    name, default, effect, value_type = "slim", False, Effect.BITWISE, bool
    summary, values, examples, is_searched = "Halves the time of a step.", "true or false", (True,), True

    def check(self, value, plan):
        true_or_false(self, value)

    def candidates(self, profile, best):
        return (False, True)


settings.SETTINGS = {{**settings.SETTINGS, "slim": Slim()}}
settings.SEARCHED = {{**settings.SEARCHED, "slim": Slim()}}
settings.NOT_MODES, settings.OWN_PHASE = (*settings.NOT_MODES, "slim"), ("slim",)
conflicts.CONFLICTS = (
    *conflicts.CONFLICTS,
    conflicts.Conflict(
        ("slim", "micro_batch"),
        holds=lambda values: values["slim"] and values["micro_batch"] == 8,
        error=lambda values: {{"got": "slim with micro_batch=8", "expected": "another micro-batch"}},
        example={{"slim": True, "micro_batch": 8}},
    ),
)
from trimtab.core.hardware import DeviceSpec
from trimtab.core.objective import Budget, Objective
from trimtab.planner.cost_model import CostModel
from trimtab.planner.plan_choice import choose
from trimtab.planner.search import next_measurement
from trimtab.planner.search_space import priced_candidates
from trimtab.plans.profile import Candidate, LoopFacts, Profile, Trial

MIB, SLOPE, FIXED = 2**20, {slope}, {fixed}


def trial(stage, rows, slim=False):
    peak = 1000 + 10 * rows + slim * (FIXED - SLOPE * rows)
    step_s = (1 + 0.1 * (16 // rows - 1)) * (0.5 if slim else 1.0)
    return Trial(stage, Candidate(rows, slim=slim), (step_s,) * 15, peak * MIB)


def measured(stage, candidates):
    return tuple(trial(stage, c.micro_batch, c.slim) for c in candidates)


loop = LoopFacts(10, 10, 40, "SGD", 16, 16.0, "samples", None, False, False, False, "contiguous")
profile = Profile(DeviceSpec("cpu", "cpu"), loop, SplitCheck(True, "per-sample loss"))
names = []
while (phase := next_measurement(profile, Objective(), Budget())) is not None:
    names.append(phase.name)
    trials = measured(phase.name, phase.candidates)
    control = (replace(trials[0], control=True),) if phase.control else ()
    if phase.name == "slim":
        assert phase.candidates == (Candidate(16), Candidate(16, slim=True)), phase.candidates
    profile = profile.with_trials((*trials, *control))
assert "slim" in names, names
plan = choose(profile, Objective(), Budget())
assert plan.slim.value is True and plan.slim.code == {code!r}, plan.slim

model = CostModel(replace(profile, trials=tuple(t for t in profile.trials if not t.stage.startswith("final"))))
cost = model.predict(Candidate(4, slim=True))
true_mib = 1040 + FIXED - 4 * SLOPE
assert abs(cost.step_s - (1.3 - 0.5)) < 1e-9, cost
assert true_mib * MIB <= cost.peak_bytes <= 1.03 * true_mib * MIB, (cost.peak_bytes / MIB, true_mib)
sizes = {{p.candidate.micro_batch for p in priced_candidates(profile, Budget()) if p.candidate.slim}}
assert 4 in sizes and 8 not in sizes, sizes
assert "torch" not in sys.modules
print("as expected")
"""


@pytest.mark.parametrize(
    ("slope", "fixed", "code"),
    [(5, 0, "trial.less_memory"), (0, 80, "trial.faster")],
    ids=["saves memory", "needs memory"],
)
def test_the_search_tries_prices_and_chooses_a_new_setting(slope, fixed, code):
    source = Path(__file__).parents[3] / "src" / "trimtab"
    program = PROGRAM.format(source=str(source), slope=slope, fixed=fixed, code=code)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "as expected"
