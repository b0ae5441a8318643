"""What becomes of checkpoints on disk: cut, flipped, blanked, swapped, forged, killed, out of room, left behind.

All that is not as it was written is refused by the file's name, and the one before it is used, with its own values.
"""

from __future__ import annotations

import contextlib
import errno
import os
import pickle
import random
import resource
import shutil
import signal
import subprocess
import threading
from pathlib import Path

import pytest
import torch
from raising import raises
from saving import (
    KILLED,
    ended,
    forge,
    forked,
    found,
    gone_on_from,
    kill_while_saving,
    loaded,
    newest_good,
    save,
    write,
)

from trimtab.checkpoint import atomic_directory
from trimtab.checkpoint.atomic_directory import (
    NAME,
    SCHEMA,
    TENSORS,
    TREE,
    Manifest,
    committed_folders,
    delete_old_folders,
    delete_temporary_files,
    put_aside,
    verify,
    write_manifest,
)
from trimtab.checkpoint.run_lock import NAME as LOCK
from trimtab.checkpoint.run_lock import locked
from trimtab.checkpoint.state_files import read_state
from trimtab.core.errors import DamagedError, FormatError, SaveError, ValueGivenError

FILES = (NAME, TREE, TENSORS, "shard.bin")
EACH = 304  # of each kind of damage, over all files alike


@pytest.fixture
def parent(tmp_path):
    """Return a folder with two checkpoints."""
    save(tmp_path, 1)
    save(tmp_path, 2)
    return tmp_path


def refusal(parent: Path) -> DamagedError:
    """Return the error by which the second is refused, where the first is used and has its own values."""
    step, good = gone_on_from(parent)
    assert step == loaded(good.folder) == good.contents.manifest.step == 1
    ((folder, error),) = good.refused
    assert folder.name == "step-2"
    return error


def truncated(content: bytes, chance: random.Random) -> bytes:
    return content[: chance.randrange(len(content))]


def flipped(content: bytes, chance: random.Random) -> bytes:
    at = chance.randrange(len(content))
    return content[:at] + bytes([content[at] ^ 1 << chance.randrange(8)]) + content[at + 1 :]


def blanked(content: bytes, chance: random.Random) -> bytes:
    at, size = chance.randrange(len(content)), chance.choice([1, 16, 512, 4096])
    return content[:at] + bytes(min(size, len(content) - at)) + content[at + size :]


@pytest.mark.parametrize("damage", [truncated, flipped, blanked])
def test_no_damage_is_overlooked(parent, damage):
    chance = random.Random(damage.__name__)
    tried = dict.fromkeys(FILES, 0)
    while sum(tried.values()) < EACH:
        name = min(tried, key=tried.get)
        path = parent / "step-2" / name
        content = path.read_bytes()
        damaged = damage(content, chance)
        if damaged == content:  # a block that was blank
            continue
        path.write_bytes(damaged)
        assert refusal(parent).field == str(path), (name, damaged)
        path.write_bytes(content)
        tried[name] += 1
    assert newest_good(parent).contents.step == 2


def failing(monkeypatch, call: str, place: str, number: int) -> None:
    """Have the system say an error where a call is about a path that ends so, or about an open file of one."""
    does = getattr(os, call)

    def fails(about, *given, **named):
        path = os.readlink(f"/proc/self/fd/{about}") if isinstance(about, int) else str(about)
        if path.endswith(place):
            raise OSError(number, os.strerror(number))
        return does(about, *given, **named)

    monkeypatch.setattr(os, call, fails)


PLACES = [
    ("open", f"step-2/{NAME}"),
    ("open", f"step-2/{TREE}"),
    ("preadv", f"step-2/{TENSORS}"),
    ("scandir", "step-2"),
]


