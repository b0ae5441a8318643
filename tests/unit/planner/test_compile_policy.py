"""When a model is compiled on trial, and in which mode, on a simulated machine."""

from __future__ import annotations

from dataclasses import replace

import pytest
from simulated_machine import CPU, HEAD, MIB, Machine, measured, values

from trimtab.core.choice import COMPILED_BLOCKS, COMPILED_GRAPHS, CUDA_GRAPHS, SplitCheck, is_by_compiler
from trimtab.core.hardware import DeviceSpec
from trimtab.core.objective import Budget, Objective, Reference
from trimtab.planner.cost_model import CostModel
from trimtab.planner.multi_rank_plan import for_replicas, profile_for_stage
from trimtab.planner.plan_choice import choose
from trimtab.plans.plan import Plan
from trimtab.plans.profile import Candidate, Profile

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
        (89, 1e9, GPU, True),  # half of 0.9 s a step is 40 s, twice what compiling takes
        (88, 1e9, GPU, False),
        (89, 5e9, GPU, False),  # half a second are products, which compiling leaves
        (160, 5e9, GPU, True),
        (160, None, GPU, True),  # what they take is not known: half
        (159, None, GPU, False),
        (1_999, 1e9, replace(CPU, peak_flops={"fp32": 1e10}), False),  # of a processor a hundredth of the run
        (2_000, 1e9, replace(CPU, peak_flops={"fp32": 1e10}), True),
    ],
)
def test_a_gpu_compiles_where_what_it_is_likely_to_save_pays(steps, flops, device, tried):
    machine = Machine(speed=dict.fromkeys(("tf32", "bf16", "fp16"), 0.5))
    profile = measured(machine, total_steps=steps, **(STEP | {"device": device, "flops_per_step": flops}))
    assert (trial_of(machine) is not None) is tried
    assert tried or plan_of(profile).compiled.code == "compile.run_too_short"


def test_what_convolves_saves_less_by_compiling_and_takes_longer():
    """Of ResNet-50's steps on an H200, recorded, it saved 0.3 of what they take beyond their products, in 43 s."""
    for steps, tried in ((297, True), (296, False)):
        machine = Machine(speed=dict.fromkeys(("tf32", "bf16", "fp16", "channels_last"), 0.5))
        measured(machine, total_steps=steps, **(STEP | {"has_convolutions": True}))
        assert (trial_of(machine) is not None) is tried


@pytest.mark.parametrize(
    ("flops", "facts", "is_brief"),
    [
        (1e10, {}, False),  # a second a step, in fp32 as long as its products
        (1e10, {"has_convolutions": True}, True),  # which take a tenth of it in TF32
        (1e10, {"reference": Reference("bf16")}, True),
        (2e9, {}, True),
        (2e9, {"device": CPU}, False),
        (None, {}, False),
    ],
)
def test_modes_of_a_step_that_waits_for_its_launches_take_fewest_laps(flops, facts, is_brief):
    machine = Machine()
    measured(machine, **(STEP | {"flops_per_step": flops} | facts))
    (modes,) = [stage for stage in machine.stages if stage.name == "modes"]
    assert modes.is_brief is is_brief
    assert not any(stage.is_brief for stage in machine.stages if stage is not modes)


def test_a_hurried_search_on_a_gpu_compiles_what_promises_much():
    """Where its steps are long, measuring has no time left by its own rule before anything was compiled."""
    processor, gpu, brief = Machine(), Machine(), Machine()
    profile = measured(processor, total_steps=10_000, over_time_budget=True)
    measured(gpu, total_steps=10_000, over_time_budget=True, **STEP)
    measured(brief, total_steps=60, over_time_budget=True, **STEP)
    assert trial_of(processor) is None
    assert trial_of(gpu) is not None
    assert trial_of(brief) is None
    assert plan_of(profile).compiled.code == "search.over_time"


def chunks_that_compiling_does_by_itself(stage: str, candidate: Candidate) -> float:
    """Chunks gain 3% of the model as it is, and cost 8% of what is compiled."""
    seconds = 0.7 if candidate.compiled else 1.0
    return seconds * (1.0 if candidate.loss_chunk is None else 1.08 if candidate.compiled else 0.97)


