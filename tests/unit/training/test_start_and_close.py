"""`start` applies a plan in place; `close` leaves everything but the training as it was, whatever happened between."""

from __future__ import annotations

import copy
import gc
import io
import weakref

import pytest
import torch
from raising import raises
from small_loops import sgd
from small_loops import square_loss as loss_fn
from state_digest import fingerprint
from torch import nn

import trimtab
from trimtab.core.errors import LoopError, OptimizerError, UsageError, ValueGivenError
from trimtab.plans.plan import Plan
from trimtab.state import process_state
from trimtab.state.process_state import ProcessState

ROWS = 4
RETAIN = {"allocator": "retain"} if process_state.can_retain() else {}
PLANS = {
    "kept": Plan.fixed(ROWS),
    "split": Plan.fixed(ROWS, 3),
    "bf16": Plan.fixed(ROWS, precision="bf16"),
    "fp16": Plan.fixed(ROWS, 2, precision="fp16"),
    "layout": Plan.fixed(ROWS, memory_layout="channels_last"),
    "fused": Plan.fixed(ROWS, fused_optimizer=True),
    "schedule": Plan.fixed(ROWS, schedule="warmup_cosine", learning_rate_scale=3.0),
    "all": Plan.fixed(ROWS, 3, memory_layout="channels_last", fused_optimizer=True, precision="bf16", **RETAIN),
}
OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "adam amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True, foreach=True),
}
every_plan = pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
every_optimizer = pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)


