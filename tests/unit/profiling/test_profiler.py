"""What a profile contains in addition to its trials: facts of the loop, FLOP, phases, the wait for data, padding."""

from __future__ import annotations

import itertools
import time

import pytest
import torch
from raising import raises
from small_loops import class_loss as mean_loss
from small_loops import sgd
from torch import nn

import trimtab
from trimtab.core.errors import ValueGivenError
from trimtab.core.objective import Reference
from trimtab.losses import Summed
from trimtab.measure import machine, timing
from trimtab.planner import search
from trimtab.planner.plan_choice import choose
from trimtab.planner.recommendations import padded_vocabulary
from trimtab.profiling import profiler, trials
from trimtab.profiling.loop_facts import count_step, loop_facts
from trimtab.profiling.measurement_notes import Notes
from trimtab.profiling.profiler import padding_saves_s
from trimtab.profiling.sample_batches import waiting_s
from trimtab.profiling.training_loop import TrainingLoop
from trimtab.state import process_state

pytestmark = pytest.mark.slow

ROWS = 8


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(trials, "BLOCK_S", 1e-6)
    monkeypatch.setattr(machine, "measured_cpu_peaks", lambda threads: {"fp32": 1e9, "bf16": 1e6, "fp16": 1e6})


def loop():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    return model, torch.optim.AdamW(model.parameters()), (torch.randn(ROWS, 4), torch.randint(0, 3, (ROWS,)))


def profiled(loss_fn=mean_loss, **others):
    model, optimizer, batch = loop()
    return trimtab.profile(model, optimizer, loss_fn, batch, num_blocks=3, **others)


class Loader:
    """Batches that take a while each, the first longer; tells how many were drawn."""

    def __init__(self, batch, wait_s=0.003, first_s=0.1, num_workers=0):
        self.batch, self.wait_s, self.first_s, self.num_workers = batch, wait_s, first_s, num_workers
        self.drawn = 0

    def __iter__(self):
        time.sleep(self.first_s)
        for _ in range(50):
            time.sleep(self.wait_s)
            self.drawn += 1
            yield self.batch


def test_the_wait_for_a_batch_is_timed_after_the_first_and_becomes_advice():
    model, optimizer, batch = loop()
    loader = Loader(batch)
    found = profiled(data=loader)
    assert 0.003 <= found.phases_s["data"] < 0.03
    assert loader.drawn == 0  # its state is as before
    model, optimizer, batch = loop()
    plan = trimtab.plan(model, optimizer, mean_loss, batch, data=Loader(batch, wait_s=0.02), num_blocks=3)
    assert any(each.code == "data.waiting" for each in plan.advice)


@pytest.mark.parametrize(
    ("num_workers", "step_s", "waits_s"), [(0, 0.01, 0.03), (2, 0.01, 0.02), (None, 0.01, 0.03), (1, 0.05, 0)]
)
def test_workers_draw_while_the_step_runs(num_workers, step_s, waits_s):
    loader = Loader(loop()[2], num_workers=num_workers)
    assert waiting_s(0.03, {"forward": step_s}, loader) == pytest.approx(waits_s)


@pytest.mark.parametrize("batches", [0, 1])
def test_data_too_short_to_time_is_no_data(batches):
    assert "data" not in profiled(data=[loop()[2]] * batches).phases_s


@pytest.mark.parametrize(
    ("make", "adapt", "drawn"),
    [
        (list, "learning_rate", 3),
        (iter, "learning_rate", 0),
        (iter, None, 3),
    ],
)
def test_an_iterator_is_left_whole_for_the_range_test(monkeypatch, make, adapt, drawn):
    model, optimizer, batch = loop()
    timed = []
    monkeypatch.setattr(
        profiler, "draw_some", lambda subject, data, notes: timed.extend(data) or profiler.SampledBatches()
    )
    trimtab.plan(model, optimizer, mean_loss, batch, adapt=adapt, data=make([batch] * 3), num_blocks=3)
    assert len(timed) == drawn