@pytest.mark.parametrize("over_time_budget", [False, True])
@pytest.mark.parametrize(("limit", "chunk"), [(None, None), (500 * MIB, 2048)])
def test_what_is_compiled_is_tried_with_its_head_whole_too(over_time_budget, limit, chunk):
    """In a hurry no other change is doubted: chunks went with what was compiled, untried, and made it slower."""
    budget = Budget() if limit is None else Budget(memory=limit)
    saves = {2048: 0.4, 1024: 0.4}
    machine = Machine(step_of=chunks_that_compiling_does_by_itself, head_saves=saves, noise=0.002)
    how = {
        "total_steps": 10_000,
        "over_time_budget": over_time_budget,
        "budget": budget,
        "check": SplitCheck(False, "one batch"),
    }
    profile = measured(machine, **STEP, **HEAD, **how)
    plan = choose(profile, Objective(), budget)
    assert plan.compiled.value
    assert plan.loss_chunk.value == chunk


def held_up(stage: str, candidate: Candidate) -> float:
    """A step whose kernels wait for the host: all modes take about as long, and compiled what their products do."""
    bare = 1.0 if candidate.precision == "fp32" else 1.02
    return bare if not is_by_compiler(candidate.compiled) else {"fp32": 0.8}.get(candidate.precision, 0.4)


def test_where_the_host_holds_up_all_modes_the_one_with_the_fastest_products_is_compiled():
    machine = Machine(step_of=held_up)
    profile = measured(machine, total_steps=10_000, **STEP)
    tried = trial_of(machine)
    assert tried == Candidate(64, precision="bf16", compiled=True)
    plan = plan_of(profile)
    assert {"bf16", True} <= set(values(plan))
    assert plan.verified is not None
    assert plan.verified[0] == pytest.approx(2.5)
    for choice in (plan.compiled, plan.precision):
        assert choice.code == "trial.faster"
        assert all(part in choice.reason for part in ("bf16, compiled, micro-batch 64", "2.5x the speed", "fp32"))


def test_it_is_predicted_for_the_mode_it_was_tried_in_alone():
    profile = measured(Machine(step_of=held_up), total_steps=10_000, **STEP)
    model = CostModel(profile)
    assert model.predict(Candidate(64, precision="bf16", compiled=True)).step_s == pytest.approx(0.4)
    final = profile.stage("final")
    assert {trial.candidate.precision for trial in final if trial.candidate.compiled} == {"bf16"}


@pytest.mark.parametrize("faster", ["keep", "channels_last"])
def test_of_equal_products_the_faster_layout_is_compiled(faster):
    machine = Machine(step_of=lambda stage, c: held_up(stage, c) * (1.0 if c.memory_layout == faster else 1.1))
    works = STEP | {"has_convolutions": True, "flops_per_step": 60e9}  # a third of the step, so that layouts show
    plan = plan_of(measured(machine, total_steps=10_000, **works))
    tried = trial_of(machine)
    assert tried is not None
    assert (tried.precision, tried.memory_layout) == ("bf16", faster)
    assert faster == "keep" or "compiled" in plan.memory_layout.reason or "your loop's" in plan.memory_layout.reason


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
    steps = {"total_steps": 10_000, **STEP, "flops_per_step": 60e9}  # of a step that does not wait for its launches
    shares = [plan_of(measured(machine, **steps)).fused_optimizer for machine in (paid, unpaid)]
    assert [share.value for share in shares] == [True, False]


def test_a_mode_that_is_clearly_slower_is_not_compiled_for_its_products():
    machine = Machine(speed=dict.fromkeys(("tf32", "bf16", "fp16"), 0.7))
    measured(machine, total_steps=10_000, **STEP)
    tried = trial_of(machine)
    assert tried is not None
    assert tried.precision == "fp32"


WAITS = STEP | {"flops_per_step": 1e9}  # 5 ms of products in bf16, and a second a step


def steps_of(**seconds):
    """A step that takes other seconds as it is, recorded, compiled, or both."""
    of = {False: "own", CUDA_GRAPHS: "graphs", True: "compiled", COMPILED_GRAPHS: "both"}

    def step_s(stage: str, candidate: Candidate) -> float:
        return seconds.get(of[candidate.compiled], held_up(stage, candidate))

    return step_s


