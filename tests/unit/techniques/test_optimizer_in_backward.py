"""Optimizer steps within the backward pass: bitwise the same training, no gradient held, refused if it is needed."""

from __future__ import annotations

import gc
import warnings
import weakref

import pytest
import torch
import torch.distributed as dist
from raising import raises
from torch import nn
from torch.utils.checkpoint import checkpoint

import trimtab
from trimtab.core.choice import Choice, Note
from trimtab.core.errors import ModelError, OptimizerError, ValueGivenError
from trimtab.integrations.trainer_rules import accumulation_arguments, checked_plan
from trimtab.plans.plan import Plan
from trimtab.state.peak_memory import alive_between_steps, peak_bytes
from trimtab.techniques.optimizer_in_backward import StepInBackward

OPTIMIZERS = {
    "AdamW": lambda ps: torch.optim.AdamW(ps, lr=0.01),
    "fused AdamW": lambda ps: torch.optim.AdamW(ps, lr=0.01, fused=True),
    "SGD with momentum": lambda ps: torch.optim.SGD(ps, lr=0.01, momentum=0.9, nesterov=True),
    "RMSprop": lambda ps: torch.optim.RMSprop(ps, lr=0.01, momentum=0.5),
    "Adafactor": lambda ps: torch.optim.Adafactor(ps, lr=0.01),
}


class Tied(nn.Module):
    """A model whose first and last layer share their weight, and whose hidden layer is called twice."""

    def __init__(self):
        super().__init__()
        self.embedding, self.hidden, self.head = nn.Embedding(20, 8), nn.Linear(8, 8), nn.Linear(8, 20, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids):
        x = self.embedding(ids)
        return self.head(self.hidden(self.hidden(x).tanh()))


def loss_fn(model, ids):
    return nn.functional.cross_entropy(model(ids).flatten(0, -2), ids.flatten())


def train(make, steps=5, *, schedules=False, **values):
    torch.manual_seed(0)
    model = Tied()
    groups = [{"params": [model.embedding.weight]}, {"params": list(model.hidden.parameters()), "lr": 0.02}]
    optimizer = make(groups)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9) if schedules else None
    with trimtab.start(model, optimizer, Plan.fixed(4, **values)) as run:
        for step in range(steps):
            run.train_step(run.window(torch.randint(20, (4, 6), generator=torch.manual_seed(step))), loss_fn)
            if schedule is not None:
                schedule.step()
            if step == 2:  # Loading a state replaces the parameter groups.
                optimizer.load_state_dict(optimizer.state_dict())
    return model, optimizer


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_is_bitwise_the_same(name):
    (ours, mine), (plain, theirs) = (train(OPTIMIZERS[name], step_in_backward=on) for on in (True, False))
    for key, value in plain.state_dict().items():
        assert torch.equal(ours.state_dict()[key], value)
    ours_state, plain_state = mine.state_dict(), theirs.state_dict()
    torch.testing.assert_close(ours_state, plain_state, rtol=0, atol=0)


def test_the_users_schedule_and_step_hooks_run_once_per_step():
    calls = []

    def made(groups):
        optimizer = torch.optim.AdamW(groups, lr=0.01)
        optimizer.register_step_post_hook(lambda *_: calls.append("step"))
        return optimizer

    ours, _ = train(made, schedules=True, step_in_backward=True)
    assert calls == ["step"] * 5
    plain, _ = train(OPTIMIZERS["AdamW"], schedules=True)
    torch.testing.assert_close(ours.state_dict(), plain.state_dict(), rtol=0, atol=0)


def test_a_hook_before_the_step_sees_the_gradients():
    seen = []

    def made(groups):
        optimizer, first = torch.optim.AdamW(groups, lr=0.01), groups[0]["params"][0]
        optimizer.register_step_pre_hook(lambda *_: seen.append(first.grad is not None))
        return optimizer

    with pytest.warns(UserWarning, match="no effect"):
        train(made, step_in_backward=True)
    assert seen == [True] * 5


def clipped(model, optimizer):
    step = optimizer.step
    optimizer.step = lambda *args: (nn.utils.clip_grad_norm_(model.parameters(), 1e-3), step(*args))[1]


def hooked(model, optimizer):
    model.hidden.weight.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", 0.1 * p.grad))


def regrouped(model, optimizer):
    optimizer.param_groups[0] = {**optimizer.param_groups[0], "lr": 0.5}


@pytest.mark.parametrize("change", [clipped, hooked, regrouped])
def test_what_the_user_changes_during_the_run_is_respected(change):
    trained = []
    for early in (True, False):
        torch.manual_seed(0)
        model = Tied()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run = trimtab.start(model, optimizer, Plan.fixed(4, step_in_backward=early))
        for step in range(4):
            run.train_step(run.window(torch.randint(20, (4, 6), generator=torch.manual_seed(step))), loss_fn)
            if step == 1:
                change(model, optimizer)
        with warnings.catch_warnings(action="ignore"):
            run.close()
        trained.append(model.state_dict())
    torch.testing.assert_close(*trained, rtol=0, atol=0)


