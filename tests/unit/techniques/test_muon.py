"""Muon beside the user's AdamW: torch's own two steps, one object, its groups, its checkpoint and its undoing."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from raising import raises
from rank_cases import Tokens
from state_digest import fingerprint
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import trimtab
from trimtab.core.errors import FormatError, ModelError, OptimizerError, ValueGivenError
from trimtab.plans.plan import Plan
from trimtab.techniques.muon import MOMENTUM, hidden_matrices, use_muon

ROWS = 4
MUON = Plan.fixed(ROWS, optimizer="muon")
OF_BLOCKS = {f"blocks.{i}.{name}.weight" for i in range(3) for name in ("up", "down")}


def loop(**options):
    """Return a model and an AdamW of two groups with rates of their own."""
    torch.manual_seed(0)
    model = Tokens(torch.float32)
    matrices, vectors = ([p for p in model.parameters() if (p.ndim > 1) is wide] for wide in (True, False))
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0, "lr": 3e-3}]
    return model, torch.optim.AdamW(groups, lr=1e-2, **options)


def batches(first=0, steps=4):
    made = []
    for step in range(first, first + steps):
        tokens = torch.randint(11, (ROWS, 7), generator=torch.Generator().manual_seed(step))
        made.append((tokens[:, :-1], tokens[:, 1:]))
    return made


def loss_fn(model, batch):
    return nn.functional.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


def train(run, data):
    for window in run.windows(data):
        run.train_step(window, loss_fn)


def weights(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def by_hand(data, scheduled=False):
    """Return a model trained by torch's two optimizers, each over its own parameters."""
    model, _ = loop()
    named = dict(model.named_parameters())
    hidden = [named[name] for name in named if name in OF_BLOCKS]
    tables = [named["embedding.weight"]]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": tables, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0, "lr": 3e-3}]
    muon = torch.optim.Muon(hidden, lr=1e-2, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    optimizers = [torch.optim.AdamW(groups, lr=1e-2), muon]
    schedules = [ExponentialLR(each, 0.7) for each in optimizers] if scheduled else []
    for batch in data:
        model.zero_grad()
        loss_fn(model, batch).backward()
        for each in (*optimizers, *schedules):
            each.step()
    return model


@pytest.mark.parametrize("fused", [False, True])
def test_it_is_torchs_muon_beside_torchs_adamw_to_the_bit(fused):
    model, optimizer = loop(fused=fused)
    with trimtab.start(model, optimizer, MUON) as run:
        train(run, batches())
    if fused:
        torch.testing.assert_close(weights(model), weights(by_hand(batches())), rtol=1e-5, atol=1e-6)
    else:
        assert torch.equal(weights(model), weights(by_hand(batches())))


def test_rates_are_the_groups_own_and_the_users_schedule_is_followed():
    model, optimizer = loop()
    groups = optimizer.param_groups
    schedule = ExponentialLR(optimizer, 0.7)
    with trimtab.start(model, optimizer, MUON) as run:
        for window in run.windows(batches()):
            run.train_step(window, loss_fn)
            schedule.step()
    assert optimizer.param_groups is groups
    assert torch.equal(weights(model), weights(by_hand(batches(), scheduled=True)))


def test_matrices_of_blocks_are_muons_and_all_else_is_adamws():
    model, optimizer = loop()
    named = {id(p): name for name, p in model.named_parameters()}
    assert {named[id(p)] for p in hidden_matrices(model, optimizer)} == OF_BLOCKS
    model.blocks[1].requires_grad_(False)
    assert len(hidden_matrices(model, optimizer)) == 4
    model.blocks[0].up.weight = nn.Parameter(model.embedding.weight.T[:8].contiguous())
    assert len(hidden_matrices(model, optimizer)) == 3  # a parameter that the optimizer does not have
    model.also = nn.Linear(8, 16)
    model.also.weight = model.blocks[2].up.weight
    assert len(hidden_matrices(model, optimizer)) == 2  # one that is used outside of the blocks too


def test_tables_in_blocks_are_no_matrices():
    block = [nn.Sequential(nn.Embedding(4, 8), nn.LayerNorm((3, 8)), nn.Linear(8, 8)) for _ in range(2)]
    model = nn.ModuleList(block)
    found = hidden_matrices(model, torch.optim.AdamW(model.parameters()))
    assert [id(p) for p in found] == [id(each[2].weight) for each in block]


def test_gradients_stand_after_the_step_as_after_adamws():
    model, optimizer = loop()
    with trimtab.start(model, optimizer, MUON) as run:
        for window in run.windows(batches(steps=1)):
            run.train_step(window, loss_fn)
            assert all(p.grad is not None for p in model.parameters())


def test_closing_leaves_no_trace_but_the_weights():
    model, optimizer = loop()
    before = fingerprint(model, optimizer)
    trimtab.start(model, optimizer, MUON).close()
    assert fingerprint(model, optimizer) == before
    with trimtab.start(model, optimizer, MUON) as run:
        train(run, batches())
        inside = [optimizer.state[p] for p in hidden_matrices(model, optimizer)]
        assert all(set(state) == {MOMENTUM} for state in inside)
    assert not any(MOMENTUM in state for state in optimizer.state.values())
    with trimtab.start(model, optimizer, Plan.fixed(ROWS)) as run:
        train(run, batches(4))  # AdamW goes on, with moments of its own
    assert all("exp_avg" in optimizer.state[p] for p in model.parameters())


def test_adamws_moments_come_back_where_muon_never_stepped_and_go_where_it_did():
    model, optimizer = loop()
    with trimtab.start(model, optimizer, Plan.fixed(ROWS)) as run:
        train(run, batches())
    saved = copy.deepcopy(optimizer.state_dict())
    trimtab.start(model, optimizer, MUON).close()
    after = optimizer.state_dict()
    assert all(torch.equal(after["state"][i][k], v) for i, s in saved["state"].items() for k, v in s.items())
    with trimtab.start(model, optimizer, MUON) as run:
        train(run, batches(4, 1))
    assert not any(p in optimizer.state for p in hidden_matrices(model, optimizer))


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, KeyboardInterrupt])
def test_a_momentum_that_cannot_be_made_leaves_adamws_moments(monkeypatch, error):
    model, optimizer = loop()
    with trimtab.start(model, optimizer, Plan.fixed(ROWS)) as run:
        train(run, batches())
    moments = {p: dict(state) for p, state in optimizer.state.items()}
    hooks = {name: len(held) for name, held in vars(optimizer).items() if name.endswith("hooks")}
    zeros, calls = torch.zeros_like, itertools.count(1)

    def failing(*given, **how):
        if next(calls) == 2:
            raise error("the second matrix")
        return zeros(*given, **how)

    with monkeypatch.context() as patch:
        patch.setattr(torch, "zeros_like", failing)
        with pytest.raises(error, match="the second matrix"):
            use_muon(model, optimizer)
    assert next(calls) == 3
    assert optimizer.state.keys() == moments.keys()
    for parameter, state in optimizer.state.items():
        assert state.keys() == moments[parameter].keys()
        assert all(value is moments[parameter][name] for name, value in state.items())
    assert {name: len(held) for name, held in vars(optimizer).items() if name.endswith("hooks")} == hooks
    with trimtab.start(model, optimizer, MUON) as run:
        train(run, batches(4))


