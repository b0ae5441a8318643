"""A disk that fills up under a run with a record, decisions and checkpoints: it ends or goes on as it was told to."""

from __future__ import annotations

import errno
import os
import subprocess
from pathlib import Path

import pytest
import torch
from raising import raises
from saving import newest_good
from torch import nn

import trimtab
from trimtab.checkpoint.batch_size_log import NAME, BatchSizeLog
from trimtab.core.errors import SaveError
from trimtab.core.record import Header, read_record

ROWS, PASSES, PAGE = torch.arange(2048.0).reshape(512, 4) / 2048, 5, 4096
BATCHES = list(ROWS.split(4))
RULE = trimtab.BatchRule(k_max=2, min_windows=3)


@pytest.fixture
def small_disk(tmp_path):
    """Return a file system of half a megabyte."""
    place = tmp_path / "disk"
    place.mkdir()
    asked = ["mount", "-t", "tmpfs", "-o", "size=512k", "trimtab-test", str(place)]
    if os.geteuid() != 0 or subprocess.run(asked, capture_output=True, check=False).returncode:
        pytest.skip("needs the right to mount; the same is tested by calls that fail")
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True)


def train(place: Path, passes: int = PASSES, at=lambda run: None, **keep) -> int:
    """Train all passes, from wherever the folder says; returns the windows that there were."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    plan = trimtab.Plan.fixed(4, batch_rule=RULE)
    settings = trimtab.Checkpoints(place / "run", every_steps=100, every_s=None, **keep)
    with (
        trimtab.RecordWriter(place / "record.jsonl", Header("it"), continues=True) as record,
        trimtab.start(model, optimizer, plan, record=record, checkpoints=settings) as run,
    ):
        while run.passes < passes:
            for window in run.windows(BATCHES):
                run.train_step(window, lambda model, batch: model(batch).square().mean())
                at(run)
        run.checkpoint()
        return run.num_windows


def fill(place: Path, pages: int = 0) -> None:
    """Leave so many pages free."""
    others = place / "others"
    others.write_bytes(b"")
    others.write_bytes(bytes((os.statvfs(place).f_bavail - pages) * PAGE))


def whole(place: Path) -> int:
    """Return the steps of the newest checkpoint, where all that is there can be read."""
    good = newest_good(place / "run")
    assert not good.refused
    read_record(place / "record.jsonl")
    assert BatchSizeLog(place / "run" / NAME, "", writes=False)._read.fault is None
    return good.contents.step


def test_a_run_ends_with_what_was_saved_and_goes_on_where_there_is_room(small_disk):
    train(small_disk, 1)
    before = whole(small_disk)

    def filled(run):
        if run.num_windows == before + 10:
            fill(small_disk)

    with raises(SaveError, code="checkpoint.not_saved"):
        train(small_disk, at=filled)
    assert whole(small_disk) == before
    (small_disk / "others").unlink()
    windows = train(small_disk)
    assert whole(small_disk) == windows
    steps = read_record(small_disk / "record.jsonl").steps
    assert [step.index for step in steps] == list(range(windows))


@pytest.mark.filterwarnings("ignore:.*No space left on device:RuntimeWarning")
def test_a_run_that_warns_goes_on_and_loses_nothing_once_there_is_room(small_disk):
    train(small_disk, 1)
    before, seen = whole(small_disk), []

    def filled(run):
        if run.num_windows == before + 10:
            fill(small_disk)
        if run.num_windows == before + 200:
            seen.append(whole(small_disk))
            (small_disk / "others").unlink()

    windows = train(small_disk, at=filled, on_failure="warn")
    assert seen == [before]
    assert whole(small_disk) == windows > before + 200
    found = read_record(small_disk / "record.jsonl")
    assert [step.index for step in found.steps] == list(range(windows))
    assert found.end is not None
    assert any("failed" in event.detail for event in found.events if event.name == "checkpoint")


@pytest.mark.parametrize("policy", ["stop", "warn"])
def test_writes_that_fail_are_the_policy_s(tmp_path, monkeypatch, policy):
    """As on a full disk, of which half a line was taken."""
    write, failing = os.write, []

    def half(descriptor, data):
        if failing and Path(os.readlink(f"/proc/self/fd/{descriptor}")).name == failing[0]:
            if len(data) < 30:
                raise OSError(errno.ENOSPC, "No space left on device")
            return write(descriptor, data[: len(data) // 2])
        return write(descriptor, data)

    monkeypatch.setattr(os, "write", half)
    for name in (NAME, "record.jsonl"):
        place = tmp_path / name
        place.mkdir()

        def fails_a_while(run, name=name):
            failing[:] = [name] if 20 <= run.num_windows < 90 else []

        if policy == "stop":
            with raises(SaveError, code="checkpoint.not_saved"):
                train(place, 1, fails_a_while)
        else:
            with pytest.warns(RuntimeWarning, match=f"{name}.*No space left on device"):
                windows = train(place, 1, fails_a_while, on_failure="warn")
            assert whole(place) == windows
            steps = read_record(place / "record.jsonl").steps
            assert [step.index for step in steps] == list(range(windows))
        failing.clear()


@pytest.mark.filterwarnings("ignore:.*Read-only file system:RuntimeWarning")
@pytest.mark.parametrize("policy", ["stop", "warn"])
def test_a_disk_that_turns_read_only_leaves_what_was_saved(tmp_path, monkeypatch, policy):
    """As a damaged one does under a run: nothing can be written, made, cut, renamed or removed, to its very end."""
    windows = train(tmp_path, 1)
    before = whole(tmp_path)
    assert before == windows
    with monkeypatch.context() as disk:
        is_read_only = []

        def until_then(call):
            def refused(*given, **options):
                if is_read_only:
                    raise OSError(errno.EROFS, "Read-only file system")
                return call(*given, **options)

            return refused

        for name in ("write", "mkdir", "rename", "replace", "unlink", "rmdir", "ftruncate"):
            disk.setattr(os, name, until_then(getattr(os, name)))

        trained = []

        def turns(run):
            trained.append(run.num_windows)
            if run.num_windows == before + 10:
                is_read_only.append(True)

        with pytest.raises(SaveError, match="Read-only file system" if policy == "stop" else "record.jsonl"):
            train(
                tmp_path, at=turns, on_failure=policy
            )  # of a record, which is the caller's, it is told as that closes
        assert (max(trained) > before + 200) is (policy == "warn")
    assert whole(tmp_path) == before
    again = train(tmp_path)
    assert whole(tmp_path) == again
    steps = read_record(tmp_path / "record.jsonl").steps
    assert [step.index for step in steps] == list(range(again))