@pytest.mark.parametrize(("call", "place"), PLACES)
@pytest.mark.parametrize("name", ["ESTALE", "ETIMEDOUT", "EMFILE", "EACCES"])
def test_what_cannot_be_read_for_now_is_not_taken_for_damage(parent, monkeypatch, call, place, name):
    """It may be whole: the one before is not gone on from, and nothing is put aside."""
    number = getattr(errno, name)
    with monkeypatch.context() as patch:
        failing(patch, call, place, number)
        for read in (verify, lambda folder: newest_good(folder.parent)):
            with raises(FormatError, code="checkpoint.out_of_reach") as refused:
                read(parent / "step-2")
            assert not isinstance(refused.value, DamagedError)
            assert refused.value.field.endswith(place)
            assert os.strerror(number) in refused.value.problem
    assert newest_good(parent).contents.step == 2


@pytest.mark.parametrize(("call", "place"), PLACES)
@pytest.mark.parametrize("name", ["ENOENT", "ENOTDIR", "ELOOP", "EISDIR", "ENXIO", "EIO"])
def test_what_the_system_says_of_the_file_itself_is_damage(parent, monkeypatch, call, place, name):
    """It is away, a link, a folder, a socket, or on a disk that is broken."""
    failing(monkeypatch, call, place, getattr(errno, name))
    error = refusal(parent)
    assert (error.field, error.code) == (str(parent / place), "checkpoint.unreadable")


def test_a_copy_that_cannot_be_read_for_now_counts_and_another_programs_folder_does_not(parent, monkeypatch):
    os.rename(parent / "step-2", parent / "best")
    (parent / "export").mkdir()
    (parent / "export" / NAME).write_text("{}")
    failing(monkeypatch, "open", NAME, errno.EACCES)
    assert [each.name for each in committed_folders(parent)] == ["best", "step-1"]
    with raises(FormatError, code="checkpoint.out_of_reach"):
        newest_good(parent)


def test_damage_anywhere_in_a_file_of_several_chunks(tmp_path, monkeypatch):
    monkeypatch.setattr(atomic_directory, "CHUNK_BYTES", 3_000_000)  # more than one reading, and no multiple of it
    content = random.Random(0).randbytes(7_000_000)
    folder = write(tmp_path, "step-1", lambda it: (it / "large").write_bytes(content) and None, {"step": 1})
    assert len(verify(folder).files["large"].crc32) == 3
    for at in (0, 2_999_999, 3_000_000, 5_999_999, 6_999_999):
        (folder / "large").write_bytes(content[:at] + bytes([content[at] ^ 4]) + content[at + 1 :])
        with raises(DamagedError, code="checkpoint.checksum_differs"):
            verify(folder)


def swap(parent, name):
    shutil.copy(parent / "step-1" / name, parent / "step-2" / name)


def replaced(name, by):
    def replace(parent):
        path = parent / "step-2" / name
        content = path.read_bytes()
        path.unlink()
        by(path, content)

    return replace


def linked(path, content):
    (path.parents[1] / "elsewhere").write_bytes(content)
    path.symlink_to(path.parents[1] / "elsewhere")


DIFFERS, MISSING, UNREADABLE = "checkpoint.checksum_differs", "checkpoint.file_missing", "checkpoint.unreadable"
UNEXPECTED, INVALID = "checkpoint.file_unexpected", "checkpoint.manifest_invalid"
CHANGES = {
    "a file of another checkpoint": (TENSORS, DIFFERS, lambda parent: swap(parent, TENSORS)),
    "a missing file": (TREE, MISSING, replaced(TREE, lambda path, content: None)),
    "a missing manifest": (NAME, UNREADABLE, replaced(NAME, lambda path, content: None)),
    "a file too many": ("more", UNEXPECTED, lambda parent: (parent / "step-2" / "more").write_text("")),
    "a folder too many": ("more", UNEXPECTED, lambda parent: (parent / "step-2" / "more").mkdir()),
    "a hidden file too many": (".more", UNEXPECTED, lambda parent: (parent / "step-2" / ".more").write_text("")),
    "a longer file": (
        TENSORS,
        "checkpoint.size_differs",
        lambda parent: os.truncate(parent / "step-2" / TENSORS, 10**6),
    ),
    "a link to the same bytes": (TENSORS, UNREADABLE, replaced(TENSORS, linked)),
    "a manifest that is a link": (NAME, UNREADABLE, replaced(NAME, linked)),
    "a pipe": (TREE, UNREADABLE, replaced(TREE, lambda path, content: os.mkfifo(path))),
    "a manifest that is a pipe": (NAME, UNREADABLE, replaced(NAME, lambda path, content: os.mkfifo(path))),
    "a folder instead": (TREE, UNREADABLE, replaced(TREE, lambda path, content: path.mkdir())),
    "a manifest that is a folder": (NAME, UNREADABLE, replaced(NAME, lambda path, content: path.mkdir())),
}


