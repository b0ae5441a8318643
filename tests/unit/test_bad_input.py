"""What is given to plan(), profile() and start() is used or refused by a typed error, with nothing half-applied."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy
import pytest
import torch
from refusals import NO_COUNT, NO_POSITIVE, ROWS, Loop, mean_loss, new_loop, refused
from torch import nn

import trimtab
from trimtab.core import serialization
from trimtab.core.errors import BatchError, LossError, ModelError, OptimizerError, ValueGivenError
from trimtab.plans.plan import Plan

TEXT = serialization.to_json(Plan.fixed(8, 4))
loop = pytest.fixture(new_loop)


class Unknown:
    """Something of no use."""


def frozen(loop: Loop) -> nn.Module:
    return copy.deepcopy(loop.model).requires_grad_(False)


DOOR = {
    "no module": (lambda k: {"model": mean_loss}, ModelError, "model", "a function"),
    "no model": (lambda k: {"model": None}, ModelError, "model", "NoneType"),
    "no parameters": (lambda k: {"model": nn.ReLU()}, ModelError, "model", "trainable parameters"),
    "all frozen": (lambda k: {"model": frozen(k)}, ModelError, "model", "trainable parameters"),
    "no optimizer": (lambda k: {"optimizer": None}, OptimizerError, "optimizer", "NoneType"),
    "an optimizer's class": (lambda k: {"optimizer": torch.optim.SGD}, OptimizerError, "optimizer", "the class SGD"),
    "a scheduler": (
        lambda k: {"optimizer": torch.optim.lr_scheduler.ConstantLR(k.optimizer, 1.0, 1)},
        OptimizerError,
        "optimizer",
        "a ConstantLR",
    ),
    "an optimizer of another model": (
        lambda k: {"optimizer": torch.optim.SGD(copy.deepcopy(k.model).parameters(), lr=0.1)},
        OptimizerError,
        "optimizer",
        "4 parameters",
    ),
    "an optimizer that needs a closure": (
        lambda k: {"optimizer": torch.optim.LBFGS(k.model.parameters())},
        OptimizerError,
        "optimizer",
        "LBFGS",
    ),
}
NO_METER = trimtab.Metering(root=Path("no powercap"))
PLANNING = {
    "no loss": (lambda k: {"loss_fn": None}, LossError, "loss_fn", "NoneType"),
    "a loss of one argument": (lambda k: {"loss_fn": lambda model: 1}, LossError, "loss_fn", "(model)"),
    "a loss of other keys": (lambda k: {"loss_fn": lambda model, b: b["z"]}, LossError, "loss_fn", "KeyError"),
    "a batch of another kind": (lambda k: {"example_batch": (k.batch["x"],)}, LossError, "loss_fn", "TypeError"),
    "no batch": (lambda k: {"example_batch": None}, LossError, "loss_fn", "TypeError"),
    "an empty batch": (lambda k: {"example_batch": {"x": torch.zeros(0, 4)}}, BatchError, "batch", "0 samples"),
    "a loader for a batch": (
        lambda k: {"example_batch": iter([k.batch])},
        BatchError,
        "example_batch",
        "list_iterator",
    ),
    "an array": (lambda k: {"example_batch": numpy.zeros(3)}, LossError, "loss_fn", "IndexError"),
    "a longest batch that is none": (lambda k: {"longest_batch": Unknown()}, LossError, "loss_fn", "TypeError"),
    "a longest batch of fewer rows": (
        lambda k: {"longest_batch": {name: column[:2] for name, column in k.batch.items()}},
        ValueGivenError,
        "longest_batch",
        "2 samples",
    ),
    "a budget as text": (lambda k: {"budget": "8GiB"}, ValueGivenError, "budget", "'8GiB'"),
    "an objective as text": (lambda k: {"objective": "time"}, ValueGivenError, "objective", "'time'"),
    "a reference as text": (lambda k: {"reference": "bf16"}, ValueGivenError, "reference", "'bf16'"),
    "two blocks": (lambda k: {"num_blocks": 2}, ValueGivenError, "num_blocks", "2"),
    "no whole number of blocks": (lambda k: {"num_blocks": 3.5}, ValueGivenError, "num_blocks", "3.5"),
    "energy wanted without a meter": (
        lambda k: {"objective": trimtab.Objective(energy=0.5), "metering": NO_METER},
        ValueGivenError,
        "energy",
        "no powercap",
    ),
    "energy limited without a meter": (
        lambda k: {"budget": trimtab.Budget(energy=1.0), "metering": NO_METER},
        ValueGivenError,
        "energy",
        "no powercap",
    ),
}
ADAPTING = {
    "an unknown adaptation": (lambda k: {"adapt": "batch_size", "data": [k.batch]}, ValueGivenError, "adapt", ""),
    "an adaptation of another type": (lambda k: {"adapt": 3, "data": [k.batch]}, ValueGivenError, "adapt", "3"),
    "two adaptations, one unknown": (lambda k: {"adapt": ("batch", "size")}, ValueGivenError, "adapt", "size"),
    "a rule for a batch that is not freed": (
        lambda k: {"batch_rule": trimtab.BatchRule()},
        ValueGivenError,
        "batch_rule",
        "k = 1",
    ),
    "a larger batch that is not freed": (
        lambda k: {"batch_rule": trimtab.BatchRule("fixed", k=2)},
        ValueGivenError,
        "batch_rule",
        "k = 2",
    ),
    "an adaptation without data": (lambda k: {"adapt": "learning_rate"}, ValueGivenError, "data", "learning_rate"),
    "an adaptation on no data": (
        lambda k: {"adapt": "learning_rate", "data": [], "num_blocks": 3},
        ValueGivenError,
        "data",
        "no batches",
    ),
    "an adaptation on a number": (
        lambda k: {"adapt": "learning_rate", "data": 5, "num_blocks": 3},
        BatchError,
        "data",
        "a int",
    ),
    "an adaptation on empty batches": (
        lambda k: {"adapt": "learning_rate", "data": [k.batch, {"x": torch.zeros(0, 4)}], "num_blocks": 3},
        BatchError,
        "batch",
        "0 samples",
    ),
}


@pytest.mark.parametrize(
    ("changes", "error", "field", "given"), [*DOOR.values(), *PLANNING.values()], ids=[*DOOR, *PLANNING]
)
@pytest.mark.parametrize("door", ["plan", "profile"])
def test_planning_refuses(loop, door, changes, error, field, given):
    changes = changes(loop)
    with refused(loop, error, field, given):
        getattr(loop, door)(**changes)


@pytest.mark.parametrize(("changes", "error", "field", "given"), ADAPTING.values(), ids=ADAPTING)
def test_adapting_refuses(loop, changes, error, field, given):
    changes = changes(loop)
    with refused(loop, error, field, given):
        loop.plan(**changes)


def test_a_rule_that_only_measures_frees_nothing(loop):
    plan = loop.plan(batch_rule=trimtab.BatchRule("fixed"), num_blocks=3)
    assert plan.plan_kind == "equivalent"
    assert "batch_policy" not in plan.changes
    with loop.start(plan=plan) as run:
        for _ in range(40):
            assert run.num_batches == 1
            run.train_step(run.window(loop.batch), mean_loss)
        assert run.noise is not None


def test_both_adaptations_at_once(loop):
    plan = loop.plan(adapt=("learning_rate", "batch"), data=[loop.batch] * 4, num_blocks=3)
    assert plan.batch_rule == trimtab.BatchRule()
    assert "batch_policy" in plan.changes
    assert plan.search_s > 0  # of the range test


WARM = Plan.fixed(ROWS, schedule="warmup_cosine")
STARTING = {
    "a plan as a dict": ({"plan": {"precision": "bf16"}}, ValueGivenError, "plan", "a dict"),
    "a plan as text": ({"plan": TEXT}, ValueGivenError, "plan", "a str"),
    "the function plan": ({"plan": trimtab.plan}, ValueGivenError, "plan", "a function"),
    "a choice": ({"plan": Plan.fixed(8).precision}, ValueGivenError, "plan", "a Choice"),
    **{f"clip {value!r:.8}": ({"clip_norm": value}, ValueGivenError, "clip_norm", "") for value in NO_POSITIVE},
    **{
        f"total {value!r:.8}": ({"total_samples": value}, ValueGivenError, "total_samples", "")
        for value in NO_COUNT
        if value is not None
    },
    "a schedule without its end": ({"plan": WARM}, ValueGivenError, "total_samples", "warmup_cosine"),
    "two clip norms": (
        {"plan": Plan.fixed(ROWS, clip_norm=1.0), "clip_norm": 2.0},
        ValueGivenError,
        "clip_norm",
        "2",
    ),
    "tf32 on CPU": ({"plan": Plan.fixed(ROWS, precision="tf32")}, ValueGivenError, "plan.precision", "tf32"),
}


@pytest.mark.parametrize(("changes", "error", "field", "given"), STARTING.values(), ids=STARTING)
def test_starting_refuses(loop, changes, error, field, given):
    with refused(loop, error, field, given):
        loop.start(**changes)
    loop.start().close()


@pytest.mark.parametrize(("changes", "error", "field", "given"), DOOR.values(), ids=DOOR)
def test_starting_refuses_a_model_and_optimizer_that_do_not_fit(loop, changes, error, field, given):
    both = {"model": loop.model, "optimizer": loop.optimizer} | changes(loop)
    with refused(loop, error, field, given):
        trimtab.start(both["model"], both["optimizer"], Plan.fixed(ROWS))
    loop.start().close()


class MyAdamW(torch.optim.AdamW):
    """A subclass may override the step a switch relies on."""


NOT_FUSED = {
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.1),
    "a subclass": lambda p: MyAdamW(p, lr=0.1),
    "differentiable": lambda p: torch.optim.AdamW(p, lr=0.1, differentiable=True),
}


@pytest.mark.parametrize("optimizer", NOT_FUSED.values(), ids=NOT_FUSED)
def test_a_fused_step_that_does_not_exist_is_refused(loop, optimizer):
    loop.optimizer = optimizer(loop.model.parameters())
    with refused(loop, OptimizerError, "plan.fused_optimizer", type(loop.optimizer).__name__):
        loop.start(plan=Plan.fixed(ROWS, fused_optimizer=True))
