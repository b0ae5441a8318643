"""What a window's forwards changed is put back; what cannot be is left alone."""

from __future__ import annotations

import contextlib

import pytest
import torch
from small_loops import sgd
from torch import nn

import trimtab
from trimtab.plans.plan import Plan
from trimtab.training import window_snapshot
from trimtab.training.window_snapshot import WindowSnapshot


class Model(nn.Module):
    def __init__(self, **buffers):
        super().__init__()
        self.layer = nn.Linear(3, 2)
        for name, value in buffers.items():
            self.register_buffer(name.removesuffix("_cache"), value, persistent=not name.endswith("_cache"))

    def forward(self, x):
        return self.layer(x)


def test_values_and_generators_are_put_back():
    model = Model(mean=torch.zeros(2), count=torch.tensor(0), flag=torch.tensor([True]))
    start = WindowSnapshot(model)
    for window in range(3):
        start.note()
        drawn = torch.rand(2)
        before = {name: value.clone() for name, value in model.named_buffers()}
        model.mean.data.add_(1.0)  # unseen by its version
        model.count += 1
        model.flag.logical_not_()
        start.restore()
        assert torch.equal(torch.rand(2), drawn)
        for name, value in model.named_buffers():
            assert torch.equal(value, before[name]), (window, name)
        model.mean.fill_(float(window))


def test_buffers_that_need_gradients_or_were_replaced_are_restored():
    model = Model(mean=torch.zeros(2, requires_grad=True))
    start = WindowSnapshot(model)
    for value in (1.0, 2.0):
        start.note()
        with torch.no_grad():
            model.mean.add_(value)
        start.restore()
        assert torch.equal(model.mean, torch.zeros(2))
    (copies, _) = start._always
    assert not any(each.requires_grad for each in copies)
    model = Model(mean=torch.zeros(2))
    start, kept = WindowSnapshot(model), model.mean
    start.note()
    model.mean = model.mean * 0.9 + 1.0
    start.restore()
    assert model.mean is kept
    assert torch.equal(kept, torch.zeros(2))


def test_caches_are_left_alone():
    """What says how large it is stands beside it in Python, and is not put back."""
    model = Model(cos_cache=torch.zeros(4), sin_cache=torch.zeros(4), made_cache=None, gone_cache=torch.zeros(1))
    start = WindowSnapshot(model)
    start.note()
    model.cos, model.sin, model.made = torch.ones(8), torch.ones(4), torch.ones(1)
    del model.gone
    start.restore()
    assert len(model.cos) == 8
    assert torch.equal(model.sin, torch.ones(4))
    assert torch.equal(model.made, torch.ones(1))
    start.note()  # and the next window begins with what stands there
    model = Model(mask_cache=torch.zeros(2**19))
    start = WindowSnapshot(model, watches=True)
    start.note()
    model.mask += 1
    start.restore_skipped()
    assert start.unheld == []
    assert model.mask.all()


@pytest.mark.parametrize(
    "buffer",
    [
        torch.eye(3).to_sparse(),
        torch.zeros(1).expand(5),
        torch.zeros(0),
        torch.zeros(2, dtype=torch.complex64),
        torch.inference_mode()(torch.zeros)(3),
    ],
)
def test_buffers_of_any_kind_are_no_obstacle(buffer):
    model = Model(kept=buffer)
    with trimtab.start(model, sgd(model), Plan.fixed(4)) as run:
        run.train_step(run.window(torch.randn(4, 3)), lambda m, x: m(x).sum())
        assert run.applied_steps == 1


def moved_by_version(buffer):
    buffer += 1


def moved_unseen(buffer):
    buffer.data.add_(1)


def normalised(buffer):
    nn.functional.batch_norm(torch.randn(4, len(buffer)), buffer, torch.ones(len(buffer)), training=True)


MOVES = {
    "integers": (torch.arange(8), moved_by_version),
    "floats": (torch.zeros(8), moved_by_version),
    "floats without a version": (torch.zeros(8), moved_unseen),
    "statistics without a version": (torch.zeros(8), normalised),
}


@pytest.mark.parametrize(("value", "move"), MOVES.values(), ids=MOVES)
def test_a_large_buffer_is_copied_after_the_first_window_that_moved_it(value, move, monkeypatch):
    monkeypatch.setattr(window_snapshot, "_LARGE", 8)
    model = Model(still=torch.zeros(8), moving=value.clone())
    start = WindowSnapshot(model, watches=True)
    start.note()
    start.learn()
    generators = start.kept_bytes
    start.note()
    move(model.moving)
    start.learn()
    assert start.unheld == ["buffer moving"]
    assert start.kept_bytes == generators
    for _ in range(3):
        start.note()
        before = model.moving.clone()
        move(model.moving)
        start.restore_skipped()
        assert start.unheld == []
        assert torch.equal(model.moving, before)
        assert start.kept_bytes == generators + value.nbytes
        move(model.moving)


