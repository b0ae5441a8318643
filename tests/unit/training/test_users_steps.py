"""Steps and `zero_grad` of the user's own: closures that are needed, gradients that are kept, unusual optimizers."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from raising import raises
from small_loops import same_weights, sgd, train_plainly, trained
from small_loops import square_loss as loss_fn
from torch import nn

import trimtab
from trimtab.core.errors import OptimizerError
from trimtab.plans.plan import Plan

ROWS = 8


def mlp(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1)).to(dtype)


def batches(count=3, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(ROWS, 4, generator=generator).to(dtype) for _ in range(count)]


def plain(optimizer_of, count=3):
    model = mlp()
    optimizer = optimizer_of(model.parameters())
    train_plainly(model, optimizer, batches(count), loss_fn)
    return model


def ours(optimizer_of, count=3, **planned):
    model = mlp()
    trained(model, optimizer_of(model.parameters()), Plan.fixed(ROWS, **planned), batches(count), loss_fn)
    return model


# Closures.


class Sam(torch.optim.Optimizer):
    """As the usual implementation: two steps of a base optimizer, the closure asserted."""

    def __init__(self, parameters, rho=0.05):
        super().__init__(parameters, {"rho": rho})
        self.base_optimizer = torch.optim.SGD(self.param_groups, lr=0.1)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def step(self, closure=None):
        assert closure is not None, "Sharpness Aware Minimization requires closure"
        closure = torch.enable_grad()(closure)
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["old"] = p.clone()
                p.add_(p.grad, alpha=group["rho"])
        closure()
        for group in self.param_groups:
            for p in group["params"]:
                p.copy_(self.state[p]["old"])
        self.base_optimizer.step()


class Raising(torch.optim.SGD):
    def step(self, closure=None):
        if closure is None:
            raise ValueError("pass a closure")
        return super().step(closure)


class Calling(torch.optim.SGD):
    def step(self, closure=None):
        with torch.enable_grad():
            loss = closure()
        super().step()
        return loss


class OptionalBfgs(torch.optim.LBFGS):
    def step(self, closure=None):
        return super().step(closure)


NEEDING = {
    "asserts": Sam,
    "raises": functools.partial(Raising, lr=0.1),
    "calls": functools.partial(Calling, lr=0.1),
    "passes on": functools.partial(OptionalBfgs, lr=0.1),
    "by its signature": functools.partial(torch.optim.LBFGS, lr=0.1),
}
every_needing = pytest.mark.parametrize("make", NEEDING.values(), ids=NEEDING)


@every_needing
@pytest.mark.parametrize("is_planned", [False, True])
def test_a_closure_that_is_needed_is_found_before_anything_runs(make, is_planned):
    model = mlp()
    optimizer = make(model.parameters())
    before = [p.clone() for p in model.parameters()]
    calls = {
        True: lambda: trimtab.plan(model, optimizer, loss_fn, batches()[0], num_blocks=3),
        False: lambda: trimtab.start(model, optimizer, Plan.fixed(ROWS)),
    }
    with raises(OptimizerError, code="optimizer.needs_closure"):
        calls[is_planned]()
    assert not optimizer.state
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


class Optional(torch.optim.SGD):
    """A closure that is optional in fact, and attributes that a step changes."""

    def __init__(self, parameters, lr=0.1):
        super().__init__(parameters, lr=lr)
        self.calls, self.log = 0, []

    def step(self, closure=None):
        loss = None
        if closure is not None:
            loss = closure()
        self.calls += 1
        self.log.append(self.calls)
        super().step()
        return loss


def test_steps_that_need_no_closure_are_not_tried():
    model = mlp()
    optimizer = Optional(model.parameters())
    trimtab.start(model, optimizer, Plan.fixed(ROWS)).close()
    assert (optimizer.calls, optimizer.log) == (0, [])
    assert same_weights(ours(Optional), plain(Optional))
    model = mlp()
    trimtab.start(model, Logging(model.parameters(), lr=0.1), Plan.fixed(ROWS)).close()
    assert not CALLS


CALLS = []


class Logging(torch.optim.SGD):
    def step(self, closure=None):
        CALLS.append(1)
        return super().step(closure)


# Gradients that `zero_grad` keeps.


class Keeping(torch.optim.SGD):
    def zero_grad(self, set_to_none=True):
        pass


class EverySecond(torch.optim.SGD):
    calls = 0

    def zero_grad(self, *given, **named):
        self.calls += 1
        if self.calls % 2:
            super().zero_grad(*given, **named)


def replaced(parameters, lr):
    optimizer = torch.optim.SGD(parameters, lr=lr)
    optimizer.zero_grad = lambda: None
    return optimizer


def of_one_group(parameters, lr):
    parameters = list(parameters)
    optimizer = torch.optim.SGD([{"params": parameters[:1]}, {"params": parameters[1:]}], lr=lr)

    def zero_grad():
        for p in optimizer.param_groups[0]["params"]:
            p.grad = None

    optimizer.zero_grad = zero_grad
    return optimizer


KEEPING = {"a subclass": Keeping, "every second call": EverySecond, "replaced": replaced, "one group": of_one_group}


@pytest.mark.parametrize("make", KEEPING.values(), ids=KEEPING)
def test_gradients_that_are_kept_over_steps_are_refused(make):
    with raises(OptimizerError, code="optimizer.keeps_gradients"):
        ours(functools.partial(make, lr=0.1), count=4)


def cleared_in_place(parameters, lr, values=lambda gradient: gradient):
    optimizer = torch.optim.SGD(parameters, lr=lr)

    def zero_grad():
        for p in optimizer.param_groups[0]["params"]:
            if p.grad is not None:
                values(p.grad).zero_()

    optimizer.zero_grad = zero_grad
    return optimizer


def wrapped(parameters, lr):
    optimizer = torch.optim.SGD(parameters, lr=lr)
    own = optimizer.zero_grad
    optimizer.zero_grad = lambda: own()
    return optimizer


OldStyle = functools.partial(cleared_in_place, values=lambda gradient: gradient.data)
CLEARING = {"in place": cleared_in_place, "old style": OldStyle, "wrapped": wrapped}


@pytest.mark.parametrize("make", CLEARING.values(), ids=CLEARING)
def test_other_ways_to_clear_gradients_train_as_the_plain_loop(make):
    make = functools.partial(make, lr=0.1)
    assert same_weights(ours(make), plain(make))


# Steps that are wrapped, and unusual optimizers.


def clipping_step(parameters):
    parameters = list(parameters)
    optimizer = torch.optim.AdamW(parameters, lr=0.1)
    own = optimizer.step

    def step(*given, **named):
        torch.nn.utils.clip_grad_norm_(parameters, 0.01)
        return own(*given, **named)

    optimizer.step = step
    return optimizer


class Scheduled(torch.optim.SGD):
    def __init__(self, parameters):
        super().__init__(parameters, lr=0.5)
        self.steps = 0

    def step(self, closure=None):
        self.steps += 1
        for group in self.param_groups:
            group["lr"] = 0.5 / self.steps
        return super().step(closure)


def with_scheduler_in_its_step(parameters):
    optimizer = torch.optim.SGD(parameters, lr=0.5)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    optimizer.register_step_post_hook(lambda *_: scheduler.step())
    return optimizer


STEPS = {
    "a step that clips": clipping_step,
    "a step that sets its rate": Scheduled,
    "a scheduler in a hook": with_scheduler_in_its_step,
    "ASGD": functools.partial(torch.optim.ASGD, lr=0.1),
    "Rprop": functools.partial(torch.optim.Rprop, lr=0.1),
    "Adagrad": functools.partial(torch.optim.Adagrad, lr=0.1),
    "RMSprop": functools.partial(torch.optim.RMSprop, lr=0.1, centered=True),
    "Adafactor": functools.partial(torch.optim.Adafactor, lr=0.1),
}
every_step = pytest.mark.parametrize("make", STEPS.values(), ids=STEPS)


@every_step
def test_unusual_steps_train_as_the_plain_loop(make):
    assert same_weights(ours(make), plain(make))


def test_a_fused_step_is_not_swapped_in_under_a_step_of_the_users():
    model = mlp()
    with pytest.raises(OptimizerError):
        trimtab.start(model, clipping_step(model.parameters()), Plan.fixed(ROWS, fused_optimizer=True))
    optimizer = torch.optim.AdamW(model.parameters())
    torch.optim.lr_scheduler.StepLR(optimizer, 1)  # which wraps the step too, and changes nothing of it
    trimtab.start(model, optimizer, Plan.fixed(ROWS, fused_optimizer=True)).close()


# What planning finds by one plain step.


class Failing(torch.optim.SGD):
    def step(self, closure=None):
        raise ZeroDivisionError("of the user's")


class NeedingAnArgument(torch.optim.SGD):
    def step(self, loss):
        return super().step()


PLANNED = {
    "fails": (Failing, "optimizer.step_failed"),
    "an argument": (NeedingAnArgument, "optimizer.step_failed"),
    "kept gradients": (Keeping, "optimizer.keeps_gradients"),
    "kept by one group": (of_one_group, "optimizer.keeps_gradients"),
}


@pytest.mark.parametrize(("make", "code"), PLANNED.values(), ids=PLANNED)
def test_planning_refuses_a_step_that_it_could_not_measure(make, code):
    model = mlp()
    optimizer = make(model.parameters(), lr=0.1)
    before = [p.clone() for p in model.parameters()]
    with raises(OptimizerError, code=code):
        trimtab.plan(model, optimizer, loss_fn, batches()[0], num_blocks=3)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert all(p.grad is None for p in model.parameters())


def test_planning_refuses_parameters_that_change_in_the_backward():
    model = mlp()
    node = model[0].weight.view_as(model[0].weight).grad_fn.next_functions[0][0]  # where no inspection finds hooks

    def step(*_):
        with torch.no_grad():
            model[0].weight.sub_(model[0].weight.grad)

    node.register_hook(step)
    before = model[0].weight.clone()
    with raises(OptimizerError, code="optimizer.steps_in_backward"):
        trimtab.plan(model, sgd(model), loss_fn, batches()[0], num_blocks=3)
    assert torch.equal(before, model[0].weight)


class StepsItsScheduler(torch.optim.SGD):
    def step(self, closure=None):
        result = super().step(closure)
        self.scheduler.step()
        return result


def test_planning_leaves_a_scheduler_that_a_step_moves():
    model = mlp()
    optimizer = StepsItsScheduler(model.parameters(), lr=0.5)
    optimizer.scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    before = copy.deepcopy(optimizer.scheduler.state_dict())
    trimtab.plan(model, optimizer, loss_fn, batches()[0], num_blocks=3)
    assert optimizer.scheduler.state_dict() == before
    assert optimizer.param_groups[0]["lr"] == 0.5
