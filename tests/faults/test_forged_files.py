"""Files that somebody forged, in place of each that is read: none runs, hangs, or ends in an error of another kind."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path

import pytest

from trimtab.checkpoint.journal import Journal
from trimtab.checkpoint.lock import Holder
from trimtab.checkpoint.manifest import NAME, manifest_of
from trimtab.checkpoint.state_files import TREE, read_state
from trimtab.core.codec import read_json
from trimtab.core.errors import UsageError
from trimtab.core.plan import Plan
from trimtab.core.profile import Profile
from trimtab.core.record import read_record
from trimtab.experiments.evaluation.files import read_runs
from trimtab.experiments.report import read_report
from trimtab.experiments.settings_file import NAME as SETTINGS
from trimtab.experiments.settings_file import read_settings


def in_folder(name, read):
    """Return what reads a file by the folder that it is in."""

    def of(path: Path):
        (path.parent / "folder").mkdir(exist_ok=True)
        path.rename(path.parent / "folder" / name)
        return read(path.parent / "folder")

    return of


READERS = {
    "plan": lambda path: read_json(Plan, path),
    "profile": lambda path: read_json(Profile, path),
    "record": read_record,
    "report": read_report,
    "result": lambda path: read_runs([path]),
    "settings of a comparison": in_folder(SETTINGS, read_settings),
    "decisions": lambda path: Journal(path, "a plan", writes=False).follow(path),
    "manifest": in_folder(NAME, manifest_of),
    "state": in_folder(TREE, read_state),
}


class Evil:
    """A pickle that leaves a mark."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self):
        return (Path.touch, (self.marker,))


def deep(levels: int, mapping: bool = False) -> bytes:
    opens, closes = (b'{"a":', b"}") if mapping else (b"[", b"]")
    return opens * levels + b"1" + closes * levels


LIMIT = sys.getrecursionlimit()
FORGED = {
    "nothing": b"",
    "levels without end": b"[" * 100_000,
    "objects without end": b'{"a":' * 100_000,
    "a number without end": b"1" * 5_000,
    "no text": b"\xff\xfe\x00",
    "a list": b"[1]",
    "null": b"null",
    **{f"{levels} levels": deep(levels) for levels in range(LIMIT - 120, LIMIT, 4)},
    **{f"{levels} objects": deep(levels, True) for levels in range(LIMIT - 120, LIMIT, 12)},
}


@pytest.mark.parametrize("kind", READERS)
def test_each_is_refused_by_a_typed_error(kind, tmp_path):
    for number, (name, content) in enumerate(FORGED.items()):
        place = tmp_path / str(number)
        place.mkdir()
        for ending in (b"", b"\n" * 2):
            path = place / f"it{len(ending)}.jsonl" if kind == "record" else place / f"it{len(ending)}.json"
            path.write_bytes(content + ending)
            try:
                READERS[kind](path)
            except UsageError:
                continue
            except Exception as error:
                pytest.fail(f"{name}: {type(error).__name__}: {error}")
            pytest.fail(f"{name} was read")


@pytest.mark.parametrize("kind", READERS)
def test_no_pickle_runs(kind, tmp_path):
    marker = tmp_path / "marker"
    path = tmp_path / ("it.jsonl" if kind == "record" else "it.json")
    path.write_bytes(pickle.dumps(Evil(marker)) + b"\n")
    with pytest.raises(UsageError):
        READERS[kind](path)
    assert not marker.exists()


def test_a_lock_says_nobody():
    assert [Holder.said(content) for content in FORGED.values()] == [None] * len(FORGED)
