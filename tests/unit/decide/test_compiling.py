"""When a model is compiled on trial, and in which mode, on a simulated machine."""

from __future__ import annotations

from dataclasses import replace

import pytest
from simulated_machine import CPU, Machine, measured, values

from trimtab.core.hardware import DeviceSpec
from trimtab.core.objective import Budget, Objective
from trimtab.core.plan import Plan
from trimtab.core.profile import Candidate, Profile
from trimtab.decide.compiling import COMPILING_S, is_promising
from trimtab.decide.cost_model import CostModel
from trimtab.decide.planner import choose

PEAKS = {"fp32": 1e10, "tf32": 1e11, "bf16": 2e11, "fp16": 2e11}
GPU = DeviceSpec("an accelerator", "cuda", 2**36, PEAKS, 1e12, "made up")
# A second a step, of which its products take a tenth in fp32.
STEP = {"device": GPU, "can_retain": False, "flops_per_step": 1e9, "has_convolutions": False}


def trial_of(machine: Machine) -> Candidate | None:
    """Return what was compiled on trial."""
    stage = next((stage for stage in machine.stages if stage.name == "compile"), None)
    return None if stage is None else stage.candidates[1]


def plan_of(profile: Profile) -> Plan:
    return choose(profile, Objective(), Budget())


@pytest.mark.parametrize(
    ("steps", "flops", "device", "tried"),
    [
        (250, 1e9, GPU, True),  # a tenth of 0.9 s a step is 22.5 s
        (200, 1e9, GPU, False),
        (250, 5e9, GPU, False),  # half a second are products, which compiling leaves
        (450, 5e9, GPU, True),
        (450, None, GPU, True),  # what they take is not known: half
        (390, None, GPU, False),
        (1_999, 1e9, replace(CPU, peak_flops={"fp32": 1e10}), False),  # of a processor a hundredth of the run
        (2_000, 1e9, replace(CPU, peak_flops={"fp32": 1e10}), True),
    ],
)
def test_a_gpu_compiles_where_a_tenth_of_what_it_could_save_pays(steps, flops, device, tried):
    machine = Machine(speed=dict.fromkeys(("tf32", "bf16", "fp16"), 0.5))
    profile = measured(machine, total_steps=steps, **(STEP | {"device": device, "flops_per_step": flops}))
    assert (trial_of(machine) is not None) is tried
    assert tried or "not tried: a run of" in plan_of(profile).compiled.reason


def test_a_hurried_search_on_a_gpu_compiles_what_promises_much():
    """Where its steps are long, measuring has no time left by its own rule before anything was compiled."""
    processor, gpu, brief = Machine(), Machine(), Machine()
    profile = measured(processor, total_steps=10_000, hurried=True)
    measured(gpu, total_steps=10_000, hurried=True, **STEP)
    measured(brief, total_steps=200, hurried=True, **STEP)
    assert trial_of(processor) is None
    assert trial_of(gpu) is not None
    assert trial_of(brief) is None
    assert "measuring had taken what the run spares" in plan_of(profile).compiled.reason


def held_up(stage: str, candidate: Candidate) -> float:
    """A step whose kernels wait for the host: all modes take about as long, and compiled what their products do."""
    bare = 1.0 if candidate.precision == "fp32" else 1.02
    return bare if not candidate.compiled else {"fp32": 0.8}.get(candidate.precision, 0.4)


def test_where_the_host_holds_up_all_modes_the_one_with_the_fastest_products_is_compiled():
    machine = Machine(step_of=held_up)
    profile = measured(machine, total_steps=10_000, **STEP)
    tried = trial_of(machine)
    assert tried == Candidate("bf16", "keep", False, 64, compiled=True)
    plan = plan_of(profile)
    assert {"bf16", True} <= set(values(plan))
    assert plan.verified is not None
    assert plan.verified[0] == pytest.approx(2.5)
    for choice in (plan.compiled, plan.precision):
        said = choice.reason.replace(" (95% 2.5 to 2.5, n=3)", "")
        assert "bf16, compiled, micro-batch 64, at 2.5x the speed of fp32, micro-batch 64" in said


