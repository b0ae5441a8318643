"""The loop around a run: windows with a length, an optimizer step left in, batches of unequal sizes in a window."""

from __future__ import annotations

import contextlib
import operator
import warnings
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from tqdm import tqdm

import trimtab
from trimtab.checkpoint.config import Checkpoints
from trimtab.core.choice import SplitCheck
from trimtab.losses import Summed
from trimtab.plans.plan import Plan

ROWS = 8


def made(**options):
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, **options)


def batches(num=4, rows=ROWS):
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(rows, 4, generator=generator), torch.arange(rows) % 3) for _ in range(num)]


def mean(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def weights(model):
    return model.weight.detach().clone()


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
            run.train_step(window, mean)
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
        assert list(run.train_step(window, mean) for window in bar)  # noqa: C400
        assert run.num_windows == 4
        assert list(run.windows(iter(()))) == []


def test_a_resumed_epoch_has_the_length_of_what_is_left(tmp_path):
    data, kept = batches(), Checkpoints(tmp_path, every_steps=1)
    with contextlib.suppress(KeyError), trimtab.start(*made(), Plan.fixed(ROWS), checkpoints=kept) as run:
        for window in run.windows(data):
            if run.num_windows == 3:
                raise KeyError
            run.train_step(window, mean)
    with trimtab.start(*made(), Plan.fixed(ROWS), checkpoints=kept) as run:
        windows = run.windows(data)
        assert len(windows) == 1
        for window in windows:
            run.train_step(window, mean)
        assert (run.num_windows, len(run.windows(data))) == (4, 4)


def test_leaving_the_loop_ends_the_epoch_at_once():
    with trimtab.start(*made(), Plan.fixed(ROWS)) as run:
        for window in run.windows(batches()):
            run.train_step(window, mean)
            break
        assert run.passes == 1
        windows = run.windows(batches())
        run.train_step(next(windows), mean)
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
                        run.backward(mean(run.model, micro))
                    run.step()
                else:
                    run.train_step(window, mean)
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
            run.accumulate(run.window(batches()[0]), mean)
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
                run.train_step(window, mean)
                schedule.step()
                other.step()
                optimizer.zero_grad()
                optimizer.step()  # without gradients nothing changes
        model(batches()[0][0]).mean().backward()
        optimizer.step()  # the run is over

    assert seen_while(loop) == []


def test_planning_is_not_warned_of():
    model, optimizer = made()
    assert seen_while(lambda: trimtab.plan(model, optimizer, mean, batches()[0], num_blocks=3)) == []


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
        return Summed(mean(model, batch) * len(batch[1]), len(batch[1])) if is_sum else mean(model, batch)

    data = [batches(1, rows)[0] for rows in sizes * 2]
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        with trimtab.start(*made(), replace(Plan.fixed(ROWS), check=check)) as run:
            run.of_batches(2)
            for window in run.windows(data):
                run.train_step(window, loss_fn)
    found = [str(each.message) for each in seen]
    assert len(found) == is_warned
    assert all("trimtab.Summed" in text for text in found)


def test_a_window_of_batches_of_an_unknown_size_weighs_each_alike():
    data = [
        {"x": x, "y": y, "bounds": torch.arange(size)} for (x, y), size in zip(batches(), (3, 2, 5, 2), strict=True)
    ]

    def loss_fn(model, batch):
        return mean(model, (batch["x"][: len(batch["bounds"])], batch["y"][: len(batch["bounds"])]))

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
    torch.testing.assert_close(weights(ours), weights(model), rtol=1e-6, atol=1e-7)
