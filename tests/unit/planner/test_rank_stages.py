"""Which stage ranks share a model by."""

from __future__ import annotations

from dataclasses import replace

import pytest
from raising import raises
from simulated_machine import CPU, MIB, Machine, measured

from trimtab.core.choice import COMPILED_BLOCKS
from trimtab.core.errors import InfeasibleError
from trimtab.core.hardware import Link, LinkCalibration
from trimtab.core.memory_model import PeakMemoryModel
from trimtab.core.objective import Budget, Objective
from trimtab.core.parallelism import StepShape
from trimtab.distributed.deepspeed_backend import config_of
from trimtab.planner import zero_stage
from trimtab.planner.multi_rank_plan import WAYS, RankPeakMemory, profile_for_stage
from trimtab.planner.plan_choice import choose_each
from trimtab.planner.zero_stage import StageCost, choose_stage, held_with, stages_text
from trimtab.plans.profile import Profile

pytestmark = pytest.mark.slow

RANKS = 4
# Ranks of a processor are held against limits with what gloo may hold on top; of an accelerator nothing is.
ACCELERATOR = replace(CPU, name="an accelerator", kind="cuda")
# MiB that a rank holds beyond one process, in windows of one micro-batch and of several: buckets, less what is sharded.
HELD = {
    (0, True): (10, 20),
    (1, True): (-5, 5),
    (2, True): (-20, -5),
    (2, False): (-20, -20),
    (3, True): (-40, -25),
    (3, False): (-40, -40),
}


PROFILES: dict[str, Profile] = {}  # measured once for all tests that ask for the same


def calibration(bytes_per_s: float = 1e11) -> LinkCalibration:
    return LinkCalibration(Link("planted", 1e-6, bytes_per_s, "planted", calibrated=True))


def shape(plan) -> StepShape:
    micro_s = (plan.measured or plan.predicted).step_s * 0.9 / plan.num_micro_batches
    return StepShape(micro_s / 3, 2 * micro_s / 3, 0.01, (2**20,) * 8, (1.0,) * 8)


def profile_of(
    *, memory: int | None = None, time: float | None = None, weight: float = 0.0, device=ACCELERATOR, **machine
):
    budget, objective = Budget(None if memory is None else memory * MIB, time), Objective(1.0, weight)
    key = repr((budget, objective, device, machine))
    if key not in PROFILES:
        made = Machine(**{"split_s": 0.2, **machine})
        PROFILES[key] = measured(made, device=device, budget=budget, objective=objective, always=True)
    return PROFILES[key]


def traces_of(profile) -> tuple[RankPeakMemory, ...]:
    def moved(model: PeakMemoryModel, more: int) -> PeakMemoryModel:
        return model.beside(more * MIB)

    return tuple(
        RankPeakMemory(each.candidate, way, moved(each.whole, HELD[way][0]), moved(each.sliced, HELD[way][1]))
        for each in profile.traces
        for way in WAYS
    )


def choose(profile, link: LinkCalibration | None = None):
    return choose_stage(profile, traces_of(profile), RANKS, link or calibration(), shape)


def test_where_memory_is_ample_every_rank_holds_the_model():
    plan, found = choose(profile_of())
    assert (plan.zero_stage.value, plan.num_ranks, plan.micro_batch.value) == (0, RANKS, 64)
    assert {loser.value for loser in plan.zero_stage.rejected} == {1, 2, 3}
    assert [each.way for each in found] == list(WAYS)


def test_a_plan_says_what_a_rank_holds_and_what_its_window_takes():
    profile = profile_of()
    plan, found = choose(profile)
    assert plan.predicted is not None
    assert plan.predicted.peak_bytes == (100 + 10 * 64 + 10) * MIB
    cost = found[0].cost
    assert plan.predicted.step_s == cost.total_s == cost.compute_s + cost.exposed_s + cost.optimizer_s
    assert (plan.measured, plan.verified, plan.baseline) == (None, None, None)  # one process's, not a rank's


@pytest.mark.parametrize(("memory", "stage", "peak"), [(751, 0, 750), (745, 1, 735), (736, 2, 720), (716, 3, 700)])
def test_under_a_limit_a_stage_is_chosen_that_meets_it_whole(memory, stage, peak):
    plan, _ = choose(profile_of(memory=memory))
    assert (plan.zero_stage.value, plan.predicted.peak_bytes) == (stage, peak * MIB)
    assert ("zero_stage" in plan.changes, plan.plan_kind) == (stage > 0, "equivalent")


