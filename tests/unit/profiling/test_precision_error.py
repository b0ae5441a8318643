"""Half precision with an inaccurate gradient is refused, and the modules that cause the error are named."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from small_loops import class_loss
from torch import nn

import trimtab
from trimtab.core.choice import Note
from trimtab.core.serialization import from_json, to_json
from trimtab.planner.recompute_cost import keep_all, predict
from trimtab.planner.search import SearchPhase
from trimtab.plans.plan import Plan
from trimtab.plans.profile import Candidate, Profile
from trimtab.profiling import plan_proof
from trimtab.profiling.block_profile import measure_recomputable
from trimtab.profiling.candidate_traces import trace_candidates
from trimtab.profiling.measurement_notes import Notes
from trimtab.profiling.plan_proof import prove, refuted_settings, with_proof
from trimtab.profiling.precision_error import GradientError, sufficient_modules
from trimtab.profiling.smoke_test import CrashTest
from trimtab.profiling.training_loop import TrainingLoop
from trimtab.profiling.trials import run_stage
from trimtab.settings.loss_chunk import LEAST_CLASSES
from trimtab.state.loop_state import LoopState
from trimtab.techniques import mixed_precision

ROWS = 8
REFERENCE = Candidate(ROWS)
HALF = replace(REFERENCE, precision="bf16")


class Normalised(nn.Module):
    """Normalises features with the variance as a difference of means, which cancels for a large mean."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)
        nn.init.constant_(self.linear.bias, 5.0)

    def forward(self, x):
        x = self.linear(x)
        mean = x.mean(-1, keepdim=True)
        variance = (x * x).mean(-1, keepdim=True) - mean * mean
        return (x - mean) / torch.sqrt(variance.abs() + 1e-5)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.head = nn.Linear(4, 16), Normalised(), nn.Linear(16, 3)

    def forward(self, x):
        return self.head(self.norm(self.first(x)))


class Potential(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 16), nn.Linear(16, 3)

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))


class Residual(nn.Module):
    """Second difference of a network: the differences of nearly equal numbers are only rounding in bf16."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.encoder, self.potential = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 4)), Potential()

    def forward(self, x):
        x, h = self.encoder(x), 0.05
        return (self.potential(x + h) - 2 * self.potential(x) + self.potential(x - h)) / h**2


def loop(model):
    generator = torch.Generator().manual_seed(1)
    batch = torch.randn(ROWS, 4, generator=generator), torch.arange(ROWS) % 3
    return TrainingLoop(model, torch.optim.SGD(model.parameters(), lr=0.1), class_loss, batch)


@pytest.mark.parametrize("make", [Net, Residual])
def test_a_precision_with_an_inaccurate_gradient_is_refused(make):
    subject = loop(make())
    candidate = HALF.having(fused_optimizer=True)
    proof = prove(subject, candidate, REFERENCE)
    assert (proof.holds, proof.code) == (False, "proof.inaccurate")
    assert proof.worst > 1
    assert refuted_settings(subject, candidate, REFERENCE) == ("precision",)


def test_a_precision_of_the_loop_itself_is_not_refused():
    assert prove(loop(Residual()), HALF.having(fused_optimizer=True), HALF).holds


def test_rounding_of_weights_explains_a_large_error_near_a_minimum():
    """The gradient of a fitted model is small, so that its error exceeds its norm in every half-precision loop."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 4))
    optimizer = torch.optim.LBFGS(model.parameters(), lr=1, max_iter=300, line_search_fn="strong_wolfe")
    x = torch.randn(ROWS, 4)

    def loss_fn(model, batch):
        return (model(batch[0]) - batch[0].sin()).square().mean()

    def closure():
        optimizer.zero_grad()
        loss = loss_fn(model, (x,))
        loss.backward()
        return loss

    optimizer.step(closure)
    subject = TrainingLoop(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn, (x,))
    with torch.autocast("cpu", torch.bfloat16):
        half = torch.autograd.grad(loss_fn(model, (x,)), list(model.parameters()))
    whole = torch.autograd.grad(loss_fn(model, (x,)), list(model.parameters()))
    sizes = [torch.cat([each.flatten() for each in found]).norm() for found in (half, whole)]
    assert sizes[0] > 5 * sizes[1], "the error in bf16 is several times the gradient"
    assert prove(subject, HALF, REFERENCE).holds


def refused(subject, candidate, monkeypatch, profile=None):
    """Return the profile after the proof of a candidate as the plan's choice, and the notes."""
    notes = Notes()
    profile = profile or trimtab.profile(*subject_of(subject), num_blocks=3)
    monkeypatch.setattr("trimtab.profiling.plan_proof.chosen_candidate", lambda *_: candidate)
    start = LoopState(subject.trained, subject.optimizer)
    profile, is_over = with_proof(subject, profile, lambda _: None, start, notes)
    return profile, is_over, notes.found


