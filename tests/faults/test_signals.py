"""Signals to a run and to all that belongs to it: saved where its window is over, ended at once by a second one."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import torch
from saving import ended, forked
from torch import nn
from torch.utils.data import DataLoader, Dataset

import trimtab
from trimtab.checkpoint.atomic_directory import committed_folders

WINDOWS = 9


class Slow(Dataset):
    """Rows that take their time, with chance of their own; of no pass all are drawn before the first is trained on."""

    def __len__(self):
        return 24

    def __getitem__(self, index):
        time.sleep(0.02)
        return torch.full((4,), float(index)) / 24 + torch.rand(4)


def loss_fn(model, batch):
    return model(batch).square().mean()


def train(folder: Path, said, *, workers: int = 1, slow_s: float = 0.0) -> list[float]:
    """Train to the end, from wherever the folder says; a byte is said in each window, and one more in a slow one."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = DataLoader(Slow(), batch_size=4, shuffle=True, num_workers=workers)
    keep, losses = trimtab.Checkpoints(folder, every_s=None), []
    with trimtab.start(model, optimizer, trimtab.Plan.fixed(4), checkpoints=keep) as run:
        while run.num_windows < WINDOWS:
            for window in run.windows(loader):
                losses.append(float(run.train_step(window, loss_fn)))
                said()
                time.sleep(slow_s)
                if run.num_windows == WINDOWS:
                    break
        run.checkpoint()
    return losses


def started(folder: Path, **options) -> tuple[int, int]:
    """Return a process that trains in a group of its own, and what it says through."""
    out, into = os.pipe()

    def work() -> None:
        os.setsid()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        try:
            train(folder, lambda: os.write(into, b"."), **options)
        except KeyboardInterrupt:
            os._exit(130)
        except SystemExit as left:
            os._exit(left.code)

    pid = forked(work)
    os.close(into)
    return pid, out


def signalled(folder: Path, send, *, windows: int = 2, later_s: float = 0.0, **options) -> int:
    """Return how a process ended that was sent signals after so many windows, and so many seconds."""
    pid, out = started(folder, **options)
    try:
        for _ in range(windows):
            assert os.read(out, 1) == b"."
        time.sleep(later_s)
        send(pid)
        return ended(pid)
    finally:
        os.close(out)


def ctrl_c(pid: int) -> None:
    os.killpg(pid, signal.SIGINT)


def timeout(pid: int) -> None:
    """Send what GNU timeout does."""
    os.kill(pid, signal.SIGTERM)
    os.killpg(pid, signal.SIGTERM)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Return the losses of a run that was sent nothing."""
    return train(tmp_path_factory.mktemp("whole") / "run", int)


@pytest.mark.parametrize("later_s", [0.0, 0.07])
@pytest.mark.parametrize(("send", "code"), [(ctrl_c, 130), (timeout, 128 + signal.SIGTERM)])
def test_a_signal_to_the_group_saves_a_run_whose_loader_has_workers(tmp_path, whole, send, code, later_s):
    """While it draws too, which is most of its time."""
    assert signalled(tmp_path / "run", send, later_s=later_s) == code
    (saved,) = committed_folders(tmp_path / "run")
    windows = int(saved.name.partition("-")[2])
    assert 2 <= windows < WINDOWS
    assert train(tmp_path / "run", int) == whole[windows:]


def test_a_terminal_that_is_closed_saves_the_run(tmp_path, whole):
    """SIGHUP, to the whole group."""
    code = signalled(tmp_path / "run", lambda pid: os.killpg(pid, signal.SIGHUP))
    assert code == 128 + signal.SIGHUP
    (saved,) = committed_folders(tmp_path / "run")
    assert train(tmp_path / "run", int) == whole[int(saved.name.partition("-")[2]) :]


def test_a_hangup_that_is_ignored_stays_ignored(tmp_path):
    """As under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        losses = train(tmp_path / "run", lambda: os.kill(os.getpid(), signal.SIGHUP), workers=0)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert len(losses) == WINDOWS


def test_a_second_signal_ends_it_at_once(tmp_path):
    def twice(pid):
        os.kill(pid, signal.SIGTERM)
        time.sleep(0.4)
        os.kill(pid, signal.SIGTERM)

    begun_s = time.monotonic()
    assert signalled(tmp_path / "run", twice, windows=1, workers=0, slow_s=30) == -signal.SIGTERM
    assert time.monotonic() - begun_s < 15
    assert committed_folders(tmp_path / "run") == []


def test_two_at_once_are_one(tmp_path):
    """The window is slow, and both come in the middle of it."""
    assert signalled(tmp_path / "run", timeout, windows=1, later_s=0.2, workers=0, slow_s=1) == 128 + signal.SIGTERM
    assert len(committed_folders(tmp_path / "run")) == 1
