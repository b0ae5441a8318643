"""Muon for matrices and AdamW for the rest: torch's own two steps, one state, saved and loaded as one."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

from benchmarks.paper.muon_with_adamw import MuonWithAdamW, muon_with_adamw
from benchmarks.paper.tasks import load_task
from trimtab.tasks.models.gpt import GPT, GPTShape

SHAPE = GPTShape(vocab_size=20, context=8, num_layers=2, num_heads=2, width=8, tied_head=True)


def gpt() -> GPT:
    torch.manual_seed(0)
    return GPT(SHAPE)


def parted(model: GPT) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    matrices = [p for name, p in model.named_parameters() if name.startswith("blocks.") and p.ndim == 2]
    return matrices, [p for p in model.parameters() if not any(p is matrix for matrix in matrices)]


def made(model: GPT) -> MuonWithAdamW:
    return muon_with_adamw(*parted(model), muon_rate=0.02, adamw_rate=1e-3, betas=(0.9, 0.95), weight_decay=0.1)


def learn(model: GPT, *optimizers: torch.optim.Optimizer, steps: int = 3, first: int = 0) -> None:
    for step in range(first, first + steps):
        tokens = torch.randint(20, (4, 9), generator=torch.Generator().manual_seed(step))
        model.zero_grad()
        model(tokens[:, :-1], tokens[:, 1:])[0].backward()
        for optimizer in optimizers:
            optimizer.step()


def same(one: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def test_it_is_torchs_two_optimizers_to_the_bit():
    ours, theirs = gpt(), gpt()
    matrices, others = parted(theirs)
    learn(ours, made(ours))
    learn(
        theirs,
        torch.optim.Muon(matrices, lr=0.02, weight_decay=0.1),
        torch.optim.AdamW(others, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True),
    )
    assert same(ours, theirs)
    assert not same(ours, gpt())


def test_each_groups_rate_is_its_own():
    model = gpt()
    optimizer = made(model)
    for group in optimizer.param_groups:
        group["lr"] = 0.0 if group["muon"] else group["lr"]
    before = copy.deepcopy(model)
    learn(model, optimizer, steps=1)
    (matrices, others), (old_matrices, old_others) = parted(model), parted(before)
    assert all(torch.equal(a, b) for a, b in zip(matrices, old_matrices, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(others, old_others, strict=True))
    model = gpt()
    optimizer = made(model)
    learn(model, optimizer, steps=1)
    its_model, its_optimizer = copy.deepcopy((model, optimizer))
    learn(model, optimizer, first=1)
    learn(its_model, its_optimizer, first=1)
    assert same(model, its_model)
    model, calls = gpt(), []
    optimizer = made(model)
    optimizer.register_step_pre_hook(lambda *args: calls.append("before"))
    optimizer.register_step_post_hook(lambda *args: calls.append("after"))
    assert optimizer.step(lambda: calls.append("closure") or 2.0) == 2.0
    assert calls == ["before", "closure", "after"]


@pytest.mark.parametrize("through", [lambda state: state, lambda state: pickle.loads(pickle.dumps(state))])
def test_it_goes_on_from_a_saved_state(through):
    whole, begun = gpt(), gpt()
    learn(whole, made(whole), steps=5)
    first = made(begun)
    learn(begun, first, steps=2)
    second = made(begun)
    second.load_state_dict(through(first.state_dict()))
    learn(begun, second, steps=3, first=2)
    assert same(whole, begun)


@pytest.mark.parametrize(("name", "rate"), [("wikitext2_gpt", 3e-3), ("wikitext2_gpt2", 6e-4)])
def test_the_built_in_recipe_gives_muon_the_matrices_of_the_blocks(name, rate):
    task = load_task(name)
    with torch.device("meta"):
        model = task.make_model()
    muons, rest = task.muon.make_optimizer(model).param_groups
    names = {id(p): key for key, p in model.named_parameters()}
    of_muon, of_adamw = ({names[id(p)] for p in group["params"]} for group in (muons, rest))
    kinds = ("attention.qkv", "attention.project", "expand", "contract")
    layers = model.shape.num_layers
    assert of_muon == {f"blocks.{layer}.{kind}.weight" for layer in range(layers) for kind in kinds}
    assert of_adamw == set(names.values()) - of_muon
    assert (muons["lr"], muons["weight_decay"], muons["momentum"], muons["nesterov"]) == (0.02, 0.1, 0.95, True)
    assert (rest["lr"], rest["betas"], rest["weight_decay"], rest["fused"]) == (rate, (0.9, 0.95), 0.1, True)
