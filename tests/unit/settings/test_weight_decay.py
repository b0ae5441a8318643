"""A plan's weight decay: set for a run, of all groups that decay, and put back."""

from __future__ import annotations

import copy

import pytest
import torch
from raising import raises
from torch import Tensor, nn

import trimtab
from trimtab.checkpoint.config import changes, world_of
from trimtab.core.errors import OptimizerError, ValueGivenError
from trimtab.integrations.trainer_rules import checked_plan
from trimtab.plans.plan import Plan
from trimtab.settings.weight_decay import use_weight_decay
from trimtab.tasks.models.gpt import GPT, GPTShape

PLANNED = Plan.fixed(4, weight_decay=0.5)


def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def made(decay: float = 0.01) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model whose biases do not decay, and its optimizer."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    weights = [p for p in model.parameters() if p.dim() == 2]
    rest = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": weights, "weight_decay": decay}, {"params": rest, "weight_decay": 0.0}]
    return model, torch.optim.AdamW(groups, lr=0.05)


def decays(optimizer: torch.optim.Optimizer) -> list[float]:
    return [group["weight_decay"] for group in optimizer.param_groups]


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, plan: Plan, steps: int = 5) -> list[Tensor]:
    with trimtab.start(model, optimizer, plan) as run:
        for seed in range(steps):
            batch = torch.randn(4, 3, generator=torch.Generator().manual_seed(seed))
            run.train_step(run.window(batch), loss_fn)
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("more", [{}, {"fused_optimizer": True}])
def test_it_trains_as_a_plain_loop_with_that_decay(more):
    ours = trained(*made(), Plan.fixed(4, weight_decay=0.5, **more))
    model, optimizer = made(decay=0.5)
    if more:
        for group in optimizer.param_groups:
            group["fused"] = True
    for seed in range(5):
        optimizer.zero_grad()
        loss_fn(model, torch.randn(4, 3, generator=torch.Generator().manual_seed(seed))).backward()
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(ours, model.parameters(), strict=True))
    others = trained(*made(), Plan.fixed(4, **more))
    assert not torch.equal(ours[0], others[0])


def test_groups_that_decay_nothing_are_left_and_all_is_put_back():
    model, optimizer = made()
    with trimtab.start(model, optimizer, PLANNED):
        assert decays(optimizer) == [0.5, 0.0]
    assert decays(optimizer) == [0.01, 0.0]


def test_what_is_saved_holds_the_users_own_and_what_is_loaded_takes_the_plans():
    model, optimizer = made()
    with trimtab.start(model, optimizer, PLANNED) as run:
        run.train_step(run.window(torch.randn(4, 3)), loss_fn)
        saved = optimizer.state_dict()
        assert [group["weight_decay"] for group in saved["param_groups"]] == [0.01, 0.0]
        assert decays(optimizer) == [0.5, 0.0]
        optimizer.load_state_dict(saved)
        assert decays(optimizer) == [0.5, 0.0]
    assert decays(optimizer) == [0.01, 0.0]
    after = optimizer.state_dict()
    assert [group["weight_decay"] for group in after["param_groups"]] == [0.01, 0.0]


def test_a_run_that_is_gone_on_with_decays_as_planned():
    whole = trained(*made(), PLANNED, steps=4)
    model, optimizer = made()
    with trimtab.start(model, optimizer, PLANNED) as run:
        for seed in range(2):
            run.train_step(run.window(torch.randn(4, 3, generator=torch.Generator().manual_seed(seed))), loss_fn)
        kept = copy.deepcopy((model.state_dict(), optimizer.state_dict(), run.state_dict()))
    model, optimizer = made()
    with trimtab.start(model, optimizer, PLANNED) as run:
        for each, state in zip((model, optimizer, run), kept, strict=True):
            each.load_state_dict(state)
        for seed in range(2, 4):
            run.train_step(run.window(torch.randn(4, 3, generator=torch.Generator().manual_seed(seed))), loss_fn)
    assert all(torch.equal(a, b) for a, b in zip(whole, model.parameters(), strict=True))


