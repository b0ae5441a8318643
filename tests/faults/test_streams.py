"""Standard streams that are closed or lack characters, file names that are no UTF-8, and escapes in texts."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import trimtab
from trimtab.core.record import End, Event, Header, RecordWriter, StepRecord, read_record
from trimtab.core.serialization import (
    escape_control_characters,
    from_json,
    quoted,
    read_json,
    to_encodable,
    to_json,
    unquoted,
    write_whole,
)

NAME = os.fsdecode(b"f\xff\xfe \xe9")  # no UTF-8
ESCAPES = "a\x1b[31mred\x1b]0;title\x07 \x9b2J \u202eback\x00"


def record(path: Path, name: str = "it") -> Path:
    with RecordWriter(path, Header(name, 0)) as writer:
        for index in range(3):
            writer.write(StepRecord(index, 4, 4.0, 1.0, 0.1, 0.1))
        writer.write(Event(ESCAPES, 1, {"what": ESCAPES, "times": "1 × 2 → 3"}))
        writer.write(End("closed"))
    return path


def command(arguments: list[str], redirections: str = "", **environment: str) -> subprocess.CompletedProcess:
    """Run the command by a shell, with its streams redirected."""
    line = f"{shlex.join([sys.executable, '-m', 'trimtab.cli', *arguments])} {redirections}"
    env = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    return subprocess.run(["sh", "-c", line], capture_output=True, env=env, timeout=120, check=False)


@pytest.mark.parametrize("redirections", ["<&- >&-", ">&- 2>&-"])
def test_a_closed_stream_does_not_end_a_command(tmp_path, redirections):
    path = record(tmp_path / "r.jsonl")
    before = path.read_bytes()
    found = command(["report", str(path), "--out", str(tmp_path / "out")], redirections)
    assert found.returncode == 0, found.stderr
    assert (tmp_path / "out" / "r.html").read_bytes().startswith(b"<!")
    assert path.read_bytes() == before


@pytest.mark.parametrize(("encoding", "options"), [("ascii", ["--json"]), ("latin-1", [])])
def test_a_stream_that_lacks_characters_does_not_end_a_command(tmp_path, encoding, options):
    path = record(tmp_path / f"{NAME} →.jsonl")
    arguments = ["report", str(path), "--out", str(tmp_path / NAME), *options]
    found = command(arguments, PYTHONIOENCODING=encoding)
    assert found.returncode == 0, found.stderr
    if options:
        assert json.loads(found.stdout)["html"].startswith(str(tmp_path))
    (page,) = (tmp_path / NAME).iterdir()
    assert page.suffix == ".html"


def test_an_error_with_such_a_name_is_explained(tmp_path):
    found = command(["report", str(tmp_path / f"{NAME}\x1b[31m.jsonl")], PYTHONIOENCODING="ascii")
    assert found.returncode == 1
    assert b"Traceback" not in found.stderr
    assert b"\x1b" not in found.stderr


@pytest.mark.parametrize("text", [ESCAPES, "\r", "\x7f", "\x85", "\u2066"])
def test_control_characters_are_shown(text):
    shown = escape_control_characters(text)
    assert shown.isprintable()
    assert escape_control_characters(shown) == shown


def test_text_stays_text():
    assert escape_control_characters("a\tb\nÄ → 漢 😀") == "a\tb\nÄ → 漢 😀"
    assert to_encodable("Ä") == "Ä"


def test_bytes_of_names_are_in_files_and_come_back_of_paths():
    header = from_json(Header, to_json(Header(NAME, detail={NAME: NAME})))
    assert header.name == to_encodable(NAME)
    path = Path("/") / NAME / "ä%20"
    assert quoted(path).isascii()
    assert unquoted(quoted(path)) == path


def test_a_result_and_a_record_in_such_folders(tmp_path):
    folder = tmp_path / NAME
    folder.mkdir()
    write_whole(folder / "plan.json", to_json(trimtab.Plan.fixed(4)))
    assert read_json(trimtab.Plan, folder / "plan.json").batch_size == 4
    assert read_record(record(folder / "r.jsonl", NAME)).header.name == to_encodable(NAME)


def test_a_run_in_such_a_folder_is_kept_and_resumed(tmp_path):
    folder, batches = tmp_path / NAME, [torch.randn(4, 3) for _ in range(4)]

    def train(steps: int) -> int:
        torch.manual_seed(0)
        model = nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        keep = trimtab.Checkpoints(folder, every_steps=1, every_s=None)
        with trimtab.start(model, optimizer, trimtab.Plan.fixed(4), checkpoints=keep) as run:
            before = run.num_windows
            for window in run.windows(batches):
                run.train_step(window, lambda model, batch: model(batch).square().mean())
                if run.num_windows == steps:
                    break
            run.checkpoint() if run.num_windows == steps else None
        return before

    assert train(2) == 0
    assert train(4) >= 1