@pytest.mark.parametrize("run_first", [True, False])
def test_a_resumed_run_goes_on_to_the_bit(run_first):
    whole, optimizer = loop()
    with trimtab.start(whole, optimizer, MUON) as run:
        train(run, batches(0, 6))
    begun, its = loop()
    with trimtab.start(begun, its, MUON) as run:
        train(run, batches(0, 3))
        kept = copy.deepcopy((begun.state_dict(), its.state_dict(), run.state_dict()))
    resumed, its = loop()
    resumed.load_state_dict(kept[0])
    with trimtab.start(resumed, its, MUON) as run:
        loads = [(run, kept[2]), (its, kept[1])]
        for each, state in loads if run_first else reversed(loads):
            each.load_state_dict(state)
        train(run, batches(3, 3))
    assert torch.equal(weights(resumed), weights(whole))


def test_a_kept_run_goes_on_from_its_checkpoint_to_the_bit(tmp_path):
    whole, optimizer = loop()
    with trimtab.start(whole, optimizer, MUON) as run:
        train(run, batches(0, 6))
    for steps in (3, 6):  # cut off after three; resumed, the loader's first three are passed over
        model, optimizer = loop()
        checkpoints = trimtab.Checkpoints(tmp_path / "run", every_steps=3)
        with trimtab.start(model, optimizer, MUON, checkpoints=checkpoints) as run:
            assert run.applied_steps == steps - 3
            for window in run.windows(batches(0, 6)):
                run.train_step(window, loss_fn)
                if run.applied_steps == steps:
                    run.checkpoint()
                    break
    assert torch.equal(weights(model), weights(whole))


def test_a_checkpoint_outlives_the_plan():
    """Saved under Muon, gone on with under AdamW alone: it begins its moments of the matrices anew."""
    model, optimizer = loop()
    with trimtab.start(model, optimizer, MUON) as run:
        train(run, batches())
        saved = copy.deepcopy(optimizer.state_dict())
    other, its = loop()
    its.load_state_dict(saved)
    with trimtab.start(other, its, Plan.fixed(ROWS)) as run:
        train(run, batches())
    assert torch.isfinite(weights(other)).all()


@pytest.mark.parametrize(
    "state", [{"momentum_buffer": []}, {"momentum_buffer": [torch.zeros(2, 2)] * 6}, {"other": 1}, 3]
)
def test_a_momentum_of_another_model_is_refused_before_anything_changes(state):
    model, optimizer = loop()
    with trimtab.start(model, optimizer, MUON) as run:
        train(run, batches())
        good = run.state_dict()
        with raises(FormatError, code="format.invalid", field="state.muon"):
            run.load_state_dict(good | {"muon": state})
        now = run.state_dict()["muon"][MOMENTUM]
        assert all(torch.equal(*pair) for pair in zip(now, good["muon"][MOMENTUM], strict=True))


