"""A step that takes the place of the user's is compared with it on copies of the user's own parameters."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.optimizer import register_optimizer_step_post_hook

import trimtab
from trimtab.core.errors import OptimizerError
from trimtab.plans.plan import Plan
from trimtab.profiling.loop_facts import loop_facts, with_tested_step
from trimtab.techniques import optimizer_self_test
from trimtab.techniques.muon import require_muon
from trimtab.techniques.optimizer_self_test import fused_difference

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01),
    "nesterov": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True),
    "maximize": lambda parameters: torch.optim.SGD(parameters, lr=0.1, maximize=True),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=1e-3, weight_decay=0.01),
    "amsgrad": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, amsgrad=True),
    "a rate as a tensor": lambda parameters: torch.optim.AdamW(parameters, lr=torch.tensor(1e-3), maximize=True),
    "a rate of zero": lambda parameters: torch.optim.AdamW(parameters, lr=0.0),
}


@pytest.fixture(autouse=True)
def nothing_cached(monkeypatch):
    monkeypatch.setattr(optimizer_self_test, "_results", {})


def parameters_of(dtype):
    torch.manual_seed(0)
    values = [
        torch.randn(20, 30),
        torch.randn(20, 30).T,
        torch.randn(5, 4, 3, 3).contiguous(memory_format=torch.channels_last),
        torch.randn(()),
        torch.randn(0, 3),
        torch.ones(64),
        torch.zeros(9),
    ]
    return [nn.Parameter(value.to(dtype)) for value in values]


def really_differs(make, dtype):
    """Whether the fused step, taken on the parameters themselves, ends up elsewhere than the plain step."""
    plain, fused = parameters_of(dtype), parameters_of(dtype)
    for parameters, flags in ((plain, {"fused": False, "foreach": False}), (fused, {"fused": True, "foreach": False})):
        optimizer = make(parameters)
        for group in optimizer.param_groups:
            group.update(flags, lr=0.1)
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    return any(not torch.allclose(a, b, rtol=0.05, atol=0.02) for a, b in zip(plain, fused, strict=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_a_fused_step_is_refused_exactly_where_it_differs(make, dtype):
    optimizer = make(parameters_of(dtype))
    assert bool(fused_difference(optimizer)) is really_differs(make, dtype)
    assert not optimizer.state


def test_the_difference_names_dtype_and_device():
    class Broken(torch.optim.SGD):
        def step(self, closure=None):
            if not self.param_groups[0]["fused"]:
                super().step(closure)

    found = fused_difference(Broken([nn.Parameter(torch.ones(3, 4, dtype=torch.float64))], lr=0.1))
    assert "float64" in found
    assert "cpu" in found


@pytest.mark.parametrize("fault", ["one element", "the second step", "an exception"])
def test_a_fault_in_a_part_of_the_step_is_found(fault):
    class Broken(torch.optim.SGD):
        steps = 0

        def step(self, closure=None):
            kept = self.param_groups[0]["params"][0].detach().clone()
            super().step(closure)
            self.steps += 1
            if self.param_groups[0]["fused"]:
                value = self.param_groups[0]["params"][0].detach()
                if fault == "one element":
                    value.view(-1)[-1] = kept.view(-1)[-1]
                elif fault == "the second step" and self.steps == 2:
                    value.copy_(kept)
                elif fault == "an exception":
                    raise RuntimeError("no such kernel")

    assert fused_difference(Broken([nn.Parameter(torch.randn(6, 5))], lr=0.1, momentum=0.9))


def test_each_kind_of_parameter_is_tested_once(monkeypatch):
    made = []
    stepped = optimizer_self_test._SelfTest.stepped
    monkeypatch.setattr(optimizer_self_test._SelfTest, "stepped", lambda *given: made.append(1) or stepped(*given))
    parameters = [nn.Parameter(torch.randn(8, 8)) for _ in range(50)]
    for _ in range(3):
        assert not fused_difference(torch.optim.SGD(parameters, lr=0.1))
    assert len(made) == 2  # the plain step and the fused step
    fused_difference(torch.optim.SGD(parameters, lr=0.1, momentum=0.9))
    assert len(made) == 4


def test_random_numbers_and_hooks_of_every_optimizer_are_left_alone():
    seen = []
    handle = register_optimizer_step_post_hook(lambda *_: seen.append(1))
    state = torch.get_rng_state()
    try:
        fused_difference(torch.optim.AdamW([nn.Parameter(torch.ones(3, 3))]))
    finally:
        handle.remove()
    assert not seen
    assert torch.equal(state, torch.get_rng_state())


class Net(nn.Module):
    def __init__(self, dtype):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(400, 64).to(dtype)
        self.head = nn.Linear(64, 4)

    def forward(self, ids):
        return self.head(self.embedding(ids).float().mean(1))


def loss_fn(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def batch():
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 400, (32, 5), generator=generator), torch.randint(0, 4, (32,), generator=generator)


HALVES = [torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_a_run_with_a_wrong_fused_step_is_refused_at_its_start(dtype, monkeypatch):
    monkeypatch.setattr("trimtab.techniques.optimizers.fused_difference", lambda optimizer: "planted")
    model = Net(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with pytest.raises(OptimizerError) as caught:
        trimtab.start(model, optimizer, Plan.fixed(32, fused_optimizer=True))
    assert caught.value.code == "optimizer.fused_differs"
    assert not optimizer.param_groups[0]["fused"]
    trimtab.start(model, optimizer, Plan.fixed(32)).close()


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_a_run_that_is_not_refused_trains_half_parameters(dtype):
    model, reference = Net(dtype), Net(dtype)
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.5, momentum=0.9)
    for _ in range(5):
        optimizer.zero_grad()
        loss_fn(reference, batch()).backward()
        optimizer.step()
    ours = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    is_wrong = bool(fused_difference(ours))  # as torch 2.13's is on a CPU
    with contextlib.suppress(*[OptimizerError] * is_wrong):
        with trimtab.start(model, ours, Plan.fixed(32, fused_optimizer=True)) as run:
            for window in run.windows([batch()] * 5):
                run.train_step(window, loss_fn)
        assert not is_wrong
    if is_wrong:
        return
    moved = (reference.embedding.weight - Net(dtype).embedding.weight).norm()
    assert (model.embedding.weight - reference.embedding.weight).norm() < 0.1 * moved


def test_a_wrong_fused_step_does_not_count_as_supported(monkeypatch):
    model = Net(torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    facts = loop_facts(model, optimizer, 32, {})
    assert with_tested_step(facts, optimizer) == facts
    monkeypatch.setattr("trimtab.profiling.loop_facts.fused_difference", lambda optimizer: "planted difference")
    tested = with_tested_step(facts, optimizer)
    assert not tested.supports_fused
    assert "planted difference" in tested.fused_refusal


def test_muon_is_compared_with_its_step_in_double_precision(monkeypatch):
    for dtype in DTYPES:
        require_muon([nn.Parameter(torch.randn(12, 8).to(dtype)), nn.Parameter(torch.zeros(8, 12).to(dtype))])

    class Broken(torch.optim.Muon):
        def step(self, closure=None):
            if self.param_groups[0]["params"][0].dtype is torch.float64:
                super().step(closure)

    monkeypatch.setattr(torch.optim, "Muon", Broken)
    with pytest.raises(OptimizerError) as caught:
        require_muon([nn.Parameter(torch.randn(12, 8))])
    assert caught.value.code == "optimizer.muon_differs"