def tried_ways(machine: Machine) -> list[bool | str]:
    stages = [stage for stage in machine.stages if stage.name in ("graphs", "compile")]
    return [candidate.compiled for stage in stages for candidate in stage.candidates]


def test_a_step_that_waits_for_its_launches_is_launched_at_once():
    machine = Machine(step_of=steps_of(graphs=0.2, both=0.1))
    plan = plan_of(measured(machine, total_steps=10_000, **WAITS))
    assert tried_ways(machine) == [False, CUDA_GRAPHS, False, CUDA_GRAPHS, COMPILED_GRAPHS]
    assert plan.compiled.value == COMPILED_GRAPHS
    assert plan.verified is not None
    assert plan.verified[0] == pytest.approx(10)
    assert plan.compiled.code == "trial.faster"
    assert "10x the speed" in plan.compiled.reason
    assert {loser.value for loser in plan.compiled.rejected} == {False, CUDA_GRAPHS}


def test_what_takes_no_time_to_try_is_tried_in_a_run_of_unknown_length():
    machine = Machine(step_of=steps_of(graphs=0.2, both=0.1))
    plan = plan_of(measured(machine, **WAITS))
    assert tried_ways(machine) == [False, CUDA_GRAPHS]
    assert plan.compiled.value == CUDA_GRAPHS


@pytest.mark.parametrize(("steps", "way"), [(2100, COMPILED_GRAPHS), (1900, CUDA_GRAPHS)])
def test_compiling_pays_beside_what_is_recorded_alone_or_is_left(steps, way):
    """It saves a tenth of a second a step, and took a hundred: two hundred are to be saved."""
    machine = Machine(step_of=steps_of(graphs=0.2, both=0.1), compile_s=100.0)
    plan = plan_of(measured(machine, total_steps=steps, **WAITS))
    assert tried_ways(machine) == [False, CUDA_GRAPHS, False, CUDA_GRAPHS, COMPILED_GRAPHS]
    assert plan.compiled.value == way
    lost = [loser for loser in plan.compiled.rejected if loser.value == COMPILED_GRAPHS]
    assert all(each.code == "compile.does_not_pay" and "CUDA graphs" in each.reason for each in lost)
    assert bool(lost) is (way == CUDA_GRAPHS)


@pytest.mark.parametrize(("steps", "tried"), [(410, False), (411, True)])
def test_what_compiling_could_still_save_of_a_recorded_step_pays_for_its_trial(steps, tried):
    """Of 0.2 s all but the 5 ms of its products: half of that is 40 s, of 411 steps."""
    machine = Machine(step_of=steps_of(graphs=0.2, both=0.1), compile_s=20.0)
    plan = plan_of(measured(machine, total_steps=steps, **WAITS))
    assert (COMPILED_GRAPHS in tried_ways(machine)) is tried
    assert plan.compiled.value == (COMPILED_GRAPHS if tried else CUDA_GRAPHS)


@pytest.mark.parametrize(
    ("facts", "tried"),
    [
        ({}, True),
        ({"flops_per_step": 51e9}, False),  # in bf16 a fourth of the step and more is products
        ({"flops_per_step": 49e9}, True),
        ({"flops_per_step": None}, True),
        ({"device": replace(CPU, peak_flops={"fp32": 1e10})}, False),
        ({"is_compiled": True}, False),
    ],
)
def test_graphs_are_tried_where_a_step_takes_many_times_its_products(facts, tried):
    machine = Machine(step_of=steps_of(graphs=0.1))
    profile = measured(machine, total_steps=10_000, **(WAITS | facts))
    assert (CUDA_GRAPHS in tried_ways(machine)) is tried
    assert (plan_of(profile).compiled.value == CUDA_GRAPHS) is tried


def test_graphs_that_are_no_faster_than_what_is_compiled_are_left():
    machine = Machine(step_of=steps_of(graphs=1.0, compiled=0.4, both=0.4))
    plan = plan_of(measured(machine, total_steps=10_000, **WAITS))
    assert plan.compiled.value is True
    assert tried_ways(machine) == [False, CUDA_GRAPHS, False, True]
    codes = {loser.code for loser in plan.compiled.rejected if loser.value == CUDA_GRAPHS}
    assert codes == {"trial.no_gain"}


