"""The loop around a run: lengths, lines of a plain loop left in it, uneven and empty batches, errors and warnings."""

from __future__ import annotations

import contextlib
import dataclasses
import operator
import warnings
from dataclasses import replace

import pytest
import torch
from raising import raises
from small_loops import class_loss, labelled_batches, linear_loop, sgd, square_loss, train
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from tqdm import tqdm

import trimtab
from trimtab.checkpoint.config import Checkpoints
from trimtab.core.choice import SplitCheck
from trimtab.core.errors import LoopError, LossError
from trimtab.losses import Summed
from trimtab.plans.plan import Plan
from trimtab.training.backend import UserBackend
from trimtab.training.metadata_exchange import SingleProcessExchange
from trimtab.training.run import Run

ROWS = 8


def made(**options):
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    return model, sgd(model, **options)


def batches(num=4, rows=ROWS):
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(rows, 4, generator=generator), torch.arange(rows) % 3) for _ in range(num)]


# Lengths.


class Stream(IterableDataset):
    def __iter__(self):
        return iter(batches())


LOADERS = {
    "list": (batches, 4),
    "loader": (lambda: DataLoader(TensorDataset(torch.randn(30, 4), torch.arange(30) % 3), batch_size=8), 4),
    "shard": (lambda: trimtab.shard(batches(), 0, 2), 4),
}
ENDLESS = {"generator": lambda: iter(batches()), "stream": lambda: DataLoader(Stream(), batch_size=None)}


