"""Learning rates and hands-on gradients: schedules count what was trained on, and nothing leaks out of a step."""

from __future__ import annotations

import math

import pytest
import torch
from plain_loop import Trained, assert_same_training, train_ours, train_plain
from torch import nn
from torch.optim import lr_scheduler
from training_cases import ROWS, class_batches, class_case, class_mean, token_case

import trimtab
from trimtab.plans.plan import Plan

SIZES = (12,) * 9 + (5,)  # a short last window: progress counts samples, not steps
TOTAL = sum(SIZES)


class ByHand:
    """5% linear warm-up, then a cosine to a tenth: set before each step from what will have been trained on after."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.base = [group["lr"] for group in optimizer.param_groups]
        self.index = 0
        self._set()

    def _set(self) -> None:
        progress = min(1.0, sum(SIZES[: self.index + 1]) / TOTAL)
        if progress < 0.05:
            factor = progress / 0.05
        else:
            factor = 0.1 + 0.9 * (1 + math.cos(math.pi * (progress - 0.05) / 0.95)) / 2
        for group, base in zip(self.optimizer.param_groups, self.base, strict=True):
            group["lr"] = base * factor

    def step(self) -> None:
        self.index += 1
        self._set()


@pytest.mark.parametrize("micro_batch", [12, 5])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_warmup_and_cosine_follow_the_samples_trained_on(optimizer, micro_batch):
    case = class_case(optimizer=optimizer, batches=class_batches(SIZES))
    ours = train_ours(case, Plan.fixed(ROWS, micro_batch, schedule="warmup_cosine"), total_samples=TOTAL)
    assert_same_training(ours, train_plain(case, scheduler=ByHand), 1e-12)


class LineByHand(ByHand):
    """A rise over half the run, then a straight line down to a hundredth."""

    def _set(self) -> None:
        progress = min(1.0, sum(SIZES[: self.index + 1]) / TOTAL)
        factor = progress / 0.5 if progress < 0.5 else max(0.01, (1 - progress) / 0.5)
        for group, base in zip(self.optimizer.param_groups, self.base, strict=True):
            group["lr"] = base * factor


@pytest.mark.parametrize("micro_batch", [12, 5])
def test_a_line_and_another_rise_follow_the_samples_too(micro_batch):
    case = class_case(batches=class_batches(SIZES))
    plan = Plan.fixed(ROWS, micro_batch, schedule="warmup_linear", warmup_fraction=0.5)
    ours = train_ours(case, plan, total_samples=TOTAL)
    assert_same_training(ours, train_plain(case, scheduler=LineByHand), 1e-12)


def test_the_first_step_of_a_schedule_is_not_lost_and_a_longer_run_than_planned_stays_at_the_end():
    case = class_case()
    start = train_ours(case, Plan.fixed(ROWS, schedule="warmup_cosine"), total_samples=10**6)
    assert not torch.equal(start.weights["0.weight"], case.build()[0][0].weight)
    over = train_ours(case, Plan.fixed(ROWS, schedule="warmup_cosine"), total_samples=1)
    slow = case.having(optimizer=lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9, weight_decay=1e-3))
    assert_same_training(over, train_plain(slow), 1e-12)


SCHEDULERS = {
    "cosine, which reads the rate back": lambda o: lr_scheduler.CosineAnnealingLR(o, 8),
    "exponential, which multiplies it": lambda o: lr_scheduler.ExponentialLR(o, 0.7),
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda i: 1 / (1 + i)),
}


def sgd_twice_as_fast(parameters):
    return torch.optim.SGD(parameters, lr=0.4, momentum=0.9, weight_decay=1e-3)


@pytest.mark.parametrize("scheduler", SCHEDULERS.values(), ids=SCHEDULERS)
def test_the_users_own_scheduler_is_left_alone(scheduler):
    case = class_case()
    ours = train_ours(case, Plan.fixed(ROWS, 5), scheduler)
    plain = train_plain(case, scheduler=scheduler)
    assert_same_training(ours, plain, 1e-12)
    assert ours.optimizer.param_groups[0]["lr"] == plain.optimizer.param_groups[0]["lr"]


@pytest.mark.parametrize("scheduler", SCHEDULERS.values(), ids=SCHEDULERS)
def test_a_scaled_rate_does_not_compound_with_the_users_scheduler(scheduler):
    case = class_case()
    ours = train_ours(case, Plan.fixed(ROWS, 5, learning_rate_scale=2.0), scheduler)
    plain = train_plain(case.having(optimizer=sgd_twice_as_fast), scheduler=scheduler)
    assert_same_training(ours, plain, 1e-12)
    assert ours.optimizer.param_groups[0]["lr"] == pytest.approx(plain.optimizer.param_groups[0]["lr"] / 2, rel=1e-12)


def test_the_scale_and_the_schedule_of_a_plan_multiply():
    case = class_case(batches=class_batches(SIZES))
    plan = Plan.fixed(ROWS, 5, learning_rate_scale=2.0, schedule="warmup_cosine")
    ours = train_ours(case, plan, total_samples=TOTAL)
    assert_same_training(ours, train_plain(case.having(optimizer=sgd_twice_as_fast), scheduler=ByHand), 1e-12)


def test_every_parameter_group_keeps_its_own_rate():
    def groups(parameters):
        return torch.optim.SGD([{"params": parameters[:2], "lr": 0.3}, {"params": parameters[2:], "lr": 0.01}])

    def faster(parameters):
        return torch.optim.SGD([{"params": parameters[:2], "lr": 0.9}, {"params": parameters[2:], "lr": 0.03}])

    case = class_case(optimizer="sgd").having(optimizer=groups)
    ours = train_ours(case, Plan.fixed(ROWS, 5, learning_rate_scale=3.0))
    assert_same_training(ours, train_plain(case.having(optimizer=faster)), 1e-12)


def test_a_scheduler_waits_when_the_window_was_void():
    case = class_case(torch.float32, loss_fn=lambda model, batch: class_mean(model, batch) * 1e30)
    model, optimizer = case.build()
    scheduler = lr_scheduler.ExponentialLR(optimizer, 0.5)
    with trimtab.start(model, optimizer, Plan.fixed(ROWS, precision="fp16")) as run:
        window = run.window(case.batches[0])
        run.train_step(window, case.loss_fn)
        if run.applied_steps:
            scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.2


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("kind", ["means", "token sums"])
def test_unscaled_gradients_are_the_true_ones_and_can_be_clipped_by_hand(kind, precision):
    case = class_case(torch.float32) if kind == "means" else token_case(torch.float32)
    plan = Plan.fixed(ROWS, 5, precision=precision)
    model, optimizer = case.build()
    own = Trained(model, optimizer)
    with trimtab.start(model, optimizer, plan) as run:
        for window in run.windows(case.batches[:2]):
            for micro in window:
                with run.autocast():
                    result = case.loss_fn(run.model, micro)
                run.backward(result)
            run.unscale()
            own.norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.2))
            run.step()
            own.losses.append(run.loss)
    library = train_ours(case.having(batches=case.batches[:2]), plan, clip_norm=0.2)
    # One multiplication by the product of two factors against two multiplications: 1 unit more of rounding.
    assert_same_training(own, library, 1e-6)
    if precision == "fp32":
        assert_same_training(own, train_plain(case.having(batches=case.batches[:2]), 0.2), 1e-6)


def test_unscale_then_the_runs_own_clipping_applies_each_factor_once():
    case = token_case()
    model, optimizer = case.build()
    own = Trained(model, optimizer)
    with trimtab.start(model, optimizer, Plan.fixed(ROWS, 5), clip_norm=0.2) as run:
        for window in run.windows(case.batches):
            for micro in window:
                run.backward(case.loss_fn(run.model, micro))
            run.unscale()
            run.step()
            own.losses.append(run.loss)
            own.norms.append(run.grad_norm)
    assert_same_training(own, train_plain(case, 0.2), 1e-12)


def test_a_gradient_changed_between_unscale_and_step_is_what_is_applied():
    case = class_case()
    model, optimizer = case.build()
    with trimtab.start(model, optimizer, Plan.fixed(ROWS, 5)) as run:
        for micro in (window := run.window(case.batches[0])):
            run.backward(class_mean(run.model, micro))
        run.unscale()
        before = [p.detach().clone() for p in model.parameters()]
        for p in model.parameters():
            p.grad.fill_(1.0)
        run.step()
        assert window.rows == run.consumed_samples
    for old, p in zip(before, model.parameters(), strict=True):
        expected = old - 0.2 * (1 + 1e-3 * old)  # learning rate x (gradient + weight decay)
        assert torch.allclose(p.detach(), expected, rtol=1e-14, atol=1e-15)