@pytest.mark.parametrize(
    ("failing", "way"), [((COMPILED_GRAPHS,), CUDA_GRAPHS), ((CUDA_GRAPHS, COMPILED_GRAPHS), True)]
)
def test_a_way_that_fails_leaves_the_others(failing, way):
    machine = Machine(
        step_of=steps_of(graphs=0.2, compiled=0.4, both=0.1),
        fails=lambda stage, c: "its gradient differs" if c.compiled in failing else None,
    )
    plan = plan_of(measured(machine, total_steps=10_000, **WAITS))
    assert plan.compiled.value == way
    lost = {loser.value: loser.reason for loser in plan.compiled.rejected}
    assert lost[failing[0]] == "its gradient differs"


def test_of_modes_that_wait_alike_the_layout_of_the_units_is_recorded():
    def alike(stage: str, candidate: Candidate) -> float:
        return 1.0 if candidate.memory_layout == "keep" else 1.05

    machine = Machine(step_of=alike)
    measured(machine, total_steps=10_000, **(WAITS | {"has_convolutions": True}))
    stages = [stage for stage in machine.stages if stage.name in ("graphs", "compile")]
    assert {each.memory_layout for stage in stages for each in stage.candidates[1:]} == {"channels_last"}
    assert len(stages) == 2


def test_of_ranks_nothing_is_launched_at_once():
    profile = measured(Machine(step_of=steps_of(graphs=0.2, both=0.1)), total_steps=10_000, **WAITS)
    for stage in (0, 1, 2):
        found = [trial.candidate.compiled for trial in profile_for_stage(profile, "torch", stage).trials]
        assert not {CUDA_GRAPHS, COMPILED_GRAPHS} & set(found)
    recorded = measured(Machine(step_of=steps_of(graphs=0.2)), **WAITS)
    for plan, way in ((plan_of(profile), True), (plan_of(recorded), False)):
        shared = for_replicas(plan, 2)
        assert (shared.num_ranks, shared.compiled.value) == (2, way)
        assert shared.compiled.code == "graphs.removed"


def test_a_fused_step_is_weighed_in_the_step_that_is_left():
    """2% of a step as the loop has it are 8% of one that takes a fourth."""
    machine = Machine(speed={"bf16": 100.0}, fused_speed=1.25)
    plan = plan_of(measured(machine, total_steps=100, **STEP))
    assert plan.precision.value == "bf16"
    assert plan.fused_optimizer.value is True
    assert "18% of a whole step" in plan.fused_optimizer.reason


@pytest.mark.parametrize(
    ("steps", "kinds", "tried"),
    [
        (499, 1 / 12, ()),  # a hundredth of the run is less than a quarter of what the whole model takes
        (500, 1 / 12, (COMPILED_BLOCKS,)),
        (999, 1 / 2, ()),  # half of the blocks differ
        (1_000, 1 / 2, (COMPILED_BLOCKS,)),
        (2_000, 1 / 12, (COMPILED_BLOCKS, True)),
        (2_000, None, (True,)),
    ],
)
def test_equal_blocks_are_compiled_once_in_runs_too_short_for_the_whole_model(steps, kinds, tried):
    machine = Machine()
    profile = measured(machine, total_steps=steps, can_retain=False, kinds_of_blocks=kinds)
    found = [stage.candidates[1:] for stage in machine.stages if stage.name == "compile"]
    assert [candidate.compiled for candidate in (found or [()])[0]] == list(tried)
    assert tried or plan_of(profile).compiled.code == "compile.run_too_short"


@pytest.mark.parametrize(
    ("whole", "blocks", "steps", "chosen"),
    [
        (1.5, 1.4, 10_000, True),  # 400 s less over the run, for 25 s more
        (1.41, 1.4, 3_000, COMPILED_BLOCKS),  # 15 s less, for 25 s more
        (1.2, 1.4, 10_000, COMPILED_BLOCKS),
        (1.0, 1.0, 10_000, False),
    ],
)
def test_the_way_to_compile_that_saves_most_over_the_run_is_chosen(whole, blocks, steps, chosen):
    machine = Machine(compiled_speed=whole, blocks_speed=blocks)
    plan = plan_of(measured(machine, total_steps=steps, can_retain=False, kinds_of_blocks=1 / 12))
    assert plan.compiled.value == chosen
