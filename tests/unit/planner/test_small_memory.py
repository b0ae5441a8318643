"""Plans within little memory on a GPU that waits for its host: by what GPT-2's steps took an H200, about.

32 rows of 1,024 tokens in bf16 take 0.15 s in 37 GB. Two rows at a time the host needs 0.4 s, one at a time 0.65;
recorded two take 0.22 s, compiled and recorded 0.125, and one at a time half as long again (docs/LOG.md, 2026-11-27).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
from simulated_machine import Machine, measured
from test_compile_policy import GPU

from trimtab.core.choice import COMPILED_GRAPHS, CUDA_GRAPHS, is_by_compiler, is_recorded
from trimtab.core.memory_model import PeakMemoryModel
from trimtab.core.objective import Budget, Objective, Reference
from trimtab.planner.compile_policy import is_promising, to_compile
from trimtab.planner.cost_model import CostModel
from trimtab.planner.plan_choice import choose
from trimtab.plans.plan import Plan
from trimtab.plans.profile import Candidate, Profile, TracedCandidate

GB = 10**9
PEAKS = {"fp32": 5e13, "tf32": 4e14, "bf16": 8e14, "fp16": 8e14}
STRONG = {
    "device": replace(GPU, peak_flops=PEAKS),
    "reference": Reference("bf16"),
    "batch_size": 32,
    "flops_per_step": 2.9e13,
    "has_convolutions": False,
    "can_retain": False,
    "is_fused": True,
    "head_tokens": 32_768,
    "head_words": 50_257,
    "logits": (32_768, 50_257),
    "total_steps": 888,
    "over_time_budget": True,
}
SLOWER = {"fp32": 5.0, "tf32": 1.8, "bf16": 1.0, "fp16": 1.0}


@dataclass
class Host(Machine):
    """Launches of a micro-batch take the host 20 ms; a recorded one takes what its kernels do."""

    noise: float = 0.003
    compile_s: float = 25.0

    def step_s(self, stage: str, candidate: Candidate) -> float:
        count = self.rows // candidate.micro_batch
        kernels_s = 0.065 if is_by_compiler(candidate.compiled) else 0.15
        kernels_s = kernels_s * SLOWER[candidate.precision] + 0.006 * count + 0.012 * (candidate.loss_chunk is not None)
        return kernels_s if is_recorded(candidate.compiled) else max(kernels_s, 0.02 * count)

    def peak_bytes(self, candidate: Candidate) -> int:
        """Return weights, gradients and state, what a row takes, its logits or a chunk's, and what recordings hold."""
        rows = candidate.micro_batch
        tokens = min(1024 * rows, candidate.loss_chunk or 1024 * rows)
        own, logits = (0.35, 0.55) if not is_by_compiler(candidate.compiled) else (0.25, 0.4)
        held = 0.8 if is_recorded(candidate.compiled) else 0.0
        return int((2.5 + held + own * rows + logits * tokens / 1024) * GB)

    def trace(self, candidate: Candidate) -> TracedCandidate:
        """Return the line through two sizes whose chunks are whole."""
        few, whole = (self.peak_bytes(replace(candidate, micro_batch=rows)) for rows in (16, 32))
        row = (whole - few) / 16
        model = PeakMemoryModel(((whole - 32 * row, row),))
        return TracedCandidate(candidate, model, model, step=PeakMemoryModel(((2.0 * GB, 0.0),)))


def planned(machine: Machine, memory: float, **how: Any) -> tuple[Profile, Plan]:
    budget = Budget(memory=int(memory * GB))
    profile = measured(machine, budget=budget, **(STRONG | how))
    return profile, choose(profile, Objective(), budget)


def test_what_is_compiled_and_recorded_fits_in_chunks_of_its_own_size():
    machine = Host()
    profile, plan = planned(machine, 4.5)
    assert [stage.name for stage in machine.stages] == ["modes", "head", "sizes", "graphs", "compile", "final"]
    tried = machine.stages[1].candidates
    assert [(each.loss_chunk, each.micro_batch) for each in tried] == [(None, 32), (8192, 32), (4096, 32), (512, 32)]
    assert plan.compiled.value == COMPILED_GRAPHS
    assert (plan.micro_batch.value, plan.loss_chunk.value, plan.precision.value) == (2, 512, "bf16")
    assert plan.measured is not None
    assert (plan.measured.peak_bytes or 0) <= 4.5 * GB
    assert plan.measured.step_s < 1.35 * machine.step_s("final", profile.reference_candidate)


