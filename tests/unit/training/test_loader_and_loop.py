"""What a loop and its loader may do around a run: empty batches, ended runs, errors, and functions replaced later."""

from __future__ import annotations

import warnings
from dataclasses import replace

import pytest
import torch
from raising import raises
from torch import nn

import trimtab
from trimtab.core.choice import SplitCheck
from trimtab.core.errors import LoopError
from trimtab.plans.plan import Plan
from trimtab.training.backend import UserBackend
from trimtab.training.metadata_exchange import SingleProcessExchange
from trimtab.training.run import Run


def loop():
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def loss_fn(model, batch):
    return model(batch).square().mean()


class Counted:
    """A loader that counts how often it was started."""

    def __init__(self, sizes=(4, 4)):
        self.sizes, self.starts = sizes, 0

    def __iter__(self):
        self.starts += 1
        return iter([torch.randn(size, 3) for size in self.sizes])


def test_batches_without_a_sample_of_this_rank_are_skipped():
    model, optimizer = loop()
    data = [torch.randn(4, 3), torch.randn(1, 3), torch.randn(4, 3)]
    with trimtab.start(model, optimizer, Plan.fixed(2)) as run:
        for window in run.windows(trimtab.shard(data, rank=1, num_ranks=2)):
            run.train_step(window, loss_fn)
        assert (run.num_windows, run.consumed_samples, run.passes) == (2, 4, 1)


def test_a_run_that_was_asked_to_end_starts_no_loader():
    loader = Counted()
    with trimtab.start(*loop(), Plan.fixed(4)) as run:
        run.ask_to_end()
        assert list(run.windows(loader)) == []
    assert loader.starts == 0


@pytest.mark.parametrize("is_closed", [True, False], ids=["closed", "window open"])
def test_a_call_out_of_order_starts_no_loader(is_closed):
    loader = Counted()
    run = trimtab.start(*loop(), Plan.fixed(4))
    if is_closed:
        run.close()
    else:
        run.accumulate(run.window(torch.randn(4, 3)), loss_fn)
    with raises(LoopError, code="run.closed" if is_closed else "loop.window_open"):
        next(iter(run.windows(loader)))
    assert loader.starts == 0
    run.close()


def test_unequal_batches_that_raise_leave_the_weights_as_they_were():
    model, optimizer = loop()
    before = model.weight.clone()
    check = SplitCheck(False, "the gradients differ", 0.5)
    with trimtab.start(model, optimizer, replace(Plan.fixed(4), check=check)) as run, warnings.catch_warnings():
        warnings.simplefilter("error")
        run.of_batches(2)
        windows = iter(run.windows(Counted((4, 2, 4, 4))))
        with pytest.raises(RuntimeWarning, match="unequal sizes"):
            run.train_step(next(windows), loss_fn)
        assert torch.equal(model.weight, before)
        assert (run.num_windows, run.applied_steps) == (0, 0)
        run.train_step(next(windows), loss_fn)
    assert not torch.equal(model.weight, before)


def test_ranks_that_reduce_by_hand_count_the_schedule_alike_without_a_total():
    """A run that is resumed with a total would otherwise have another learning rate on each rank."""

    def scheduled(sizes):
        backend = UserBackend(SingleProcessExchange(has_peers=True))
        with Run(*loop(), Plan.fixed(4), backend=backend) as run:
            for window in run.windows(Counted(sizes)):
                run.train_step(window, loss_fn)
            return run.state_dict()["consumed"]["scheduled"]

    assert scheduled((4, 4, 4)) == scheduled((4, 4, 1)) == 12


def test_a_zero_grad_that_is_replaced_during_training_is_called_for_each_window():
    model, optimizer = loop()
    calls, own = [], optimizer.zero_grad

    def counted(set_to_none=True):
        calls.append(run.num_windows)
        own(set_to_none)

    with trimtab.start(model, optimizer, Plan.fixed(4)) as run:
        optimizer.zero_grad = counted
        for window in run.windows(Counted((4, 4, 4))):
            run.train_step(window, loss_fn)
        assert calls == [0, 1, 2]


def test_an_error_after_a_backward_does_not_allow_a_second_one(monkeypatch):
    model, optimizer = loop()

    def fails(self, *given):
        raise ValueError("measuring failed")

    monkeypatch.setattr("trimtab.training.loop_warnings.LeftoverGradientChanges.backward_ends", fails)
    with trimtab.start(model, optimizer, Plan.fixed(4)) as run:
        for micro in run.window(torch.randn(4, 3)):
            loss = loss_fn(run.model, micro)
            with pytest.raises(ValueError, match="measuring failed"):
                run.backward(loss)
            with raises(LoopError, code="loop.no_micro_batch"):
                run.backward(loss_fn(run.model, micro))
            break
        run.discard()
