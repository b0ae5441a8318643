"""Passes that the loop leaves early, of runs that are cut off: what follows is that of one that never was."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import signal

import pytest
import torch
from crashing import train
from test_crash import crashed, said, whole
from torch import nn

import trimtab

DIED, LEAVES = 14, 3


def died(folder, options) -> None:
    with pytest.raises(SystemExit):
        train(folder / "run", folder / "died.txt", options | {"dies_after": DIED})


def never_cut_off(folder, options) -> dict[str, set[str]]:
    train(folder / "never", folder / "never.txt", options | {"keep": {"every_steps": None}})
    return said(folder / "never.txt")


@pytest.mark.parametrize("plan", [{}, {"micro_batch": 4}])
@pytest.mark.parametrize(
    ("saves", "at"),
    [
        ({"keep": {"every_steps": 12}}, 12),  # due as a pass begins
        ({"keep": {"every_steps": None}, "saves_between": True}, 12),  # asked for between two
        ({"keep": {"every_steps": 13}}, 13),  # in one that is under way
    ],
)
def test_no_loss_differs_of_passes_that_are_left(tmp_path, plan, saves, at):
    options = {"leaves_after": LEAVES} | plan
    died(tmp_path, options | saves)
    assert (tmp_path / "run" / f"step-{at}").exists()
    train(tmp_path / "run", tmp_path / "again.txt", options | saves)
    found, expected = said(tmp_path / "again.txt"), never_cut_off(tmp_path, options)
    assert found == {window: loss for window, loss in expected.items() if window in found}
    assert {str(at), "end"} <= found.keys()


@pytest.mark.parametrize("ranks", [1, 2])
def test_no_loss_differs_after_kills_in_passes_that_are_left(tmp_path, ranks):
    options = {"leaves_after": LEAVES, "keep": {"every_steps": LEAVES}, "ranks": ranks}
    found, kills = crashed(tmp_path, options, kills=2, seed=5)
    assert kills.counted >= 1, "too few of the kills came between its start and its end"
    assert found == whole(tmp_path, options)


BATCHES = [torch.full((4, 2), 1.0 + i) for i in range(6)]


def loss_fn(model, batch):
    return model(batch).square().mean()


@contextlib.contextmanager
def started(folder, **options):
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    checkpoints = trimtab.Checkpoints(folder, every_s=None)
    with trimtab.start(model, optimizer, trimtab.Plan.fixed(4), checkpoints=checkpoints, **options) as run:
        yield run


def trained(run, windows, number=None) -> list[int]:
    """Return which batches were trained on."""
    seen = []
    for window in windows if number is None else itertools.islice(windows, number):
        run.train_step(window, lambda model, batch: seen.append(int(batch[0, 0])) or loss_fn(model, batch))
    return seen


def left(run, loader=BATCHES, number=2) -> list[int]:
    return trained(run, run.windows(loader), number)


def gone_on(folder, loader=BATCHES) -> tuple[list[int], int]:
    """Return which batches the next pass of a run that goes on has, and how many were over before."""
    with started(folder) as run:
        passes = run.passes
        return trained(run, run.windows(loader)), passes


def test_a_pass_that_was_left_is_over_at_once(tmp_path):
    with started(tmp_path / "run") as run:
        left(run)
        assert run.passes == 1
        run.checkpoint()
    assert gone_on(tmp_path / "run") == ([1, 2, 3, 4, 5, 6], 1)


def test_a_pass_is_not_left_while_somebody_holds_its_windows(tmp_path):
    with started(tmp_path / "run") as run:
        windows = run.windows(BATCHES)
        trained(run, windows, 2)
        assert run.passes == 0
        run.checkpoint()
        assert trained(run, windows) == [3, 4, 5, 6]
    assert gone_on(tmp_path / "run") == ([3, 4, 5, 6], 0)


def test_windows_that_are_dropped_late_leave_no_other_pass(tmp_path):
    with started(tmp_path / "run") as run:
        windows = run.windows(BATCHES)
        trained(run, windows, 2)
        others = run.windows(BATCHES)
        trained(run, others, 3)
        del windows
        gc.collect()
        assert run.passes == 1
        run.checkpoint()
        del others
    assert gone_on(tmp_path / "run") == ([4, 5, 6], 1)


def test_what_is_saved_as_an_error_is_handled_goes_on_with_the_pass(tmp_path):
    with started(tmp_path / "run") as run:
        try:
            for window in run.windows(BATCHES):
                run.train_step(window, loss_fn)
                if run.num_windows == 2:
                    raise RuntimeError("of the loop's own")
        except RuntimeError:
            run.checkpoint()
    assert gone_on(tmp_path / "run") == ([3, 4, 5, 6], 0)


def test_a_whole_loop_that_runs_as_an_error_is_handled_leaves_its_passes(tmp_path):
    try:
        raise RuntimeError("of before")
    except RuntimeError:
        with started(tmp_path / "run") as run:
            left(run)
            run.checkpoint()
    assert gone_on(tmp_path / "run") == ([1, 2, 3, 4, 5, 6], 1)


@pytest.mark.parametrize("first", ["interrupt", "break"])
def test_a_pass_that_is_left_to_interrupt_the_run_is_gone_on_with(tmp_path, first):
    with started(tmp_path / "run") as run:
        for window in run.windows(BATCHES):
            run.train_step(window, loss_fn)
            if run.num_windows == 2:
                if first == "interrupt":
                    run.interrupt()
                break
        run.interrupt()
        run.checkpoint()
    assert gone_on(tmp_path / "run") == ([3, 4, 5, 6], 0)


def two_passes(run, *, leaves) -> None:
    """Train, with a signal in the second window, after which the loop may leave the pass."""
    while run.passes < 2:
        for window in run.windows(BATCHES):
            run.train_step(window, loss_fn)
            if run.num_windows == 2:
                os.kill(os.getpid(), signal.SIGTERM)
                if leaves:
                    break


@pytest.mark.parametrize(("leaves", "rest"), [(False, ([3, 4, 5, 6], 0)), (True, ([1, 2, 3, 4, 5, 6], 1))])
def test_a_signal_saves_the_pass_that_is_under_way(tmp_path, leaves, rest):
    with pytest.raises(SystemExit), started(tmp_path / "run") as run:
        two_passes(run, leaves=leaves)
    assert gone_on(tmp_path / "run") == rest


def test_a_pass_that_the_loop_leaves_as_the_run_has_stopped_is_not_over(tmp_path):
    with started(tmp_path / "run", stop=trimtab.Stop(target=1.0, smaller_is_better=True)) as run:
        for window in run.windows(BATCHES):
            run.train_step(window, loss_fn)
            if run.num_windows == 2:
                run.evaluated(0.5)
                break
        assert [*run.windows(BATCHES)] == []
        run.checkpoint()
    assert gone_on(tmp_path / "run") == ([3, 4, 5, 6], 0)


@pytest.mark.parametrize("again", [False, True])
def test_of_a_stream_the_next_pass_is_the_rest(tmp_path, again):
    """An iterator that was left goes on where it is; in another process what was drawn of it is drawn again."""
    with started(tmp_path / "run") as run:
        stream = iter(BATCHES)
        left(run, stream)
        if again:
            assert left(run, stream) == [3, 4]
        run.checkpoint()
    assert gone_on(tmp_path / "run", iter(BATCHES)) == (([5, 6], 2) if again else ([3, 4, 5, 6], 1))


def test_of_streams_that_are_made_anew_each_pass_is_its_own(tmp_path):
    with started(tmp_path / "run") as run:
        left(run, iter(BATCHES))
        assert left(run, iter(BATCHES), 3) == [1, 2, 3]
        run.checkpoint()
    assert gone_on(tmp_path / "run", iter(BATCHES)) == ([4, 5, 6], 2)


def test_a_loop_over_passes_that_interrupts_and_leaves_is_gone_on_with(tmp_path):
    """Though it asks for the next pass: that is where a run that was interrupted is saved."""
    with contextlib.suppress(SystemExit), started(tmp_path / "run") as run:
        while run.passes < 3:
            for window in run.windows(BATCHES):
                run.train_step(window, loss_fn)
                if run.num_windows == 2:
                    run.interrupt()
                    break
    assert gone_on(tmp_path / "run") == ([3, 4, 5, 6], 0)


class Anew:
    """An iterator that knows its length, and begins anew whenever it is asked for itself."""

    def __iter__(self):
        self._left = iter(BATCHES)
        return self

    def __next__(self):
        return next(self._left)

    def __len__(self):
        return len(BATCHES)


def test_an_iterator_that_begins_anew_is_no_stream(tmp_path):
    with started(tmp_path / "run") as run:
        loader = Anew()
        assert left(run, loader, 3) == [1, 2, 3]
        assert left(run, loader, 2) == [1, 2]
        assert run.position.state_dict()["drawn"] == 0
        run.checkpoint()
    assert gone_on(tmp_path / "run", Anew()) == ([1, 2, 3, 4, 5, 6], 2)


def test_a_generator_around_the_loop_that_is_closed_leaves_the_pass(tmp_path):
    def epoch(run):
        try:
            for window in run.windows(BATCHES):
                yield run.train_step(window, loss_fn)
        finally:
            del window
            gc.collect()
            run.checkpoint()

    with started(tmp_path / "run") as run:
        losses = epoch(run)
        next(losses), next(losses)
        losses.close()
    assert gone_on(tmp_path / "run") == ([1, 2, 3, 4, 5, 6], 1)