@pytest.mark.parametrize(("make", "number"), LOADERS.values(), ids=LOADERS)
@pytest.mark.parametrize("per_window", [1, 2, 3])
def test_windows_have_the_length_of_the_loader(make, number, per_window):
    with trimtab.start(*made(), Plan.fixed(ROWS)) as run:
        run.of_batches(per_window)
        windows = run.windows(make())
        expected = -(-number // per_window)
        assert (len(windows), operator.length_hint(windows)) == (expected, expected)
        found = 0
        for window in tqdm(windows, disable=True):
            found += 1
            run.train_step(window, class_loss)
        assert found == expected == run.num_windows


@pytest.mark.parametrize("make", ENDLESS.values(), ids=ENDLESS)
def test_without_a_length_windows_have_none_and_all_else_works(make):
    with trimtab.start(*made(), Plan.fixed(ROWS)) as run:
        windows = run.windows(make())
        with pytest.raises(TypeError):
            len(windows)
        assert windows
        bar = tqdm(windows, disable=True)
        assert bar.total is None
        assert list(run.train_step(window, class_loss) for window in bar)  # noqa: C400
        assert run.num_windows == 4
        assert list(run.windows(iter(()))) == []


def test_a_resumed_epoch_has_the_length_of_what_is_left(tmp_path):
    data, kept = batches(), Checkpoints(tmp_path, every_steps=1)
    with contextlib.suppress(KeyError), trimtab.start(*made(), Plan.fixed(ROWS), checkpoints=kept) as run:
        for window in run.windows(data):
            if run.num_windows == 3:
                raise KeyError
            run.train_step(window, class_loss)
    with trimtab.start(*made(), Plan.fixed(ROWS), checkpoints=kept) as run:
        windows = run.windows(data)
        assert len(windows) == 1
        for window in windows:
            run.train_step(window, class_loss)
        assert (run.num_windows, len(run.windows(data))) == (4, 4)


def test_leaving_the_loop_ends_the_epoch_at_once():
    with trimtab.start(*made(), Plan.fixed(ROWS)) as run:
        for window in run.windows(batches()):
            run.train_step(window, class_loss)
            break
        assert run.passes == 1
        windows = run.windows(batches())
        run.train_step(next(windows), class_loss)
        windows.close()
        assert run.passes == 2
        assert list(windows) == []


# A step of the loop's own.


def seen_while(function):
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        function()
    return [str(each.message) for each in seen if "optimizer.step()" in str(each.message)]


@pytest.mark.parametrize("where", ["train_step", "open form", "with zero_grad behind"])
def test_an_own_step_is_warned_of_once_by_its_line(where):
    def loop():
        model, optimizer = made()
        with trimtab.start(model, optimizer, Plan.fixed(ROWS)) as run:
            for window in run.windows(batches()):
                if where == "open form":
                    for micro in window:
                        run.backward(class_loss(run.model, micro))
                    run.step()
                else:
                    run.train_step(window, class_loss)
                optimizer.step()  # too much
                if where == "with zero_grad behind":
                    optimizer.zero_grad()

    (text,) = seen_while(loop)
    assert __file__ in text
    assert "optimizer.step()  # too much" in text


def test_a_step_in_place_of_the_runs_is_told_to_be_the_runs():
    def loop():
        model, optimizer = made()
        with trimtab.start(model, optimizer, Plan.fixed(ROWS)) as run:
            run.accumulate(run.window(batches()[0]), class_loss)
            optimizer.step()

    (text,) = seen_while(loop)
    assert "run.step()" in text


class Wrapped(torch.optim.SGD):
    """Steps twice in one step, as sharpness-aware optimizers do."""

    def step(self, closure=None):
        super().step(closure)
        super().step(closure)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("kind", [torch.optim.SGD, Wrapped])
def test_what_a_loop_may_do_is_not_warned_of(kind, precision):
    model, _ = made()
    optimizer = kind(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)

    def loop():
        other = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
        with trimtab.start(model, optimizer, Plan.fixed(ROWS, 4, precision=precision)) as run:
            for window in run.windows(batches()):
                optimizer.zero_grad()
                run.train_step(window, class_loss)
                schedule.step()
                other.step()
                optimizer.zero_grad()
                optimizer.step()  # without gradients nothing changes
        model(batches()[0][0]).mean().backward()
        optimizer.step()  # the run is over

    assert seen_while(loop) == []


def test_planning_is_not_warned_of():
    model, optimizer = made()
    assert seen_while(lambda: trimtab.plan(model, optimizer, class_loss, batches()[0], num_blocks=3)) == []


# Batches of unequal sizes in a window.

UNPROVED = SplitCheck(False, "the gradient of an unequal split differs by 0.2, relative", 0.2)


@pytest.mark.parametrize(
    ("check", "sizes", "is_sum", "is_warned"),
    [
        (UNPROVED, (8, 4), False, True),
        (UNPROVED, (8, 8), False, False),
        (UNPROVED, (8, 4), True, False),
        (SplitCheck(True, "proved", 1e-7), (8, 4), False, False),
        (SplitCheck(False, "batch statistics"), (8, 4), False, False),
        (None, (8, 4), False, False),
    ],
)
def test_means_over_unlike_terms_of_unequal_batches_are_warned_of_once(check, sizes, is_sum, is_warned):
    def loss_fn(model, batch):
        return Summed(class_loss(model, batch) * len(batch[1]), len(batch[1])) if is_sum else class_loss(model, batch)

    data = [batches(1, rows)[0] for rows in sizes * 2]
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        with trimtab.start(*made(), replace(Plan.fixed(ROWS), check=check)) as run:
            run.of_batches(2)
            train(run, data, loss_fn)
    found = [str(each.message) for each in seen]
    assert len(found) == is_warned
    assert all("trimtab.Summed" in text for text in found)


def test_a_window_of_batches_of_an_unknown_size_weighs_each_alike():
    data = [
        {"x": x, "y": y, "bounds": torch.arange(size)} for (x, y), size in zip(batches(), (3, 2, 5, 2), strict=True)
    ]

    def loss_fn(model, batch):
        return class_loss(model, (batch["x"][: len(batch["bounds"])], batch["y"][: len(batch["bounds"])]))

    model, optimizer = made()
    for pair in (data[:2], data[2:]):
        optimizer.zero_grad()
        for batch in pair:
            (loss_fn(model, batch) / 2).backward()
        optimizer.step()
    ours, optimizer = made()
    with trimtab.start(ours, optimizer, Plan.fixed(ROWS)) as run:
        run.of_batches(2)
        for window in run.windows(data):
            assert window.samples is None
            run.train_step(window, loss_fn)
        assert (run.consumed_samples, run.num_windows) == (0, 2)
    torch.testing.assert_close(ours.weight, model.weight, rtol=1e-6, atol=1e-7)


def trained_by(body, **plan):
    model, optimizer = linear_loop(8, 3, lr=0.3)
    with trimtab.start(model, optimizer, trimtab.Plan.fixed(16, **plan)) as run:
        for window in run.windows(labelled_batches(3, 16, 8)):
            body(run, window, model, optimizer)


def zeroes_before_the_step(run, window, model, optimizer):
    run.accumulate(window, class_loss)
    optimizer.zero_grad()
    run.step()


def zeroes_before_each_backward(run, window, model, optimizer):
    for batch in window:
        optimizer.zero_grad()
        run.backward(class_loss(run.model, batch))
    run.step()


def goes_backward_twice(run, window, model, optimizer):
    for batch in window:
        loss = class_loss(run.model, batch)
        loss.backward(retain_graph=True)
        run.backward(loss)
    run.step()


def clips_before_the_step(run, window, model, optimizer):
    run.accumulate(window, class_loss)
    clip_grad_norm_(model.parameters(), 1.0)
    run.step()


def clamps_before_the_step(run, window, model, optimizer):
    run.accumulate(window, class_loss)
    for parameter in model.parameters():
        parameter.grad.clamp_(-1, 1)
    run.step()


def clips_unscaled_gradients(run, window, model, optimizer):
    run.accumulate(window, class_loss)
    run.unscale()
    clip_grad_norm_(model.parameters(), 1.0)
    run.step()


def steps_alone(run, window, model, optimizer):
    run.train_step(window, class_loss)


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
        trained_by(body, **plan)
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
    trained_by(body, **plan)  # warnings are errors here


def test_a_window_given_up_is_no_change():
    def body(run, window, model, optimizer):
        if run.applied_steps == 0:
            for batch in window:
                run.backward(class_loss(run.model, batch))
            run.discard()
            run.train_step(run.window(labelled_batches(3, 16, 8)[0]), class_loss)
        else:
            run.train_step(window, class_loss)

    trained_by(body)


@pytest.mark.usefixtures("brief_trials")
def test_a_backward_inside_the_loss_is_named_as_the_cause():
    def inside(model, batch):
        loss = class_loss(model, batch)
        loss.backward()
        return loss

    with raises(LossError, code="loss.graph_used"):
        trimtab.plan(*linear_loop(8, 3, lr=0.3), inside, labelled_batches(3, 16, 8)[0], num_blocks=3)
    with pytest.warns(RuntimeWarning), raises(LossError, code="loss.graph_used"):
        trained_by(lambda run, window, *_: run.train_step(window, inside))


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
        trained_by(lambda run, window, *_: run.train_step(window, own), precision=precision)
    assert len(caught) == (precision == "fp16")


class Counted:
    """A loader that counts how often it was started."""

    def __init__(self, sizes=(4, 4)):
        self.sizes, self.starts = sizes, 0

    def __iter__(self):
        self.starts += 1
        return iter([torch.randn(size, 3) for size in self.sizes])


def test_batches_without_a_sample_of_this_rank_are_skipped():
    model, optimizer = linear_loop()
    data = [torch.randn(4, 3), torch.randn(1, 3), torch.randn(4, 3)]
    with trimtab.start(model, optimizer, Plan.fixed(2)) as run:
        train(run, trimtab.shard(data, rank=1, num_ranks=2), square_loss)
        assert (run.num_windows, run.consumed_samples, run.passes) == (2, 4, 1)


def test_a_run_that_was_asked_to_end_starts_no_loader():
    loader = Counted()
    with trimtab.start(*linear_loop(), Plan.fixed(4)) as run:
        run.ask_to_end()
        assert list(run.windows(loader)) == []
    assert loader.starts == 0


@pytest.mark.parametrize("is_closed", [True, False], ids=["closed", "window open"])
def test_a_call_out_of_order_starts_no_loader(is_closed):
    loader = Counted()
    run = trimtab.start(*linear_loop(), Plan.fixed(4))
    if is_closed:
        run.close()
    else:
        run.accumulate(run.window(torch.randn(4, 3)), square_loss)
    with raises(LoopError, code="run.closed" if is_closed else "loop.window_open"):
        next(iter(run.windows(loader)))
    assert loader.starts == 0
    run.close()


def test_unequal_batches_that_raise_leave_the_weights_as_they_were():
    model, optimizer = linear_loop()
    before = model.weight.clone()
    check = SplitCheck(False, "the gradients differ", 0.5)
    with trimtab.start(model, optimizer, replace(Plan.fixed(4), check=check)) as run, warnings.catch_warnings():
        warnings.simplefilter("error")
        run.of_batches(2)
        windows = iter(run.windows(Counted((4, 2, 4, 4))))
        with pytest.raises(RuntimeWarning, match="unequal sizes"):
            run.train_step(next(windows), square_loss)
        assert torch.equal(model.weight, before)
        assert (run.num_windows, run.applied_steps) == (0, 0)
        run.train_step(next(windows), square_loss)
    assert not torch.equal(model.weight, before)


def test_ranks_that_reduce_by_hand_count_the_schedule_alike_without_a_total():
    def scheduled(sizes):
        backend = UserBackend(SingleProcessExchange(has_peers=True))
        with Run(*linear_loop(), Plan.fixed(4), backend=backend) as run:
            train(run, Counted(sizes), square_loss)
            return run.state_dict()["consumed"]["scheduled"]

    assert scheduled((4, 4, 4)) == scheduled((4, 4, 1)) == 12


def test_a_zero_grad_that_is_replaced_during_training_is_called_for_each_window():
    model, optimizer = linear_loop()
    calls, own = [], optimizer.zero_grad

    def counted(set_to_none=True):
        calls.append(run.num_windows)
        own(set_to_none)

    with trimtab.start(model, optimizer, Plan.fixed(4)) as run:
        optimizer.zero_grad = counted
        train(run, Counted((4, 4, 4)), square_loss)
        assert calls == [0, 1, 2]


def test_an_error_after_a_backward_does_not_allow_a_second_one(monkeypatch):
    model, optimizer = linear_loop()

    def fails(self, *given):
        raise ValueError("measuring failed")

    monkeypatch.setattr("trimtab.training.loop_warnings.LeftoverGradientChanges.backward_ends", fails)
    with trimtab.start(model, optimizer, Plan.fixed(4)) as run:
        for micro in run.window(torch.randn(4, 3)):
            loss = square_loss(run.model, micro)
            with pytest.raises(ValueError, match="measuring failed"):
                run.backward(loss)
            with raises(LoopError, code="loop.no_micro_batch"):
                run.backward(square_loss(run.model, micro))
            break
        run.discard()


def warnings_of_start(plan):
    """Start and close a run; returns the warnings."""
    model = torch.nn.Linear(4, 2)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        trimtab.start(model, sgd(model), plan).close()
    return [each for each in seen if issubclass(each.category, trimtab.UnprovedSplitWarning)]


def test_a_split_set_by_hand_is_warned_of_where_it_is_started():
    (found,) = warnings_of_start(trimtab.Plan.fixed(8, micro_batch=4))
    assert found.filename == __file__


@pytest.mark.parametrize(
    "plan",
    [
        trimtab.Plan.fixed(8),
        trimtab.Plan.fixed(8, precision="bf16", fused_optimizer=True),
        dataclasses.replace(trimtab.Plan.fixed(8, micro_batch=4), check=SplitCheck(True, "proved")),
        dataclasses.replace(trimtab.Plan.fixed(8), check=SplitCheck(False, "batch statistics")),
    ],
    ids=["whole", "other settings", "proved", "refused and whole"],
)
def test_other_plans_are_not(plan):
    assert not warnings_of_start(plan)


def test_a_split_that_its_check_refused_is_warned_of_with_the_reason():
    plan = dataclasses.replace(
        trimtab.Plan.fixed(8, micro_batch=4), check=SplitCheck(False, "the loss compares samples")
    )
    (found,) = warnings_of_start(plan)
    assert "the loss compares samples" in str(found.message)
