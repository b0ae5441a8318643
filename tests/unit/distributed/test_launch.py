"""How ranks are started: what runs in them is this package and what the user named, and nothing that lies about."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from raising import raises
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher import api

from trimtab.core.errors import RankError
from trimtab.core.serialization import to_json
from trimtab.distributed.launch import LAUNCHER, REPORTS, LaunchedRank, launch, rank_lost, ranks_failed
from trimtab.plans.plan import Plan

ROOT = Path(__file__).parents[3]
TINY_TASK = ROOT / "tests" / "unit" / "experiments" / "tiny_task.py"
PLANTED = "open('ran', 'a').write(__name__)\nraise ImportError('planted')\n"
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


def report_done(ranks: int) -> None:
    """Report as ranks do whose command has finished."""
    for each in range(ranks):
        LaunchedRank({REPORTS: os.environ[REPORTS], "RANK": str(each)}).done()


@pytest.fixture
def rank(monkeypatch, tmp_path):
    """Return what runs a rank's own command in a folder where somebody left files by the names of packages."""
    commands: list[list[str]] = []

    def noting(config, program):
        def ranks(*given: str) -> None:
            commands.append([program, *given])
            report_done(2)

        return ranks

    monkeypatch.setattr(api, "elastic_launch", noting)
    for name in ("typer", "numpy", "torch", "trimtab"):
        (tmp_path / f"{name}.py").write_text(PLANTED)
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    environment.pop("PYTHONSAFEPATH", None)

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        launch(arguments, 2)
        command = commands.pop()
        assert command[0] == sys.executable
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)

    return run


def test_a_rank_runs_nothing_that_lies_in_the_current_folder(rank, tmp_path):
    done = rank("train", "--help")
    assert not (tmp_path / "ran").exists()
    assert (done.returncode, "--ranks" in done.stdout) == (0, True), done.stderr


def test_a_rank_finds_the_task_that_was_named_there(rank, tmp_path):
    shutil.copy(TINY_TASK, tmp_path / "mine.py")
    (tmp_path / "plan.json").write_text(to_json(Plan.fixed(32)))
    done = rank("train", "mine:task", "--plan", "plan.json", "--steps", "2", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["rows"] == 64
    assert not (tmp_path / "ran").exists()


def handlers() -> dict[int, object]:
    return {number: signal.getsignal(number) for number in ENDING}


@pytest.fixture
def ending(monkeypatch):
    """Return what has ranks end so, under a launcher that handles signals itself, as torch's does for good."""
    before = handlers()

    def set_ending(error: BaseException | None) -> None:
        def ranks(*given: str) -> None:
            for number in ENDING:
                signal.signal(number, lambda *sent: None)
            if error is not None:
                raise error
            report_done(2)

        monkeypatch.setattr(api, "elastic_launch", lambda config, program: ranks)

    yield set_ending
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(("number", "end"), [(signal.SIGINT, KeyboardInterrupt()), (signal.SIGTERM, SystemExit(143))])
def test_a_signal_ends_the_command_as_it_does_one_without_ranks(ending, number, end):
    before = handlers()
    ending(SignalException("sent", number))
    with pytest.raises(type(end)) as caught:
        launch((), 2)
    assert caught.value.args == end.args
    assert handlers() == before


def test_ranks_that_end_well_leave_signals_to_what_handled_them(ending):
    before = handlers()
    ending(None)
    launch((), 2)
    assert handlers() == before


@pytest.mark.parametrize("finished", [0, 1])
def test_ranks_that_leave_before_their_command_has_finished_are_named(monkeypatch, finished):
    monkeypatch.setattr(api, "elastic_launch", lambda config, program: lambda *given: report_done(finished))
    with raises(RankError, code="ranks.ended_early") as caught:
        launch((), 2)
    assert caught.value.ranks == ((1,) if finished else (0, 1))
    assert not {LAUNCHER, REPORTS} & set(os.environ)


def as_report(rank: int, error: BaseException) -> None:
    LaunchedRank({REPORTS: os.environ[REPORTS], "RANK": str(rank)}).failed(error)


KILLED, ENDED_BY_LAUNCHER, ABORTED = -signal.SIGKILL, -signal.SIGTERM, -signal.SIGABRT
LOST, TOLD = rank_lost(1, "no heartbeat for 60 s"), ranks_failed({1: "ValueError: bad"})


@pytest.mark.parametrize(
    ("statuses", "reports", "behind"),
    [
        ({0: 1, 1: 1}, {0: TOLD, 1: ValueError("bad")}, 1),
        ({0: 1, 1: ENDED_BY_LAUNCHER}, {0: TOLD}, 1),
        ({0: 1, 1: KILLED}, {0: LOST}, 1),
        ({0: ABORTED, 1: 1}, {1: ValueError("bad")}, 1),
        ({0: 1, 1: 3}, {0: LOST}, 1),
        ({0: 1}, {0: ValueError("bad")}, 0),
        ({0: ENDED_BY_LAUNCHER, 1: ABORTED}, {}, 1),
    ],
)
def test_the_rank_that_failed_by_itself_is_named(monkeypatch, statuses, reports, behind):
    def ranks(*given: str) -> None:
        for rank, error in reports.items():
            as_report(rank, error)
        failures = {rank: ProcessFailure(rank, 1, status, "none") for rank, status in statuses.items()}
        raise ChildFailedError("ranks", failures)

    monkeypatch.setattr(api, "elastic_launch", lambda config, program: ranks)
    with raises(RankError, code="ranks.ended") as caught:
        launch((), 2)
    assert caught.value.ranks == (behind,)
    assert (LOST.code, LOST.ranks, TOLD.code, TOLD.ranks) == ("ranks.silent", (1,), "ranks.ended", (1,))
