"""What a loop gives its run, and when, is used or refused by a typed error, with nothing half-applied."""

from __future__ import annotations

import copy
import dataclasses
import functools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from raising import raises
from refusals import INF, NAN, ROWS, Loop, mean_loss, new_loop, refused, sum_loss
from torch import nn

import trimtab
from trimtab.core.errors import BatchError, LoopError, LossError
from trimtab.losses import Summed
from trimtab.plans.plan import Plan

loop = pytest.fixture(new_loop)


class Unknown:
    """Something of no use."""


FIELDS = {"loss.count_invalid": "loss count"}
LOSSES = {
    "not a scalar": (lambda m, b: m(b["x"]), "loss.invalid", "shape (2, 3)"),
    "a vector": (lambda m, b: m(b["x"]).sum(1), "loss.invalid", "shape (2,)"),
    "detached": (lambda m, b: mean_loss(m, b).detach(), "loss.invalid", ""),
    "of the data alone": (lambda m, b: (m(b["x"]), b["x"].mean())[1], "loss.invalid", ""),
    "a float": (lambda m, b: mean_loss(m, b).item(), "loss.invalid", "a float"),
    "None": (lambda m, b: (m(b["x"]), None)[1], "loss.invalid", "a NoneType"),
    "a dict": (lambda m, b: {"loss": mean_loss(m, b)}, "loss.invalid", "a dict"),
    "a list": (lambda m, b: [mean_loss(m, b)], "loss.invalid", "a list"),
    "a tuple of 3": (lambda m, b: (sum_loss(m, b), 2, m), "loss.invalid", "a tuple"),
    "a tuple of 1": (lambda m, b: (sum_loss(m, b),), "loss.invalid", "a tuple"),
    "complex": (lambda m, b: mean_loss(m, b) * 1j, "loss.invalid", "complex"),
    "with an accuracy": (lambda m, b: (mean_loss(m, b), m(b["x"]).mean()), "loss.pair_ambiguous", ""),
    "with a number": (lambda m, b: (sum_loss(m, b), 2), "loss.pair_ambiguous", ""),
    "a negative count": (lambda m, b: Summed(sum_loss(m, b), -1), "loss.count_invalid", "-1"),
    "a count of nan": (lambda m, b: Summed(sum_loss(m, b), NAN), "loss.count_invalid", "nan"),
    "a count without end": (lambda m, b: Summed(sum_loss(m, b), INF), "loss.count_invalid", "inf"),
    "a count of text": (lambda m, b: Summed(sum_loss(m, b), "2"), "loss.count_invalid", "'2'"),
    "a count of yes": (lambda m, b: Summed(sum_loss(m, b), True), "loss.count_invalid", "True"),
    "a count per row": (lambda m, b: Summed(sum_loss(m, b), torch.ones(2)), "loss.count_invalid", "shape (2,)"),
    "a count with a gradient": (
        lambda m, b: Summed(sum_loss(m, b), mean_loss(m, b)),
        "loss.count_invalid",
        "requires_grad",
    ),
    "a first count of nan, on the device": (
        lambda m, b: Summed(sum_loss(m, b), torch.tensor(NAN)),
        "loss.count_invalid",
        "nan",
    ),
    "a first count without end, on the device": (
        lambda m, b: Summed(sum_loss(m, b), torch.tensor(INF)),
        "loss.count_invalid",
        "inf",
    ),
    "a first count below zero, on the device": (
        lambda m, b: Summed(sum_loss(m, b), torch.tensor(-3)),
        "loss.count_invalid",
        "-3",
    ),
}


@pytest.mark.parametrize(("loss_fn", "code", "given"), LOSSES.values(), ids=LOSSES)
def test_a_loss_that_is_none_is_refused_and_the_next_window_trains(loop, loss_fn, code, given):
    nn.Module.eval(loop.model)  # no dropout: a forward draws no random number, so that every bit can be compared
    with loop.start() as run:
        with refused(loop, LossError, FIELDS.get(code, "loss"), given, run, code=code):
            run.train_step(run.window(loop.batch), loss_fn)
        run.train_step(run.window(loop.batch), mean_loss)
        assert run.applied_steps == 1