@pytest.mark.parametrize(("name", "code", "change"), CHANGES.values(), ids=CHANGES)
def test_what_is_not_the_folder_that_was_written_is_refused(parent, name, code, change):
    change(parent)
    error = refusal(parent)
    assert (error.field, error.code) == (str(parent / "step-2" / name), code)


def named(name):
    return lambda said: said["files"].update({name: said["files"].pop(TREE)})


FORGED = {
    "out of the folder": named("../step-1/state.json"),
    "an absolute path": named("/etc/passwd"),
    "a folder's file": named("more/state.json"),
    "a backslash": named("..\\state.json"),
    "the folder": named("."),
    "its parent": named(".."),
    "no name": named(""),
    "a name with an end": named("state.json\0"),
    "itself": named(NAME),
    "no files": lambda said: said.pop("files"),
    "files that are a list": lambda said: said.update(files=[]),
    "a size that is none": lambda said: said["files"][TREE].update(bytes="9"),
    "no step": lambda said: said["about"].pop("step"),
    "a step before the first": lambda said: said["about"].update(step=-1),
    "a step that is none": lambda said: said["about"].update(step=True),
    "an unknown key": lambda said: said.update(more=1),
}


@pytest.mark.parametrize("change", FORGED.values(), ids=FORGED)
def test_a_forged_manifest_leads_nowhere(parent, change):
    forge(parent / "step-2", change)
    error = refusal(parent)
    assert (error.field, error.code) == (str(parent / "step-2" / NAME), INVALID)


OTHER_SCRIPTS = ("²", "٢", "２", "१")
NOT_AS_WRITTEN = ("+2", " 2", "2\n", "2_0", "02", "0", "-1", "2.0", "", "two", "1" * 10, "1" * 5_000, 2, True, None, [])
WORLDS = [*({"ranks": ranks} for ranks in (*OTHER_SCRIPTS, *NOT_AS_WRITTEN)), [], "2", None]


@pytest.mark.parametrize("world", WORLDS, ids=lambda world: ascii(world)[:30])
def test_ranks_are_a_number_as_it_is_written(parent, world):
    """And not what `int` may read as one, or `str.isdigit` take for one."""
    forge(parent / "step-2", lambda said: said["about"].update(world=world))
    error = refusal(parent)
    assert (error.field, error.code) == (str(parent / "step-2" / NAME), INVALID)
    assert "ranks" in error.problem


def test_ranks_that_are_a_number_have_files_each(parent):
    forge(parent / "step-2", lambda said: said["about"].update(world={"ranks": "1"}))
    assert newest_good(parent).contents.num_ranks == 1
    forge(parent / "step-2", lambda said: said["about"].update(world={"ranks": "999999999"}))
    error = refusal(parent)
    assert (error.field, error.code) == (str(parent / "step-2" / f"rank-1-{TENSORS}"), MISSING)
    assert "999999999 ranks" in error.problem


@pytest.mark.parametrize("size", [0, 10**15])
def test_a_size_is_compared_before_anything_is_read(parent, size):
    forge(parent / "step-2", lambda said: said["files"][TREE].update(bytes=size))
    error = refusal(parent)
    assert (error.field, error.code) == (str(parent / "step-2" / TREE), "checkpoint.size_differs")
    assert f"{size} bytes" in error.problem


def test_a_negative_size_is_refused_with_its_manifest(parent):
    forge(parent / "step-2", lambda said: said["files"][TREE].update(bytes=-1))
    error = refusal(parent)
    assert (error.field, error.code) == (str(parent / "step-2" / NAME), INVALID)


