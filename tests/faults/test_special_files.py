"""Files that a user names: pipes, devices, folders and files without end are refused, and nothing waits for them."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path

import pytest

from benchmarks.paper.sources import sha256_file
from trimtab.carbon.intensity import of_csv
from trimtab.carbon.services import CsvIntensity
from trimtab.checkpoint.atomic_directory import NAME, manifest_of
from trimtab.checkpoint.batch_size_log import BatchSizeLog
from trimtab.core import files
from trimtab.core.errors import FormatError, TrimtabError
from trimtab.core.record import Header, RecordWriter, read_record, require_own
from trimtab.core.serialization import read_json
from trimtab.experiments.results import SETTINGS, read_result, read_settings
from trimtab.plans.plan import Plan
from trimtab.plans.profile import Profile
from trimtab.tasks import load_task

READERS = {
    "plan": lambda path: read_json(Plan, path),
    "profile": lambda path: read_json(Profile, path),
    "record": read_record,
    "result": read_result,
    "record among results": lambda path: read_result(path.rename(path.with_suffix(".jsonl"))),
    "carbon": lambda path: CsvIntensity(path, "average").forecast(0.0),
    "a data set's file": sha256_file,
}
IN_FOLDERS = {"settings": (SETTINGS, read_settings), "manifest": (NAME, manifest_of)}


@pytest.fixture(autouse=True)
def in_time():
    """End a test that waits for what never comes."""

    def late(*_):
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(10)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def bound(path: Path) -> None:
    os.chdir(path.parent)  # the name of a socket is short
    with socket.socket(socket.AF_UNIX) as each:
        each.bind(path.name)


SPECIAL = {
    "pipe": os.mkfifo,
    "folder": Path.mkdir,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "pipe behind a link": lambda path: (os.mkfifo(path.with_name("it")), path.symlink_to("it")),
    "socket": bound,
}


@pytest.mark.parametrize("kind", SPECIAL)
@pytest.mark.parametrize("reader", READERS)
def test_what_is_no_regular_file_is_refused(reader, kind, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "it.json"
    SPECIAL[kind](path)
    with pytest.raises(TrimtabError) as raised:
        READERS[reader](path)
    # A socket cannot be opened, and a folder of results is one.
    if kind != "socket" and not (kind == "folder" and "result" in reader):
        assert raised.value.code == "file.not_regular"


@pytest.mark.parametrize("kind", ["pipe", "device"])
@pytest.mark.parametrize("name", IN_FOLDERS)
def test_files_in_folders_too(name, kind, tmp_path):
    file, read = IN_FOLDERS[name]
    SPECIAL[kind](tmp_path / file)
    with pytest.raises(TrimtabError):
        read(tmp_path)


def test_others_that_look_at_a_pipe_do_not_wait_for_it(tmp_path):
    path = tmp_path / "it.py"
    os.mkfifo(path)
    with pytest.raises(TrimtabError):
        load_task(f"{path}:task")
    with pytest.raises(FormatError):
        BatchSizeLog(path, "a plan", writes=False)
    require_own(path, Header("it"))


@pytest.mark.parametrize("reader", READERS)
def test_a_file_that_is_larger_than_its_kind_is_not_read(reader, tmp_path):
    path = tmp_path / "it.json"
    with path.open("wb") as file:
        file.truncate(2**40)  # takes no room on disk
    with pytest.raises(FormatError) as raised:
        READERS[reader](path)
    assert raised.value.code == "file.too_large"


def test_a_file_whose_size_is_not_known_is_read_up_to_the_limit(tmp_path):
    grows = Path("/proc/self/smaps")  # regular, of size 0
    if not grows.is_file() or not grows.read_bytes():
        pytest.skip("needs Linux")
    with pytest.raises(FormatError) as raised:
        files.read_bytes(grows, "it", limit=10)
    assert raised.value.code == "file.too_large"


@pytest.mark.parametrize("path", ["none", "a\0b"])
def test_what_cannot_be_opened(path, tmp_path):
    with pytest.raises(FormatError) as raised:
        read_json(Plan, str(tmp_path / path))
    assert raised.value.code == "file.unreadable"


def test_text_that_is_none(tmp_path):
    (tmp_path / "it").write_bytes(b"\xff\xfe")
    with pytest.raises(FormatError) as raised:
        files.read_text(tmp_path / "it", "it")
    assert raised.value.code == "file.not_text"


def test_a_link_to_a_file_and_a_record_of_lines_are_read(tmp_path):
    with RecordWriter(tmp_path / "r.jsonl", Header("it")):
        pass
    (tmp_path / "link").symlink_to("r.jsonl")
    assert read_record(tmp_path / "link").header == Header("it")


# Carbon intensity in CSV.

HEAD = "time,g_per_kwh\n2026-03-01T00:00Z,100\n2026-03-01T01:00Z,"
CELLS = {
    "a thousands comma": ("1,234", "csv.extra_cell"),
    "a quoted one": ('"1,234"', "csv.number"),
    "two of them": ("1,234,567", "csv.extra_cell"),
    "an underscore": ("1_234", "csv.number"),
    "a unit": ("120 g", "csv.number"),
    "nothing": ("", "csv.number"),
    "nan": ("nan", "csv.number"),
    "infinity": ("1e400", "csv.number"),
    "below zero": ("-1", "csv.number"),
    "a quote that does not end": ('"1', "csv.invalid"),
    "a cell without end": ("1" * 200_000, "csv.invalid"),
}


@pytest.mark.parametrize("cell", CELLS)
def test_a_cell_that_is_no_number_is_refused(cell):
    text, code = CELLS[cell]
    with pytest.raises(FormatError) as raised:
        of_csv(HEAD + text + "\n", "average")
    assert raised.value.code == code
    if code != "csv.invalid":
        assert raised.value.field == "carbon:3"