def test_a_large_buffer_that_other_ones_take_the_place_of_is_restored_after_the_first_window(monkeypatch):
    monkeypatch.setattr(window_snapshot, "_LARGE", 8)
    model = Model(queue=torch.zeros(8))
    start = WindowSnapshot(model, watches=True)
    for window in range(3):
        start.note()
        before, values = model.queue, model.queue.clone()
        model.queue[0] += 1
        model.queue = model.queue.clone()
        if window:
            start.restore_skipped()
            assert model.queue is before
            assert torch.equal(before, values)
            model.queue[0] += 1
            model.queue = model.queue.clone()
        start.learn()


def test_large_batch_statistics_are_copied_from_the_first_window_on(monkeypatch):
    monkeypatch.setattr(window_snapshot, "_LARGE", 8)
    model = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8))
    start = WindowSnapshot(model)
    start.note()
    model(torch.randn(4, 3))
    start.restore()
    assert torch.equal(model[1].running_mean, torch.zeros(8))
    assert start.unheld == []


@pytest.mark.parametrize("window", [0, 2])
def test_a_window_that_moved_a_large_buffer_first_is_not_repeated(window):
    model = Model(base=torch.zeros(2**18))
    calls = []

    def loss_fn(model, batch):
        model.base.data.add_(1)
        calls.append(len(batch))
        if len(calls) == window + 1:
            raise torch.OutOfMemoryError("no")
        return model(batch).mean() + 0 * model.base[0]

    options = {"out_of_memory": "split"}
    with trimtab.start(model, sgd(model), Plan.fixed(4), **options) as run:
        for _ in range(window):
            run.train_step(run.window(torch.randn(4, 3)), loss_fn)
        context = pytest.warns(RuntimeWarning) if window else pytest.raises(torch.OutOfMemoryError)
        with context as caught:
            run.train_step(run.window(torch.randn(4, 3)), loss_fn)
        if not window:
            assert "buffer base" in caught.value.__notes__[0]
            return
    assert calls == [4] * window + [4, 2, 2]
    assert model.base[0] == window + 2


@pytest.mark.parametrize(("moves", "warned"), [(True, True), (False, False)])
def test_a_skipped_step_warns_of_a_large_buffer_that_it_moved_first(moves, warned):
    model = Model(base=torch.zeros(2**18))

    def loss_fn(model, batch):
        if moves:
            model.base.add_(1)
        return model(batch).mean()

    context = pytest.warns(RuntimeWarning) if warned else contextlib.nullcontext()
    with (
        trimtab.start(model, sgd(model), Plan.fixed(4), nonfinite="skip") as run,
        context,
    ):
        run.train_step(run.window(torch.full((4, 3), torch.nan)), loss_fn)


def test_memory_that_runs_out_while_noting_passes_and_nothing_is_put_back(monkeypatch):
    model = Model(mean=torch.full((2,), 3.0))

    def fail(*args, **kwargs):
        raise torch.OutOfMemoryError("no")

    with trimtab.start(model, sgd(model), Plan.fixed(4)) as run:
        with monkeypatch.context() as patch:
            patch.setattr(window_snapshot.torch, "empty_like", fail)
            with pytest.raises(torch.OutOfMemoryError):
                run.train_step(run.window(torch.randn(4, 3)), lambda m, x: m(x).sum())
        assert torch.equal(model.mean, torch.full((2,), 3.0))
        run.train_step(run.window(torch.randn(4, 3)), lambda m, x: m(x).sum())
        assert run.applied_steps == 1


def test_a_loop_that_cannot_be_run_again_pays_for_nothing(monkeypatch):
    notes = []
    monkeypatch.setattr(WindowSnapshot, "note", lambda self: notes.append(1))
    model = Model(mean=torch.zeros(2))
    with trimtab.start(model, sgd(model), Plan.fixed(4)) as run:
        for micro in (window := run.window(torch.randn(4, 3))):
            run.backward(run.model(micro).sum())
        run.step()
        assert len(window) == 1
    assert notes == []


@pytest.mark.filterwarnings("ignore:.torch.jit.*:DeprecationWarning")
def test_the_statistics_of_a_scripted_model_are_put_back_where_a_step_is_skipped():
    model = torch.jit.script(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)))
    with trimtab.start(model, sgd(model), Plan.fixed(6), nonfinite="skip") as run:
        run.train_step(run.window(torch.randn(6, 3)), lambda model, x: model(x).square().mean())
        before = {name: value.clone() for name, value in model.state_dict().items()}
        run.train_step(run.window(torch.full((6, 3), torch.nan)), lambda model, x: model(x).square().mean())
        assert run.applied_steps == 1
    assert int(before["1.num_batches_tracked"]) == 1
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