@pytest.mark.parametrize(
    ("schema", "got", "age"),
    [
        (1, "1", "older"),
        (SCHEMA + 1, f"{SCHEMA + 1}", "newer"),
        (True, "True", ""),
        (None, "None", ""),
        ("2", "'2'", ""),
    ],
)
def test_another_schema_is_refused_by_name(parent, schema, got, age):
    forge(parent / "step-2", lambda said: said.update(schema=schema, files="of another kind"))
    for read in (verify, lambda folder: newest_good(folder.parent)):
        with raises(FormatError, code="checkpoint.other_schema") as refused:
            read(parent / "step-2")
        assert not isinstance(refused.value, DamagedError)  # what another version wrote is not to be put aside
        assert (refused.value.got, refused.value.expected) == (got, str(SCHEMA))
        assert ("version that wrote it" in refused.value.hint) is bool(age)
        assert age in refused.value.hint


def test_a_checkpoint_of_an_older_schema_is_no_matter_where_a_newer_one_is_whole(parent):
    forge(parent / "step-1", lambda said: said.update(schema=1))
    assert newest_good(parent).contents.step == 2
    assert delete_old_folders(parent, 1) == []  # nor is it deleted: it is not one that this version knows
    assert (parent / "step-1").is_dir()


def test_a_manifest_without_end_is_not_read(parent):
    with (parent / "step-2" / NAME).open("wb") as file:
        file.truncate(2**40)  # takes no room
    assert f"{2**40} bytes" in refusal(parent).problem


@pytest.mark.parametrize("text", [b"", b"{}", b"[]", b"1" * 5_000, b"[" * 100_000, b'{"files":' * 3_000, b"\xff\xfe"])
def test_a_manifest_that_is_none(parent, text):
    (parent / "step-2" / NAME).write_bytes(text)
    assert refusal(parent).field == str(parent / "step-2" / NAME)