@pytest.mark.parametrize(("factor", "longest"), [(1, 1.0), (3, 3.0)])
def test_a_batch_longer_than_the_example_is_seen(factor, longest):
    batch = loop()[2]
    longer = tuple(torch.cat([part] * factor) for part in batch)
    found = profiled(data=[batch, batch, longer])
    assert found.loop.longest == longest
    advice = choose(found, trimtab.Objective(), trimtab.Budget()).advice
    assert any(each.code == "batch.longer_drawn" for each in advice) is (factor > 1)


def test_the_price_of_handing_memory_back_is_known_before_anything_is_tried(monkeypatch):
    seen = itertools.cycle((0, 5000, 5100, 5200))
    monkeypatch.setattr(process_state, "can_retain", lambda: True)
    monkeypatch.setattr(timing, "num_faults", lambda: next(seen))
    monkeypatch.setattr(timing, "fault_s", lambda: 1e-6)
    found = profiled()
    assert (found.loop.faults_per_step, found.loop.fault_s) == (100, 1e-6)
    monkeypatch.setattr(process_state, "can_retain", lambda: False)
    assert profiled().loop.fault_s is None


def small_only(model, batch):
    if len(batch[0]) > 4:
        raise torch.OutOfMemoryError("CUDA out of memory")
    return mean_loss(model, batch)


def test_a_loop_that_does_not_fit_is_planned_in_slices():
    model, optimizer, batch = loop()
    found = trimtab.profile(model, optimizer, small_only, batch)
    assert (found.loop.flops_per_step, found.loop.terms_per_step, found.loop.terms) == (None, ROWS, "rows")
    assert found.check.splittable
    assert "first 4 of 8 samples" in found.check.reason
    assert found.phases_s == {}
    plan = trimtab.plan(model, optimizer, small_only, batch)
    assert plan.micro_batch.value in (1, 2, 4)
    assert "baseline is not possible (out of memory)" in plan.micro_batch.reason
    assert plan.baseline is None


