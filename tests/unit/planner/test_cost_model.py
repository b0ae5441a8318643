"""Predicted seconds and bytes: exact on a machine that is what the model supposes, and never out of units."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_machine import HEAD, MIB, Machine, measured

from trimtab.core.memory_model import PeakMemoryModel
from trimtab.core.objective import Budget, Objective, Reference
from trimtab.planner.cost_model import CONVOLUTIONS, MARGIN, CostModel
from trimtab.planner.search_space import priced_candidates
from trimtab.plans.profile import Candidate
from trimtab.settings.micro_batch import MOST_NARROW

REFERENCE = Candidate(64)
MEMORY = Objective(time=1, memory=1)
factors = st.floats(0.5, 3.0)


@settings(max_examples=30)
@given(
    st.fixed_dictionaries({"bf16": factors, "channels_last": factors, "retain": st.just(1 / 0.7)}),
    factors,
    st.floats(0.0, 0.5),
    st.fixed_dictionaries({2048: st.floats(0.5, 1.2), 1024: st.floats(0.5, 1.2)}),  # of what the fastest has left
)
def test_a_machine_that_adds_up_is_predicted_exactly(speed, fused_speed, split_s, head_speed):
    """But for what a faster kernel scales: the machine's precision speeds up the head's share too."""
    machine = Machine(speed=speed, fused_speed=fused_speed, split_s=split_s, head_speed=head_speed)
    profile = measured(machine, faults_per_step=3e5, fault_s=1e-6, **HEAD)
    for point in priced_candidates(profile, Budget()):
        own = replace(point.candidate, allocator="retain")
        if point.candidate == own:
            assert point.cost.step_s == pytest.approx(machine.step_s("", own), rel=1e-6)
        else:
            assert point.cost.step_s == pytest.approx(machine.step_s("", own) / 0.7, rel=1e-6)


def test_a_chunk_of_all_of_a_micro_batch_is_no_choice():
    """It makes its logits at once, whatever was traced of chunks of larger ones."""
    profile = measured(Machine(head_speed={2048: 2.0, 1024: 2.0}), **HEAD)
    found = [point.candidate for point in priced_candidates(profile, Budget())]
    tokens = {rows: rows * HEAD["head_tokens"] // profile.loop.batch_size for rows in {c.micro_batch for c in found}}
    chunked = {rows: {c.loss_chunk for c in found if c.micro_batch == rows} for rows in tokens}
    for rows, chunks in chunked.items():
        assert chunks == {None, *(chunk for chunk in (2048, 1024) if chunk < tokens[rows])}


@pytest.mark.parametrize("drift", [0.0, 0.5])
def test_a_machine_whose_speed_drifts_moves_no_ratio(drift):
    machine = Machine(speed={"bf16": 2.0}, split_s=0.2, drift=drift, seed=3)
    model = CostModel(measured(machine, can_retain=False))
    base = model.predict(REFERENCE).step_s
    half = model.predict(replace(REFERENCE, precision="bf16")).step_s
    assert half / base == pytest.approx(0.55)
    if not drift:
        assert model.predict(replace(REFERENCE, micro_batch=8)).step_s / base == pytest.approx(1 + 7 * 0.2)


@pytest.mark.parametrize("disturbed", ["modes", "head", "sizes"])
def test_a_stage_that_was_disturbed_as_a_whole_moves_no_seconds(disturbed):
    """Each stage has the fastest mode in it; of three, two tell what it takes."""

    def step_s(stage, candidate):
        return (3.0 if stage == disturbed else 1.0) * (0.5 if candidate.precision == "bf16" else 1.0)

    model = CostModel(measured(Machine(step_of=step_s), can_retain=False, **HEAD))
    assert model.predict(REFERENCE).step_s == pytest.approx(1.0)


@pytest.mark.parametrize(("drift", "least"), [(0.05, 0.85), (0.3, 0.6)])
def test_the_interval_holds_for_blocks_that_it_was_not_made_of(drift, least):
    """Those of finals. A machine that drifts by a third is told wider than one that does not."""
    inside, total, widths = 0, 0, []
    for seed in range(20):
        profile = measured(Machine(speed={"bf16": 2.0}, split_s=0.2, drift=drift, seed=seed), can_retain=False)
        before = tuple(trial for trial in profile.trials if trial.stage not in profile.finals)
        model = CostModel(replace(profile, trials=before))
        for trial in (each for each in profile.trials if each.stage in profile.finals):
            low, high = model.between(model.predict(trial.candidate).step_s)
            widths.append(high / low)
            inside += sum(low <= block_s <= high for block_s in trial.block_s)
            total += len(trial.block_s)
    assert total > 100
    assert inside / total >= least
    assert min(widths) >= 1.15 / 0.85 - 1e-9
    assert (max(widths) > 1.5) == (drift > 0.1)


@pytest.mark.parametrize("stage", ["modes", "head", "sizes"])
def test_one_block_that_was_disturbed_moves_no_prediction(stage):
    machine = Machine(speed={"bf16": 2.0}, split_s=0.2, head_speed={2048: 1.1, 1024: 0.9})
    profile = measured(machine, can_retain=False, **HEAD)
    first = next(trial for trial in profile.stage(stage) if not trial.control)
    slow = replace(first, block_s=(first.block_s[0], 8 * first.block_s[1], *first.block_s[2:]))
    disturbed = replace(profile, trials=tuple(slow if trial is first else trial for trial in profile.trials))
    told = {point.candidate: point.cost.step_s for point in priced_candidates(profile, Budget())}
    assert {point.candidate: point.cost.step_s for point in priced_candidates(disturbed, Budget())} == pytest.approx(
        told
    )


def test_what_was_never_tried_has_no_cost():
    model = CostModel(measured(Machine()))
    found = model.predict(replace(REFERENCE, precision="fp16"))
    assert (found.step_s, found.peak_bytes, found.counted) == (None, None, False)
    assert CostModel(replace(measured(Machine()), trials=())).predict(REFERENCE).step_s is None


def test_sizes_lie_on_straight_lines_and_a_cache_saves_not_without_end():
    seconds = {64: 1.0, 32: 0.8, 16: 0.9, 8: 1.0, 4: 3.0, 2: 3.0, 1: 3.0}
    facts = {"can_retain": False, "has_convolutions": False, "supports_fused": False}
    machine = Machine(step_of=lambda stage, c: seconds[c.micro_batch], traces=False)
    found = measured(machine, budget=Budget(memory=1), **facts)
    few = [t for t in found.trials if t.stage != "sizes" or t.candidate.micro_batch >= 16]
    model = CostModel(replace(found, trials=tuple(few)))

    def at(rows: int) -> float:
        return round(model.predict(replace(REFERENCE, micro_batch=rows)).step_s or 0, 6)

    assert [at(rows) for rows in (64, 32, 22, 16, 8)] == [1.0, 0.8, 0.85, 0.9, 1.1]
    falling = Machine(step_of=lambda stage, c: {64: 1.0, 16: 0.8}[c.micro_batch])
    profile = measured(falling, **facts)
    before = replace(profile, trials=tuple(t for t in profile.trials if not t.stage.startswith("final")))
    assert CostModel(before).predict(replace(REFERENCE, micro_batch=1)).step_s == pytest.approx(0.8)


def test_counted_bytes_go_before_traced_ones():
    machine = Machine(traced=0.9)
    profile = measured(machine, objective=MEMORY, can_retain=False)
    model = CostModel(profile)
    counted, traced = (model.predict(replace(REFERENCE, micro_batch=rows)) for rows in (64, 2))
    assert (counted.counted, counted.peak_bytes) == (True, 740 * MIB)
    assert not traced.counted
    assert model.margin == pytest.approx(1 / 0.9 - 1)  # the miss of those that were counted
    assert traced.peak_bytes == pytest.approx(120 * MIB)


@pytest.mark.parametrize(
    ("facts", "margin"), [({"has_workspaces": False}, MARGIN), ({"has_workspaces": True}, CONVOLUTIONS)]
)
def test_a_trace_is_held_with_a_margin(facts, margin):
    """Where nothing was tried, by what its layers take beside tensors."""
    profile = replace(measured(Machine(), objective=MEMORY, **facts), trials=())
    found = CostModel(profile).predict(REFERENCE)
    assert found.peak_bytes == pytest.approx((1 + margin) * 740 * MIB)
    assert CostModel(profile).may_fit(REFERENCE, 740 * MIB)
    assert not CostModel(profile).may_fit(REFERENCE, 739 * MIB)


def test_a_batch_that_is_free_holds_gradients_beside_a_forward():
    profile = replace(measured(Machine(), objective=MEMORY), trials=())
    sliced = PeakMemoryModel(((900.0 * MIB, 0.0),))
    traces = tuple(replace(each, sliced=sliced) for each in profile.traces)
    kept, freed = (replace(profile, traces=traces, adapts_batch_size=frees) for frees in (False, True))
    assert CostModel(kept).predict(REFERENCE).peak_bytes < CostModel(freed).predict(REFERENCE).peak_bytes
    assert CostModel(freed).predict(REFERENCE).peak_bytes >= 900 * MIB


@pytest.mark.parametrize(("accumulate", "extra"), [(1, MIB), (16, 0)])
def test_fp32_sums_of_many_micro_batches_need_memory(accumulate, extra):
    """Unless the loop's own accumulation makes these sums in half precision."""
    reference = Reference(accumulate=accumulate)
    facts = {"reference": reference, "always": True, "can_retain": False}
    wide = CostModel(measured(Machine(), wide_gradient_bytes=MIB, **facts))
    narrow = CostModel(measured(Machine(), **facts))
    for rows in (64, 64 // MOST_NARROW, 4):
        added = wide.traced_bytes(Candidate(rows)) - narrow.traced_bytes(Candidate(rows))
        assert added == (extra if rows == 4 else 0)
