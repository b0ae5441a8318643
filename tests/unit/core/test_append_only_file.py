"""A file that is added to: all of what is flushed or nothing, whatever the disk says; and one written as a whole."""

from __future__ import annotations

import errno
import os
import tracemalloc

import pytest
from raising import raises

from trimtab.core.errors import FormatError, SaveError
from trimtab.core.files import AppendOnlyFile
from trimtab.core.record import Header, RecordWriter
from trimtab.core.serialization import write_whole


class Disk:
    """Takes so many bytes more."""

    def __init__(self, monkeypatch, room: int) -> None:
        self.room, self._write = room, os.write
        monkeypatch.setattr(os, "write", self.write)

    def write(self, descriptor, data):
        if not self.room:
            raise OSError(errno.ENOSPC, "No space left on device")
        taken = self._write(descriptor, data[: self.room])
        self.room -= taken
        return taken


@pytest.mark.parametrize("room", range(12))
def test_all_of_it_or_nothing_and_then_the_rest(tmp_path, monkeypatch, room):
    path = tmp_path / "it"
    file = AppendOnlyFile(path)
    file.write(b"begun\n")
    file.flush()
    disk = Disk(monkeypatch, room)
    for line in (b"one\n", b"two two\n"):
        file.write(line)
    with raises(SaveError, code="checkpoint.not_saved") as refused:
        file.flush()
    assert refused.value.errno == errno.ENOSPC
    assert path.read_bytes() == b"begun\n"
    disk.room = 100
    file.write(b"three\n")
    file.close()
    file.close()
    with pytest.raises(ValueError, match="closed"):
        file.write(b"four\n")
    assert path.read_bytes() == b"begun\none\ntwo two\nthree\n"


def test_half_a_line_that_could_not_be_taken_off_is_with_the_next(tmp_path, monkeypatch):
    file = AppendOnlyFile(tmp_path / "it")
    disk, cut = Disk(monkeypatch, 2), os.ftruncate
    monkeypatch.setattr(os, "ftruncate", lambda *_: disk.write(0, b""))
    file.write(b"one\n")
    with pytest.raises(SaveError):
        file.flush()
    assert (tmp_path / "it").read_bytes() == b"on"
    monkeypatch.setattr(os, "ftruncate", cut)
    disk.room = 100
    file.close()
    assert (tmp_path / "it").read_bytes() == b"one\n"


def test_what_nobody_closed_is_written_by_who_made_it_alone(tmp_path):
    file = AppendOnlyFile(tmp_path / "it")
    file.write(b"one\n")
    child = os.fork()
    if child == 0:
        file.close()
        os._exit(0)
    os.waitpid(child, 0)
    assert (tmp_path / "it").read_bytes() == b""
    del file
    assert (tmp_path / "it").read_bytes() == b"one\n"


def test_a_link_is_followed_where_that_is_wanted(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "it")
    with pytest.raises(FileExistsError):
        AppendOnlyFile(tmp_path / "link", is_new=True)
    AppendOnlyFile(tmp_path / "link").close()
    assert (tmp_path / "it").exists()


def test_a_whole_file_is_written_through_no_link_and_leaves_nothing_where_it_fails(tmp_path, monkeypatch):
    (tmp_path / "mine").write_text("kept")
    for name in ("it", "it.partial"):
        (tmp_path / name).symlink_to(tmp_path / "mine")
    write_whole(tmp_path / "it", "new")
    assert (tmp_path / "mine").read_text() == "kept"
    assert (tmp_path / "it").read_text() == "new"
    before = sorted(os.listdir(tmp_path))
    Disk(monkeypatch, 2)
    with raises(OSError, code="checkpoint.not_saved"):
        write_whole(tmp_path / "it", "newer")
    assert (sorted(os.listdir(tmp_path)), (tmp_path / "it").read_text()) == (before, "new")


def test_a_whole_file_is_on_disk_before_it_has_its_name(tmp_path, monkeypatch):
    done, sync, replace = [], os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda descriptor: done.append("sync") or sync(descriptor))
    monkeypatch.setattr(os, "replace", lambda *paths: done.append("replace") or replace(*paths))
    write_whole(tmp_path / "it", "new")
    assert done == ["sync", "replace"]


def test_what_is_kept_of_a_long_record_is_not_read(tmp_path):
    path = tmp_path / "r.jsonl"
    RecordWriter(path, Header("it")).close()
    with path.open("r+b") as file:
        file.truncate(2**26 - 1)  # takes no room
        file.seek(2**26 - 1)
        file.write(b"\nmore")
    with RecordWriter(path, Header("it"), continues=True) as record:
        tracemalloc.start()
        record.keep(2**26)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 2**20
        assert path.stat().st_size == 2**26
        with raises(FormatError, code="record.truncated"):
            record.keep(1000)


@pytest.mark.parametrize(("number", "is_taken"), [(errno.EINVAL, True), (errno.EIO, False)])
def test_a_new_records_name_is_on_disk_or_the_error_names_it(tmp_path, monkeypatch, number, is_taken):
    sync, of_folders = os.fsync, []

    def fails_of_folders(descriptor):
        if os.path.isdir(f"/proc/self/fd/{descriptor}"):
            of_folders.append(descriptor)
            raise OSError(number, os.strerror(number))
        sync(descriptor)

    with RecordWriter(tmp_path / "r.jsonl", Header("it")) as record, monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fails_of_folders)
        if is_taken:  # a file system that syncs no folders, and says so
            assert record.end() == record.end() == (tmp_path / "r.jsonl").stat().st_size
            assert len(of_folders) == 1
        else:
            for _ in range(2):  # it is tried again
                with raises(SaveError, code="checkpoint.not_saved"):
                    record.end()