def test_terms_are_known_where_only_the_backward_does_not_fit():
    class Full(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            raise torch.OutOfMemoryError("CUDA out of memory")

    model, optimizer, batch = loop()
    subject = TrainingLoop(model, optimizer, lambda m, b: Summed(Full.apply(mean_loss(m, b)), 24), batch)
    assert count_step(subject, "fp32", Notes())[:3] == (None, 24.0, "tokens")


def test_a_loop_is_counted_in_its_own_precision():
    """One that runs in 16 bits only has FLOP, terms and a plan; splitting it is not proved."""

    def half_only(model, batch):
        if not torch.is_autocast_enabled("cpu"):
            raise RuntimeError("the kernel wants 16 bits")
        return mean_loss(model, batch)

    found = profiled(half_only, reference=Reference("bf16"))
    assert found.loop.flops_per_step > 0
    assert not found.check.splittable
    assert list(found.phases_s) == ["slicing", "forward", "backward", "optimizer"]  # and no wait for data


def test_padding_is_timed_at_the_logits_of_the_loss(monkeypatch):
    asked = []
    monkeypatch.setattr("trimtab.profiling.profiler.padding_saves_s", lambda *given: asked.append(given[1:]) or 0.25)
    found = profiled(mean_loss)
    assert asked == [(found.loop.logits[1], ROWS, "fp32")]
    assert found.loop.padding_saves_s == 0.25


@pytest.mark.parametrize("fused", [False, True])
def test_scores_of_attention_that_is_written_out_are_seen(fused):
    def attend(x):
        if fused:
            return nn.functional.scaled_dot_product_attention(x, x, x)
        return (x @ x.mT / x.shape[-1] ** 0.5).softmax(-1) @ x

    model = nn.Linear(4, 4)
    batch = torch.randn(ROWS, 2, 32, 4)  # 2 heads of 32 tokens
    loop_of = model, torch.optim.AdamW(model.parameters()), lambda m, x: attend(m(x)).square().mean(), batch
    found = trimtab.profile(*loop_of, num_blocks=3)
    assert found.loop.scores_bytes == (0 if fused else 4 * ROWS * 2 * 32 * 32)
    advice = choose(found, trimtab.Objective(), trimtab.Budget()).advice
    assert len(advice) == (not fused)
    assert fused or advice[0].code == "attention.unfused"


def test_how_long_a_run_is_tells_when_to_hurry_and_whether_to_compile(monkeypatch):
    monkeypatch.setattr(search, "MOST_OF_A_RUN", 0.0)  # so that these few milliseconds are not too slow for it
    over_time_budget, patient = profiled(total_steps=1), profiled()
    assert (over_time_budget.over_time_budget, patient.over_time_budget) == (True, False)
    assert not over_time_budget.stage("sizes")
    plan = choose(over_time_budget, trimtab.Objective(), trimtab.Budget())
    assert "not tried: a run of" in plan.compiled.reason
    assert "total_steps" in choose(patient, trimtab.Objective(), trimtab.Budget()).compiled.reason
    with raises(ValueGivenError, code="value.invalid", field="total_steps"):
        profiled(total_steps=0)


WORDS = 5_000
MODEL = nn.Sequential(nn.Embedding(WORDS, 8), nn.Linear(8, WORDS))


@pytest.fixture
def timed(monkeypatch):
    """Let a product take as many seconds as a test says of its words."""
    seconds = {}

    def time_call(function, device):
        function()
        return seconds[len(function.args[1])]

    monkeypatch.setattr(profiler, "time_call", time_call)
    return seconds


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_what_is_saved_is_of_all_tokens_of_a_step(timed, precision):
    timed.update({WORDS: 1.5, 5_056: 1.25})
    assert padding_saves_s(MODEL, WORDS, 5_120, precision) == pytest.approx(10 * 0.25)
    assert padding_saves_s(MODEL, WORDS, 16, precision) == pytest.approx(0.25)


def test_padding_that_is_slower_or_runs_out_of_memory_saves_nothing(timed, monkeypatch):
    timed.update({WORDS: 1.0, 5_056: 1.25})
    assert padding_saves_s(MODEL, WORDS, 512, "fp32") == 0.0

    def fail(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(profiler, "time_call", fail)
    assert padding_saves_s(MODEL, WORDS, 512, "fp32") is None


def test_noise_saves_nothing(monkeypatch):
    seconds = iter([9.0, 9.0, *(1.3, 1.0, 1.3, 1.0) * 3])  # pairs turn their order: 1.3 is ours as often as the other's
    monkeypatch.setattr(profiler, "time_call", lambda *_: next(seconds))
    assert padding_saves_s(MODEL, WORDS, 512, "fp32") == 0.0


@pytest.mark.parametrize(("model", "words"), [(MODEL, 5_056), (MODEL, 4_999), (nn.Linear(8, 100), 100)])
def test_where_there_is_nothing_to_pad_nothing_is_timed(timed, model, words):
    assert padding_saves_s(model, words, 512, "fp32") is None


def test_rounding_up():
    assert [padded_vocabulary(n) for n in (50_257, 50_304, 1)] == [50_304, 50_304, 64]


@pytest.mark.parametrize(
    ("layer", "has_workspaces", "has_convolutions"),
    [
        (nn.Conv1d(2, 2, 3), True, False),  # no layout of images: its weight has three dimensions
        (nn.Conv2d(2, 2, 3), True, True),
        (nn.Conv3d(2, 2, 3), True, False),
        (nn.ConvTranspose2d(2, 2, 3), True, True),
        (nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Conv1d(2, 2, 3))), True, False),
        (nn.LayerNorm(2), False, False),
    ],
)
def test_convolutions_of_any_dimension_have_workspaces(layer, has_workspaces, has_convolutions):
    facts = loop_facts(layer, sgd(layer), 4, {})
    assert (facts.has_workspaces, facts.has_convolutions) == (has_workspaces, has_convolutions)


def test_what_is_frozen_is_counted_apart():
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    model[0].requires_grad_(False)
    facts = loop_facts(model, torch.optim.AdamW(model[1].parameters()), 4, {})
    assert (facts.num_parameters, facts.trainable_parameters, facts.parameter_bytes) == (11, 3, 44)