def test_a_refused_precision_is_accepted_with_the_modules_that_make_it_accurate(monkeypatch):
    subject = loop(Net())
    before = {name: each.clone() for name, each in subject.model.state_dict().items()}
    profile, is_over, notes = refused(subject, HALF, monkeypatch)
    assert not is_over
    assert notes == ()
    (refusal,) = profile.refused_by_proof
    assert (refusal.setting, refusal.value, refusal.code) == ("precision", "bf16", "proof.inaccurate")
    assert (refusal.remedy.setting, refusal.remedy.value) == ("fp32_modules", "norm")
    remedied = HALF.having(fp32_modules="norm")
    assert profile.error_of(HALF).code == "proof.inaccurate"
    assert profile.error_of(remedied) is None
    assert from_json(Profile, to_json(profile)) == profile
    profile, is_over, _ = refused(subject, remedied, monkeypatch, profile)
    assert is_over
    assert profile.proof_of(remedied).holds
    assert all(torch.equal(before[name], each) for name, each in subject.model.state_dict().items())
    assert type(subject.model.norm) is Normalised
    plan = Plan.fixed(ROWS, precision="bf16", fp32_modules="norm")
    assert relative_error(subject, plan) < 0.1 < relative_error(subject, Plan.fixed(ROWS, precision="bf16"))


def test_a_precision_without_sufficient_modules_stays_refused_with_a_note(monkeypatch):
    """Both the encoder and the potential must be accurate, which are the whole model."""
    profile, is_over, notes = refused(loop(Residual()), HALF, monkeypatch)
    assert not is_over
    assert [note.code for note in notes] == ["precision.fp32_modules"]
    (refusal,) = profile.refused_by_proof
    assert refusal.remedy is None


class Masked(Net):
    """Assigns results to some rows of a tensor, which needs equal types: the activation cannot run in fp32."""

    def __init__(self):
        super().__init__()
        self.activation = nn.Tanh()

    def forward(self, x):
        x = self.first(x)
        y, rows = torch.zeros_like(x), [0, 2, 5]
        y[rows] = self.activation(x[rows])
        return self.head(self.norm(y))


def test_modules_with_which_the_loop_fails_do_not_end_the_search():
    subject = loop(Masked())
    start = LoopState(subject.trained, subject.optimizer)
    assert plan_proof._sufficient_modules(subject, HALF, REFERENCE, None, start).names == "norm"


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's own compiler
def test_modules_of_a_compiled_model_are_found_without_compiling():
    compiled = []

    def backend(graph, _):
        compiled.append(graph)
        return graph.forward

    subject = loop(torch.compile(Net(), backend=backend))
    start = LoopState(subject.trained, subject.optimizer)
    found = plan_proof._sufficient_modules(subject, HALF, REFERENCE, None, start)
    torch._dynamo.reset()
    assert found.names == "norm"  # A name in the compiled model would begin with "_orig_mod".
    assert not compiled


def test_modules_that_do_not_suffice_are_refused_and_the_precision_is_not_refused_again(monkeypatch):
    subject, candidate = loop(Net()), HALF.having(fp32_modules="first", fused_optimizer=True)
    proof = prove(subject, candidate, REFERENCE)
    assert (proof.holds, proof.code) == (False, "proof.inaccurate")
    assert refuted_settings(subject, candidate, REFERENCE) == ("fp32_modules",)
    profile, is_over, _ = refused(subject, candidate, monkeypatch)
    assert not is_over
    assert [(each.setting, each.value) for each in profile.refused_by_proof] == [("fp32_modules", "first")]


def test_modules_with_the_last_layer_are_not_combined_with_a_chunked_loss(monkeypatch):
    class Tail(Normalised):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(16, LEAST_CLASSES)

        def forward(self, x):
            return self.head(super().forward(x))

    torch.manual_seed(0)
    profile, _, _ = refused(loop(nn.Sequential(nn.Linear(4, 16), Tail())), HALF, monkeypatch)
    remedied = HALF.having(fp32_modules="1")
    assert profile.error_of(remedied) is None
    assert profile.error_of(remedied.having(loss_chunk=2)).code == "fp32_modules.loss_chunk"


def subject_of(subject):
    return subject.model, subject.optimizer, subject.loss_fn, subject.batch


def relative_error(subject, plan):
    def gradient(plan):
        with trimtab.start(subject.model, subject.optimizer, plan) as run:
            run.accumulate(run.window(subject.batch), subject.loss_fn)
            return torch.cat([p.grad.flatten() for p in subject.model.parameters()])

    whole = gradient(Plan.fixed(ROWS))
    return float((gradient(plan) - whole).norm() / whole.norm())


def test_few_modules_with_few_parameters_are_sufficient():
    model = nn.Sequential(
        nn.Linear(2, 2), nn.LayerNorm(2), nn.Bilinear(2, 2, 2), nn.LayerNorm(2), nn.Tanh(), nn.Linear(2, 2)
    )

    def names(sufficient):
        def error_with(modules):
            return 0.01 if sufficient(set(modules)) else 4.0

        return sufficient_modules(model, "bf16", GradientError(5.0, 0.001), error_with).names

    norms = {model[1], model[3]}
    assert names(lambda found: model[3] in found) == "3"
    assert names(lambda found: norms <= found) == "1,3"
    assert names(lambda found: bool({model[0], model[1]} & found)) == "1"
    assert names(lambda found: {model[1], model[2]} <= found) == "1,2"  # Of two kinds.
    assert names(lambda found: {model[2], model[5]} <= found) == ""  # Only with all parameters in fp32.
    assert names(lambda found: False) == ""