def test_an_error_in_the_backward_says_that_parameters_were_updated():
    model = Tied()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def fails(_):
        raise RuntimeError("late")

    def failing(called, ids):
        x = called.embedding(ids)
        x.register_hook(fails)  # After the gradients of the layers above.
        return called.head(called.hidden(x)).square().mean() + 0 * called(ids).sum()

    with trimtab.start(model, optimizer, Plan.fixed(4, step_in_backward=True)) as run:
        with pytest.raises(RuntimeError, match="late") as caught:
            run.train_step(run.window(torch.randint(20, (4, 6))), failing)
        assert any("step_in_backward" in note for note in caught.value.__notes__)


def test_a_dropped_run_frees_its_optimizer():
    model = Tied()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hooks = StepInBackward(optimizer)
    seen = weakref.ref(optimizer)
    del model, optimizer, hooks
    gc.collect()
    assert seen() is None


def test_no_gradient_is_held():
    peaks = []
    for early in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(8)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        batch = torch.randn(4, 256)
        with trimtab.start(model, optimizer, Plan.fixed(4, step_in_backward=early)) as run:

            def step(run=run, batch=batch):
                run.train_step(run.window(batch), lambda called, x: called(x).square().mean())

            step()
            optimizer.zero_grad(set_to_none=True)
            live = lambda model=model, optimizer=optimizer: alive_between_steps(model, optimizer)  # noqa: E731
            peaks.append(peak_bytes(step, torch.device("cpu"), live))
    gradients = 8 * 256 * 257 * 4
    assert peaks[1] < peaks[0] - 0.7 * gradients


def test_the_hooks_are_removed_and_loops_of_their_own_step_at_the_end():
    """Between backward and step, the user's code may read the gradient."""
    torch.manual_seed(0)
    model = Tied()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ids = torch.randint(20, (4, 6))
    run = trimtab.start(model, optimizer, Plan.fixed(4, step_in_backward=True))
    for micro in run.window(ids):
        run.backward(loss_fn(run.model, micro))
    assert model.hidden.weight.grad is not None
    run.step()
    with pytest.warns(UserWarning, match="no effect"):
        run.close()
    loss_fn(model, ids).backward()
    before = model.hidden.weight.detach().clone()
    assert model.hidden.weight.grad is not None
    assert torch.equal(model.hidden.weight, before)


@pytest.mark.parametrize(
    ("arguments", "values"),
    [
        ({"clip_norm": 1.0}, {}),
        ({"nonfinite": "skip"}, {}),
        ({"out_of_memory": "split"}, {}),
        ({"stop": trimtab.Stop(grad_norm=0.1)}, {}),
        ({}, {"clip_norm": 1.0}),
        ({}, {"precision": "fp16"}),
        ({}, {"num_ranks": 2}),
    ],
)
def test_a_run_that_needs_the_gradient_of_the_whole_step_is_refused(arguments, values):
    model = Tied()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with raises(ValueGivenError, code="step_in_backward.gradient_needed", field="plan.step_in_backward"):
        trimtab.start(model, optimizer, Plan.fixed(4, step_in_backward=True, **values), **arguments)


def planned():
    """Return a plan whose step within the backward pass was chosen by planning."""
    chosen = Choice(True, "12% less peak memory", changed=True, code="trial.less_memory")
    notes = (Note("step_in_backward.saves", "the peak memory is predicted to rise by 12 MiB"),)
    return Plan(4, Choice(4, "fits"), step_in_backward=chosen, notes=notes)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("clip_norm", {"clip_norm": 1.0}),
        ("nonfinite", {"nonfinite": "skip"}),
        ("out_of_memory='split'", {"out_of_memory": "split"}),
        ("grad_norm", {"stop": trimtab.Stop(grad_norm=1e-9)}),
    ],
)
def test_a_planned_value_is_switched_off_for_a_run_that_needs_the_gradient(name, arguments):
    torch.manual_seed(0)
    model = Tied()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.warns(UserWarning, match="12 MiB") as caught:
        run = trimtab.start(model, optimizer, planned(), **arguments)
    assert len(caught) == 1
    assert name in str(caught[0].message)
    with run:
        run.train_step(run.window(torch.randint(20, (4, 6))), loss_fn)
        assert run.applied_steps == 1
        assert model.hidden.weight.grad is not None
    assert (run.plan.step_in_backward.value, run.plan.step_in_backward.code) == (False, "step_in_backward.switched_off")
    assert not [note for note in run.plan.notes if note.code == "step_in_backward.saves"]


