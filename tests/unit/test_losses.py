"""Results of a loss function: which forms are accepted, what they train, and what is refused."""

from __future__ import annotations

import copy
from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from fractions import Fraction
from types import MappingProxyType

import numpy as np
import pytest
import torch
from torch import nn

import trimtab
from trimtab.core.errors import LossError
from trimtab.losses import Summed, as_loss
from trimtab.plans.plan import Plan

ROWS = 12
Outcome = namedtuple("Outcome", ["loss", "auxiliary"])


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def batches(num=3):
    generator = torch.Generator().manual_seed(1)
    inputs = [torch.randn(ROWS, 4, generator=generator, dtype=torch.float64) for _ in range(num)]
    return [{"x": x, "y": torch.randint(0, 3, (ROWS,), generator=generator)} for x in inputs]


def output(model, batch):
    return model(batch["x"])


def mean(model, batch):
    return nn.functional.cross_entropy(output(model, batch), batch["y"])


def summed(model, batch):
    total = nn.functional.cross_entropy(output(model, batch), batch["y"], reduction="sum")
    return Summed(total, torch.tensor(len(batch["y"])))


def plain():
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in batches():
        optimizer.zero_grad()
        mean(model, batch).backward()
        optimizer.step()
    return model


def train(loss_fn, micro_batch=5):
    model = build()
    with trimtab.start(model, torch.optim.SGD(model.parameters(), lr=0.1), Plan.fixed(ROWS, micro_batch)) as run:
        for window in run.windows(batches()):
            run.train_step(window, loss_fn)
        return model, run.auxiliary


def distance(model, other):
    return max(float((a - b).detach().norm()) for a, b in zip(model.parameters(), other.parameters(), strict=True))


@dataclass
class Extras:
    """Values of a loss, as an object."""

    logits: torch.Tensor
    name: str = "extras"


AUXILIARY = {
    "dict": lambda m, b: {"accuracy": output(m, b).mean(), "rows": len(b["x"])},
    "ordered dict": lambda m, b: OrderedDict(accuracy=output(m, b).mean()),
    "immutable mapping": lambda m, b: MappingProxyType({"accuracy": output(m, b).mean()}),
    "dataclass": lambda m, b: Extras(output(m, b)),
    "tensor": lambda m, b: output(m, b),
    "list": lambda m, b: [output(m, b).mean(), 3],
    "nested": lambda m, b: {"each": (output(m, b), {"inner": [output(m, b)]})},
    "array": lambda m, b: np.arange(3),
    "text": lambda m, b: "step",
}


@pytest.mark.parametrize("loss_fn", [mean, summed])
@pytest.mark.parametrize("micro_batch", [ROWS, 5, 1])
@pytest.mark.parametrize("extra", AUXILIARY.values(), ids=AUXILIARY)
def test_auxiliary_values_change_nothing(extra, micro_batch, loss_fn):
    model, found = train(lambda m, b: (loss_fn(m, b), extra(m, b)), micro_batch)
    assert distance(model, plain()) < 1e-12
    assert len(found) == -(-ROWS // micro_batch)


def tensors(value):
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, Extras):
        return [value.logits]
    items = value.values() if hasattr(value, "values") else value if isinstance(value, list | tuple) else ()
    return [tensor for item in items for tensor in tensors(item)]


@pytest.mark.parametrize(
    ("extra", "number"),
    [("dict", 1), ("ordered dict", 1), ("immutable mapping", 1), ("dataclass", 1), ("tensor", 1), ("nested", 2)],
)
def test_tensors_of_auxiliary_values_are_detached(extra, number):
    _, found = train(lambda m, b: Outcome(mean(m, b), AUXILIARY[extra](m, b)))
    assert all(len(tensors(each)) == number for each in found)
    assert not any(tensor.requires_grad for each in found for tensor in tensors(each))


def test_auxiliary_values_are_those_of_the_last_window_in_their_class():
    model = build()
    with trimtab.start(model, torch.optim.SGD(model.parameters(), lr=0.1), Plan.fixed(ROWS, 5)) as run:
        assert run.auxiliary == ()
        for number, window in enumerate(run.windows(batches())):
            run.train_step(window, lambda m, b, number=number: (mean(m, b), {"window": number, "rows": len(b["x"])}))
            assert run.auxiliary == tuple({"window": number, "rows": rows} for rows in (5, 5, 2))
        run.train_step(run.window(batches()[0]), mean)
        assert run.auxiliary == (None, None, None)
    _, (first, *_) = train(lambda m, b: (mean(m, b), Extras(output(m, b))))
    assert (type(first), first.name, first.logits.shape) == (Extras, "extras", (5, 3))
    _, (first, *_) = train(lambda m, b: (mean(m, b), OrderedDict(a=1)))
    assert type(first) is OrderedDict
    model = build()
    with trimtab.start(model, torch.optim.SGD(model.parameters(), lr=0.1), Plan.fixed(ROWS, 5)) as run:
        for window in run.windows(batches()):
            for micro in window:
                run.backward((summed(run.model, micro), {"rows": len(micro["x"])}))
            run.step()
            assert [each["rows"] for each in run.auxiliary] == [5, 5, 2]
    assert distance(model, plain()) < 1e-12


