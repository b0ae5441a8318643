"""A plan for a device that is not here: traced and predicted, and nothing of the loop is touched."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from raising import raises
from small_loops import sgd
from torch import nn

import trimtab
from trimtab.core.errors import InfeasibleError, ModelError, ValueGivenError
from trimtab.core.hardware import DeviceSpec, absent_device
from trimtab.measure.fake_tensors import FakeTensors
from trimtab.measure.memory_trace import trace_step
from trimtab.planner.target_device_candidates import recorded_candidates, recorded_traces, traced_for
from trimtab.plans.profile import Candidate
from trimtab.profiling.candidate_traces import trace_elsewhere
from trimtab.profiling.target_device import profile_elsewhere
from trimtab.tasks.language_modelling import next_token_loss
from trimtab.tasks.models.gpt import GPT, GPTShape

pytestmark = pytest.mark.slow

H100 = absent_device("H100 SXM")
SHAPE = GPTShape(vocab_size=2048, context=32, num_layers=1, num_heads=2, width=32)
ROWS = 16
MEMORY_TOO = trimtab.Objective(1.0, 0.5)


def loop():
    torch.manual_seed(0)
    model = GPT(SHAPE).train()
    batch = (torch.randint(0, 2048, (ROWS, 33)),)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3), next_token_loss, batch


def profiled(*given, device: DeviceSpec = H100, **others):
    known = {"reference": trimtab.Reference(), "objective": trimtab.Objective(), "budget": trimtab.Budget()}
    return profile_elsewhere(*given, device, **(known | others))


def planned(**others):
    return trimtab.plan(*loop(), **({"device": H100} | others))


@pytest.fixture(scope="module")
def free():
    """A plan without a limit."""
    return planned()


def test_each_precision_of_the_device_is_traced_and_the_fastest_in_chunks():
    profile = profiled(*loop(), objective=MEMORY_TOO)
    assert profile.trials == ()
    found = {(each.candidate.precision, each.candidate.loss_chunk) for each in profile.traces}
    (fastest,) = {precision for precision, chunk in found if chunk is not None}
    assert found == {(p, None) for p in ("fp32", "tf32", "bf16")} | {(fastest, chunk) for chunk in (128, 64)}
    assert all(each.candidate.fused_optimizer for each in profile.traces)


def test_a_fused_step_is_planned_where_it_was_what_was_traced():
    plan = planned(reference=trimtab.Reference("bf16"))
    assert plan.fused_optimizer.value
    assert plan.fused_optimizer.code == "trace.fused"
    assert [(loser.value, loser.code) for loser in plan.fused_optimizer.rejected] == [(False, "trace.missing")]


@pytest.mark.parametrize("device", [H100, replace(H100, peak_flops={"fp32": 15e12, "fp16": 112e12})])
def test_a_recorded_profile_has_the_traces_that_would_be_made(device):
    """Of a device that has fp16 and no bf16 too: its operators are those that bf16 has."""
    live = profiled(*loop(), objective=MEMORY_TOO, device=device)
    bare = replace(live, traces=())
    found = [each for wanted in recorded_candidates(bare) for each in trace_elsewhere(*loop(), wanted)]
    kept = replace(bare, target_device_traces=tuple(found))
    again = traced_for(kept.for_device(live.device), recorded_traces(kept))
    assert [each.candidate for each in again.traces] == [each.candidate for each in live.traces]
    for ours, theirs in zip(again.traces, live.traces, strict=True):
        assert (ours.whole, ours.sliced, ours.work) == (theirs.whole, theirs.sliced, theirs.work)
        if theirs.candidate.loss_chunk is None:
            peaks = {each.precision for each in theirs.work.micro_batch} - {theirs.candidate.precision}
            assert peaks <= {"fp32"}  # in no other half precision, which the device may lack


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.LSTM(32, 64, batch_first=True), nn.Linear(64, 8)

    def forward(self, x):
        return self.head(self.body(x)[0])


def test_layers_most_of_whose_memory_no_trace_tells_are_refused():
    torch.manual_seed(0)
    model = Recurrent()
    loss_fn = lambda m, b: m(b[0]).square().mean()  # noqa: E731
    with raises(ModelError, code="model.recurrent", field="model"):
        trimtab.plan(model, torch.optim.AdamW(model.parameters()), loss_fn, (torch.randn(16, 64, 32),), device=H100)


def test_figures_are_compared_with_limits_with_a_margin(free):
    assert "peak memory: traced, plus a margin of 5%" in free.explain()
    assert "step time: from the data sheet of the device; 33% is added before comparison with a limit" in free.explain()
    assert planned(budget=trimtab.Budget(time=1.34 * free.predicted.step_s)).predicted == free.predicted
    for limit in ({"time": 1.32 * free.predicted.step_s}, {"memory": "1MiB"}):
        with raises(InfeasibleError, code="plan.infeasible", field="budget"):
            planned(budget=trimtab.Budget(**limit))
    with pytest.raises(InfeasibleError):
        planned(device=replace(H100, memory_bytes=1000))


def test_small_chunks_of_the_loss_head_are_traced_where_memory_counts_alone():
    def chunks(**others):
        return {each.candidate.loss_chunk for each in profiled(*loop(), **others).traces} - {None}

    assert chunks() == chunks(budget=trimtab.Budget(memory="80GiB")) == {128}
    assert chunks(budget=trimtab.Budget(memory="4MiB")) == chunks(objective=MEMORY_TOO) == {128, 64}


@pytest.mark.parametrize("share", [0.9, 0.5])
def test_less_memory_is_met_and_gives_no_faster_plan(free, share):
    limit = int(share * free.baseline.peak_bytes)
    limited = planned(budget=trimtab.Budget(memory=limit))
    assert free.predicted.step_s <= limited.predicted.step_s
    assert limited.predicted.peak_bytes <= limit


def test_nothing_of_the_loop_is_touched():
    model, optimizer, loss_fn, batch = loop()
    before = copy.deepcopy(model.state_dict())
    trimtab.plan(model, optimizer, loss_fn, batch, device="H100 SXM")
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not optimizer.state
    assert not any(group["fused"] for group in optimizer.param_groups)
    assert model.head.chunk_rows is None
    assert "loss" not in vars(model.head)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("chunk", [128, 64])
def test_peaks_are_those_of_a_trace_at_any_size(precision, chunk):
    model, optimizer, loss_fn, batch = loop()
    both = [Candidate(ROWS, precision=each, fused_optimizer=True, loss_chunk=chunk) for each in ("fp32", "bf16")]
    found = trace_elsewhere(model, optimizer, loss_fn, batch, both)
    (traced,) = (each for each in found if each.candidate.precision == precision)
    model.head.chunk_rows = chunk
    for group in optimizer.param_groups:
        group["fused"] = True
    autocast = lambda: torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16")  # noqa: E731
    for rows, k in ((16, 1), (12, 1), (6, 2)):
        step = trace_step(model, optimizer, loss_fn, (batch[0][:rows],), autocast=autocast, num_micro_batches=k)
        found = traced.whole if k == 1 else traced.sliced
        whole_batch = (ROWS - rows) * batch[0][0].numel() * 8  # a slice is a view of all of it
        assert found.peak_bytes(rows) == pytest.approx(step + whole_batch, rel=2e-3)


def test_a_plan_is_predicted_and_says_so():
    slow = replace(H100, peak_flops={"fp32": 1e9, "tf32": 2e9, "bf16": 8e9})
    plan = planned(device=slow)
    assert (plan.measured, plan.verified, plan.check) == (None, None, None)
    assert plan.baseline.step_s > plan.predicted.step_s
    assert plan.precision.value == "bf16"
    assert plan.predicted.step_s > 0
    assert "this plan, predicted: " in plan.explain()
    assert "this plan, measured: " not in plan.explain()
    assert "x the speed on H100 SXM, predicted" in plan.explain().splitlines()[0]
    assert "not proved" in str(replace(plan, micro_batch=replace(plan.micro_batch, value=8, changed=True)))
    assert {loser.value for loser in plan.precision.rejected} >= {"fp32", "tf32"}


def test_batch_statistics_are_not_split():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.LazyLinear(2))
    model(torch.zeros(2, 3, 8, 8))
    loss_fn = lambda m, b: nn.functional.cross_entropy(m(b[0]), b[1])  # noqa: E731
    batch = (torch.randn(8, 3, 8, 8), torch.zeros(8).long())
    plan = trimtab.plan(model, sgd(model), loss_fn, batch, device="H100 SXM")
    assert "peak memory: traced, plus a margin of 15%" in plan.explain()
    assert plan.micro_batch.value == 8
    assert (plan.check.splittable, plan.check.code) == (False, "split.batch_statistics")
    assert plan.check.reason in plan.explain()


def test_a_loop_without_memory_can_be_planned(free):
    with FakeTensors():
        model, optimizer, loss_fn, batch = loop()
    plan = trimtab.plan(model, optimizer, loss_fn, batch, device="H100 SXM")
    assert (plan.predicted, plan.changes) == (free.predicted, free.changes)


def test_what_cannot_be_traced_is_said_at_the_door():
    model, optimizer, _, batch = loop()
    reads = lambda m, b: m(b[0]).sum() * m(b[0]).sum().item()  # noqa: E731
    several = lambda m, b: nn.functional.cross_entropy(m(b[0])[:, -1], b[0][:, -1], reduction="none")  # noqa: E731
    for loss_fn in (reads, several):
        with raises(ModelError, code="model.not_traceable", field="model"):
            trimtab.plan(model, optimizer, loss_fn, (batch[0][:, :32],), device="H100 SXM")
    with raises(ValueGivenError, code="batch.too_small", field="example_batch"):
        trimtab.plan(model, optimizer, next_token_loss, (batch[0][:2],), device="H100 SXM")
    with raises(ValueGivenError, code="device.peaks_unknown", field="device"):
        planned(device=replace(H100, bandwidth_bytes_s=None))


@pytest.mark.parametrize("device", ["Frobnicator 9000", ""])
def test_a_device_that_is_not_known_is_refused(device):
    with raises(ValueGivenError, code="value.invalid", field="device"):
        planned(device=device)
