"""One run a folder: a lock that ends with its process, whoever else was forked from it."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import socket

import pytest
from raising import raises
from saving import forked

from trimtab.checkpoint.run_lock import NAME, LockHolder, locked
from trimtab.core.errors import FormatError, InUseError


def child(work) -> tuple[int, int]:
    """Fork a process that works, says so, and waits to be killed; returns (pid, what it says through)."""
    out, into = os.pipe()

    def work_on() -> None:
        held = work()
        os.write(into, b".")
        signal.pause()
        del held

    pid = forked(work_on)
    os.close(into)
    return pid, out


@pytest.fixture
def held_elsewhere(tmp_path):
    """Return the process that holds a folder."""
    pid, out = child(lambda: locked(tmp_path))
    assert os.read(out, 1) == b"."
    os.close(out)
    yield pid
    kill(pid)


def kill(pid):
    try:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    except (ProcessLookupError, ChildProcessError):
        pass


def test_a_folder_is_held_once_and_let_go_of(tmp_path):
    with locked(tmp_path) as lock:
        assert lock.recovered is None
        assert LockHolder.said((tmp_path / NAME).read_bytes()) == LockHolder.here()
        with raises(FormatError, code="output.in_use"):
            locked(tmp_path)
    with locked(tmp_path) as lock:
        assert lock.recovered is None
    lock.release()


def test_another_process_is_named_and_its_kill_frees_the_folder(tmp_path, held_elsewhere):
    with raises(InUseError, code="output.in_use") as refused:
        locked(tmp_path)
    assert (refused.value.pid, refused.value.code) == (held_elsewhere, "output.in_use")
    kill(held_elsewhere)
    with locked(tmp_path) as lock:
        assert (lock.recovered.pid, lock.recovered.host) == (held_elsewhere, socket.gethostname())


def test_what_was_forked_from_a_run_does_not_hold_its_folder(tmp_path):
    lock = locked(tmp_path)
    pid, out = child(lambda: None)  # as a worker of a loader, which outlives its run for a while
    try:
        assert os.read(out, 1) == b"."
        lock.release()
        locked(tmp_path).release()
    finally:
        kill(pid)
        os.close(out)


ENDLESS = b'{"pid": 1e400, "host": "a"}'


@pytest.mark.parametrize("said", [b"", b"[1]", b'{"pid": "x"}', b"\xff", b"[" * 900, ENDLESS])
def test_a_holder_that_does_not_say_who_it_is(tmp_path, said):
    with locked(tmp_path):
        (tmp_path / NAME).write_bytes(said)
        with raises(FormatError, code="output.in_use"):
            locked(tmp_path)
    assert locked(tmp_path).recovered is None


@pytest.mark.parametrize("number", [errno.EROFS, errno.EIO])
def test_a_folder_is_let_go_of_though_its_disk_takes_no_more_writes(tmp_path, monkeypatch, number):
    lock = locked(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "ftruncate", lambda *_: (_ for _ in ()).throw(OSError(number, os.strerror(number))))
        lock.release()
    with locked(tmp_path) as again:
        assert again.recovered == LockHolder.here()  # nothing could be written of its end


def test_a_file_system_without_locks_is_said(tmp_path, monkeypatch):
    def none(*_):
        raise OSError(errno.ENOTSUP, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", none)
    with raises(FormatError, code="folder.no_locks"):
        locked(tmp_path)


def test_no_folder_and_no_link_is_held(tmp_path):
    (tmp_path / "mine").write_text("kept")
    (tmp_path / NAME).symlink_to(tmp_path / "mine")
    with pytest.raises(OSError):  # noqa: PT011 - the number differs between systems
        locked(tmp_path)
    assert (tmp_path / "mine").read_text() == "kept"
    with pytest.raises(FileNotFoundError):
        locked(tmp_path / "none")
    with pytest.raises(NotADirectoryError):
        locked(tmp_path / "mine")


def test_no_file_is_left_open(tmp_path, monkeypatch):
    def broken(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    before = len(os.listdir("/dev/fd"))
    with locked(tmp_path):
        for _ in range(3):
            with pytest.raises(FormatError):
                locked(tmp_path)
    monkeypatch.setattr(os, "pwrite", broken)
    with pytest.raises(OSError, match="No space left"):
        locked(tmp_path)
    assert len(os.listdir("/dev/fd")) == before
    assert json.loads(json.dumps(LockHolder.here().__dict__))["pid"] == os.getpid()