def test_what_is_loaded_is_the_users_own_from_then_on():
    other = made(decay=0.2)[1].state_dict()
    model, optimizer = made()
    with trimtab.start(model, optimizer, PLANNED) as run:
        run.train_step(run.window(torch.randn(4, 3)), loss_fn)
        optimizer.load_state_dict(other)
        assert decays(optimizer) == [0.5, 0.0]
        assert [group["weight_decay"] for group in optimizer.state_dict()["param_groups"]] == [0.2, 0.0]
    assert decays(optimizer) == [0.2, 0.0]


def test_a_state_that_decays_nothing_is_refused_where_it_is_loaded():
    """The plan would decay nothing from then on, and say that it does."""
    other = made(decay=0.0)[1].state_dict()
    model, optimizer = made()
    with (
        trimtab.start(model, optimizer, PLANNED),
        raises(OptimizerError, code="weight_decay.none", field="plan.weight_decay"),
    ):
        optimizer.load_state_dict(other)


def test_a_host_decides_it_by_its_own_settings():
    with raises(ValueGivenError, code="plan.decided_by_trainer", field="plan.weight_decay"):
        checked_plan(PLANNED, "the Trainer")


@pytest.mark.parametrize(("way", "without"), [("cuda_graphs", False), ("compiled_cuda_graphs", True)])
def test_a_host_launches_no_graphs(way, without):
    plan = checked_plan(trimtab.Plan.fixed(8, compiled=way), "the Trainer")
    assert (plan.compiled.value, plan.measured) == (without, None)
    assert plan.compiled.reason.startswith("without CUDA graphs")
    same = trimtab.Plan.fixed(8, compiled=True)
    assert checked_plan(same, "the Trainer") is same


def test_a_run_that_was_kept_before_plans_had_the_setting_goes_on():
    model, optimizer = made()
    left, planned = (world_of(model, optimizer, plan, ["cpu"]) for plan in (Plan.fixed(4), PLANNED))
    before = left | {"plan": left["plan"].replace("weight_decay=None, ", "")}
    assert before != left
    assert changes(before, left) == {}
    assert changes(before, planned).keys() == changes(left, planned).keys() == {"plan"}


def test_groups_that_come_and_go_are_left():
    _, optimizer = made()
    undo = use_weight_decay(optimizer, 0.5)
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))], "weight_decay": 0.3})
    assert decays(optimizer) == [0.5, 0.0, 0.3]
    assert [group["weight_decay"] for group in optimizer.state_dict()["param_groups"]] == [0.01, 0.0, 0.3]
    undo()
    assert decays(optimizer) == [0.01, 0.0, 0.3]
    undo = use_weight_decay(optimizer, 0.5)
    del optimizer.param_groups[1:]
    assert [group["weight_decay"] for group in optimizer.state_dict()["param_groups"]] == [0.01]
    undo()
    assert decays(optimizer) == [0.01]


def test_muon_decays_by_it_too():
    def after(decay: float, plan: Plan) -> list[Tensor]:
        torch.manual_seed(0)
        model = GPT(GPTShape(11, 8, num_layers=1, num_heads=2, width=8, dropout=0.0))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=decay)
        with trimtab.start(model, optimizer, plan) as run:
            tokens = torch.randint(11, (4, 9), generator=torch.Generator().manual_seed(1))
            run.train_step(run.window(tokens), lambda model, batch: model(batch[:, :-1]).square().mean())
        return [p.detach().clone() for p in model.parameters()]

    planned = after(0.01, Plan.fixed(4, optimizer="muon", weight_decay=0.5))
    by_hand = after(0.5, Plan.fixed(4, optimizer="muon"))
    assert all(torch.equal(a, b) for a, b in zip(planned, by_hand, strict=True))


def test_an_optimizer_that_decays_nothing_is_refused():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with raises(OptimizerError, code="weight_decay.none", field="plan.weight_decay"):
        trimtab.start(model, optimizer, Plan.fixed(4, weight_decay=0.5))


@pytest.mark.parametrize("name", ["state_dict", "load_state_dict"])
def test_an_optimizer_that_is_saved_in_a_way_of_its_own_is_refused(name):
    """It would not ask what is the user's and what the plan's."""
    own = type("Own", (torch.optim.AdamW,), {name: lambda self, *args: {}})
    model = nn.Linear(2, 2)
    with raises(OptimizerError, code="weight_decay.custom_state", field="plan.weight_decay"):
        trimtab.start(model, own(model.parameters()), PLANNED)