def test_half_of_the_memory_is_met_in_chunks_and_not_by_splitting_that_costs_more():
    """A size that breaks the limit has to give way: what smaller ones take is asked, in a hurry too."""
    machine = Host(compile_s=1e6)
    _, plan = planned(machine, 16.2)
    assert "sizes" in [stage.name for stage in machine.stages]
    assert (plan.micro_batch.value, plan.loss_chunk.value) == (32, 2048)


def test_sizes_that_nothing_needs_are_still_left_out_in_a_hurry():
    machine = Host()
    planned(machine, 40)
    assert "sizes" not in [stage.name for stage in machine.stages]


@pytest.mark.parametrize(
    ("way", "limit"), [(CUDA_GRAPHS, 4.5), (COMPILED_GRAPHS, 4.5), (CUDA_GRAPHS, 100), (True, 100)]
)
def test_a_peak_that_no_trace_tells_is_told_at_other_sizes_and_never_too_low(way, limit):
    """From two rows, where the limit has split the batch, and from all of it, which is compiled and not recorded."""
    machine = Host()
    profile, _ = planned(machine, limit, total_steps=5_000)
    tried = {trial.candidate.micro_batch for trial in profile.trials if trial.candidate.compiled == way}
    assert tried == ({2} if limit < 5 else {32})
    model = CostModel(profile)
    for rows, chunk in ((1, None), (2, None), (4, None), (8, None), (32, None), (4, 512), (32, 8192)):
        each = Candidate(rows, precision="bf16", fused_optimizer=True, loss_chunk=chunk, compiled=way)
        if chunk and not any(trial.candidate.loss_chunk == chunk for trial in profile.stage("head")):
            continue
        told, true = model.predict(each).peak_bytes, machine.peak_bytes(each)
        assert told is not None
        assert 0.97 * true <= told <= (1.05 if way == CUDA_GRAPHS else 5) * true


@pytest.mark.parametrize("way", [CUDA_GRAPHS, COMPILED_GRAPHS])
def test_a_recorded_step_of_another_size_is_not_told_shorter_than_it_is(way):
    """Smaller ones as much longer as the model as it is, whose host has more to launch; of larger ones no gain."""
    machine = Host()
    profile, _ = planned(machine, 4.5)
    model = CostModel(profile)
    for rows in (1, 2, 4, 32):
        each = Candidate(rows, precision="bf16", fused_optimizer=True, compiled=way)
        told, true = model.predict(each).step_s, machine.step_s("final", each)
        assert told is not None
        assert 0.98 * true <= told <= (1.6 if rows < 4 else 4) * true


def test_graphs_that_break_the_limit_do_not_speak_against_compiling():
    """A step of theirs leaves too little to be saved; one that waits for its host, as plans would be left with, not."""
    profile, _ = planned(Host(), 4.5)
    before = replace(profile, trials=tuple(t for t in profile.trials if t.stage not in ("compile", "final")))
    fastest, steps = before.stage("graphs")[0].candidate, 350
    for limit, promises in ((2.5 * GB, True), (100 * GB, False), (None, False)):
        under = replace(before, budget=Budget(memory=limit), total_steps=steps)
        assert is_promising(under, fastest) is promises


def test_of_modes_that_wait_alike_bf16_is_recorded():
    """fp16 seems a little faster and would need a loss scale."""

    class Noisy(Host):
        def step_s(self, stage: str, candidate: Candidate) -> float:
            return super().step_s(stage, candidate) * (0.9 if candidate.precision == "fp16" else 1.0)

    machine = Noisy()
    profile, _ = planned(machine, 4.5)
    assert to_compile(profile, CostModel(profile).modes[0]).precision == "bf16"
    recorded = [each for stage in machine.stages if stage.name == "graphs" for each in stage.candidates[1:]]
    assert {each.precision for each in recorded} == {"bf16"}
    chunked = {traced.candidate.precision for traced in profile.traces if traced.candidate.loss_chunk}
    assert chunked == {"bf16", "fp16"}  # the fastest may still be what is left
    scaled = replace(profile, reference=Reference("fp16"))  # a loop that has one already keeps it
    assert to_compile(scaled, CostModel(profile).modes[0]).precision == "fp16"
    unknown = replace(profile, device=replace(profile.device, peak_flops={}))
    assert to_compile(unknown, CostModel(profile).modes[0]).precision == "fp16"  # the fastest: no peak says otherwise
