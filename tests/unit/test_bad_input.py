"""Whatever is given at the public door is used or refused: by a typed error that names it, with nothing half-applied."""

from __future__ import annotations

import copy
import json
import math
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import trimtab
from trimtab.calibrate import trials
from trimtab.core import codec
from trimtab.core.errors import (
    BatchError,
    FormatError,
    LoopError,
    LossError,
    ModelError,
    OptimizerError,
    TrimtabError,
    ValueGivenError,
)
from trimtab.core.plan import Plan
from trimtab.measure import machine
from trimtab.measure.snapshot import fingerprint

ROWS = 6
NAN, INF = math.nan, math.inf


@dataclass
class Loop:
    """A loop in the middle of training, and what its plan() and start() are called with."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    batch: Any

    def plan(self, **changes: Any) -> Plan:
        given = {"model": self.model, "optimizer": self.optimizer, "loss_fn": mean_loss, "example_batch": self.batch}
        return trimtab.plan(**given | changes)

    def profile(self, **changes: Any) -> Any:
        given = {"model": self.model, "optimizer": self.optimizer, "loss_fn": mean_loss, "example_batch": self.batch}
        return trimtab.profile(**given | changes)

    def start(self, model: Any = None, optimizer: Any = None, plan: Any = None, **more: Any) -> Any:
        return trimtab.start(model or self.model, optimizer or self.optimizer, plan or Plan.fixed(ROWS, 2), **more)


def mean_loss(model: nn.Module, batch: Any) -> Any:
    return nn.functional.cross_entropy(model(batch["x"]), batch["y"])


def sum_loss(model: nn.Module, batch: Any) -> Any:
    return nn.functional.cross_entropy(model(batch["x"]), batch["y"], reduction="sum")


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> Loop:
    monkeypatch.setattr(trials, "_BLOCK_S", 1e-4)
    monkeypatch.setattr(machine, "measured_cpu_peaks", lambda threads: {"fp32": 1e9, "bf16": 1e6, "fp16": 1e6})
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.Tanh(), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    batch = {"x": torch.randn(ROWS, 4), "y": torch.randint(0, 3, (ROWS,))}
    mean_loss(model, batch).backward()
    optimizer.step()
    return Loop(model, optimizer, batch)


@contextmanager
def refused(loop: Loop, error: type[TrimtabError], field: str, given: str = "", run: Any = None) -> Any:
    """Expect `error` about `field`, with all three parts, and every bit of the loop as it was."""
    before = fingerprint(loop.model, loop.optimizer), run and run.state_dict()
    with pytest.raises(TrimtabError) as caught:
        yield
    assert type(caught.value) is error, caught.value
    assert caught.value.field == field, caught.value
    assert given in caught.value.given, caught.value
    assert caught.value.expected
    assert str(caught.value).startswith(f"{field}: given ")
    assert (fingerprint(loop.model, loop.optimizer), run and run.state_dict()) == before


# Values by hand: Plan.fixed, Budget, Objective, Reference.

NO_COUNT = [0, -1, 2.0, NAN, INF, "8", None, True, 2**63, [8], 8j]
NO_POSITIVE = [0, -1, NAN, INF, -INF, "1", True, [1], 10**400]
VALUES = [
    *(("plan.batch_rows", value, lambda v: Plan.fixed(v)) for value in NO_COUNT),
    *(
        ("plan.micro_batch", value, lambda v: Plan.fixed(8, v))
        for value in [9, *(v for v in NO_COUNT if v is not None)]
    ),
    *(("plan.precision", value, lambda v: Plan.fixed(8, precision=v)) for value in ["int8", "FP32", 16, None, []]),
    *(("plan.memory_layout", value, lambda v: Plan.fixed(8, memory_layout=v)) for value in ["nhwc", None, 1]),
    *(("plan.allocator", value, lambda v: Plan.fixed(8, allocator=v)) for value in ["jemalloc", None, True]),
    *(("plan.schedule", value, lambda v: Plan.fixed(8, schedule=v)) for value in ["cosine", None, 0.5]),
    *(
        ("plan.learning_rate_scale", value, lambda v: Plan.fixed(8, learning_rate_scale=v))
        for value in [*NO_POSITIVE, None]
    ),
    *(("plan.clip_norm", value, lambda v: Plan.fixed(8, clip_norm=v)) for value in NO_POSITIVE),
    *(("memory", value, lambda v: trimtab.Budget(memory=v)) for value in [-1, NAN, INF, "lots", "8 parsecs", [], True]),
    *(("time", value, lambda v: trimtab.Budget(time=v)) for value in NO_POSITIVE),
    *(("energy", value, lambda v: trimtab.Budget(energy=v)) for value in NO_POSITIVE),
    *(("time", value, lambda v: trimtab.Objective(time=v)) for value in [-1, NAN, INF, "1", None]),
    *(("memory", value, lambda v: trimtab.Objective(memory=v)) for value in [-1e-9, NAN, True]),
    ("objective", 0, lambda v: trimtab.Objective(time=v)),
    *(("reference.precision", value, lambda v: trimtab.Reference(v)) for value in ["int8", None, 32]),
    *(("reference.clip_norm", value, lambda v: trimtab.Reference(clip_norm=v)) for value in NO_POSITIVE),
]


@pytest.mark.parametrize(("field", "value", "make"), VALUES, ids=[f"{f} {v!r:.12}" for f, v, _ in VALUES])
def test_a_value_out_of_range_is_refused(field, value, make):
    with pytest.raises(ValueGivenError) as caught:
        make(value)
    assert caught.value.field == field
    assert caught.value.expected


@pytest.mark.parametrize("value", [1, 0, "yes", None, NAN])
def test_fused_is_yes_or_no(value):
    with pytest.raises(FormatError, match=r"plan\.fused_optimizer: given .*expected true or false"):
        Plan.fixed(8, fused_optimizer=value)


@pytest.mark.parametrize("name", ["microbatch", "lr", "batch_rows_", "reference", "check"])
def test_an_unknown_setting_is_refused_and_the_known_ones_named(name):
    with pytest.raises(FormatError, match=rf"plan\.{name}: given an unknown field; expected one of micro_batch, "):
        Plan.fixed(8, **{name: 1})


anything = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=5),
    st.binary(max_size=3),
    st.complex_numbers(),
)
anything = st.one_of(
    anything, st.lists(anything, max_size=2), st.dictionaries(st.text(max_size=2), anything, max_size=2)
)


@given(st.sampled_from(sorted(Plan.marks())), anything)
def test_any_value_of_any_setting_makes_a_plan_or_a_typed_error(name, value):
    try:
        plan = Plan.fixed(8, **{name: value})
    except TrimtabError as error:
        assert error.field == f"plan.{name}"
    else:
        assert codec.from_json(Plan, codec.to_json(plan)) == plan


# Plans as JSON.

TEXT = codec.to_json(Plan.fixed(8, 4, precision="bf16"))


def damaged(**changes: Any) -> str:
    return json.dumps(json.loads(TEXT) | changes)


def without(key: str) -> str:
    return json.dumps({k: v for k, v in json.loads(TEXT).items() if k != key})


CHOICE = json.loads(TEXT)["micro_batch"]
JSON = {
    "cut off": (TEXT[:-20], "Plan"),
    "empty": ("", "Plan"),
    "a list": ("[]", "Plan"),
    "null": ("null", "Plan"),
    "an unknown key": (damaged(micro=3), "Plan.micro"),
    "a missing key": (without("batch_rows"), "Plan.batch_rows"),
    "a newer schema": (damaged(schema=99), "plan.schema"),
    "rows as text": (damaged(batch_rows="8"), "Plan.batch_rows"),
    "rows missing a value": (damaged(batch_rows=None), "Plan.batch_rows"),
    "negative rows": (damaged(batch_rows=-8), "plan.batch_rows"),
    "a bare value": (damaged(micro_batch=4), "Plan.micro_batch"),
    "a micro-batch above the batch": (damaged(micro_batch=CHOICE | {"value": 9}), "plan.micro_batch"),
    "a mark of its own": (damaged(micro_batch=CHOICE | {"mark": "free"}), "Plan.micro_batch.mark"),
    "a choice without reason": (damaged(micro_batch={"value": 4}), "Plan.micro_batch.reason"),
    "an infinite rate": (damaged(learning_rate_scale=CHOICE | {"value": "inf"}), "plan.learning_rate_scale"),
}


@pytest.mark.parametrize(("text", "field"), JSON.values(), ids=JSON)
def test_a_damaged_plan_is_refused_by_the_path_of_the_damage(text, field):
    with pytest.raises((FormatError, ValueGivenError)) as caught:
        codec.from_json(Plan, text)
    assert caught.value.field == field


@given(st.integers(0, len(TEXT) - 1), st.sampled_from(["", "0", '"', "}", "null", "NaN", "-"]))
def test_any_damage_to_a_plan_is_seen_or_harmless(index, character):
    try:
        plan = codec.from_json(Plan, TEXT[:index] + character + TEXT[index + 1 :])
    except TrimtabError as error:
        assert error.expected
    else:
        assert codec.from_json(Plan, codec.to_json(plan)) == plan


# plan() and profile(): everything they are given.


class Unknown:
    """Something of no use."""


def frozen(loop: Loop) -> nn.Module:
    return copy.deepcopy(loop.model).requires_grad_(False)


DOOR = {
    "no module": (lambda k: {"model": mean_loss}, ModelError, "model", "a function"),
    "no model": (lambda k: {"model": None}, ModelError, "model", "NoneType"),
    "no parameters": (lambda k: {"model": nn.ReLU()}, ModelError, "model", "no parameter"),
    "all frozen": (lambda k: {"model": frozen(k)}, ModelError, "model", "no parameter"),
    "no optimizer": (lambda k: {"optimizer": None}, OptimizerError, "optimizer", "NoneType"),
    "an optimizer's class": (lambda k: {"optimizer": torch.optim.SGD}, OptimizerError, "optimizer", "a type"),
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
        "4 parameters that are not the model's",
    ),
    "an optimizer that needs a closure": (
        lambda k: {"optimizer": torch.optim.LBFGS(k.model.parameters())},
        OptimizerError,
        "optimizer",
        "LBFGS",
    ),
}
PLANNING = {
    "no loss": (lambda k: {"loss_fn": None}, ValueGivenError, "loss_fn", "NoneType"),
    "a loss of one argument": (lambda k: {"loss_fn": lambda model: 1}, LossError, "loss_fn", "TypeError"),
    "a loss of other keys": (lambda k: {"loss_fn": lambda model, b: b["z"]}, LossError, "loss_fn", "KeyError"),
    "a batch of another kind": (lambda k: {"example_batch": (k.batch["x"],)}, LossError, "loss_fn", "TypeError"),
    "no batch": (lambda k: {"example_batch": None}, BatchError, "batch", "without rows"),
    "an empty batch": (lambda k: {"example_batch": {"x": torch.zeros(0, 4)}}, BatchError, "batch", "0 rows"),
    "a loader for a batch": (lambda k: {"example_batch": iter([k.batch])}, BatchError, "batch", "list_iterator"),
    "an array": (lambda k: {"example_batch": numpy.zeros(3)}, BatchError, "batch", "ndarray"),
    "a longest batch that is none": (lambda k: {"longest_batch": Unknown()}, BatchError, "batch", "Unknown"),
    "a budget as text": (lambda k: {"budget": "8GiB"}, ValueGivenError, "budget", "'8GiB'"),
    "an objective as text": (lambda k: {"objective": "time"}, ValueGivenError, "objective", "'time'"),
    "a reference as text": (lambda k: {"reference": "bf16"}, ValueGivenError, "reference", "'bf16'"),
    "two blocks": (lambda k: {"num_blocks": 2}, ValueGivenError, "num_blocks", "2"),
    "no whole number of blocks": (lambda k: {"num_blocks": 3.5}, ValueGivenError, "num_blocks", "3.5"),
    "energy wanted without a meter": (
        lambda k: {"objective": trimtab.Objective(energy=0.5)},
        ValueGivenError,
        "energy",
        "a weight or limit",
    ),
    "energy limited without a meter": (
        lambda k: {"budget": trimtab.Budget(energy=1.0)},
        ValueGivenError,
        "energy",
        "a weight or limit",
    ),
}
ADAPTING = {
    "an unknown adaptation": (lambda k: {"adapt": "batch_size", "data": [k.batch]}, ValueGivenError, "adapt", ""),
    "an adaptation of another type": (lambda k: {"adapt": 3, "data": [k.batch]}, ValueGivenError, "adapt", "3"),
    "an adaptation without data": (lambda k: {"adapt": "learning_rate"}, ValueGivenError, "data", "nothing"),
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
        "0 rows",
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


# start(): what it is given beside model and optimizer.

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
    "a schedule without its end": ({"plan": WARM}, ValueGivenError, "total_samples", "nothing"),
    "two clip norms": (
        {"plan": Plan.fixed(ROWS, clip_norm=1.0), "clip_norm": 2.0},
        ValueGivenError,
        "clip_norm",
        "2",
    ),
    "tf32 on CPU": ({"plan": Plan.fixed(ROWS, precision="tf32")}, ValueGivenError, "plan.precision", "tf32 on cpu"),
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


# The run: losses.

LOSSES = {
    "not a scalar": (lambda m, b: m(b["x"]), "loss", "shape (2, 3)"),
    "a vector": (lambda m, b: m(b["x"]).sum(1), "loss", "shape (2,)"),
    "detached": (lambda m, b: mean_loss(m, b).detach(), "loss", "does not depend"),
    "of the data alone": (lambda m, b: (m(b["x"]), b["x"].mean())[1], "loss", "does not depend"),
    "a float": (lambda m, b: mean_loss(m, b).item(), "loss", "a float"),
    "None": (lambda m, b: m(b["x"]) and None if False else None, "loss", "a NoneType"),
    "a dict": (lambda m, b: {"loss": mean_loss(m, b)}, "loss", "a dict"),
    "a list": (lambda m, b: [mean_loss(m, b)], "loss", "a list"),
    "a tuple of 3": (lambda m, b: (sum_loss(m, b), 2, m), "loss", "a tuple"),
    "a tuple of 1": (lambda m, b: (sum_loss(m, b),), "loss", "a tuple"),
    "complex": (lambda m, b: mean_loss(m, b) * 1j, "loss", "complex"),
    "with its output": (lambda m, b: (mean_loss(m, b), m(b["x"])), "loss count", "shape (2, 3)"),
    "a negative count": (lambda m, b: (sum_loss(m, b), -1), "loss count", "-1"),
    "a count of nan": (lambda m, b: (sum_loss(m, b), NAN), "loss count", "nan"),
    "a count without end": (lambda m, b: (sum_loss(m, b), INF), "loss count", "inf"),
    "a count of text": (lambda m, b: (sum_loss(m, b), "2"), "loss count", "'2'"),
    "a count of yes": (lambda m, b: (sum_loss(m, b), True), "loss count", "True"),
    "a count per row": (lambda m, b: (sum_loss(m, b), torch.ones(2)), "loss count", "shape (2,)"),
    "a count with a gradient": (lambda m, b: (sum_loss(m, b), mean_loss(m, b)), "loss count", "requires grad"),
    "a first count of nan, on the device": (
        lambda m, b: (sum_loss(m, b), torch.tensor(NAN)),
        "loss count",
        "nan",
    ),
    "a first count without end, on the device": (
        lambda m, b: (sum_loss(m, b), torch.tensor(INF)),
        "loss count",
        "inf",
    ),
    "a first count below zero, on the device": (
        lambda m, b: (sum_loss(m, b), torch.tensor(-3)),
        "loss count",
        "-3",
    ),
}


@pytest.mark.parametrize(("loss_fn", "field", "given"), LOSSES.values(), ids=LOSSES)
def test_a_loss_that_is_none_is_refused_and_the_next_window_trains(loop, loss_fn, field, given):
    nn.Module.eval(loop.model)  # no dropout: a forward draws no random number, so that every bit can be compared
    with loop.start() as run:
        with refused(loop, LossError, field, given, run):
            run.train_step(run.window(loop.batch), loss_fn)
        run.train_step(run.window(loop.batch), mean_loss)
        assert run.applied_steps == 1


@pytest.mark.parametrize(("loss_fn", "field", "given"), LOSSES.values(), ids=LOSSES)
def test_a_loss_refused_by_backward_can_be_given_again_rightly(loop, loss_fn, field, given):
    loop.model.eval()
    with loop.start() as run:
        for index, micro in enumerate(run.window(loop.batch)):
            result = loss_fn(run.model, micro)
            run.model(micro["x"])
            if index == 0:
                with refused(loop, LossError, field, given, run):
                    run.backward(result)
            run.backward(sum_loss(run.model, micro), 2)
        assert run.step()


@pytest.mark.parametrize("sum_first", [True, False])
def test_means_and_sums_do_not_mix_in_a_window(loop, sum_first):
    def mixed(model, batch):
        calls.append(1)
        is_sum = (len(calls) == 1) is sum_first
        return (sum_loss(model, batch), 2) if is_sum else mean_loss(model, batch)

    calls = []
    loop.model.eval()
    with loop.start() as run, refused(loop, LossError, "loss", "a mean for one micro-batch", run):
        run.train_step(run.window(loop.batch), mixed)


# The run: batches.

BATCHES = {
    "a custom object": (lambda k: Unknown(), "batch", "Unknown"),
    "one inside": (lambda k: k.batch | {"boxes": Unknown()}, "batch['boxes']", "Unknown"),
    "rows that differ": (lambda k: k.batch | {"y": k.batch["y"][:3]}, "batch", "batch['x']: 6, batch['y']: 3"),
    "no rows": (lambda k: {name: value[:0] for name, value in k.batch.items()}, "batch", "0 rows"),
    "nothing": (lambda k: None, "batch", "without rows"),
    "an array": (lambda k: numpy.zeros((6, 4)), "batch", "ndarray"),
    "a number": (lambda k: 3, "batch", "without rows"),
}


@pytest.mark.parametrize(("batch", "field", "given"), BATCHES.values(), ids=BATCHES)
def test_a_batch_that_cannot_be_counted_is_refused(loop, batch, field, given):
    with loop.start() as run:
        for take in (lambda: run.window(batch(loop)), lambda: next(run.windows([batch(loop)]))):
            with refused(loop, BatchError, field, given, run):
                take()


@pytest.mark.parametrize("loader", [5, None, Unknown()])
def test_a_loader_that_is_none_is_refused(loop, loader):
    with loop.start() as run, refused(loop, BatchError, "loader", f"a {type(loader).__name__}", run):
        next(run.windows(loader))


@pytest.mark.parametrize("loss_fn", [None, 3, "mean"])
def test_a_loss_that_cannot_be_called_is_refused(loop, loss_fn):
    with loop.start() as run, refused(loop, LossError, "loss_fn", f"a {type(loss_fn).__name__}", run):
        run.train_step(run.window(loop.batch), loss_fn)


def test_a_batch_given_for_a_window_is_refused(loop):
    with loop.start() as run, refused(loop, LoopError, "window", "a dict", run):
        run.train_step(loop.batch, mean_loss)


def test_a_window_of_another_run_is_refused(loop):
    other = copy.deepcopy(loop.model)
    with trimtab.start(other, torch.optim.SGD(other.parameters(), lr=0.1), Plan.fixed(ROWS)) as elsewhere:
        window = elsewhere.window(loop.batch)
        with loop.start() as run, refused(loop, LoopError, "window", "another run", run):
            run.train_step(window, mean_loss)
        elsewhere.train_step(window, mean_loss)


# The run: the order of its verbs. Each breach is given an open run in the state it needs.


def micro_batches(loop: Loop, run: Any, number: int) -> Any:
    """Run `number` micro-batches of a window of three; returns its iterator."""
    micros = iter(run.window(loop.batch))
    for _ in range(number):
        run.backward(mean_loss(run.model, next(micros)))
    return micros


def loss_of_a_copy(loop: Loop, run: Any) -> Any:
    return mean_loss(copy.deepcopy(run.model), next(iter(run.window(loop.batch))))


def loss_of_a_part(loop: Loop, run: Any) -> Any:
    return run.model[0](next(iter(run.window(loop.batch)))["x"]).mean()


def after(number: int, *verbs: str) -> Any:
    def prepare(loop: Loop, run: Any) -> Any:
        micro_batches(loop, run, number)
        for verb in verbs:
            getattr(run, verb)()

    return prepare


BREACHES = {
    "step without a window": (after(0), lambda k, run, _: run.step(), "run.step", "no window"),
    "unscale without a window": (after(0), lambda k, run, _: run.unscale(), "run.unscale", "no window"),
    "step twice": (after(3, "step"), lambda k, run, _: run.step(), "run.step", "no window"),
    "step before the last": (after(2), lambda k, run, _: run.step(), "run.step", "last micro-batch was not seen"),
    "unscale before the last": (after(1), lambda k, run, _: run.unscale(), "run.unscale", "last micro-batch"),
    "unscale twice": (after(3, "unscale"), lambda k, run, _: run.unscale(), "run.unscale", "a second call"),
    "backward without a window": (
        lambda k, run: mean_loss(run.model, k.batch),
        lambda k, run, loss: run.backward(loss),
        "run.backward",
        "no open micro-batch",
    ),
    "backward twice": (
        lambda k, run: (micro_batches(k, run, 1), mean_loss(run.model, k.batch))[1],
        lambda k, run, loss: run.backward(loss),
        "run.backward",
        "no open micro-batch",
    ),
    "a forgotten run.model": (
        loss_of_a_copy,
        lambda k, run, loss: run.backward(loss),
        "run.backward",
        "without a forward",
    ),
    "a part of run.model": (
        loss_of_a_part,
        lambda k, run, loss: run.backward(loss),
        "run.backward",
        "without a forward",
    ),
    "the next window before the step": (
        after(3),
        lambda k, run, _: next(iter(run.window(k.batch))),
        "window",
        "a new window before run.step()",
    ),
    "the next window in the middle": (
        after(1),
        lambda k, run, _: next(run.windows([k.batch])),
        "run.windows",
        "a new window before run.step()",
    ),
    "a second pass": (
        lambda k, run: (window := run.window(k.batch), run.train_step(window, mean_loss))[0],
        lambda k, run, window: list(window),
        "window",
        "a second pass",
    ),
    "a list of a window": (
        lambda k, run: run.window(k.batch),
        lambda k, run, window: list(window),
        "window",
        "the next micro-batch before run.backward",
    ),
}


@pytest.mark.parametrize(("prepare", "breach", "field", "given"), BREACHES.values(), ids=BREACHES)
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_verb_out_of_order_is_refused(loop, precision, prepare, breach, field, given):
    loop.model.eval()
    with loop.start(plan=Plan.fixed(ROWS, 2, precision=precision)) as run:
        prepared = prepare(loop, run)
        with refused(loop, LoopError, field, given, run):
            breach(loop, run, prepared)


def test_leaving_a_window_early_is_seen_at_the_step(loop):
    loop.model.eval()
    with loop.start() as run:
        for micro in run.window(loop.batch):
            run.backward(mean_loss(run.model, micro))
            break
        with refused(loop, LoopError, "run.step", "last micro-batch was not seen", run):
            run.step()


@settings(max_examples=40)
@given(anything)
def test_any_loss_given_to_backward_is_refused_by_its_type(value):
    model = nn.Linear(2, 1)
    with trimtab.start(model, torch.optim.SGD(model.parameters(), lr=0.1), Plan.fixed(2)) as run:
        for micro in run.window(torch.ones(2, 2)):
            model(micro)
            with pytest.raises(LossError, match=r"^loss: given a "):
                run.backward(value)
            with pytest.raises(LossError, match=r"^loss"):
                run.backward((value, value))
            break