@pytest.mark.parametrize(("loss_fn", "code", "given"), LOSSES.values(), ids=LOSSES)
def test_a_loss_refused_by_backward_can_be_given_again_rightly(loop, loss_fn, code, given):
    loop.model.eval()
    with loop.start() as run:
        for index, micro in enumerate(run.window(loop.batch)):
            result = loss_fn(run.model, micro)
            run.model(micro["x"])
            if index == 0:
                with refused(loop, LossError, FIELDS.get(code, "loss"), given, run, code=code):
                    run.backward(result)
            run.backward(Summed(sum_loss(run.model, micro), 2))
        expected = float(mean_loss(run.model, loop.batch).detach())
        assert run.step()
        assert float(run.loss) == pytest.approx(expected, rel=1e-5), "the refused loss was counted"


@pytest.mark.parametrize("sum_first", [True, False])
def test_means_and_sums_do_not_mix_in_a_window(loop, sum_first):
    def mixed(model, batch):
        calls.append(1)
        is_sum = (len(calls) == 1) is sum_first
        return Summed(sum_loss(model, batch), 2) if is_sum else mean_loss(model, batch)

    calls = []
    loop.model.eval()
    with loop.start() as run, refused(loop, LossError, "loss", "mean", run, code="loss.kinds_mixed"):
        run.train_step(run.window(loop.batch), mixed)


def test_a_batch_of_no_samples_is_refused(loop):
    batch = {name: value[:0] for name, value in loop.batch.items()}
    with loop.start() as run:
        for take in (lambda: run.window(batch), lambda: next(run.windows([batch]))):
            with refused(loop, BatchError, "batch", "0 samples", run, code="batch.no_samples"):
                take()


@pytest.mark.parametrize("loader", [5, None, Unknown()])
def test_a_loader_that_is_none_is_refused(loop, loader):
    with loop.start() as run, refused(loop, BatchError, "loader", f"a {type(loader).__name__}", run):
        next(run.windows(loader))


@pytest.mark.parametrize("loss_fn", [None, 3, "mean"])
def test_a_loss_that_cannot_be_called_is_refused(loop, loss_fn):
    with (
        loop.start() as run,
        refused(loop, LossError, "loss_fn", f"a {type(loss_fn).__name__}", run, code="loss_fn.not_callable"),
    ):
        run.train_step(run.window(loop.batch), loss_fn)


def test_a_window_that_is_none_or_of_another_run_is_refused(loop):
    with loop.start() as run, refused(loop, LoopError, "window", "a dict", run, code="loop.not_a_window"):
        run.train_step(loop.batch, mean_loss)


def test_a_window_of_another_run_is_refused(loop):
    other = copy.deepcopy(loop.model)
    with trimtab.start(other, torch.optim.SGD(other.parameters(), lr=0.1), Plan.fixed(ROWS)) as elsewhere:
        window = elsewhere.window(loop.batch)
        with loop.start() as run, refused(loop, LoopError, "window", "another run", run, code="loop.not_a_window"):
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
    "step without a window": (after(0), lambda k, run, _: run.step(), "run.step", "loop.no_window"),
    "unscale without a window": (after(0), lambda k, run, _: run.unscale(), "run.unscale", "loop.no_window"),
    "step twice": (after(3, "step"), lambda k, run, _: run.step(), "run.step", "loop.no_window"),
    "step before the last": (after(2), lambda k, run, _: run.step(), "run.step", "loop.window_incomplete"),
    "unscale before the last": (after(1), lambda k, run, _: run.unscale(), "run.unscale", "loop.window_incomplete"),
    "unscale twice": (after(3, "unscale"), lambda k, run, _: run.unscale(), "run.unscale", "loop.unscaled_twice"),
    "backward without a window": (
        lambda k, run: mean_loss(run.model, k.batch),
        lambda k, run, loss: run.backward(loss),
        "run.backward",
        "loop.no_micro_batch",
    ),
    "backward twice": (
        lambda k, run: (micro_batches(k, run, 1), mean_loss(run.model, k.batch))[1],
        lambda k, run, loss: run.backward(loss),
        "run.backward",
        "loop.no_micro_batch",
    ),
    "a forgotten run.model": (
        loss_of_a_copy,
        lambda k, run, loss: run.backward(loss),
        "run.backward",
        "loop.forward_missing",
    ),
    "a part of run.model": (
        loss_of_a_part,
        lambda k, run, loss: run.backward(loss),
        "run.backward",
        "loop.forward_missing",
    ),
    "the next window before the step": (
        after(3),
        lambda k, run, _: next(iter(run.window(k.batch))),
        "window",
        "loop.window_open",
    ),
    "the next window in the middle": (
        after(1),
        lambda k, run, _: next(run.windows([k.batch])),
        "run.windows",
        "loop.window_open",
    ),
    "a second pass": (
        lambda k, run: (window := run.window(k.batch), run.train_step(window, mean_loss))[0],
        lambda k, run, window: list(window),
        "window",
        "loop.window_used",
    ),
    "a list of a window": (
        lambda k, run: run.window(k.batch),
        lambda k, run, window: list(window),
        "window",
        "loop.window_as_batch",
    ),
}


