"""A plan's storage of optimizer state: the user's object with smaller state, its checkpoints, and its undoing."""

from __future__ import annotations

import copy
import gc
import itertools
import pickle
import weakref

import pytest
import torch
from raising import raises
from state_digest import fingerprint
from torch import Tensor, nn
from torch.optim.lr_scheduler import ExponentialLR

import trimtab
from trimtab.core.errors import FormatError, ModelError, OptimizerError, ValueGivenError
from trimtab.integrations.trainer_rules import checked_plan
from trimtab.plans.plan import Plan
from trimtab.profiling.candidate_traces import trace_optimizer_states
from trimtab.profiling.training_loop import TrainingLoop
from trimtab.settings.optimizer_state import STORAGES
from trimtab.state.peak_memory import peak_bytes, state_tensors, storage_bytes
from trimtab.techniques.low_bit_state import bytes_saved, use_low_bit
from trimtab.techniques.low_bit_storage import QuantizedBlocks, storage_of

ROWS = 4
LOW = STORAGES[1:]
every_kind = pytest.mark.parametrize("kind", LOW)
OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3, weight_decay=0.1),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-3, weight_decay=0.1, amsgrad=True, maximize=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01, nesterov=True),
}


def plan_of(kind: str, **more) -> Plan:
    return Plan.fixed(ROWS, optimizer_state=kind, **more)