def test_a_window_that_overflows_moves_no_matrix():
    """AdamW's fused step looks for an overflow itself; Muon is told of it too."""
    for fused in (False, True):
        model, optimizer = loop(fused=fused)
        plan = Plan.fixed(ROWS, optimizer="muon", precision="fp16")
        with trimtab.start(model, optimizer, plan) as run:
            before = weights(model)
            (window,) = [run.window(batch) for batch in batches(steps=1)]
            run.train_step(window, lambda model, batch: loss_fn(model, batch) * 1e30)
            assert run.applied_steps == 0
            assert torch.equal(weights(model), before)
            train(run, batches(1))
            assert run.applied_steps > 0


def test_an_optimizer_that_raised_steps_the_matrices_once():
    model, optimizer = loop()
    plain, failing = by_hand(batches(steps=1)), [True]

    def fail(*_):
        if failing.pop():
            failing.append(False)
            raise RuntimeError("once")
        failing.append(False)

    with trimtab.start(model, optimizer, MUON) as run:
        optimizer.register_step_pre_hook(fail)
        (window,) = [run.window(batch) for batch in batches(steps=1)]
        for micro in window:
            run.backward(loss_fn(run.model, micro))
        with pytest.raises(RuntimeError, match="once"):
            run.step()
        assert run.step()
    assert torch.equal(weights(model), weights(plain))


def test_a_step_with_a_closure_is_refused_before_it_changes_anything():
    model, optimizer = loop()
    with trimtab.start(model, optimizer, MUON) as run:
        train(run, batches())
        loss_fn(model, batches()[0]).backward()
        before = fingerprint(model, optimizer)
        for args, more in (((lambda: 0.0,), {}), ((), {"closure": lambda: 0.0})):
            with raises(OptimizerError, code="muon.closure", field="optimizer.step"):
                optimizer.step(*args, **more)
        assert fingerprint(model, optimizer) == before
        assert all(p.grad is not None for p in model.parameters())


def test_hooks_of_all_optimizers_are_called_once_for_each_step():
    model, optimizer = loop()
    calls = []
    hooks = [
        register_optimizer_step_pre_hook(lambda stepped, *_: calls.append(("before", stepped is optimizer))),
        register_optimizer_step_post_hook(lambda stepped, *_: calls.append(("after", stepped is optimizer))),
    ]
    try:
        with trimtab.start(model, optimizer, MUON) as run:
            train(run, batches(steps=2))
    finally:
        for hook in hooks:
            hook.remove()
    assert calls == [("before", True), ("after", True)] * 2


def test_the_users_hooks_see_all_gradients_before_and_after_a_step():
    model, optimizer = loop()
    seen = []

    def see(stepped, *_):
        seen.append(all(p.grad is not None for group in stepped.param_groups for p in group["params"]))

    optimizer.register_step_pre_hook(see)
    optimizer.register_step_post_hook(see)
    with trimtab.start(model, optimizer, MUON) as run:
        train(run, batches(steps=2))
    assert seen == [True] * 4


def sharded(model):
    model.set_requires_gradient_sync = None  # as of a module that FSDP2 holds


@pytest.mark.parametrize(
    ("make", "change", "error", "code", "got"),
    [
        (torch.optim.SGD, None, OptimizerError, "muon.not_adamw", "SGD"),
        (torch.optim.Adam, None, OptimizerError, "muon.not_adamw", "Adam"),
        (lambda p, lr: torch.optim.AdamW(p, lr, maximize=True), None, OptimizerError, "muon.option", "maximize=True"),
        (torch.optim.AdamW, sharded, ModelError, "muon.sharded", "sharded"),
        (torch.optim.AdamW, lambda model: model.blocks.requires_grad_(False), ModelError, "muon.no_matrices", ""),
    ],
)
def test_what_muon_cannot_go_beside_is_refused_at_the_door(make, change, error, code, got):
    model, _ = loop()
    optimizer = make(model.parameters(), lr=0.1)
    if change is not None:
        change(model)
    before = fingerprint(model, optimizer)
    with raises(error, code=code) as caught:
        trimtab.start(model, optimizer, MUON)
    assert got in caught.value.got
    assert fingerprint(model, optimizer) == before


def test_a_model_without_blocks_has_no_hidden_matrix():
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    with raises(ModelError, code="muon.no_matrices", field="model"):
        trimtab.start(model, torch.optim.AdamW(model.parameters()), MUON)


@pytest.mark.parametrize("values", [{"zero_stage": 1}, {"zero_stage": 3}, {"zero_stage": 2, "engine": "deepspeed"}])
def test_shards_are_no_whole_matrices(values):
    with raises(ValueGivenError, code="value.invalid", field="plan.optimizer"):
        Plan.fixed(ROWS, optimizer="muon", num_ranks=2, **values)
    assert Plan.fixed(ROWS, optimizer="muon", num_ranks=2, zero_stage=0).optimizer.value == "muon"
