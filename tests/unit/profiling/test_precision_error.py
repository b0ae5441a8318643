"""Half precision with an inaccurate gradient is refused, and the modules that cause the error are named."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from small_loops import class_loss
from torch import nn

import trimtab
from trimtab.plans.plan import Plan
from trimtab.plans.profile import Candidate
from trimtab.profiling.plan_proof import prove, refuted_settings
from trimtab.profiling.precision_error import GradientError, advice
from trimtab.profiling.training_loop import TrainingLoop

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


@pytest.mark.parametrize("make", [Net, Residual])
def test_planning_notes_the_modules_that_make_the_gradient_accurate(make, monkeypatch):
    subject = loop(make())
    monkeypatch.setattr("trimtab.profiling.plan_proof.chosen_candidate", lambda *_: HALF)
    profile = trimtab.profile(*subject_of(subject), num_blocks=3)
    assert profile.is_refuted("precision", "bf16")
    (text,) = [note.text for note in profile.notes if note.code == "precision.fp32_modules"]
    if make is Residual:  # Both the encoder and the potential must be accurate.
        assert "fp32_modules=" not in text
        return
    assert "fp32_modules='norm'" in text
    plan = Plan.fixed(ROWS, precision="bf16", fp32_modules="norm")
    assert relative_error(subject, plan) < 0.1 < relative_error(subject, Plan.fixed(ROWS, precision="bf16"))


def subject_of(subject):
    return subject.model, subject.optimizer, subject.loss_fn, subject.batch


def relative_error(subject, plan):
    def gradient(plan):
        with trimtab.start(subject.model, subject.optimizer, plan) as run:
            run.accumulate(run.window(subject.batch), subject.loss_fn)
            return torch.cat([p.grad.flatten() for p in subject.model.parameters()])

    whole = gradient(Plan.fixed(ROWS))
    return float((gradient(plan) - whole).norm() / whole.norm())


def test_advice_prefers_few_parameters_and_a_single_module():
    model = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2), nn.Linear(2, 2), nn.LayerNorm(2), nn.Tanh())
    error = GradientError(5.0, 0.001)

    def names(sufficient):
        def error_with(modules):
            return 0.01 if sufficient(set(modules)) else 4.0

        return advice(model, "bf16", error, error_with)

    norms = {model[1], model[3]}
    assert "fp32_modules='3'" in names(lambda found: model[3] in found)
    assert "fp32_modules='1,3'" in names(lambda found: norms <= found)
    assert "fp32_modules='1'" in names(lambda found: bool({model[0], model[1]} & found))
    assert "fp32_modules=" not in names(lambda found: False)
