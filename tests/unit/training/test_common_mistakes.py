"""Mistakes of newcomers: each gets a typed error before anything changes, or one warning; right loops get none."""

from __future__ import annotations

import contextlib
import functools
import importlib
import itertools
import re
import traceback
import warnings
from pathlib import Path

import pytest
import torch
from raising import raises
from small_loops import class_loss, labelled_batches, sgd
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import TensorDataset
from tqdm import tqdm

import trimtab
from trimtab import errors
from trimtab.core import errors as core_errors
from trimtab.core.errors import BatchError, LoopError, LossError, ModelError, OptimizerError, ValueGivenError
from trimtab.experiments.step_check import check_step
from trimtab.losses import Summed, divisor_of_mean
from trimtab.plans.plan import Plan

ROWS = 8


def made(dropout=0.0):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Dropout(dropout), nn.Linear(6, 3))
    return model, sgd(model)


def data():
    return labelled_batches(3, ROWS, 4)


def started(**plan):
    return trimtab.start(*made(), Plan.fixed(ROWS, **plan))


def messages(function):
    """Return the messages of all warnings except those of unproved splits."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        function()
    return [str(each.message) for each in seen if each.category is not trimtab.UnprovedSplitWarning]


# A window is not a batch.


def unpacked(model, window):
    inputs, targets = window
    model(inputs)
    del targets


USES = {
    "unpacked": unpacked,
    "a list": lambda model, window: list(window),
    "indexed": lambda model, window: window[0],
    "a dict": lambda model, window: window["x"],
    "moved": lambda model, window: window.to("cpu"),
    "passed to the model": lambda model, window: model(window),
    "passed to the loss": class_loss,
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
@pytest.mark.filterwarnings("ignore::trimtab.UnprovedSplitWarning")
@pytest.mark.parametrize("micro_batch", [ROWS, ROWS // 2])
def test_a_window_used_as_a_batch_is_refused_and_the_next_one_trains(use, micro_batch):
    with started(micro_batch=micro_batch) as run:
        windows = run.windows(data())
        with raises(LoopError, code="loop.window_as_batch", field="window"):
            use(run.model, next(windows))
        run.train_step(next(windows), class_loss)
        assert run.applied_steps == 1


def test_a_window_has_no_other_attributes():
    with started() as run:
        assert not hasattr(run.window(data()[0]), "shape")


@pytest.mark.parametrize(
    "given",
    [lambda window: data()[0], lambda window: class_loss, lambda window: next(iter(window))],
    ids=["a batch", "swapped", "a micro-batch"],
)
def test_a_batch_in_place_of_a_window_is_refused(given):
    with started() as run, raises(LoopError, code="loop.not_a_window"):
        run.train_step(given(run.window(data()[0])), class_loss)


NO_LOADERS = {
    "enumerate": (lambda: enumerate(data()), LoopError, "loop.not_a_loader"),
    "a dataset": (lambda: TensorDataset(*data()[0]), LoopError, "loop.not_a_loader"),
    "a tensor": (lambda: data()[0][0], LoopError, "loop.not_a_loader"),
    "a dict": (lambda: {"x": data()[0][0]}, LoopError, "loop.not_a_loader"),
    "a number": (lambda: 3, BatchError, "batch.invalid"),
}


@pytest.mark.parametrize(("loader", "kind", "code"), NO_LOADERS.values(), ids=NO_LOADERS)
def test_what_is_no_loader_is_refused(loader, kind, code):
    with started() as run, raises(kind, code=code, field="loader"):
        next(run.windows(loader()))


def test_progress_bars_and_enumerate_go_around_windows_or_the_bar_around_the_loader():
    with started() as run:
        inner = run.windows(tqdm(data(), disable=True))
        assert len(inner) == 3
        for window in inner:
            run.train_step(window, class_loss)
        outer = tqdm(run.windows(data()), disable=True)
        assert len(outer) == outer.total == 3
        for index, window in enumerate(outer):
            run.train_step(window, class_loss)
            assert run.num_windows == 4 + index


# The loss function.

NO_LOSSES = {
    "a criterion": (nn.CrossEntropyLoss(), "loss_fn.is_criterion"),
    "a functional": (F.cross_entropy, "loss_fn.is_criterion"),
    "one argument": (lambda batch: 0, "loss_fn.arguments"),
    "three arguments": (lambda model, inputs, targets: 0, "loss_fn.arguments"),
    "batch first": (lambda batch, model: 0, "loss_fn.order"),
    "its value": (torch.tensor(1.0), "loss_fn.not_callable"),
}


@pytest.mark.parametrize(("loss_fn", "code"), NO_LOSSES.values(), ids=NO_LOSSES)
def test_a_function_with_other_arguments_is_refused(loss_fn, code):
    with started() as run, raises(LossError, code=code, field="loss_fn"):
        run.train_step(run.window(data()[0]), loss_fn)
    with raises(LossError, code=code, field="loss_fn"):
        trimtab.plan(*made(), loss_fn, data()[0])


class Scored(nn.Module):
    def forward(self, model, batch):
        return class_loss(model, batch)


class Lossy:
    def __call__(self, model, batch, weight=1.0):
        return weight * class_loss(model, batch)


FUNCTIONS = {
    "other names": lambda m, b: class_loss(m, b),
    "defaults": lambda model, batch, k=2: class_loss(model, batch),
    "any arguments": lambda *given: class_loss(*given),
    "partial": functools.partial(Lossy(), weight=2.0),
    "a module": Scored(),
    "an object": Lossy(),
}


@pytest.mark.parametrize("loss_fn", FUNCTIONS.values(), ids=FUNCTIONS)
def test_any_function_of_model_and_batch_is_accepted(loss_fn):
    with started() as run:
        run.train_step(run.window(data()[0]), loss_fn)
        assert run.applied_steps == 1


# Lines of the plain loop.


def test_a_plain_backward_in_place_of_the_runs_is_refused():
    with started() as run, raises(LoopError, code="loop.backward_missing"):
        for micro in run.window(data()[0]):
            class_loss(run.model, micro).backward()


def test_a_second_backward_after_a_step_is_refused():
    with started() as run:
        loss = run.train_step(run.window(data()[0]), class_loss)
        with raises(LoopError, code="loop.no_micro_batch"):
            run.backward(loss)


def own_autocast(model, batch):
    with torch.autocast("cpu", torch.bfloat16):
        return class_loss(model, batch)


def without_autocast(run, window):
    for micro in window:
        run.backward(class_loss(run.model, micro))
    run.step()


def under_autocast(run, window):
    with torch.autocast("cpu", torch.bfloat16):
        run.train_step(window, class_loss)


def with_the_runs(run, window):
    for micro in window:
        with run.autocast():
            loss = class_loss(run.model, micro)
        run.backward(loss)
    run.step()


@pytest.mark.parametrize(
    ("step", "precision", "is_warned"),
    [
        (lambda run, window: run.train_step(window, own_autocast), "fp32", True),
        (lambda run, window: run.train_step(window, own_autocast), "bf16", False),
        (under_autocast, "fp32", True),
        (without_autocast, "bf16", False),
        (without_autocast, "fp32", False),
        (with_the_runs, "bf16", False),
    ],
)
def test_an_autocast_that_differs_from_the_plans_is_warned_of_once(step, precision, is_warned):
    def loop():
        with started(precision=precision) as run:
            for window in run.windows(data()):
                step(run, window)

    assert sum("autocast" in each for each in messages(loop)) == is_warned


def mean_in_fours(model, batch):
    return class_loss(model, batch) / 4


def two_heads(model, batch):
    return (class_loss(model, batch) + class_loss(model, batch)) / 4


@pytest.mark.parametrize(
    ("loss_fn", "micro_batch", "num_batches", "is_warned"),
    [
        (mean_in_fours, 2, 1, True),
        (mean_in_fours, ROWS, 4, True),
        (mean_in_fours, 4, 1, False),
        (mean_in_fours, ROWS, 1, False),
        (two_heads, 2, 1, False),
        (class_loss, 2, 1, False),
    ],
)
def test_a_mean_divided_by_the_number_of_parts_is_warned_of(loss_fn, micro_batch, num_batches, is_warned):
    def loop():
        with started(micro_batch=micro_batch) as run:
            run.of_batches(num_batches)
            for window in run.windows(labelled_batches(8, ROWS, 4)):
                run.train_step(window, loss_fn)

    assert sum("divided by 4" in each for each in messages(loop)) == is_warned


def test_divisors_are_found_behind_means_alone():
    x = torch.randn(4, 3, requires_grad=True)
    for mean in (x.mean(), F.mse_loss(x, x * 0), F.cross_entropy(x, torch.arange(4) % 3)):
        assert divisor_of_mean(mean / 8) == 8
        assert divisor_of_mean(mean * 0.125) is None
        assert divisor_of_mean(mean) is None
    assert divisor_of_mean(x.sum() / 8) is None
    assert divisor_of_mean(x.mean() / x.sum()) is None


@pytest.mark.parametrize("divides", [True, False])
def test_a_comparison_refuses_a_loss_that_divides_by_the_accumulated_batches(divides):
    def step(model, optimizer, batch):
        (class_loss(model, batch) / 2).backward()
        if next(calls) % 2:
            optimizer.step()
            optimizer.zero_grad()

    def setup(seed):
        loss_fn = halved if divides else class_loss
        return trimtab.Loop(*made(), loss_fn, labelled_batches(4, ROWS, 4), step=step, accumulate=2)

    def halved(model, batch):
        return class_loss(model, batch) / 2

    calls = itertools.count()
    refused = raises(ValueGivenError, code="step.gradient_differs") if divides else contextlib.nullcontext()
    with refused:
        check_step(setup, trimtab.Reference())


def tokens(model, batch):
    return Summed(F.cross_entropy(model(batch[0]), batch[1], reduction="sum"), len(batch[1]))


@pytest.mark.parametrize(
    ("loss_fn", "plan", "unscales", "is_warned"),
    [
        (class_loss, {"micro_batch": 4}, False, False),
        (tokens, {"micro_batch": 4}, False, True),
        (tokens, {"micro_batch": 4}, True, False),
        (tokens, {}, False, False),
        (class_loss, {"precision": "fp16"}, False, True),
        (class_loss, {"precision": "fp16"}, True, False),
    ],
)
def test_clipping_by_hand_is_warned_of_while_gradients_have_a_factor(loss_fn, plan, unscales, is_warned):
    def loop():
        with started(**plan) as run:
            for window in run.windows(data()):
                run.accumulate(window, loss_fn)
                if unscales:
                    run.unscale()
                clip_grad_norm_(run.model.parameters(), 0.1)
                run.step()

    assert len(messages(loop)) == is_warned


def test_clipping_by_hand_between_backward_and_step_equals_a_plain_loop():
    model, optimizer = made()
    for batch in data():
        optimizer.zero_grad()
        class_loss(model, batch).backward()
        clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
    with started() as run:
        for window in run.windows(data()):
            run.accumulate(window, class_loss)
            clip_grad_norm_(run.model.parameters(), 0.1)
            run.step()
        for ours, theirs in zip(run.model.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("is_early", [False, True])
def test_schedulers_after_the_step_get_no_warning_of_torch(precision, is_early):
    def loop():
        model, optimizer = made()
        with trimtab.start(model, optimizer, Plan.fixed(ROWS, precision=precision)) as run:
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
            for window in run.windows(data()):
                if is_early:
                    scheduler.step()
                run.accumulate(window, class_loss)
                if run.step() and not is_early:
                    scheduler.step()

    assert sum("lr_scheduler" in each for each in messages(loop)) == is_early


def trains_in_evaluation(model, optimizer):
    model.eval()
    with trimtab.start(model, optimizer, Plan.fixed(ROWS)) as run:
        for window in run.windows(data()):
            run.train_step(window, class_loss)


def evaluates_once(model, optimizer):
    with trimtab.start(model, optimizer, Plan.fixed(ROWS)) as run:
        for _ in range(2):
            for window in run.windows(data()):
                run.train_step(window, class_loss)
            model.eval()


def restores_the_mode(model, optimizer):
    with trimtab.start(model, optimizer, Plan.fixed(ROWS)) as run:
        for _ in range(2):
            model.train()
            for window in run.windows(data()):
                run.train_step(window, class_loss)
            model.eval()


@pytest.mark.parametrize(
    ("loop", "dropout", "is_warned"),
    [
        (trains_in_evaluation, 0.1, False),
        (evaluates_once, 0.1, True),
        (evaluates_once, 0.0, False),
        (restores_the_mode, 0.1, False),
    ],
)
def test_a_mode_left_from_an_evaluation_is_warned_of_once_where_it_matters(loop, dropout, is_warned):
    assert sum("evaluation mode" in each for each in messages(lambda: loop(*made(dropout)))) == is_warned


# What start is given.


def normalised(*, frozen=False):
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))
    if frozen:
        model[1].eval()
    return model


@pytest.mark.parametrize(
    ("model", "names_the_layer"), [(normalised(), True), (normalised(frozen=True), False), (made()[0], False)]
)
def test_a_split_set_by_hand_is_warned_of_by_the_layer_that_it_changes(model, names_the_layer):
    with pytest.warns(trimtab.UnprovedSplitWarning) as seen:
        trimtab.start(model, sgd(model), Plan.fixed(ROWS, micro_batch=2)).close()
    assert ["batch normalisation ('1')" in str(each.message) for each in seen] == [names_the_layer]


ARGUMENTS = {
    "an optimizer class": (lambda m, o: (m, torch.optim.SGD, Plan.fixed(8)), OptimizerError, "optimizer.not_torch"),
    "parameters": (lambda m, o: (m, m.parameters(), Plan.fixed(8)), OptimizerError, "optimizer.not_torch"),
    "a model class": (lambda m, o: (nn.Linear, o, Plan.fixed(8)), ModelError, "model.not_module"),
    "swapped": (lambda m, o: (o, m, Plan.fixed(8)), ModelError, "model.not_module"),
    "a path": (lambda m, o: (m, o, "plan.json"), ValueGivenError, "plan.not_plan"),
    "a batch size": (lambda m, o: (m, o, 8), ValueGivenError, "plan.not_plan"),
    "a meta model": (lambda m, o: (m.to("meta"), sgd(m.to("meta")), Plan.fixed(8)), ModelError, "model.on_meta"),
}


@pytest.mark.parametrize(("arguments", "kind", "code"), ARGUMENTS.values(), ids=ARGUMENTS)
def test_arguments_of_start_that_do_not_fit_are_refused(arguments, kind, code):
    with raises(kind, code=code) as caught:
        trimtab.start(*arguments(*made()))
    assert caught.value.hint


@pytest.mark.parametrize("call", [trimtab.plan, trimtab.profile])
@pytest.mark.parametrize("fails", [True, False], ids=["it raises", "no scalar"])
def test_errors_of_planning_show_the_callers_line_and_the_users_code(monkeypatch, call, fails):
    def loss_fn(model, batch):
        assert not fails, "the loss function's own error"
        return model(batch[0])

    def files(error):
        return [Path(frame.filename) for frame in traceback.extract_tb(error.__traceback__)]

    with pytest.raises(LossError) as caught:
        call(*made(), loss_fn, data()[0])
    assert Path(__file__) in files(caught.value)
    assert len(files(caught.value)) <= 4
    if fails:
        assert files(caught.value.__cause__)[-1] == Path(__file__)
    monkeypatch.setenv("TRIMTAB_TRACEBACK", "1")
    with pytest.raises(LossError) as caught:
        call(*made(), loss_fn, data()[0])
    assert len(files(caught.value)) > 4


def test_a_second_run_of_a_model_is_refused_until_the_first_is_closed():
    model, optimizer = made()
    run = trimtab.start(model, optimizer, Plan.fixed(ROWS))
    with raises(LoopError, code="run.model_in_use"):
        trimtab.start(model, optimizer, Plan.fixed(ROWS))
    run.close()
    trimtab.start(model, optimizer, Plan.fixed(ROWS)).close()


# Names.

PRECISIONS = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    "bfloat16": "bf16",
    "float16": "fp16",
    "float32": "fp32",
    "torch.bfloat16": "bf16",
    "tf32": "tf32",
}


@pytest.mark.parametrize(("given", "name"), PRECISIONS.items())
def test_dtypes_and_their_names_are_precisions(given, name):
    assert Plan.fixed(8, precision=given) == Plan.fixed(8, precision=name)
    assert Plan.fixed(8, precision=given).precision.value == name
    assert trimtab.Reference(given) == trimtab.Reference(name)


@pytest.mark.parametrize("given", [torch.float64, "float64", 16, None, "bf-16"])
def test_other_precisions_are_refused(given):
    with raises(ValueGivenError, code="value.invalid"):
        trimtab.Reference(given)
    with pytest.raises(errors.UsageError):
        Plan.fixed(8, precision=given)


def test_errors_are_a_module_with_every_class():
    found = importlib.import_module("trimtab.errors")
    assert found is trimtab.errors
    classes = {
        name for name, each in vars(core_errors).items() if isinstance(each, type) and each.__module__ != "typing"
    }
    assert set(found.__all__) == {name for name in classes if issubclass(getattr(core_errors, name), Exception)}
    assert found.UsageError is core_errors.UsageError


def test_codes_of_the_page_of_troubleshooting_exist():
    root = Path(__file__).parents[3]
    page = (root / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    source = "\n".join(path.read_text(encoding="utf-8") for path in (root / "src").rglob("*.py"))
    tables = page.partition("## A setting is refused")[2]
    cells = re.findall(r"^\| ((?:`[a-z_]+\.[a-z_]+`(?:, )?)+) \|", tables, re.MULTILINE)
    codes = [code for cell in cells for code in re.findall(r"`([^`]+)`", cell)]
    assert len(codes) > 25
    assert [code for code in codes if f'"{code}"' not in source] == []