class Evil:
    """A pickle that leaves a mark."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self):
        return (Path.touch, (self.marker,))


@pytest.mark.parametrize("name", [*FILES, "latest", LOCK])
@pytest.mark.parametrize("signed", [False, True], ids=["as it is", "with a manifest of its own"])
@pytest.mark.parametrize("zipped", [False, True], ids=["pickle", "torch.save"])
def test_nothing_that_is_read_runs(parent, tmp_path_factory, name, signed, zipped):
    marker = tmp_path_factory.mktemp("evil") / "marker"
    path = parent / "step-2" / name if name in FILES else parent / name
    torch.save(Evil(marker), path) if zipped else path.write_bytes(pickle.dumps(Evil(marker)))
    if signed and name != NAME:
        (parent / "step-2" / NAME).unlink()
        write_manifest(parent / "step-2", {"step": 2})
    for read in (verify, read_state):
        try:
            read(parent / "step-2")
        except FormatError as error:
            assert name in str(error)  # noqa: PT017 - where it is refused, by its name
    assert newest_good(parent).folder is not None
    with locked(parent):
        delete_temporary_files(parent)
        with contextlib.suppress(DamagedError):
            delete_old_folders(parent, 1)
    assert not marker.exists()


def test_the_newest_is_told_by_steps_and_by_nothing_else(parent):
    save(parent, 10)
    for age, step in enumerate([10, 2, 1]):  # a clock that was set back
        os.utime(parent / f"step-{step}", (10**9 + age, 10**9 + age))
        os.utime(parent / f"step-{step}" / NAME, (10**9 + age, 10**9 + age))
    for hint in ("step-1\n", "step-99\n", "../..\n", ""):
        (parent / "latest").write_text(hint)
        assert [each.name for each in found(parent)] == ["step-10", "step-2", "step-1"]
        assert newest_good(parent).contents.step == 10
    (parent / "latest").unlink()
    write(parent, "kept-by-hand", lambda folder: None, {"step": 11})
    (parent / "notes").mkdir()
    (parent / "journal").write_text("")
    (parent / "step-12").symlink_to(parent / "step-1")
    assert [each.name for each in found(parent)][:2] == ["kept-by-hand", "step-10"]


def test_a_folder_of_another_name_counts_where_its_manifest_can_be_believed(parent, tmp_path_factory):
    """Other programs write manifests too, and a copy may have been cut off."""
    mine = tmp_path_factory.mktemp("mine")
    others = {"export": b'{"name": "web"}', "cut": b'{"about": {"st', "void": b""}
    for name, text in others.items():
        for place in (parent, mine):
            (place / name).mkdir()
            (place / name / NAME).write_bytes(text)
    assert newest_good(mine) == (None, None, [])
    good = newest_good(parent)
    assert (good.contents.step, good.refused) == (2, [])
    assert [each.name for each in committed_folders(parent)] == ["step-2", "step-1"]
    shutil.copytree(parent / "step-2", parent / "to-keep")
    assert [each.name for each in committed_folders(parent)] == ["step-2", "to-keep", "step-1"]
    assert delete_old_folders(parent, 1) == [parent / "step-1"]
    shutil.rmtree(parent / "step-2")
    assert loaded(newest_good(parent).folder) == 2


def test_a_run_whose_only_checkpoint_has_another_name_and_is_damaged_does_not_begin_anew(parent):
    shutil.rmtree(parent / "step-1")
    os.rename(parent / "step-2", parent / "best")
    (parent / "best" / NAME).write_bytes(b"{")
    good = newest_good(parent)
    assert good.folder is None
    assert [folder.name for folder, _ in good.refused] == ["best"]


def test_a_folder_of_another_name_and_another_schema_is_refused_by_name(parent):
    os.rename(parent / "step-2", parent / "best")
    forge(parent / "best", lambda said: said.update(schema=SCHEMA + 1))
    with raises(FormatError, code="checkpoint.other_schema"):
        newest_good(parent)


def test_what_the_user_laid_there_is_not_put_aside(parent):
    (parent / "step-7").symlink_to(parent / "step-1")
    shutil.copytree(parent / "step-1", parent / "best")
    before = sorted(os.listdir(parent))
    assert not put_aside(parent / "step-7")
    assert not put_aside(parent / "best")
    assert sorted(os.listdir(parent)) == before
    assert put_aside(parent / "step-2")
    assert [name.partition("-2")[0] for name in {*os.listdir(parent)} - {*before}] == ["step"]


def test_a_link_in_place_of_the_hint_is_not_written_through(parent):
    (parent / "mine").write_text("kept")
    (parent / "latest").unlink()
    for name in ("latest", "latest.partial"):
        (parent / name).symlink_to(parent / "mine")
    save(parent, 3)
    assert (parent / "mine").read_text() == "kept"
    assert (parent / "latest").read_text() == "step-3\n"


def test_a_folder_that_its_file_system_does_not_sync_is_committed_all_the_same(parent, monkeypatch):
    fsync = os.fsync

    def none_of_folders(descriptor):
        if Path(f"/proc/self/fd/{descriptor}").is_dir():
            raise OSError(errno.EINVAL, "Invalid argument")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", none_of_folders)
    assert loaded(save(parent, 3)) == 3


def test_nothing_is_written_into_or_over_what_is_there(parent):
    (parent / "step-3").mkdir()
    (parent / "step-4").write_text("mine")
    (parent / "step-5").symlink_to(parent / "none")
    before = sorted(os.listdir(parent))
    for step in (2, 3, 4, 5):
        with raises(FormatError, code="checkpoint.exists", field=str(parent / f"step-{step}")):
            save(parent, step)
    assert sorted(os.listdir(parent)) == before
    assert loaded(parent / "step-2") == 2
    with raises(FormatError, code="checkpoint.exists"):  # while it was being filled
        write(parent, "step-7", lambda folder: (parent / "step-7").mkdir(), {"step": 7})


@pytest.mark.parametrize("about", [{}, {"step": -1}, {"step": 1.0}], ids=str)
def test_what_it_is_about_is_looked_at_before_it_is_filled(tmp_path, about):
    with raises(ValueGivenError, code="value.invalid"):
        write(tmp_path, "step-1", lambda folder: pytest.fail("it was filled"), about)
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("fill", [lambda f: (f / "more").mkdir(), linked, lambda f: (f / NAME).write_text("")])
def test_what_is_filled_in_is_files(tmp_path, fill):
    parent = tmp_path / "parent"
    parent.mkdir()
    filled = (lambda folder: fill(folder / "a", b"")) if fill is linked else fill
    with raises(FormatError, code="checkpoint.not_a_file"):
        write(parent, "step-1", filled, {"step": 1})
    assert not [name for name in os.listdir(parent) if "step" in name]


@pytest.mark.parametrize("error", [RuntimeError("it"), KeyboardInterrupt(), FormatError("a", got="b", expected="c")])
def test_whatever_ends_a_save_leaves_what_was_there(parent, error):
    def fill(folder):
        (folder / "half").write_text("it")
        raise error

    before = sorted(os.listdir(parent))
    with pytest.raises(type(error)):
        write(parent, "step-3", fill, {"step": 3})
    assert sorted(os.listdir(parent)) == before


CHANGING = ("fsync", "rename", "replace", "mkdir", "unlink", "rmdir")
CALLS = (*CHANGING, "open", "scandir", "preadv")


class Counted:
    """Lets calls of the operating system through, until one."""

    def __init__(self, monkeypatch, names, at: int, happens) -> None:
        self.calls, self._at, self._happens = 0, at, happens
        for name in names:
            monkeypatch.setattr(os, name, self._counting(getattr(os, name)))

    def _counting(self, does):
        def call(*given, **named):
            self.calls += 1
            if self.calls == self._at:
                self._happens()
            return does(*given, **named)

        return call


def full():
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_call_that_fails_leaves_the_folder_with_the_last_one_or_the_new_one(parent):
    said: list[SaveError] = []
    for at in range(1, 1_000):
        before, failures = sorted(os.listdir(parent)), len(said)
        with pytest.MonkeyPatch.context() as patch:
            counted = Counted(patch, CALLS, at, full)
            try:
                save(parent, 3)
            except SaveError as error:
                said.append(error)
        good = newest_good(parent)
        assert not good.refused
        if loaded(good.folder) == 2:
            assert len(said) > failures
            assert sorted(os.listdir(parent)) == before
        else:  # it was committed, be it that the disk may not know of it yet
            assert not any(atomic_directory.TEMPORARY in name for name in os.listdir(parent))
            shutil.rmtree(good.folder)
            (parent / "latest").write_text("step-2")
        if counted.calls < at:
            break
    assert 15 < at < 100, "every call failed once"
    assert len(said) > 12
    assert {error.errno for error in said} == {errno.ENOSPC}
    assert {error.field for error in said} == {str(parent / "step-3")}
    assert all("No space left on device" in str(error) for error in said)


def test_what_is_committed_is_there_though_its_name_cannot_be_brought_to_disk(parent, monkeypatch):
    fsync = os.fsync

    def not_of_the_parent(descriptor):
        if os.readlink(f"/proc/self/fd/{descriptor}") == str(parent):
            raise OSError(errno.EIO, "Input/output error")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", not_of_the_parent)
    with raises(SaveError, code="checkpoint.not_synced"):
        save(parent, 3)
    assert loaded(newest_good(parent).folder) == 3
    assert (parent / "latest").read_text() == "step-2\n"


def test_everything_is_on_disk_before_it_counts(tmp_path, monkeypatch):
    calls: list[tuple[str, str]] = []

    def said(name, does, path_of):
        def call(*given):
            done = does(*given)
            path = Path(path_of(given[0]))
            calls.append((name, "folder" if atomic_directory.TEMPORARY in path.name else path.name))
            return done

        return call

    monkeypatch.setattr(os, "fsync", said("sync", os.fsync, lambda number: os.readlink(f"/proc/self/fd/{number}")))
    monkeypatch.setattr(os, "rename", said("rename", os.rename, lambda path: path))
    save(tmp_path, 1)
    synced = [path for call, path in calls]
    assert calls[-2:] == [("rename", "folder"), ("sync", tmp_path.name)]
    assert synced[:-2] == ["shard.bin", TREE, TENSORS, NAME, "folder"]


def test_killed_at_any_call_of_a_save_or_a_deletion(parent):
    def work(at):
        with pytest.MonkeyPatch.context() as patch:
            Counted(patch, CHANGING, at, lambda: os.kill(os.getpid(), signal.SIGKILL))
            save(parent, 3)
            delete_old_folders(parent, 2)

    half, code = 0, KILLED
    for at in range(1, 1_000):
        code = ended(forked(lambda at=at: work(at)))
        good = newest_good(parent)
        assert not good.refused
        assert loaded(good.folder) in (2, 3)
        half += any(atomic_directory.TEMPORARY in name for name in os.listdir(parent))
        delete_temporary_files(parent)
        assert not any(atomic_directory.TEMPORARY in name for name in os.listdir(parent))
        if code == 0:
            break
        assert code == KILLED
        shutil.rmtree(parent / "step-3", ignore_errors=True)
        if not (parent / "step-1").exists():
            save(parent, 1)
    assert 15 < at < 100
    assert half > 10
    assert [each.name for each in found(parent)] == ["step-3", "step-2"]


def test_killed_at_moments_that_nobody_chose(tmp_path):
    chance = random.Random(5)
    steps, _ = kill_while_saving(tmp_path, lambda: chance.uniform(0, 0.02), kills=6)
    assert steps >= 6


PAGES = 128


@pytest.fixture
def small_disk(tmp_path):
    """Return a file system of half a megabyte."""
    place = tmp_path / "disk"
    place.mkdir()
    asked = ["mount", "-t", "tmpfs", "-o", f"size={PAGES * 4}k", "trimtab-test", str(place)]
    if os.geteuid() != 0 or subprocess.run(asked, capture_output=True, check=False).returncode:
        pytest.skip("needs the right to mount; the same is tested by a limit of files' sizes")
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True)


def test_a_full_disk_costs_one_checkpoint(small_disk):
    save(small_disk, 1)
    others, said = small_disk / "others", []
    for pages in range(PAGES):  # in the end there is room for all of it
        others.write_bytes(b"")
        room = os.statvfs(small_disk).f_bfree
        others.write_bytes(bytes((room - pages) * 4096))
        before = sorted(os.listdir(small_disk))
        try:
            save(small_disk, 2)
        except SaveError as error:
            said.append(str(error))
            assert sorted(os.listdir(small_disk)) == before
            good = newest_good(small_disk)
            assert (loaded(good.folder), good.refused) == (1, [])
        else:
            break
    assert loaded(newest_good(small_disk).folder) == 2
    assert len(said) >= 6, "tensors of four pages, and three small files, did not fit one after another"
    assert all("step-2" in each and "No space left on device" in each for each in said)


def test_a_file_that_may_not_grow_costs_one_checkpoint(parent):
    def work():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        try:
            save(parent, 3, 50_000)
        except SaveError as error:
            os._exit(7 if "File too large" in str(error) else 8)

    before = sorted(os.listdir(parent))
    assert ended(forked(work)) == 7
    assert sorted(os.listdir(parent)) == before
    assert loaded(newest_good(parent).folder) == 2


def test_a_parent_that_cannot_be_written(parent, monkeypatch):
    (parent / "file").write_text("")
    for place, said in ((parent / "none", "No such file"), (parent / "file", "Not a directory")):
        with pytest.raises(SaveError, match=said):
            save(place, 3)
    assert newest_good(parent / "none") == (None, None, [])
    assert found(parent / "none") == []

    def read_only(*_):
        raise PermissionError(errno.EROFS, "Read-only file system")

    with monkeypatch.context() as patch:
        patch.setattr(os, "mkdir", read_only)
        with raises(SaveError, code="checkpoint.not_saved"):
            save(parent, 3)
    assert loaded(newest_good(parent).folder) == 2


def test_a_folder_without_the_right_to_write(parent):
    def work():
        os.setuid(65534) if os.geteuid() == 0 else None
        try:
            save(parent, 3)
        except SaveError as error:
            os._exit(7 if error.errno == errno.EACCES else 8)

    for folder in (parent, *parent.parents[:2]):
        os.chmod(folder, 0o755)
    os.chmod(parent, 0o555)
    try:
        assert ended(forked(work)) == 7
    finally:
        os.chmod(parent, 0o755)


def test_temporaries_of_dead_writers_go_and_of_living_ones_stay(parent):
    out, into = os.pipe()

    def work():
        def fill(folder):
            (folder / "half").write_text("it")
            os.write(into, b".")
            signal.pause()

        write(parent, "step-3", fill, {"step": 3})

    pid = forked(work)
    try:
        assert os.read(out, 1) == b"."
        (living,) = parent.glob("step-3.tmp-*")
        os.utime(living, (0, 0))  # as old as can be
        (parent / "step-9.tmp-0").mkdir()
        assert [each.name for each in delete_temporary_files(parent)] == ["step-9.tmp-0"]
        assert (living / "half").exists()
        assert loaded(newest_good(parent).folder) == 2
    finally:
        os.kill(pid, signal.SIGKILL)
        ended(pid)
        os.close(out)
        os.close(into)
    assert delete_temporary_files(parent) == [living]
    assert not living.exists()
    elsewhere = parent.parent / "mine"
    (parent / "step-1.tmp-link").symlink_to(parent / "step-1")
    assert delete_temporary_files(parent) == []
    assert not elsewhere.exists()
    assert loaded(parent / "step-1") == 1


def test_where_folders_cannot_be_locked_checkpoints_are_written_and_nothing_is_cleaned(parent, monkeypatch):
    def none(*_):
        raise OSError(errno.ENOTSUP, "Operation not supported")

    (parent / "step-9.tmp-0").mkdir()
    monkeypatch.setattr("fcntl.flock", none)
    assert loaded(save(parent, 3)) == 3
    assert delete_temporary_files(parent) == []
    assert (parent / "step-9.tmp-0").exists()


def test_two_good_ones_remain_whatever_fails(parent, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", lambda *_: (_ for _ in ()).throw(OSError(errno.EIO, "Input/output error")))
        for _ in range(3):
            with raises(SaveError, code="checkpoint.not_saved"):
                save(parent, 3)
            assert delete_old_folders(parent, 2) == []
    assert [loaded(folder) for folder in found(parent)] == [2, 1]
    save(parent, 3)
    assert [each.name for each in delete_old_folders(parent, 2)] == ["step-1"]
    assert [loaded(folder) for folder in found(parent)] == [3, 2]


def test_nothing_is_deleted_for_a_newest_that_is_not_whole(parent):
    save(parent, 3)
    (parent / "step-3" / TENSORS).write_bytes(flipped((parent / "step-3" / TENSORS).read_bytes(), random.Random(0)))
    with raises(DamagedError, code="checkpoint.checksum_differs"):
        delete_old_folders(parent, 1)
    assert [each.name for each in found(parent)] == ["step-3", "step-2", "step-1"]
    (parent / "step-3" / NAME).unlink()  # is none that counts
    assert delete_old_folders(parent, 2) == []
    with raises(ValueGivenError, code="value.invalid", field="keep_last"):
        delete_old_folders(parent, 0)


def test_what_cannot_be_deleted_is_told_and_whole(parent, monkeypatch):
    monkeypatch.setattr(
        os, "rename", lambda *_: (_ for _ in ()).throw(PermissionError(errno.EACCES, "Permission denied"))
    )
    with raises(SaveError, code="checkpoint.not_deleted", field=str(parent / "step-1")):
        delete_old_folders(parent, 1)
    assert loaded(parent / "step-1") == 1


def test_no_file_stays_open_and_no_thread_alive(parent):
    before = len(os.listdir("/dev/fd")), threading.active_count()
    for step in range(3, 8):
        save(parent, step)
        delete_old_folders(parent, 2)
        (parent / f"step-{step - 1}" / TREE).write_text("")
        newest_good(parent)
        with pytest.raises(DamagedError):
            verify(parent / f"step-{step - 1}")
    assert (len(os.listdir("/dev/fd")), threading.active_count()) == before


def test_the_manifest_says_what_is_there(parent):
    manifest = verify(parent / "step-2")
    assert manifest.files.keys() == {TREE, TENSORS, "shard.bin"}
    assert manifest == Manifest(manifest.files, {"step": 2})
    assert sum(each.bytes for each in manifest.files.values()) == sum(
        each.stat().st_size for each in (parent / "step-2").iterdir() if each.name != NAME
    )
    assert (parent / "latest").read_text() == "step-2\n"