def test_gradients_are_reduced_after_each_micro_batch_where_holding_them_is_too_much():
    profile = profile_of(memory=72)  # 60 + 10 of one row, and what a trace is raised by
    plan, found = choose(profile)
    assert (plan.zero_stage.value, plan.reduces_once.value, plan.micro_batch.value) == (3, False, 1)
    assert plan.reduces_once.changed
    assert found[0].code in ("budget.memory", "plan.infeasible")
    assert "over the budget" in str(found[0])


@pytest.mark.parametrize(("memory", "stage", "layout"), [(None, 0, "channels_last"), (72, 3, "keep")])
def test_a_stage_that_shards_is_chosen_without_a_layout(memory, stage, layout):
    plan, found = choose(profile_of(memory=memory, speed={"channels_last": 1.5}))
    assert (plan.zero_stage.value, plan.memory_layout.value) == (stage, layout)
    assert all(each.plan.memory_layout.value == "keep" for each in found if each.way[0] >= 2 and hasattr(each, "plan"))


def test_limits_that_no_stage_meets_are_refused():
    with raises(InfeasibleError, code="plan.infeasible", field="budget"):
        choose(profile_of(memory=50))


def test_memory_that_is_weighed_chooses_the_stage_too():
    plan, _ = choose(profile_of(weight=10.0))
    assert plan.zero_stage.value == 3


def test_on_a_slow_link_half_of_the_bytes_are_sent_where_the_model_is_replicated():
    plan, found = choose(profile_of(), calibration(2e6))
    first = found[0]
    assert first.plan.reduce_dtype.value == "bf16"
    assert first.cost.exposed_s > 0
    assert plan.predicted.step_s == min(each.cost.total_s for each in found if isinstance(each, StageCost))


def test_the_table_has_a_line_of_each_way():
    _, found = choose(profile_of(memory=751))
    lines = stages_text(found).splitlines()
    assert len(lines) == 2 + len(WAYS)
    assert "Stragglers" in lines[-1]
    assert "stage 0: shards nothing" in lines[1]
    assert "a single micro-batch is reduced once" in lines[4]


def fast_in(*values: str, compiled: float = 1.0, weight: float = 0.0, blocks: float | None = None):
    device = replace(CPU, peak_flops={"fp32": 1e11, "fp16": 2e11})
    machine = Machine(split_s=0.2, speed=dict.fromkeys(values, 3.0), compiled_speed=compiled, compile_s=0.1)
    machine = replace(machine, blocks_speed=blocks or 1.0)
    how = {"objective": Objective(1.0, weight), "kinds_of_blocks": None if blocks is None else 1 / 12}
    return measured(machine, device=device, total_steps=10**6, always=True, **how)


def test_deepspeeds_stages_are_told_by_the_same_traces_and_their_plan_says_so():
    profile = profile_of()
    plan, found = choose_stage(profile, traces_of(profile), RANKS, calibration(), shape, "deepspeed")
    assert [each.way for each in found] == [(1, True), (2, True), (3, True)]
    assert (plan.engine.value, plan.engine.changed, plan.zero_stage.value) == ("deepspeed", True, 1)
    assert {loser.value for loser in plan.zero_stage.rejected} == {2, 3}
    assert plan.engine.code == "engine.requested"
    _, by_torch = choose(profile)
    assert [each.peak_bytes for each in found] == [by_torch[i].peak_bytes for i in (1, 2, 4)]
    for each in found:
        assert isinstance(each, StageCost)
        assert config_of(each.plan, 10**9)["zero_optimization"]["stage"] == each.way[0]
        assert each.cost.exposed_s == each.cost.communication_s  # its configuration overlaps nothing