def model_of(dtype: torch.dtype = torch.float32, width: int = 65) -> nn.Module:
    """Return a model with a large weight, of whole blocks and a rest, and with small parameters."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, width), nn.Tanh(), nn.Linear(width, 2)).to(dtype)


def loop(
    make=OPTIMIZERS["adamw"], dtype: torch.dtype = torch.float32, width: int = 65
) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = model_of(dtype, width)
    return model, make(model.parameters())


def batches(first: int = 0, steps: int = 3, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [torch.randn(ROWS, 64, generator=torch.Generator().manual_seed(first + i)).to(dtype) for i in range(steps)]


def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch)[:, :2] - batch[:, :2]).square().mean()


def train(run, data) -> None:
    for window in run.windows(data):
        run.train_step(window, loss_fn)


def weights(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def large(model: nn.Module) -> nn.Parameter:
    return model[0].weight


def tensors(state: dict) -> dict[str, Tensor]:
    return {name: value for name, value in state.items() if isinstance(value, Tensor)}


@every_kind
@pytest.mark.parametrize(("name", "width"), [*((name, 65) for name in OPTIMIZERS), ("adamw", 4200)])
def test_a_step_is_torchs_step_from_the_stored_values(kind, name, width):
    """By hand: torch's fused optimizer, whose large states are written and read back after each step.

    The larger width has more elements than the 2**18 that are updated at once on a CPU.
    """
    model, optimizer = loop(OPTIMIZERS[name], width=width)
    with trimtab.start(model, optimizer, plan_of(kind)) as run:
        train(run, batches())
        saved = optimizer.state_dict()["state"]
    plain, its = loop(OPTIMIZERS[name], width=width)
    its.param_groups[0]["fused"] = True
    # bf16 is rounded by the run's own random numbers, so only the size of the difference is compared.
    exact = kind != "bf16"
    for batch in batches():
        its.zero_grad()
        loss_fn(plain, batch).backward()
        its.step()
        states = [tensors(its.state[p]).items() for p in plain.parameters() if exact and p.numel() >= 4096]
        for key, value in itertools.chain.from_iterable(states):
            if key != "step":
                storage = storage_of(kind, value.device, is_signed="sq" not in key)
                stored = storage.zeros(value.numel())
                storage.write(stored, 0, value.flatten(), torch.empty(0))
                value.copy_(storage.read(stored, 0, value.numel()).view_as(value))
    if exact:
        torch.testing.assert_close(weights(model), weights(plain), rtol=1e-6, atol=1e-7)
    for key, value in tensors(its.state[large(plain)]).items():
        assert float((saved[0][key] - value).norm()) <= (1e-6 if exact else 2**-7) * float(value.norm())


@every_kind
def test_the_state_takes_the_announced_bytes_and_small_parameters_keep_theirs(kind):
    plain, its = loop()
    with trimtab.start(plain, its, Plan.fixed(ROWS)) as run:
        train(run, batches())
    model, optimizer = loop()
    saved = bytes_saved(optimizer, kind)
    with trimtab.start(model, optimizer, plan_of(kind)) as run:
        train(run, batches())
        assert storage_bytes(state_tensors(optimizer)) == storage_bytes(state_tensors(its)) - saved
        small = [p for p in model.parameters() if p is not large(model)]
        assert all(optimizer.state[p].keys() == {"step", "exp_avg", "exp_avg_sq"} for p in small)
    bits = {"bf16": 16, "8bit": 8, "4bit": 4}[kind]
    assert saved == pytest.approx(2 * 64 * 65 * (32 - bits) / 8, rel=0.05)


def test_closing_before_a_step_leaves_no_trace():
    model, optimizer = loop()
    before = fingerprint(model, optimizer)
    trimtab.start(model, optimizer, plan_of("8bit")).close()
    assert fingerprint(model, optimizer) == before


@every_kind
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_continues_in_few_bits_and_comes_back_plain(kind, name):
    model, optimizer = loop(OPTIMIZERS[name])
    with trimtab.start(model, optimizer, Plan.fixed(ROWS)) as run:
        train(run, batches())
    before = {key: value.clone() for key, value in tensors(optimizer.state[large(model)]).items()}
    hooks = {key: len(held) for key, held in vars(optimizer).items() if key.endswith("hooks")}
    trimtab.start(model, optimizer, plan_of(kind)).close()
    after = optimizer.state[large(model)]
    assert after.keys() == before.keys()
    for key, value in tensors(after).items():
        assert (value.shape, value.dtype, value.stride()) == (
            before[key].shape,
            before[key].dtype,
            before[key].stride(),
        )
        if key != "step":
            assert float((value - before[key]).norm() / before[key].norm()) < (0.35 if kind == "4bit" else 0.02)
    assert {key: len(held) for key, held in vars(optimizer).items() if key.endswith("hooks")} == hooks
    assert after.get("step") == before.get("step")
    loss_fn(model, batches()[0]).backward()
    optimizer.step()  # the plain loop resumes


@every_kind
def test_a_saved_state_is_plain_and_loads_into_a_plain_optimizer(kind):
    model, optimizer = loop()
    with trimtab.start(model, optimizer, plan_of(kind)) as run:
        train(run, batches())
        saved = pickle.loads(pickle.dumps(optimizer.state_dict()))
        assert {key for state in saved["state"].values() for key in state} == {"step", "exp_avg", "exp_avg_sq"}
        assert all(value.dtype is torch.float32 for state in saved["state"].values() for value in state.values())
    after = optimizer.state_dict()["state"]
    assert all(torch.equal(value, after[i][key]) for i, state in saved["state"].items() for key, value in state.items())
    _, other = loop()
    other.load_state_dict(saved)
    assert torch.equal(other.state[other.param_groups[0]["params"][0]]["exp_avg"], saved["state"][0]["exp_avg"])


@every_kind
@pytest.mark.parametrize("run_first", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_resumed_run_is_bitwise_equal(kind, run_first, dtype):
    whole, optimizer = loop(dtype=dtype)
    with trimtab.start(whole, optimizer, plan_of(kind)) as run:
        train(run, batches(0, 6, dtype))
    begun, its = loop(dtype=dtype)
    with trimtab.start(begun, its, plan_of(kind)) as run:
        train(run, batches(0, 3, dtype))
        kept = copy.deepcopy((begun.state_dict(), its.state_dict(), run.state_dict()))
    resumed, its = loop(dtype=dtype)
    resumed.load_state_dict(kept[0])
    with trimtab.start(resumed, its, plan_of(kind)) as run:
        loads = [(run, kept[2]), (its, kept[1])]
        for each, state in loads if run_first else reversed(loads):
            each.load_state_dict(state)
        loaded = its.state_dict()["state"]
        assert all(map(torch.equal, tensors(loaded[0]).values(), tensors(kept[1]["state"][0]).values()))
        train(run, batches(3, 3, dtype))
    assert torch.equal(weights(resumed), weights(whole))


@every_kind
def test_a_checkpointed_run_resumes_with_identical_losses(kind, tmp_path):
    losses: dict[str, list[float]] = {}
    for name, folder, stops in (("whole", "a", (6,)), ("parts", "b", (3, 6))):
        losses[name] = []
        for steps in stops:
            model, optimizer = loop()
            checkpoints = trimtab.Checkpoints(tmp_path / folder, every_steps=3)
            with trimtab.start(model, optimizer, plan_of(kind), checkpoints=checkpoints) as run:
                for window in run.windows(batches(0, 6)):
                    losses[name].append(float(run.train_step(window, loss_fn)))
                    if run.applied_steps == steps:
                        run.checkpoint()
                        break
    assert losses["parts"] == losses["whole"]
    assert len(losses["whole"]) == 6


@pytest.mark.parametrize("state", [{"steps": -1}, {"other": 1}, 3])
def test_an_invalid_state_is_refused_before_anything_changes(state):
    model, optimizer = loop()
    with trimtab.start(model, optimizer, plan_of("bf16")) as run:
        train(run, batches())
        good = run.state_dict()
        with pytest.raises((FormatError, ValueGivenError)) as caught:
            run.load_state_dict(good | {"optimizer_state": state})
        assert str(caught.value.field).startswith("state.optimizer_state")
        assert run.state_dict()["optimizer_state"] == good["optimizer_state"] == {"steps": 3}


def test_learning_rates_follow_the_users_schedule():
    model, optimizer = loop()
    groups, schedule = optimizer.param_groups, ExponentialLR(optimizer, 0.0)
    with trimtab.start(model, optimizer, plan_of("8bit")) as run:
        train(run, batches(0, 1))
        schedule.step()  # the rate is 0 from here on
        before = weights(model)
        train(run, batches(1, 1))
        assert torch.equal(weights(model), before)
    assert optimizer.param_groups is groups


def test_gradients_are_there_after_the_step_and_late_groups_keep_plain_state():
    model, optimizer = loop()
    added = nn.Parameter(torch.ones(5000))
    with trimtab.start(model, optimizer, plan_of("8bit")) as run:
        train(run, batches(0, 1))
        (window,) = [run.window(batch) for batch in batches(1, 1)]
        run.train_step(window, loss_fn)
        assert all(p.grad is not None for p in model.parameters())
        optimizer.add_param_group({"params": [added]})
        added.grad = torch.ones(5000)
        with pytest.warns(RuntimeWarning, match="applied twice"):
            optimizer.step()
        assert "exp_avg" in optimizer.state[added]
        assert "exp_avg" in optimizer.state_dict()["state"][4]


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_that_overflows_changes_nothing(fused):
    model, optimizer = loop(lambda p: torch.optim.AdamW(p, lr=1e-3, fused=fused))
    with trimtab.start(model, optimizer, plan_of("8bit", precision="fp16")) as run:
        before = weights(model)
        run.train_step(run.window(batches()[0]), lambda model, batch: loss_fn(model, batch) * 1e30)
        assert run.applied_steps == 0
        assert torch.equal(weights(model), before)
        train(run, batches())
        assert run.applied_steps > 0


def test_an_optimizer_that_raised_steps_each_parameter_once():
    plain, its = loop()
    with trimtab.start(plain, its, plan_of("8bit")) as run:
        train(run, batches(0, 1))
    model, optimizer = loop()
    faults = [RuntimeError("once")]

    def fail(*_):
        if faults:
            raise faults.pop()

    with trimtab.start(model, optimizer, plan_of("8bit")) as run:
        optimizer.register_step_pre_hook(fail)
        for micro in (window := run.window(batches()[0])):
            run.backward(loss_fn(run.model, micro))
        with pytest.raises(RuntimeError, match="once"):
            run.step()
        assert run.step()
    assert window is not None
    assert torch.equal(weights(model), weights(plain))


def test_the_gradients_of_a_step_that_raised_are_released_with_the_window():
    model, optimizer = loop()
    gradients = []

    def fail(*_):
        raise RuntimeError("once")

    large(model).register_post_accumulate_grad_hook(lambda p: gradients.append(weakref.ref(p.grad)))
    with trimtab.start(model, optimizer, plan_of("8bit")) as run:
        optimizer.register_step_pre_hook(fail)
        for micro in run.window(batches()[0]):
            run.backward(loss_fn(run.model, micro))
        with pytest.raises(RuntimeError, match="once"):
            run.step()
        run.discard()
        gc.collect()
        assert gradients[0]() is None


def test_the_users_hooks_see_all_gradients_before_and_after_a_step():
    model, optimizer = loop()
    seen = []

    def see(stepped, *_):
        seen.append(all(p.grad is not None for group in stepped.param_groups for p in group["params"]))

    optimizer.register_step_pre_hook(see)
    optimizer.register_step_post_hook(see)
    with trimtab.start(model, optimizer, plan_of("8bit")) as run:
        train(run, batches(0, 2))
    assert seen == [True] * 4


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_with_a_closure_is_refused_before_it_changes_anything(name):
    model, optimizer = loop(OPTIMIZERS[name])
    with trimtab.start(model, optimizer, plan_of("8bit")) as run:
        train(run, batches())
        before = fingerprint(model, optimizer)
        for args, more in (((lambda: 0.0,), {}), ((), {"closure": lambda: 0.0})):
            with raises(OptimizerError, code="optimizer_state.closure", field="optimizer.step"):
                optimizer.step(*args, **more)
        assert fingerprint(model, optimizer) == before


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda loop: pickle.loads(pickle.dumps(loop))])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_copy_of_the_optimizer_has_plain_state_and_steps(name, duplicate):
    model, optimizer = loop(OPTIMIZERS[name])
    with trimtab.start(model, optimizer, plan_of("8bit")) as run:
        train(run, batches())
        its, copied = duplicate((model, optimizer))
        assert not optimizer.state[large(model)].keys() & copied.state[large(its)].keys() - {"step"}
    stepped = []
    for each, by in ((model, optimizer), (its, copied)):
        by.zero_grad()
        loss_fn(each, batches()[0]).backward()
        by.step()
        stepped.append(weights(each))
    assert torch.equal(*stepped)


@pytest.mark.parametrize(("name", "option", "value"), [("sgd", "momentum", 0.0), ("adam", "amsgrad", False)])
def test_saved_and_restored_state_is_plain_after_its_option_was_switched_off(name, option, value):
    model, optimizer = loop(OPTIMIZERS[name])
    with trimtab.start(model, optimizer, plan_of("8bit")) as run:
        train(run, batches(0, 1))
        optimizer.param_groups[0].update({option: value, "nesterov": False})
        saved = optimizer.state_dict()["state"][0]
    plain, its = loop(OPTIMIZERS[name])
    with trimtab.start(plain, its, plan_of("user")) as run:
        train(run, batches(0, 1))
    assert saved.keys() == optimizer.state[large(model)].keys() == its.state[large(plain)].keys()


@pytest.mark.parametrize("failures", [1, 10**6])
def test_hooks_are_removed_if_plain_state_does_not_fit(monkeypatch, failures):
    model, optimizer = loop()
    hooks = {key: len(held) for key, held in vars(optimizer).items() if key.endswith("hooks")}
    run = trimtab.start(model, optimizer, plan_of("8bit"))
    train(run, batches())
    saved = optimizer.state_dict()["state"][0]
    read, faults = QuantizedBlocks.read, [torch.OutOfMemoryError("the plain state")] * failures

    def fail(*args):
        if faults:
            raise faults.pop()
        return read(*args)

    monkeypatch.setattr(QuantizedBlocks, "read", fail)
    if failures == 1:  # The state is restored in host memory.
        with pytest.warns(RuntimeWarning, match="host memory"):
            run.close()
        assert all(torch.equal(value, saved[key]) for key, value in optimizer.state[large(model)].items())
    else:
        with pytest.raises(torch.OutOfMemoryError):
            run.close()
    assert {key: len(held) for key, held in vars(optimizer).items() if key.endswith("hooks")} == hooks


def test_small_updates_of_bf16_weights_add_up():
    """Rounded to the nearest value, a step of 1e-3 of a weight of 1 would leave the weight unchanged for ever."""
    moved = {}
    for kind in ("user", "bf16"):
        parameter = nn.Parameter(torch.ones(4096, dtype=torch.bfloat16))
        optimizer = torch.optim.SGD([parameter], lr=1e-4, momentum=0.9)
        end = use_low_bit(optimizer, kind) if kind != "user" else lambda: None
        for _ in range(40):
            parameter.grad = torch.ones_like(parameter)
            optimizer.step()
        end()
        moved[kind] = 1 - float(parameter.detach().float().mean())
    assert moved["user"] == 0
    assert moved["bf16"] == pytest.approx(1e-4 * (40 / 0.1 - 9 * (1 - 0.9**40) / 0.1), rel=0.05)


def test_channels_last_state_is_saved_with_the_users_strides():
    data = [torch.randn(ROWS, 16, 5, 5, generator=torch.Generator().manual_seed(i)) for i in range(2)]
    saved = []
    for layout in ("keep", "channels_last"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(16, 32, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        with trimtab.start(model, optimizer, plan_of("bf16", memory_layout=layout)) as run:
            for window in run.windows(data):
                run.train_step(window, lambda model, batch: model(batch).square().mean())
            saved.append(optimizer.state_dict()["state"][0]["exp_avg"])
        assert optimizer.state[model[0].weight]["exp_avg"].is_contiguous()
    assert saved[0].stride() == saved[1].stride()
    assert float((saved[0] - saved[1]).norm() / saved[0].norm()) < 2**-6  # two roundings to bf16


@every_kind
@pytest.mark.parametrize("micro_batch", [32, 8])
def test_the_traced_peak_is_the_counted_one(kind, micro_batch):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(700, 700) for _ in range(4)))
    batch = torch.randn(32, 700)
    subject = TrainingLoop(model, torch.optim.AdamW(model.parameters()), loss_fn, batch)
    traced = trace_optimizer_states(subject, Plan.fixed(32, micro_batch), (kind,))
    with subject.start_plan(Plan.fixed(32, micro_batch, optimizer_state=kind)) as run:
        subject.step(run)
        subject.optimizer.zero_grad(set_to_none=True)
        counted = peak_bytes(lambda: subject.step(run), subject.device, subject.live_tensors)
    # The tables of the formats, 0.13 MB, are traced and not counted.
    assert traced[kind] == pytest.approx(counted, rel=0.03)
    assert traced[kind] < traced["user"]


# Refusals.


def replaced(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    optimizer.step = lambda closure=None: None
    return optimizer


@pytest.mark.parametrize(
    ("make", "code"),
    [
        (torch.optim.RMSprop, "optimizer_state.class"),
        (type("Own", (torch.optim.AdamW,), {}), "optimizer_state.class"),
        (lambda p: replaced(torch.optim.AdamW(p)), "optimizer_state.own_step"),
        (lambda p: torch.optim.AdamW(p, capturable=True), "optimizer_state.option"),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.1), "optimizer_state.option"),
        (lambda p: torch.optim.SGD(p, lr=0.1), "optimizer_state.none"),
    ],
)
def test_an_optimizer_without_low_bit_state_is_refused(make, code):
    model, optimizer = loop(make)
    before = fingerprint(model, optimizer)
    with raises(OptimizerError, code=code, field="optimizer"):
        trimtab.start(model, optimizer, plan_of("8bit"))
    assert fingerprint(model, optimizer) == before


def sharded(model: nn.Module) -> nn.Module:
    model.set_requires_gradient_sync = None  # as in a module that FSDP2 shards
    return model


@pytest.mark.parametrize(
    ("model", "code"),
    [(nn.Linear(8, 8), "optimizer_state.small"), (sharded(nn.Linear(64, 64)), "optimizer_state.sharded")],
)
def test_a_model_without_low_bit_state_is_refused(model, code):
    with raises(ModelError, code=code, field="model"):
        trimtab.start(model, torch.optim.AdamW(model.parameters()), plan_of("8bit"))


def test_sparse_gradients_are_refused():
    model = nn.Sequential(nn.Embedding(64, 64, sparse=True))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with raises(OptimizerError, code="optimizer_state.sparse", field="optimizer"):
        trimtab.start(model, optimizer, plan_of("8bit"))


@pytest.mark.parametrize(
    ("more", "code"),
    [
        ({"zero_stage": 1, "num_ranks": 2}, "optimizer_state.zero_stage"),
        ({"zero_stage": 2, "num_ranks": 2, "engine": "deepspeed"}, "optimizer_state.zero_stage"),
        ({"optimizer": "muon"}, "optimizer_state.optimizer"),
        ({"fused_optimizer": True}, "optimizer_state.fused_optimizer"),
    ],
)
def test_a_conflicting_plan_is_refused(more, code):
    with raises(ValueGivenError, code=code, field="plan.optimizer_state"):
        plan_of("8bit", **more)


def test_a_trainer_decides_by_its_own_settings():
    with raises(ValueGivenError, code="plan.decided_by_trainer", field="plan.optimizer_state"):
        checked_plan(plan_of("8bit"), "the Trainer")