def replaced(optimizer):
    step = optimizer.step
    optimizer.step = lambda: step()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (replaced, "was replaced"),
        (lambda optimizer: optimizer.register_step_pre_hook(lambda *_: None), "hooks"),
        (lambda optimizer: optimizer.register_step_post_hook(lambda *_: None), "hooks"),
        (lambda optimizer: optimizer.param_groups[0]["params"][0].register_hook(lambda _: None), "hooks"),
    ],
)
def test_a_planned_value_is_switched_off_if_the_optimizer_has_changed_since_planning(change, reason):
    model = Tied()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    change(optimizer)
    with pytest.warns(UserWarning, match=reason):
        run = trimtab.start(model, optimizer, planned())
    with run:
        run.train_step(run.window(torch.randint(20, (4, 6))), loss_fn)
        assert run.plan.step_in_backward.value is False
        assert model.hidden.weight.grad is not None


def test_schedulers_of_torch_leave_a_planned_value_on():
    model = Tied()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedulers = [torch.optim.lr_scheduler.StepLR(optimizer, 1)]
    with trimtab.start(model, optimizer, planned()) as run:
        schedulers.append(torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9))
        for _ in range(2):
            run.train_step(run.window(torch.randint(20, (4, 6))), loss_fn)
            assert model.hidden.weight.grad is None
            for each in schedulers:
                each.step()


def test_an_unknown_policy_is_refused_beside_a_step_in_the_backward_pass():
    model = Tied()
    with raises(ValueGivenError, code="value.invalid", field="out_of_memory"):
        trimtab.start(model, torch.optim.SGD(model.parameters(), lr=0.1), planned(), out_of_memory="splt")


def test_a_planned_value_stays_if_nothing_needs_the_gradient():
    model = Tied()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with trimtab.start(model, optimizer, planned(), nonfinite="warn", out_of_memory="stop") as run:
        run.train_step(run.window(torch.randint(20, (4, 6))), loss_fn)
        assert run.plan.step_in_backward.value is True
        assert model.hidden.weight.grad is None


def test_a_planned_value_in_a_loop_with_its_own_step_warns_once():
    model = Tied()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = trimtab.start(model, optimizer, planned())
    for _ in range(3):
        for micro in run.window(torch.randint(20, (4, 6))):
            run.backward(loss_fn(run.model, micro))
        assert model.hidden.weight.grad is not None
        run.step()
    with pytest.warns(UserWarning, match="no effect") as caught:
        run.close()
    assert len(caught) == 1


def test_a_trainer_switches_a_planned_value_off_and_refuses_one_set_by_hand():
    with pytest.warns(UserWarning, match="12 MiB"):
        plan = checked_plan(planned(), "the Trainer")
    assert plan.step_in_backward.value is False
    with raises(ValueGivenError, code="plan.decided_by_trainer", field="plan.step_in_backward"):
        checked_plan(Plan.fixed(4, step_in_backward=True), "the Trainer")


@pytest.mark.parametrize("given", [{}, {"reference": trimtab.Reference("bf16", accumulate=2)}])
def test_trainers_plan_for_a_loop_that_keeps_gradients(given):
    found = accumulation_arguments({"reference": trimtab.Reference()} | given, 1, 2)
    assert found["reference"].keeps_gradients is True


def test_several_micro_batches_are_refused():
    with raises(ValueGivenError, code="step_in_backward.splits", field="plan.step_in_backward"):
        Plan.fixed(4, micro_batch=2, step_in_backward=True)


def test_optimizers_that_look_at_all_gradients_are_refused():
    class ByTheirNorm(torch.optim.SGD):
        """A user's optimizer, which may do anything in its step."""

    model = Tied()
    with raises(OptimizerError, code="step_in_backward.optimizer", field="plan.step_in_backward"):
        trimtab.start(model, ByTheirNorm(model.parameters(), lr=0.1), Plan.fixed(4, step_in_backward=True))


def test_a_model_that_ranks_share_is_refused():
    """Each rank would step by its own gradient, before the ranks exchange theirs."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = nn.parallel.DistributedDataParallel(Tied())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with raises(ModelError, code="step_in_backward.ranks", field="plan.step_in_backward"):
            trimtab.start(model, optimizer, Plan.fixed(4, step_in_backward=True))
    finally:
        dist.destroy_process_group()


def test_a_gradient_that_arrives_in_parts_is_an_error():
    """Reentrant checkpointing runs a backward pass per segment, each with a part of a shared weight's gradient."""
    shared = nn.Linear(4, 4)

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.shared = shared

        def forward(self, x):
            x = checkpoint(self.shared, x, use_reentrant=True)
            return checkpoint(self.shared, x, use_reentrant=True)

    model = Twice()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with (
        trimtab.start(model, optimizer, Plan.fixed(2, step_in_backward=True)) as run,
        raises(ModelError, code="step_in_backward.in_parts", field="plan.step_in_backward"),
    ):
        batch = torch.randn(2, 4, requires_grad=True)
        run.train_step(run.window(batch), lambda model, x: model(x).square().mean())