@pytest.mark.parametrize(
    ("profile", "chosen"),
    [
        (fast_in("fp16"), ("fp16", False)),
        (fast_in(compiled=3.0), ("fp32", True)),
        (fast_in(blocks=3.0), ("fp32", COMPILED_BLOCKS)),
    ],
)
def test_of_deepspeed_nothing_is_chosen_that_its_configuration_refuses(profile, chosen):
    by_torch, _ = choose(profile)
    assert (by_torch.precision.value, by_torch.compiled.value) == chosen
    plan, found = choose_stage(profile, traces_of(profile), RANKS, calibration(), shape, "deepspeed")
    for each in (plan, *(one.plan for one in found if isinstance(one, StageCost))):
        assert config_of(each, 10**9)


@pytest.mark.parametrize(("engine", "of_replicas"), [("torch", "channels_last"), ("deepspeed", "keep")])
def test_shards_have_no_layout(engine, of_replicas):
    """DeepSpeed shares state by what is contiguous, and a run of such a plan is refused."""
    profile = fast_in("channels_last")
    _, found = choose_stage(profile, traces_of(profile), RANKS, calibration(), shape, engine)
    layouts = {each.way[0]: each.plan.memory_layout.value for each in found if isinstance(each, StageCost)}
    assert layouts.pop(0, of_replicas) == layouts.pop(1) == of_replicas
    assert layouts == {2: "keep", 3: "keep"}


def test_a_peak_that_no_trace_tells_of_is_not_known():
    plan, found = choose(fast_in(compiled=3.0))
    assert (plan.compiled.value, plan.predicted.peak_bytes, found[0].peak_bytes) == (True, None, None)
    assert "unknown per rank" in plan.zero_stage.rejected[0].reason
    assert "0 B" not in stages_text(found) + plan.explain()
    assert "  unknown  " in stages_text(found)


def test_where_memory_is_weighed_what_is_not_known_is_never_better():
    plan, found = choose(fast_in(compiled=3.0, weight=1.0))
    assert not plan.compiled.value
    assert all(each.peak_bytes for each in found if isinstance(each, StageCost))


def test_where_memory_is_weighed_and_nothing_is_known_of_it_there_is_no_stage():
    profile = profile_of(weight=1.0)
    with raises(InfeasibleError, code="plan.infeasible", field="budget"):
        choose_stage(profile, (), RANKS, calibration(), shape)


@pytest.mark.parametrize("settings", [{}, {"speed": {"bf16": 0.5}, "weight_of": {"bf16": 0.5}}])
def test_a_limit_on_time_is_met_though_memory_weighs_more(settings):
    """By fewer micro-batches; or, where what is lighter is too slow at each, by what is faster."""
    more = {name: value for name, value in (("speed", settings.get("speed")),) if value}
    machine = Machine(split_s=0.2, **more, weight=settings.get("weight_of", {}))
    budget, objective = Budget(time=1.3), Objective(1.0, 10.0)
    profile = measured(machine, device=ACCELERATOR, budget=budget, objective=objective, always=True)
    plan, found = choose(profile)
    assert plan.predicted.step_s <= 1.3
    assert plan.precision.value == "fp32"
    assert all(each.cost.total_s <= 1.3 for each in found if isinstance(each, StageCost))


def test_a_limit_on_time_that_no_window_meets_is_refused():
    with raises(InfeasibleError, code="plan.infeasible", field="budget"):
        choose(profile_of(time=0.5))


@pytest.mark.parametrize(("bytes_per_s", "recomputes"), [(1e11, False), (2e7, True)])
def test_on_a_slow_link_fewer_micro_batches_are_gathered_for(bytes_per_s, recomputes):
    """What a rank of stage 3 gathers it gathers for each: blocks computed again may be cheaper than small ones."""
    profile = profile_of(memory=300, split_s=0.005, forward_s=0.3)
    found = third(profile, calibration(bytes_per_s))
    assert (found.plan.recompute.value is not None) == recomputes
    assert (found.plan.num_micro_batches == 1) == recomputes
    others = {loser.value: loser.reason for loser in found.plan.micro_batch.rejected}
    assert "per step" in others[8]


def third(profile, link, *, once: bool = True) -> StageCost:
    _, found = choose(profile, link)
    each = found[WAYS.index((3, once))]
    assert isinstance(each, StageCost)
    return each