def in_tf32(x):
    """Return values rounded to the mantissa of TF32, which is that of fp16."""
    return x.half().float() if pretended_tf32 else x


pretended_tf32 = []


class NormalisedInTf32(Normalised):
    """Normalises the rounded results of a matrix product."""

    def forward(self, x):
        x = in_tf32(self.linear(x))
        mean = in_tf32(x.mean(-1, keepdim=True))
        variance = in_tf32((x * x).mean(-1, keepdim=True)) - in_tf32(mean * mean)
        return (x - mean) / torch.sqrt(variance.abs() + 1e-5)


@pytest.mark.parametrize(("bias", "holds"), [(0.0, True), (100.0, False)])
def test_tf32_is_compared_with_fp32_as_half_precision_is(bias, holds, monkeypatch):
    def hold():
        pretended_tf32.append(True)
        return pretended_tf32.clear

    monkeypatch.setattr(mixed_precision, "check_available", lambda *_: None)
    monkeypatch.setattr(mixed_precision.tf32, "_apply", hold)
    model = Net()
    model.norm = NormalisedInTf32()
    nn.init.constant_(model.norm.linear.bias, bias)
    subject, candidate = loop(model), REFERENCE.having(precision="tf32")
    proof = prove(subject, candidate, REFERENCE)
    assert (proof.holds, proof.code) == (holds, "proof.holds" if holds else "proof.inaccurate"), proof.reason
    assert not pretended_tf32
    assert prove(subject, candidate, candidate).holds
    if not holds:
        profile, is_over, notes = refused(subject, candidate, monkeypatch)
        assert not is_over
        assert notes == ()
        assert [(each.setting, each.remedy) for each in profile.refused_by_proof] == [("precision", None)]


MADE_UP_S = {("fp32", None): 1.0, ("bf16", None): 0.5, ("bf16", "norm"): 0.6}


@pytest.mark.usefixtures("brief_trials")
def test_a_plan_combines_half_precision_with_the_modules_that_its_proof_needs(monkeypatch):
    """Everything is real but the seconds and the speed of matrix products, which differ from machine to machine."""

    def timed(*args, **kwargs):
        def made_up(trial):
            seconds = MADE_UP_S[trial.candidate.precision, trial.candidate.fp32_modules]
            # Real steps are alike, and may stop after three blocks, which are too few for a gain.
            return replace(trial, block_s=(seconds,) * max(5, len(trial.block_s)))

        return tuple(made_up(trial) if trial.is_whole else trial for trial in run_stage(*args, **kwargs))

    monkeypatch.setattr("trimtab.profiling.profiler.run_stage", timed)
    monkeypatch.setattr("trimtab.planner.search.precision_refusal", lambda _, each: None if each == "bf16" else REFUSED)
    model, optimizer, loss_fn, batch = subject_of(loop(Net()))
    plan = trimtab.plan(model, optimizer, loss_fn, batch, num_blocks=5)
    assert (plan.precision.value, plan.fp32_modules.value) == ("bf16", "norm")
    assert plan.proof.holds
    assert {"precision", "fp32_modules"} <= set(plan.proof.settings)
    assert plan.fp32_modules.code == "proof.remedy"
    assert "precision.fp32_modules" not in {note.code for note in plan.notes}
    assert from_json(Plan, to_json(plan)) == plan
    with trimtab.start(model, optimizer, plan) as run:
        run.train_step(run.window(batch), loss_fn)
    assert type(model.norm) is Normalised


REFUSED = Note("precision.slow", "not tried")


class Wide(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 512), nn.Linear(512, 64)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


@pytest.mark.usefixtures("brief_trials")
def test_traces_and_blocks_count_the_bytes_of_modules_in_fp32():
    model = nn.Sequential(nn.Linear(4, 64), *(Wide() for _ in range(4)), nn.Linear(64, 3))
    batch = torch.randn(256, 4), torch.arange(256) % 3
    subject = TrainingLoop(model, torch.optim.SGD(model.parameters(), lr=0.1), class_loss, batch)
    plain = Candidate(256, precision="bf16")
    candidates = plain, plain.having(fp32_modules="1,2,3,4")
    trials = run_stage(subject, SearchPhase("modes", candidates), 1, lambda _: None)
    counted = [trial.peak_bytes for trial in trials]
    guard = CrashTest(subject, REFERENCE.having(micro_batch=256))
    traces = trace_candidates(subject, candidates, lambda _: None, guard, Notes())
    traced = [each.whole.peak_bytes(256) for each in traces]
    chains = [measure_recomputable(subject, each).whole.at(256) for each in candidates]
    kept = [each.held_bytes + predict(each.stages, keep_all(len(each.stages))).peak_bytes for each in chains]
    assert counted[1] > 1.2 * counted[0]
    assert traced == pytest.approx(counted, rel=0.02)
    assert kept == pytest.approx(counted, rel=0.05)
