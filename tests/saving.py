"""Small checkpoints: how they are written, what is in them, and a process that writes them until it is killed."""

from __future__ import annotations

import hashlib
import json
import os
import select
import signal
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from trimtab.checkpoint import atomic_directory
from trimtab.checkpoint.atomic_directory import NAME, Manifest, committed_folders, manifest_of
from trimtab.checkpoint.state_files import StateFiles, read_state, write_state
from trimtab.core.errors import FormatError

KILLED = -signal.SIGKILL


def state_of(step: int, size: int = 2_000) -> dict[str, Any]:
    """Return a state that tells its step by every number of it."""
    weights = torch.arange(size, dtype=torch.float64) + step + 0.1
    return {"weights": weights, "step": step, "losses": [step + i / 7 for i in range(40)], "name": f"of step {step}"}


def save(parent: Path, step: int, size: int = 2_000) -> Path:
    """Write the checkpoint of a step: a state, and a file of another kind."""

    def fill(folder: Path) -> None:
        write_state(folder, state_of(step, size))
        (folder / "shard.bin").write_bytes(bytes((i * 7 + step) % 255 + 1 for i in range(3_000)))

    folder = write(parent, f"step-{step}", fill, {"step": step})
    atomic_directory.commit_name(folder)
    return folder


def write(parent: Path, name: str, fill: Callable[[Path], object], about: dict[str, Any]) -> Path:
    """Commit a folder of the files that a function writes."""
    with atomic_directory.writing(parent / name, about) as folder:
        fill(folder)
    return parent / name


def found(parent: Path) -> list[Path]:
    """Return the checkpoints with a readable manifest, newest first."""

    def is_readable(folder: Path) -> bool:
        try:
            return manifest_of(folder) is not None
        except FormatError:
            return False

    return [*filter(is_readable, committed_folders(parent))]


def newest_good(parent: Path) -> atomic_directory.NewestDirectory[Manifest]:
    """Return the newest folder that passes verification, with its manifest."""
    return atomic_directory.newest_good(parent, atomic_directory.verify)


def loaded(folder: Path, files: StateFiles | None = None) -> int:
    """Return the step of a checkpoint, all of whose numbers are that step's."""
    state = read_state(folder, files=files)
    expected = state_of(state["step"], len(state["weights"]))
    assert torch.equal(state.pop("weights"), expected.pop("weights"))
    assert state == expected
    return state["step"]


def gone_on_from(parent: Path) -> tuple[int, atomic_directory.NewestDirectory[StateFiles]]:
    """Return the step that a run goes on from, of the very bytes that were verified, 0 of none; and what was found."""
    good = atomic_directory.newest_good(parent, StateFiles.verified)
    return (0 if good.contents is None else loaded(good.folder, good.contents)), good


def forked(work: Callable[[], None]) -> int:
    """Return the pid of a process that works."""
    with warnings.catch_warnings():  # of a fork beside threads, which newer Pythons give: none of them holds anything
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        try:
            work()
            os._exit(0)
        finally:
            os._exit(1)
    return pid


def ended(pid: int) -> int:
    """Return a process's exit code, or less than 0: the signal that ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def save_on_and_on(parent: Path, said: int, size: int) -> None:
    """Save steps, from where the folder is; say each once it is committed, as a byte."""
    start = newest_good(parent)
    step = 0 if start.contents is None else start.contents.step
    while True:
        step += 1
        save(parent, step, size)
        os.write(said, b".")
        atomic_directory.delete_old_folders(parent, 2)


def kill_while_saving(parent: Path, delay_s: Callable[[], float], kills: int, size: int = 2_000) -> tuple[int, int]:
    """Kill a process that saves, again and again; each time the folder has to be what it said, or one step on.

    Args:
        delay_s: seconds from a commit to the kill.

    Returns:
        Steps there were, and kills that left a folder half written.
    """
    last = cut = there = 0
    for _ in range(kills):
        out, into = os.pipe()
        pid = forked(lambda said=into: save_on_and_on(parent, said, size))
        os.close(into)
        committed = len(os.read(out, 1))
        select.select([], [], [], delay_s())
        os.kill(pid, signal.SIGKILL)
        assert ended(pid) == KILLED
        while more := os.read(out, 1000):
            committed += len(more)
        os.close(out)
        cut += any(atomic_directory.TEMPORARY in name for name in os.listdir(parent))
        atomic_directory.delete_temporary_files(parent)
        assert not any(atomic_directory.TEMPORARY in name for name in os.listdir(parent))
        newest = newest_good(parent)
        assert not newest.refused
        step = loaded(newest.folder)
        assert last + committed <= step <= last + committed + 1
        most = max(3, there + 1)  # one more where the kill came before the older ones were deleted, time after time
        there = len(found(parent))
        assert 1 <= there <= most
        last = step
    return last, cut


def forge(folder: Path, change) -> None:
    """Write a manifest as one who can write there could: whatever it says, its checksum is right."""
    said = json.loads((folder / NAME).read_text())
    del said["sha256"]
    change(said)
    text = json.dumps(said, sort_keys=True, indent=1)
    said["sha256"] = hashlib.sha256(text.encode()).hexdigest()
    (folder / NAME).write_text(json.dumps(said, sort_keys=True, indent=1) + "\n")
