"""The user's own optimizer: its fused step where that is the plain one, and gradients dropped in its own way."""

from __future__ import annotations

import pytest
import torch
from raising import raises
from small_loops import sgd
from small_loops import square_loss as mean_square
from torch import nn

import trimtab
from trimtab.core.errors import OptimizerError
from trimtab.plans.plan import Plan
from trimtab.techniques.optimizers import supports_fused

ROWS = 4
OPTIMIZERS = {
    "sgd": lambda parameters, **options: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, **options),
    "adamw": lambda parameters, **options: torch.optim.AdamW(parameters, lr=0.01, eps=1e-3, **options),
}
every_optimizer = pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
PARAMETERS = {
    "as it is made": (torch.ones(4, 8), True),
    "transposed": (torch.ones(4, 8).T, True),
    "channels_last": (torch.ones(2, 3, 4, 4).contiguous(memory_format=torch.channels_last), True),
    "a part from the front": (torch.ones(4, 8)[1:3], True),
    "a scalar": (torch.ones(()), True),
    "empty": (torch.ones(0, 3), True),
    "with gaps": (torch.ones(4, 8)[:, :4], False),
    "every other row": (torch.ones(8, 4)[::2], False),
    "rows that share memory": (torch.ones(1, 4).expand(3, 4), False),
}


@every_optimizer
@pytest.mark.parametrize(("values", "is_dense"), PARAMETERS.values(), ids=PARAMETERS)
def test_a_parameter_is_stepped_fused_where_it_has_no_gaps(make, values, is_dense):
    parameter = nn.Parameter(values)
    assert parameter.stride() == values.stride()
    assert supports_fused(make([parameter])) is is_dense
    assert supports_fused(make([nn.Parameter(torch.ones(2)), parameter])) is is_dense


@pytest.mark.parametrize(
    ("options", "is_plain"),
    [
        ({"momentum": 0.9, "dampening": 0.5}, False),
        ({"momentum": 0.9}, True),
        ({"momentum": 0.9, "nesterov": True}, True),
        ({"dampening": 0.5}, True),
    ],
)
def test_sgd_is_stepped_fused_where_its_first_step_is_one_from_zeros(options, is_plain):
    parameters = [nn.Parameter(torch.ones(2)) for _ in range(2)]
    assert supports_fused(torch.optim.SGD(parameters, lr=0.1, **options)) is is_plain
    groups = [{"params": parameters[:1]}, {"params": parameters[1:], **options}]
    assert supports_fused(torch.optim.SGD(groups, lr=0.1)) is is_plain


def test_a_plan_with_a_fused_step_is_refused_where_that_would_be_another_one():
    gaps, plain = nn.Linear(4, 4), nn.Linear(4, 4)
    gaps.weight = nn.Parameter(torch.ones(4, 8)[:, :4])
    for model, options in ((gaps, {}), (plain, {"dampening": 0.5})):
        optimizer = sgd(model, momentum=0.9, **options)
        with raises(OptimizerError, code="optimizer.not_fusible", field="plan.fused_optimizer"):
            trimtab.start(model, optimizer, Plan.fixed(ROWS, fused_optimizer=True))
        trimtab.start(model, optimizer, Plan.fixed(ROWS)).close()


# A layer that is frozen at first.

UNFROZEN_AT = 2


def frozen_at_first(make):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    model[0].requires_grad_(False)
    return model, make(model.parameters(), weight_decay=0.01)


def rows(num=5):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(ROWS, 6, dtype=torch.float64, generator=generator) for _ in range(num)]


@every_optimizer
@pytest.mark.parametrize("out_of_memory", [None, "stop"])
def test_a_layer_unfrozen_during_a_run_is_stepped_fused_as_by_the_plain_step(make, out_of_memory):
    model, optimizer = frozen_at_first(make)
    plan = Plan.fixed(ROWS, fused_optimizer=True)
    with trimtab.start(model, optimizer, plan, out_of_memory=out_of_memory) as run:
        for index, batch in enumerate(rows()):
            model[0].requires_grad_(index >= UNFROZEN_AT)
            run.train_step(run.window(batch), mean_square)
    plain, by_hand = frozen_at_first(make)
    for index, batch in enumerate(rows()):
        plain[0].requires_grad_(index >= UNFROZEN_AT)
        by_hand.zero_grad()
        mean_square(plain, batch).backward()
        by_hand.step()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)
    assert not torch.equal(model[0].weight, frozen_at_first(make)[0][0].weight)