class Net(nn.Module):
    """Convolutions, batch statistics, a frozen part, a 4-dim buffer, and one whose rows share memory."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.second = nn.Conv2d(4, 2, 1)
        self.first.bias.requires_grad_(False)
        self.register_buffer("table", torch.arange(24.0).reshape(1, 2, 3, 4))
        self.register_buffer("shared", torch.ones(1, 3, 1, 2).expand(5, 3, 4, 2), persistent=False)

    def forward(self, x):
        return self.second(torch.tanh(self.norm(self.first(x)))).flatten(1)


def batch():
    return torch.randn(ROWS, 3, 5, 5)


def loop(optimizer, steps=2):
    torch.manual_seed(0)
    model = Net()
    made = optimizer(model.parameters())
    for _ in range(steps):
        made.zero_grad()
        loss_fn(model, batch()).backward()
        made.step()
    made.zero_grad()
    return model, made


def tensors(model, optimizer):
    yield from model.named_parameters()
    yield from model.named_buffers()
    for index, state in enumerate(optimizer.state.values()):
        yield from ((f"{index} {name}", value) for name, value in state.items() if isinstance(value, torch.Tensor))


def look(model, optimizer, values=True):
    """Everything a run may touch, but for addresses."""
    process = ProcessState.capture()
    return {
        "tensors": {
            name: (t.stride(), t.dtype, t.requires_grad, t.device, t.detach().flatten().tolist() if values else None)
            for name, t in tensors(model, optimizer)
        },
        "grads": [None if p.grad is None else p.grad.tolist() for p in model.parameters()],
        "modules": [
            (m.training, [(k, len(v)) for k, v in vars(m).items() if k.endswith("hooks")]) for m in model.modules()
        ],
        "groups": [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups],
        "optimizer hooks": {k: len(v) for k, v in vars(optimizer).items() if k.endswith("hooks")},
        "step": optimizer.step,
        "process": (process.fp32_modes, process.num_threads, process.grad_enabled, process.allocator),
    }


@every_plan
@every_optimizer
@pytest.mark.parametrize("steps", [0, 2])
def test_start_and_close_alone_change_nothing(plan, optimizer, steps):
    model, made = loop(optimizer, steps)
    before, rng = look(model, made), torch.get_rng_state()
    run = trimtab.start(model, made, plan, total_samples=100)
    assert run.model is model
    run.close()
    assert look(model, made) == before
    assert torch.equal(torch.get_rng_state(), rng)


@every_plan
@every_optimizer
def test_after_training_only_what_was_learned_differs(plan, optimizer):
    model, made = loop(optimizer)
    before, weights = look(model, made, values=False), copy.deepcopy(model.state_dict())
    with trimtab.start(model, made, plan, total_samples=100) as run:
        for _ in range(2):
            run.train_step(run.window(batch()), loss_fn)
    assert look(model, made, values=False) == before
    assert not torch.equal(model.first.weight, weights["first.weight"])
    assert torch.equal(model.first.bias, weights["first.bias"])


@every_plan
@pytest.mark.parametrize("after", [0, 1, 2, 3])
def test_an_error_in_the_middle_of_a_window_closes_as_cleanly(plan, after):
    """`after` verbs of a window: a micro-batch taken, its forward, its backward, the whole of it."""
    model, made = loop(OPTIMIZERS["adamw"])
    before = look(model, made, values=False)
    weights = copy.deepcopy(list(model.parameters()))

    def broken_loop():
        with trimtab.start(model, made, plan, total_samples=100) as run:
            window = iter(run.window(batch()))
            micro = next(window)
            if after >= 1:
                loss = loss_fn(run.model, micro)
            if after >= 2:
                run.backward(loss)
            if after >= 3:
                for micro in window:
                    run.backward(loss_fn(run.model, micro))
                run.unscale()
            raise KeyError("the user's own")

    with pytest.raises(KeyError, match="the user's own"):
        broken_loop()
    assert look(model, made, values=False) == before
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), weights, strict=True))


def test_a_model_has_one_run_at_a_time_and_a_closed_run_leaves_the_next_alone():
    model, made = loop(OPTIMIZERS["sgd"])
    run = trimtab.start(model, made, Plan.fixed(ROWS, fused_optimizer=True))
    run.close()
    with trimtab.start(model, made, Plan.fixed(ROWS, memory_layout="channels_last")):
        before = look(model, made)
        run.close()
        assert look(model, made) == before
    model, made = loop(OPTIMIZERS["sgd"])
    with trimtab.start(model, made, Plan.fixed(ROWS, memory_layout="channels_last")) as run:
        before = fingerprint(model, made)
        with raises(LoopError, code="run.model_in_use", field="model"):
            trimtab.start(model, made, Plan.fixed(ROWS))
        assert fingerprint(model, made) == before
        run.train_step(run.window(batch()), loss_fn)
    trimtab.start(model, made, Plan.fixed(ROWS)).close()


def test_a_closed_run_refuses_every_verb():
    model, made = loop(OPTIMIZERS["sgd"])
    with trimtab.start(model, made, Plan.fixed(ROWS)) as run:
        data = batch()
        window = run.window(data)
    loss = loss_fn(model, data)
    before = fingerprint(model, made)
    for verb in (
        lambda: run.window(data),
        lambda: next(run.windows([data])),
        lambda: next(iter(window)),
        lambda: run.train_step(window, loss_fn),
        lambda: run.backward(loss),
        run.unscale,
        run.step,
        run.discard,
    ):
        with raises(LoopError, code="run.closed", field="run"):
            verb()
    assert fingerprint(model, made) == before


def test_closing_between_micro_batches_ends_the_window():
    model, made = loop(OPTIMIZERS["sgd"])
    run = trimtab.start(model, made, Plan.fixed(ROWS, 2))
    micros = iter(run.window(batch()))
    run.backward(loss_fn(run.model, next(micros)))
    run.close()
    assert all(p.grad is None for p in model.parameters())
    loss = loss_fn(model, batch())
    for verb in (lambda: next(micros), lambda: run.backward(loss)):
        with raises(LoopError, code="run.closed", field="run"):
            verb()
    assert all(p.grad is None for p in model.parameters())


REFUSED = {
    "fused, no such kernel": (Plan.fixed(ROWS, memory_layout="channels_last", fused_optimizer=True), OptimizerError),
    "tf32 without CUDA": (Plan.fixed(ROWS, memory_layout="channels_last", precision="tf32"), ValueGivenError),
    "a schedule without its end": (
        Plan.fixed(ROWS, memory_layout="channels_last", schedule="warmup_cosine"),
        ValueGivenError,
    ),
}


@pytest.mark.parametrize(("plan", "error"), REFUSED.values(), ids=REFUSED)
def test_a_refused_start_changes_nothing_and_the_next_one_may_be_right(plan, error):
    model, made = loop(lambda p: torch.optim.RMSprop(p, lr=0.01))
    before = fingerprint(model, made)
    with pytest.raises(error):
        trimtab.start(model, made, plan)
    assert fingerprint(model, made) == before
    trimtab.start(model, made, Plan.fixed(ROWS)).close()


@pytest.mark.skipif(not RETAIN, reason="needs glibc")
@pytest.mark.parametrize("first", [0, 1])
def test_a_mode_of_the_process_lasts_as_long_as_the_last_run_that_needs_it(first):
    runs = [trimtab.start(*loop(OPTIMIZERS["sgd"]), Plan.fixed(ROWS, **RETAIN)) for _ in range(2)]
    assert process_state.allocator_mode() == "retain"
    runs.pop(first).close()
    assert process_state.allocator_mode() == "retain"
    runs.pop().close()
    assert process_state.allocator_mode() == "keep"


def test_a_group_added_during_a_run_stays_the_users():
    model, made = loop(lambda p: torch.optim.AdamW(list(p)[:-2], lr=0.01))
    with trimtab.start(model, made, Plan.fixed(ROWS, fused_optimizer=True)) as run:
        run.train_step(run.window(batch()), loss_fn)
        made.add_param_group({"params": list(model.parameters())[-2:], "lr": 0.02})
        run.train_step(run.window(batch()), loss_fn)
        made.load_state_dict(made.state_dict())
        run.train_step(run.window(batch()), loss_fn)
    assert [(g["lr"], g["fused"], g["foreach"]) for g in made.param_groups] == [(0.01, None, None), (0.02, None, None)]


def test_layers_unfrozen_during_a_run_are_trained():
    model, made = loop(OPTIMIZERS["sgd"])
    old = model.first.bias.detach().clone()
    with trimtab.start(model, made, Plan.fixed(ROWS, 2)) as run:
        run.train_step(run.window(batch()), loss_fn)
        assert torch.equal(model.first.bias, old)
        model.first.bias.requires_grad_(True)
        model.norm.eval()  # batch statistics would take a bias's gradient away
        run.train_step(run.window(batch()), loss_fn)
    assert not torch.equal(model.first.bias, old)
    assert model.first.bias.requires_grad


@every_plan
def test_a_copy_of_the_model_made_during_a_run_is_a_model_of_its_own(plan):
    model, made = loop(OPTIMIZERS["adamw"])
    with trimtab.start(model, made, plan, total_samples=100) as run:
        run.train_step(run.window(batch()), loss_fn)
        ema = copy.deepcopy(model)
        pickled = io.BytesIO()
        torch.save(model, pickled)
        run.train_step(run.window(batch()), loss_fn)
        assert not torch.equal(ema.first.weight, model.first.weight)
        own_gradients = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
        loss_fn(ema, batch()).backward()
        for parameter, grad in zip(model.parameters(), own_gradients, strict=True):
            assert parameter.grad is None if grad is None else torch.equal(parameter.grad, grad)
    pickled.seek(0)
    for other in (ema, torch.load(pickled, weights_only=False)):
        other.zero_grad()
        with trimtab.start(other, sgd(other), Plan.fixed(ROWS, 2)) as run:
            run.train_step(run.window(batch()), loss_fn)


def test_neither_model_nor_copy_nor_optimizer_keep_a_closed_run_alive():
    model, made = loop(OPTIMIZERS["adamw"])
    run = trimtab.start(model, made, PLANS["all"])
    run.train_step(run.window(batch()), loss_fn)
    ema = copy.deepcopy(model)
    run.close()
    gone = weakref.ref(run)
    del run
    gc.collect()
    assert gone() is None
    loss_fn(ema, batch())


def test_splitting_batch_statistics_unproved_is_other_dynamics():
    plan = Plan.fixed(8, micro_batch=4)
    for norm, plan_kind in ((nn.BatchNorm1d(3), "tuned"), (nn.LayerNorm(3), "equivalent")):
        model = nn.Sequential(nn.Linear(3, 3), norm)
        with trimtab.start(model, sgd(model), plan) as run:
            assert run.plan.plan_kind == plan_kind
            assert ("batch statistics" in run.plan.micro_batch.reason) == (plan_kind == "tuned")
    model = nn.BatchNorm1d(3)
    with trimtab.start(model, sgd(model), Plan.fixed(8)) as run:
        assert run.plan == Plan.fixed(8)  # which splits nothing


def test_a_left_over_gradient_does_not_enter_the_first_window():
    model, made = loop(OPTIMIZERS["sgd"])
    again, made_again = loop(OPTIMIZERS["sgd"])
    loss_fn(model, batch()).backward()
    again.load_state_dict(model.state_dict())
    data = batch()
    for m, o in ((model, made), (again, made_again)):
        with trimtab.start(m, o, Plan.fixed(ROWS)) as run:
            run.train_step(run.window(data), loss_fn)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


def changed(state, part, **values):
    return state | {part: state[part] | values}


DAMAGE = {
    "no mapping": (lambda state: None, "state"),
    "a list": (lambda state: [1, 2], "state"),
    "empty": (lambda state: {}, "state"),
    "a part more": (lambda state: state | {"batch": {}}, "state"),
    "a part less": (lambda state: {name: part for name, part in state.items() if name != "voids"}, "state"),
    "another precision": (lambda state: changed(state, "precision", name="tf32"), "state.precision"),
    "rows below zero": (lambda state: changed(state, "consumed", rows=-1), "state.consumed.rows"),
    "half a step": (lambda state: changed(state, "consumed", applied=1.5), "state.consumed.applied"),
    "no number of steps": (lambda state: changed(state, "consumed", applied=float("nan")), "state.consumed.applied"),
    "no scaler": (lambda state: changed(state, "precision", scaler=None), "state.precision.scaler"),
    "an empty scaler": (lambda state: changed(state, "precision", scaler={}), "state.precision.scaler"),
    "a number for a scaler": (lambda state: changed(state, "precision", scaler=65536.0), "state.precision.scaler"),
    "half a scaler": (lambda state: changed(state, "precision", scaler={"scale": 2.0}), "state.precision.scaler"),
    "a limit below one row": (lambda state: changed(state, "memory", rows=0), "state.memory.rows"),
    "a count of voids below zero": (lambda state: changed(state, "voids", total=-3), "state.voids.total"),
    "an average below zero": (lambda state: changed(state, "stop", average=-0.5), "state.stop.average"),
} | {
    f"a scale of {value!r}": (
        lambda state, value=value: changed(state, "precision", scaler=state["precision"]["scaler"] | {"scale": value}),
        "state.precision.scaler.scale",
    )
    for value in (float("nan"), float("inf"), -1.0, "1", None)
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_state_is_refused_whole(damage):
    damaged, field = DAMAGE[damage]
    model, made = loop(OPTIMIZERS["sgd"])
    with trimtab.start(model, made, Plan.fixed(ROWS, precision="fp16")) as run:
        before = run.state_dict()
        with pytest.raises(UsageError) as caught:
            run.load_state_dict(damaged(changed(before, "consumed", rows=99)) if field != "state" else damaged(before))
        assert caught.value.field == field
        assert run.state_dict() == before


def test_a_state_of_fp16_does_not_fit_a_run_without_a_scale():
    model, made = loop(OPTIMIZERS["sgd"])
    with trimtab.start(model, made, Plan.fixed(ROWS, precision="fp16")) as run:
        state = run.state_dict()
    with (
        trimtab.start(model, made, Plan.fixed(ROWS)) as run,
        raises(UsageError, code="resume.precision_differs", field="state.precision"),
    ):
        run.load_state_dict(state)