def test_it_is_predicted_for_the_mode_it_was_tried_in_alone():
    profile = measured(Machine(step_of=held_up), total_steps=10_000, **STEP)
    model = CostModel(profile)
    assert model.predict(Candidate("bf16", "keep", False, 64, compiled=True)).step_s == pytest.approx(0.4)
    final = profile.stage("final")
    assert {trial.candidate.precision for trial in final if trial.candidate.compiled} == {"bf16"}


@pytest.mark.parametrize("faster", ["keep", "channels_last"])
def test_of_equal_products_the_faster_layout_is_compiled(faster):
    machine = Machine(step_of=lambda stage, c: held_up(stage, c) * (1.0 if c.memory_layout == faster else 1.1))
    plan = plan_of(measured(machine, total_steps=10_000, **(STEP | {"has_convolutions": True})))
    tried = trial_of(machine)
    assert tried is not None
    assert (tried.precision, tried.memory_layout) == ("bf16", faster)
    assert faster == "keep" or "compiled" in plan.memory_layout.reason or "of keep" in plan.memory_layout.reason


def test_a_plan_that_is_not_compiled_is_not_explained_by_what_was():
    """Compiling did not pay, and memory counts: half precision won by itself."""
    machine = Machine(step_of=lambda stage, c: 1.5 if c.compiled else held_up(stage, c), weight={"bf16": 0.5})
    objective = Objective(time=1, memory=3)
    profile = measured(machine, total_steps=10_000, objective=objective, **STEP)
    plan = choose(profile, objective, Budget())
    assert trial_of(machine) is not None
    assert (plan.precision.value, plan.compiled.value) == ("bf16", False)
    assert "compiled" not in plan.precision.reason


def test_a_fused_step_is_not_weighed_in_a_compiled_one_that_does_not_pay():
    paid, unpaid = (Machine(fused_speed=1.06, compiled_speed=20.0, compile_s=s) for s in (10.0, 1e6))
    steps = {"total_steps": 10_000, **STEP}
    shares = [plan_of(measured(machine, **steps)).fused_optimizer for machine in (paid, unpaid)]
    assert [share.value for share in shares] == [True, False]


def test_a_reason_is_no_figure_that_speaks_against_it():
    """It won by the parts of its trials, and its own against what it differs from was slower."""
    profile = measured(Machine(step_of=held_up), total_steps=10_000, **STEP)
    for choice in (plan_of(profile).precision, plan_of(profile).compiled):
        assert not choice.reason.startswith("0.9")


def test_a_mode_that_is_clearly_slower_is_not_compiled_for_its_products():
    machine = Machine(speed=dict.fromkeys(("tf32", "bf16", "fp16"), 0.7))
    measured(machine, total_steps=10_000, **STEP)
    tried = trial_of(machine)
    assert tried is not None
    assert tried.precision == "fp32"


def test_a_processor_compiles_its_fastest_mode():
    machine = Machine(speed={"bf16": 0.99})
    measured(machine, total_steps=10_000, can_retain=False, has_convolutions=False)
    tried = trial_of(machine)
    assert tried is not None
    assert tried.precision == "fp32"


def test_a_fused_step_is_weighed_in_the_step_that_is_left():
    """2% of a step as the loop has it are 8% of one that takes a fourth."""
    machine = Machine(speed={"bf16": 100.0}, fused_speed=1.25)
    plan = plan_of(measured(machine, total_steps=100, **STEP))
    assert plan.precision.value == "bf16"
    assert plan.fused_optimizer.value is True
    assert "18% of a whole step" in plan.fused_optimizer.reason


def test_what_promises_is_told_by_the_fastest_step():
    profile = measured(Machine(speed={"bf16": 3.0}), total_steps=250, **STEP)
    assert not is_promising(profile, Candidate("bf16", "keep", False, 64))
    assert is_promising(profile, Candidate("fp32", "keep", False, 64))
    assert COMPILING_S == 20.0
