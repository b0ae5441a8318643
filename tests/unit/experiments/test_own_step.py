"""A user's own step function is held against the maths that its task declares."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tiny_task import load_data
from tiny_task import task as tiny

from trimtab.core.errors import LoopError, ValueGivenError
from trimtab.core.objective import Reference
from trimtab.experiments.own_step import check_step

CPU = torch.device("cpu")


def stepping(*, factor: float = 1.0, clip: float | None = None, precision: str = "fp32"):
    """Return a step function that scales the loss, clips the gradient, or computes in another precision."""

    def step(model, optimizer, batch):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bf16"):
            loss = factor * tiny.loss_fn(model, batch)
        loss.backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()

    return step


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def check(step, reference: Reference | None = None, **changes) -> None:
    its = replace(tiny, step=step, reference=reference or Reference("fp32"), **({"make_optimizer": sgd} | changes))
    check_step(its, load_data(), CPU)


@pytest.mark.parametrize("make_optimizer", [sgd, tiny.make_optimizer])
def test_a_step_of_the_declared_maths_passes(make_optimizer):
    check(stepping(), make_optimizer=make_optimizer)
    check(stepping(clip=0.1), Reference("fp32", 0.1), make_optimizer=make_optimizer)
    check(stepping(precision="bf16"), Reference("bf16"), make_optimizer=make_optimizer)


@pytest.mark.parametrize("other", [{"factor": 1.01}, {"clip": 0.1}, {"precision": "bf16"}])
def test_a_step_of_other_maths_is_refused(other):
    with pytest.raises(ValueGivenError, match=r"task\.step: given .*loss_fn.*reference\.clip_norm") as caught:
        check(stepping(**other))
    assert caught.value.field == "task.step"


def test_an_undeclared_step_that_does_nothing_is_refused():
    with pytest.raises(ValueGivenError, match=r"task\.step"):
        check(lambda model, optimizer, batch: None)


def test_rounding_is_no_other_maths():
    """Gradients in double precision, weights as they were."""

    def step(model, optimizer, batch):
        optimizer.zero_grad()
        (tiny.loss_fn(model, batch) / 3).backward()
        for parameter in model.parameters():
            parameter.grad.mul_(3)
        optimizer.step()

    check(step)


def test_a_step_that_strays_by_itself_is_not_blamed():
    """Noise of its own, as of atomic additions, is what it is held against then."""

    def step(model, optimizer, batch):
        stepping()(model, optimizer, batch)
        with torch.no_grad():
            model[0].weight.add_(0.001 * torch.randn(model[0].weight.shape, generator=noise))

    noise = torch.Generator().manual_seed(5)
    check(step)


def test_a_task_without_a_step_is_not_trained():
    check_step(replace(tiny, make_model=None.__class__), load_data(), CPU)


def test_the_process_is_left_as_it_was():
    before = torch.get_rng_state()
    check(stepping())
    assert torch.equal(torch.get_rng_state(), before)


def test_a_step_that_raises_is_named():
    def step(model, optimizer, batch):
        raise ZeroDivisionError("by nothing")

    with pytest.raises(LoopError, match="reference loop: given ZeroDivisionError: by nothing"):
        check(step)