# Gradients that the loop makes itself, in a model laid out by channels.


def images(num=3):
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(ROWS, 3, 7, 7, dtype=torch.float64, generator=generator) for _ in range(num)]


def convolution(make, layout=torch.contiguous_format, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 6, 3), nn.Tanh(), nn.Flatten(), nn.Linear(150, 2)).double()
    model.to(memory_format=layout)
    return model, make(model.parameters(), **options)


def put_own_gradients(model):
    """Put half of each gradient in its place, laid out as tensors are made."""
    for parameter in model.parameters():
        parameter.grad = 0.5 * parameter.grad.contiguous()


LAYOUTS = {
    "by the user": ({"layout": torch.channels_last}, {"fused_optimizer": True}),
    "by the plan": ({}, {"memory_layout": "channels_last", "fused_optimizer": True}),
    "by the plan, fused by the user": ({"fused": True}, {"memory_layout": "channels_last"}),
}


def put_gradients_of_autograd(model, batch):
    """`torch.autograd.grad` returns that of a linear layer's weight transposed: the weight itself lies as it was."""
    parameters = list(model.parameters())
    for parameter, grad in zip(parameters, torch.autograd.grad(mean_square(model, batch), parameters), strict=True):
        parameter.grad = grad.t().contiguous().t() if grad.dim() == 2 else grad


WAYS = {
    **{name: (*layout, lambda model, batch: put_own_gradients(model), 0) for name, layout in LAYOUTS.items()},
    "by autograd": ({}, {"fused_optimizer": True}, put_gradients_of_autograd, 3),
}


@every_optimizer
@pytest.mark.parametrize(("options", "values", "put", "layer"), WAYS.values(), ids=WAYS)
def test_gradients_laid_out_otherwise_are_stepped_fused_as_by_the_plain_step(make, options, values, put, layer):
    model, optimizer = convolution(make, **options)
    with trimtab.start(model, optimizer, Plan.fixed(ROWS, **values)) as run:
        for batch in images():
            for micro in run.window(batch):
                run.backward(mean_square(run.model, micro))
            put(model, batch)
            assert model[layer].weight.grad.stride() != model[layer].weight.stride()
            assert run.step()
    plain, by_hand = convolution(make)
    for batch in images():
        by_hand.zero_grad()
        mean_square(plain, batch).backward()
        put(plain, batch)
        by_hand.step()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-13)


class TakesNothing(torch.optim.SGD):
    """As Apex's: its `zero_grad` takes no argument; and it leaves zeros."""

    num_calls = 0

    def zero_grad(self):
        self.num_calls += 1
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.zero_()


class TakesAnything(torch.optim.SGD):
    """Hands on what it is given."""

    num_calls = 0

    def zero_grad(self, **options):
        self.num_calls += 1
        assert options == {"set_to_none": True}
        super().zero_grad(**options)


@pytest.mark.parametrize("kind", [TakesNothing, TakesAnything])
def test_an_optimizer_is_asked_to_drop_gradients_in_its_own_way(kind):
    trained = []
    for cls in (kind, torch.optim.SGD):
        torch.manual_seed(0)
        model = nn.Linear(6, 3).double()
        optimizer = cls(model.parameters(), lr=0.1)
        mean_square(model, rows(1)[0]).backward()  # which no window is to begin with
        with trimtab.start(model, optimizer, Plan.fixed(ROWS, micro_batch=3)) as run:
            for window in run.windows(rows()):
                run.train_step(window, mean_square)
                assert model.weight.grad is not None
            assert run.applied_steps == 5
        assert all(parameter.grad is None for parameter in model.parameters())
        trained.append(model.weight.detach())
        if cls is kind:
            assert optimizer.num_calls >= 7  # as the run starts and ends, and for each window
    assert torch.equal(*trained)