@pytest.mark.parametrize(("once", "memory"), [(True, 716), (False, 400)])
def test_shards_are_reduced_in_half_of_the_bytes_where_it_is_worth_it(once, memory):
    profile, slow = profile_of(memory=memory), calibration(2e6)
    each = third(profile, slow, once=once)
    plan = each.plan
    assert (plan.num_micro_batches == 1) == once
    assert (plan.reduce_dtype.value, plan.reduce_dtype.changed, plan.plan_kind) == ("bf16", True, "equivalent")
    assert "gathered parameters" in plan.reduce_dtype.reason
    assert plan.reduce_dtype.code == "predicted.best"
    assert [loser.value for loser in plan.reduce_dtype.rejected] == ["fp32"]
    assert "gradients reduced in bf16" in stages_text((each,))
    fast = third(profile, calibration(), once=once).plan
    assert (fast.reduce_dtype.value, fast.reduce_dtype.changed) == ("fp32", False)
    assert third(profile, replace(slow, cast_s_per_byte=1e-6), once=once).plan.reduce_dtype.value == "fp32"


@pytest.mark.parametrize("memory", [720, 300, 100])
def test_over_gloo_shards_are_held_against_a_limit_with_what_its_threads_let_go_late(memory):
    profile = profile_of(memory=memory, device=CPU)
    plan, found = choose(profile)
    for each in found:
        if isinstance(each, StageCost):
            stage, once = each.way
            assert each.margin == held_with("cpu", each.way) == (0 if stage < 2 else 0.12 if once else 0.26)
            assert (1 + each.margin) * each.peak_bytes <= memory * MIB
    there, _ = choose(profile_of(memory=716))
    assert "a margin of" not in there.zero_stage.reason
    assert ("a margin of" in plan.zero_stage.reason) == (plan.zero_stage.value >= 2)


def test_what_gloo_may_hold_is_said_where_it_decides():
    with raises(InfeasibleError, code="plan.infeasible", field="budget"):
        choose(profile_of(memory=80, device=CPU))  # a row of ten, and 60 at stage 3


@pytest.mark.parametrize(("optimizer", "is_fused"), [("AdamW", True), ("SGD", False)])
def test_shards_have_no_fused_step_of_sgd(optimizer, is_fused):
    profile = measured(Machine(fused_speed=10.0), device=ACCELERATOR, always=True, optimizer=optimizer)
    _, found = choose(profile)
    steps = {each.way[0]: each.plan.fused_optimizer.value for each in found if isinstance(each, StageCost)}
    assert steps == {0: True, 1: True, 2: is_fused, 3: is_fused}


def test_seconds_by_a_data_sheet_are_held_against_a_limit_with_their_margin(monkeypatch):
    """As one process's are; `roofline` figures of a device that is not here miss by that much."""

    def told(*given):
        return tuple(replace(plan, seconds_margin=0.33) for plan in choose_each(*given))

    monkeypatch.setattr(zero_stage, "choose_each", told)
    with raises(InfeasibleError, code="plan.infeasible", field="budget"):
        choose(profile_of(time=1.1))
    plan, _ = choose(profile_of(time=1.4))
    assert plan.predicted.step_s < 1.1


def told(optimizer: str):
    """Return a profile of a device that is not here: nothing was tried, and fused steps alone are traced."""
    found = measured(Machine(fused_speed=10.0), device=replace(CPU, kind="cuda"), always=True, optimizer=optimizer)
    plain = [each for each in found.traces if each.candidate.memory_layout == "keep"]
    traces = dict.fromkeys(replace(each.candidate, fused_optimizer=True) for each in plain)
    found = replace(found, trials=(), traces=tuple(replace(plain[0], candidate=each) for each in traces))
    assert found.traces
    return found


@pytest.mark.parametrize(("optimizer", "fused"), [("AdamW", True), ("SGD", False)])
@pytest.mark.parametrize("stage", [2, 3])
def test_shards_of_a_device_that_is_not_here_have_no_fused_step_of_sgd(optimizer, fused, stage):
    profile = told(optimizer)
    found = profile_for_stage(profile, "torch", stage)
    assert [each.candidate for each in found.traces] == [
        replace(each.candidate, fused_optimizer=fused) for each in profile.traces
    ]


@pytest.mark.parametrize("stage", [0, 1])
def test_replicas_of_one_do(stage):
    profile = told("SGD")
    assert profile_for_stage(profile, "torch", stage).traces == profile.traces
