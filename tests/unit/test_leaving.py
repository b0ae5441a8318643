"""How the command ends: as the interpreter has it, and on one of several ranks without the interpreter's end."""

from __future__ import annotations

import io
import os
import sys

import pytest

from trimtab import cli
from trimtab.cli.main import exit_rank
from trimtab.distributed import process_group


class Left(BaseException):
    """What a test has for a process that is gone."""


class Stream(io.StringIO):
    flushed = False

    def flush(self) -> None:
        self.flushed = True


@pytest.fixture
def left(monkeypatch):
    """Return the statuses that the process was ended with."""
    found = []

    def end(code: int) -> None:
        found.append(code)
        raise Left

    monkeypatch.setattr(os, "_exit", end)
    return found


def run(monkeypatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["trimtab", *arguments])
    cli.main()


@pytest.mark.parametrize(
    ("arguments", "code"), [(("--help",), 0), (("plan", "nonsense"), 1), (("train",), 2), (("fly",), 2)]
)
def test_a_rank_ends_with_the_same_status_and_words_as_another_process(monkeypatch, capsys, left, arguments, code):
    with pytest.raises(SystemExit) as usual:
        run(monkeypatch, *arguments)
    printed = capsys.readouterr()
    assert (left, usual.value.code or 0) == ([], code)
    monkeypatch.setattr(process_group, "_has_joined", True)
    with pytest.raises(Left):
        run(monkeypatch, *arguments)
    assert left == [code]
    assert capsys.readouterr() == printed


def test_a_traceback_that_was_asked_for_is_printed_by_a_rank_too(monkeypatch, capsys, left):
    monkeypatch.setenv("TRIMTAB_TRACEBACK", "1")
    monkeypatch.setattr(process_group, "_has_joined", True)
    with pytest.raises(Left):
        run(monkeypatch, "plan", "nonsense")
    assert left == [1]
    assert "Traceback" in (said := capsys.readouterr().err)
    assert "nonsense" in said


@pytest.mark.parametrize(
    ("reason", "code"), [(SystemExit(), 0), (SystemExit(130), 130), (SystemExit("no"), 1), (ValueError("odd"), 1)]
)
def test_what_was_printed_is_flushed_and_the_status_is_the_interpreters(monkeypatch, left, reason, code):
    out, err = Stream(), Stream()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    with pytest.raises(Left):
        exit_rank(reason)
    assert left == [code]
    assert out.flushed
    assert err.flushed
    assert err.getvalue().endswith(f"{reason}\n" if code == 1 else "")
    assert bool(err.getvalue()) == (code == 1)


def test_what_nobody_reads_is_a_status_of_its_own(monkeypatch, left):
    out = Stream()
    out.close()
    out.flush = lambda: out.write("")
    monkeypatch.setattr(sys, "stdout", out)
    with pytest.raises(Left):
        exit_rank(SystemExit(0))
    assert left == [120]