NUMBERS = {
    "an accuracy": torch.tensor(0.5),
    "a tensor of one element": torch.ones(1, 1),
    "a tensor of truth": torch.tensor(True),
    "an int": 12,
    "a float": 0.5,
    "a bool": True,
    "a complex": 1j,
    "a numpy float": np.float32(0.5),
    "a numpy int": np.int64(3),
    "a numpy bool": np.bool_(True),
    "an array of one": np.ones(1),
    "a fraction": Fraction(1, 2),
}


@pytest.mark.parametrize("loss_fn", [mean, summed])
@pytest.mark.parametrize("number", NUMBERS.values(), ids=NUMBERS)
def test_a_pair_with_a_number_is_refused_and_nothing_changes(number, loss_fn):
    model = build()
    before = copy.deepcopy(model.state_dict())
    with trimtab.start(model, torch.optim.SGD(model.parameters(), lr=0.1), Plan.fixed(ROWS, 5)) as run:
        with pytest.raises(LossError) as caught:
            run.train_step(run.window(batches()[0]), lambda m, b: (loss_fn(m, b), number))
        assert caught.value.code == "loss.pair_ambiguous"
        assert all(word in caught.value.hint for word in ("Summed(loss_sum, count)", '{"accuracy"'))
        assert run.applied_steps == 0
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("number", [0.5, torch.tensor(0.5)], ids=["float", "tensor"])
def test_planning_refuses_a_pair_with_a_number(number):
    model = build()
    before = copy.deepcopy(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(LossError) as caught:
        trimtab.plan(model, optimizer, lambda m, b: (mean(m, b), number), batches()[0], num_blocks=3)
    assert caught.value.code == "loss.pair_ambiguous"
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_pair_with_auxiliary_values_can_be_planned():
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss_fn = lambda m, b: (summed(m, b), {"accuracy": output(m, b).mean()})  # noqa: E731
    plan = trimtab.plan(model, optimizer, loss_fn, batches()[0], num_blocks=3)
    assert plan.check.splittable, plan.check.reason
    assert trimtab.Summed is Summed
    with pytest.raises(AttributeError):
        Summed(torch.ones(()), 2).count = 3


@pytest.mark.parametrize(
    ("result", "code"),
    [
        ((torch.ones((), requires_grad=True), {}, {}), "loss.invalid"),
        (Summed(torch.ones(2, requires_grad=True), 2), "loss.invalid"),
        ((torch.ones(2, requires_grad=True), {}), "loss.invalid"),
        (Summed(torch.ones((), requires_grad=True), "2"), "loss.count_invalid"),
        (Summed(Summed(torch.ones((), requires_grad=True), 2), 2), "loss.invalid"),
        ((Summed(torch.ones(()), 2), {}), "loss.invalid"),
    ],
)
def test_other_results_are_refused_by_code(result, code):
    with pytest.raises(LossError) as caught:
        as_loss(result)
    assert caught.value.code == code


@pytest.mark.parametrize(
    ("result", "remedy"),
    [
        ([torch.ones((), requires_grad=True), torch.ones(())], "a tuple"),
        ((torch.ones((), requires_grad=True), {}, {}), "a tuple"),
        ({"loss": torch.ones((), requires_grad=True)}, 'pop("loss")'),
    ],
)
def test_the_remedy_fits_the_container_of_a_loss(result, remedy):
    with pytest.raises(LossError) as caught:
        as_loss(result)
    assert caught.value.code == "loss.invalid"
    assert remedy in caught.value.hint


@pytest.mark.parametrize("count", [4, 4.0, np.int64(4), np.float64(4), torch.tensor(4), torch.tensor([4.0])])
def test_counts_of_a_sum(count):
    loss, found, auxiliary = as_loss(Summed(torch.ones(1, requires_grad=True), count))
    assert (loss.shape, float(found), auxiliary) == ((), 4.0, None)


def test_outputs_of_a_last_batch_of_one_sample_are_no_number():
    model = build()
    rows = [torch.randn(number, 4).double() for number in (ROWS, ROWS, 1)]
    for shape in (lambda y: y, lambda y: y[:, 0]):
        with trimtab.start(model, torch.optim.SGD(model.parameters(), lr=0.1), Plan.fixed(ROWS)) as run:
            for window in run.windows(rows):
                run.train_step(window, lambda model, x, shape=shape: ((y := model(x)).square().mean(), shape(y)))
            assert run.applied_steps == 3
