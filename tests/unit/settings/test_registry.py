"""The list of settings: every entry is complete, and a new entry is planned, proved, applied and undone."""

from __future__ import annotations

import subprocess
import sys

import pytest

from trimtab.core.choice import Effect
from trimtab.core.errors import UsageError, ValueGivenError
from trimtab.core.serialization import from_json, to_json
from trimtab.plans.plan import Plan
from trimtab.plans.profile import Candidate
from trimtab.settings import OWN_PHASE, SEARCHED, SETTINGS, SPECIAL
from trimtab.settings.base import Setting
from trimtab.settings.conflicts import CONFLICTS

every_setting = pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS)
# Settings that only exist with another one, and plans that have it.
BESIDE = {
    "warmup_fraction": {"schedule": "warmup_cosine"},
    "fp32_modules": {"precision": "bf16"},
    "float8": {"precision": "bf16"},
    "powersgd_rank": {"zero_stage": 0},
}
BESIDE |= {name: {"zero_stage": 2} for name in ("engine", "reduce_dtype", "reduces_once")}
BESIDE |= {"bucket_bytes": {"zero_stage": 1}}
ALL_TYPES = (object(), [], -1, 1.5, "no such value", None, True)


@every_setting
def test_a_setting_describes_itself(setting):
    assert SETTINGS[setting.name] is setting
    assert setting.summary.endswith(".")
    assert setting.values
    assert setting.examples
    assert setting.default not in setting.examples
    assert isinstance(setting.effect, Effect)


@every_setting
def test_examples_and_default_are_accepted_and_survive_a_file(setting):
    if setting.name == "batch_policy":  # set together with the rule
        return
    default = {} if setting.name == "micro_batch" else {setting.name: setting.default}
    assert Plan.fixed(8, **default).changes == ()
    for value in setting.examples:
        plan = Plan.fixed(8, **BESIDE.get(setting.name, {}) | {setting.name: value})
        assert setting.name in plan.changes
        assert from_json(Plan, to_json(plan)) == plan
        assert plan.plan_kind == ("tuned" if setting.effect is Effect.TRAINING else "equivalent")


@every_setting
def test_a_value_of_another_kind_is_refused_by_name(setting):
    fields = []
    for value in ALL_TYPES:
        try:
            Plan.fixed(8, **BESIDE.get(setting.name, {}) | {setting.name: value})
        except UsageError as error:
            fields.append(error.field)
    assert set(fields) == {f"plan.{setting.name}"}


@pytest.mark.parametrize("conflict", CONFLICTS, ids=lambda conflict: "-".join(conflict.settings))
def test_a_conflict_is_refused_by_name(conflict):
    with pytest.raises(ValueGivenError) as caught:
        Plan.fixed(8, **conflict.example)
    assert caught.value.field == f"plan.{conflict.settings[0]}"


def test_a_candidate_has_the_searched_settings():
    candidate = Candidate(8)
    assert {name: getattr(candidate, name) for name in SEARCHED} == {
        name: 8 if name == "micro_batch" else setting.default for name, setting in SEARCHED.items()
    }


def test_a_searched_setting_without_a_special_rule_names_its_candidates():
    assert set(SPECIAL) <= set(SEARCHED)
    for name in OWN_PHASE:
        assert type(SETTINGS[name]).candidates is not Setting.candidates


def test_a_failed_proof_blames_precision_and_allocator_last():
    assert [name for name, setting in SEARCHED.items() if setting.blamed_last] == ["precision", "allocator"]


# A loop whose forward waits unless the setting is on, planned and run by a process in which the setting is listed.
NEW_SETTING = """
import sys, time, types

package = types.ModuleType("trimtab")
package.__path__ = [{source!r}]
sys.modules["trimtab"] = package
import trimtab.settings as settings
from trimtab.core.choice import Effect
from trimtab.settings.base import Setting, true_or_false


class Hurry(Setting):
    name, default, effect, value_type = "hurry", False, Effect.BITWISE, bool
    summary, values, examples, is_searched = "Leaves out the wait of a forward.", "true or false", (True,), True

    def check(self, value, plan):
        true_or_false(self, value)

    def candidates(self, profile, best):
        return (True,)

    def apply(self, loop, value):
        loop.model.waits_s = 0.0
        return lambda: setattr(loop.model, "waits_s", WAIT_S)


WAIT_S = 0.02
settings.SETTINGS = {{**settings.SETTINGS, "hurry": Hurry()}}
settings.SEARCHED = {{**settings.SEARCHED, "hurry": Hurry()}}
settings.NOT_MODES, settings.OWN_PHASE = (*settings.NOT_MODES, "hurry"), ("hurry",)
del sys.modules["trimtab"]
import torch
import trimtab


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.waits_s = torch.nn.Linear(4, 3), WAIT_S

    def forward(self, x):
        time.sleep(self.waits_s)
        return self.layer(x)


def loss_fn(model, batch):
    return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])


model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
batch = torch.randn(8, 4), torch.arange(8) % 3
plan = trimtab.plan(model, optimizer, loss_fn, batch)
assert plan.hurry.value is True, plan.explain()
assert plan.hurry.code == "trial.faster", plan.hurry
assert "hurry" in plan.proof.settings and plan.proof.holds, plan.proof
assert model.waits_s == WAIT_S
with trimtab.start(model, optimizer, plan) as run:
    assert model.waits_s == 0.0
    run.train_step(run.window(batch), loss_fn)
assert model.waits_s == WAIT_S
print("planned, proved, applied, undone")
"""


def test_a_new_setting_needs_its_own_file_and_a_line_in_the_list_only():
    import trimtab

    code = NEW_SETTING.format(source=trimtab.__path__[0])
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "planned, proved, applied, undone"