@pytest.mark.parametrize(("prepare", "breach", "field", "code"), BREACHES.values(), ids=BREACHES)
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_verb_out_of_order_is_refused(loop, precision, prepare, breach, field, code):
    loop.model.eval()
    with loop.start(plan=Plan.fixed(ROWS, 2, precision=precision)) as run:
        prepared = prepare(loop, run)
        with refused(loop, LoopError, field, run=run, code=code):
            breach(loop, run, prepared)


def test_leaving_a_window_early_is_seen_at_the_step(loop):
    loop.model.eval()
    with loop.start() as run:
        for micro in run.window(loop.batch):
            run.backward(mean_loss(run.model, micro))
            break
        with refused(loop, LoopError, "run.step", run=run, code="loop.window_incomplete"):
            run.step()


@settings(max_examples=40)
@given(st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.lists(st.floats()) | st.just({}))
def test_any_loss_given_to_backward_is_refused_by_its_type(value):
    model = nn.Linear(2, 1)
    with trimtab.start(model, torch.optim.SGD(model.parameters(), lr=0.1), Plan.fixed(2)) as run:
        for micro in run.window(torch.ones(2, 2)):
            model(micro)
            with raises(LossError, code="loss.invalid", field="loss"):
                run.backward(value)
            with pytest.raises(LossError) as caught:
                run.backward((value, value))
            assert caught.value.field in ("loss", "loss count")
            break


@dataclasses.dataclass
class Masked:
    x: torch.Tensor
    y: torch.Tensor

    @functools.cached_property
    def number(self):
        return (self.y >= 0).sum()


def test_what_a_batch_caches_of_itself_is_made_anew_of_each_part(loop):
    batch, seen = Masked(**loop.batch), []
    assert int(batch.number) == ROWS

    def noting(model, part):
        seen.append(int(part.number))
        return mean_loss(model, {"x": part.x, "y": part.y})

    with loop.start() as run:
        run.train_step(run.window(batch), noting)
    assert seen == [2] * (ROWS // 2)


@dataclasses.dataclass
class Counting:
    """Holds what is of all its rows beside its fields, under a name that the class has too."""

    x: torch.Tensor
    y: torch.Tensor
    number = None

    def __post_init__(self):
        self.number = (self.y != -100).sum()


def test_a_tensor_that_is_no_field_is_refused_where_a_part_would_have_the_classs_own(loop):
    batch = Counting(**loop.batch)
    with loop.start() as run:
        window = run.window(batch)
        with refused(loop, BatchError, "batch", "Counting.number", run, code="batch.tensor_no_field"):
            run.train_step(window, lambda model, part: mean_loss(model, {"x": part.x, "y": part.y}))


@dataclasses.dataclass
class Plain:
    x: torch.Tensor
    y: torch.Tensor


def test_what_a_loss_keeps_on_its_batch_is_kept_for_each_part_and_breaks_no_other_pass(loop):
    batch, sizes = Plain(**loop.batch), []

    def keeping(model, part):
        if not hasattr(part, "mask"):
            part.mask = part.y >= 0
        sizes.append(len(part.mask))
        return mean_loss(model, {"x": part.x, "y": part.y})

    keeping(loop.model, batch)  # as it is trained on whole
    with loop.start() as run:
        for _ in range(2):
            run.train_step(run.window(batch), keeping)
    assert sizes == [ROWS, *([2] * (2 * ROWS // 2))]


def test_a_loss_that_needs_what_a_part_goes_without_fails_by_its_name(loop):
    batch = Plain(**loop.batch)
    batch.number = (batch.y >= 0).sum()
    with loop.start() as run, pytest.raises(AttributeError, match="number"):
        run.train_step(run.window(batch), lambda model, part: part.number * mean_loss(model, {"x": part.x}))
