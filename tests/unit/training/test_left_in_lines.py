"""Lines of a plain loop that were left in a loop around a run: warned of or refused, with their cause."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_

import trimtab
from trimtab.core.errors import LossError

ROWS = 16


def loop():
    torch.manual_seed(0)
    model = nn.Linear(8, 3)
    return model, torch.optim.SGD(model.parameters(), lr=0.3)


def batches():
    generator = torch.Generator().manual_seed(1)
    draws = range(3)
    return [
        (torch.randn(ROWS, 8, generator=generator), torch.randint(0, 3, (ROWS,), generator=generator)) for _ in draws
    ]


def loss_fn(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def trained(body, **plan):
    model, optimizer = loop()
    with trimtab.start(model, optimizer, trimtab.Plan.fixed(ROWS, **plan)) as run:
        for window in run.windows(batches()):
            body(run, window, model, optimizer)


def zeroes_before_the_step(run, window, model, optimizer):
    run.accumulate(window, loss_fn)
    optimizer.zero_grad()
    run.step()


def zeroes_before_each_backward(run, window, model, optimizer):
    for batch in window:
        optimizer.zero_grad()
        run.backward(loss_fn(run.model, batch))
    run.step()


def goes_backward_twice(run, window, model, optimizer):
    for batch in window:
        loss = loss_fn(run.model, batch)
        loss.backward(retain_graph=True)
        run.backward(loss)
    run.step()


def clips_before_the_step(run, window, model, optimizer):
    run.accumulate(window, loss_fn)
    clip_grad_norm_(model.parameters(), 1.0)
    run.step()


def clamps_before_the_step(run, window, model, optimizer):
    run.accumulate(window, loss_fn)
    for parameter in model.parameters():
        parameter.grad.clamp_(-1, 1)
    run.step()


def clips_unscaled_gradients(run, window, model, optimizer):
    run.accumulate(window, loss_fn)
    run.unscale()
    clip_grad_norm_(model.parameters(), 1.0)
    run.step()


def steps_alone(run, window, model, optimizer):
    run.train_step(window, loss_fn)


WARNED = [
    (zeroes_before_the_step, {}),
    (zeroes_before_each_backward, {"micro_batch": 4}),
    (goes_backward_twice, {}),
    (goes_backward_twice, {"micro_batch": 4}),
    (clips_before_the_step, {"precision": "fp16"}),
    (clamps_before_the_step, {"precision": "fp16"}),
]


@pytest.mark.parametrize(("body", "plan"), WARNED)
def test_changes_of_gradients_that_a_run_does_not_expect_are_warned_of_once(body, plan):
    with pytest.warns(RuntimeWarning) as caught:
        trained(body, **plan)
    assert sum(each.category is RuntimeWarning for each in caught) == 1


@pytest.mark.parametrize(
    ("body", "plan"),
    [
        (clips_before_the_step, {}),
        (clamps_before_the_step, {}),
        (clips_unscaled_gradients, {"precision": "fp16"}),
        (steps_alone, {"precision": "fp16"}),
    ],
)
def test_changes_that_a_run_allows_are_not(body, plan):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trained(body, **plan)


def test_a_window_given_up_is_no_change():
    def body(run, window, model, optimizer):
        if run.applied_steps == 0:
            for batch in window:
                run.backward(loss_fn(run.model, batch))
            run.discard()
            run.train_step(run.window(batches()[0]), loss_fn)
        else:
            run.train_step(window, loss_fn)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trained(body)


@pytest.mark.usefixtures("brief_trials")
def test_a_backward_inside_the_loss_is_named_as_the_cause():
    def inside(model, batch):
        loss = loss_fn(model, batch)
        loss.backward()
        return loss

    with pytest.raises(LossError) as caught:
        trimtab.plan(*loop(), inside, batches()[0], num_blocks=3)
    assert caught.value.code == "loss.graph_used"
    with pytest.warns(RuntimeWarning), pytest.raises(LossError) as caught:
        trained(lambda run, window, *_: run.train_step(window, inside))
    assert caught.value.code == "loss.graph_used"


# Functions of the loop's own under a loss scale ---------------------------------------------------------------------


class Clamp(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient.clamp(-1e-3, 1e-3)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_function_that_would_see_the_loss_scale_is_warned_of(precision):
    def own(model, batch):
        return F.cross_entropy(Clamp.apply(model(batch[0])), batch[1])

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trained(lambda run, window, *_: run.train_step(window, own), precision=precision)
    assert len(caught) == (precision == "fp16")
