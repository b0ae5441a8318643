"""Who handles a signal once a run is closed: what was there before it, whatever was installed since."""

from __future__ import annotations

import os
import signal

import pytest
from saving import ended, forked

from trimtab.checkpoint.signals import Signals

TERM = signal.SIGTERM


def installed() -> Signals:
    signals = Signals()
    signals.install()
    return signals


def chained(said: list[str]) -> None:
    """Install a handler that calls the one before it, as a user's may."""
    before = signal.getsignal(TERM)

    def handle(number, frame):
        said.append("mine")
        if callable(before):
            before(number, frame)

    signal.signal(TERM, handle)


def status_of(work) -> int:
    """Return how a process ended that did this, was sent SIGTERM and went on."""

    def does() -> None:
        Signals._at_work.clear()  # of this process before
        signal.signal(TERM, signal.SIG_DFL)
        work()
        signal.raise_signal(TERM)
        os._exit(3)

    return ended(forked(does))


def test_a_handler_that_outlives_the_run_ends_the_process_as_it_would_without():
    def work():
        first = installed()
        chained([])
        first.restore()

    assert status_of(work) == -TERM


def test_two_runs_that_are_closed_first_in_first_out_leave_what_was_there_before_both():
    def work():
        first, second = installed(), installed()
        first.restore()
        second.restore()
        assert signal.getsignal(TERM) == signal.SIG_DFL

    assert status_of(work) == -TERM


@pytest.fixture
def theirs():
    """Return what a handler of the user's own says that is there before all."""
    said: list[str] = []
    before = signal.signal(TERM, lambda *_: said.append("theirs"))
    yield said
    signal.signal(TERM, before)


def test_what_is_called_late_calls_what_was_there_before(theirs):
    first, said = installed(), []
    chained(said)
    first.restore()
    signal.raise_signal(TERM)
    assert (said, theirs, first.came) == (["mine"], ["theirs"], None)


def test_a_run_that_was_closed_first_ends_no_other():
    """The other saves where its window is over; what it was installed upon would have ended the process at once."""

    def beside():
        first, second = installed(), installed()
        first.restore()
        signal.raise_signal(TERM)
        os._exit(7 if second.came == TERM else 1)

    def upon():
        first = installed()
        chained([])
        first.restore()
        second = installed()
        signal.raise_signal(TERM)
        os._exit(7 if second.came == TERM else 1)

    assert [status_of(beside), status_of(upon)] == [7, 7]


def test_one_that_was_installed_before_it_is_told(theirs):
    first, second = installed(), installed()
    chained([])
    second.restore()
    signal.raise_signal(TERM)
    assert first.came == TERM
    assert theirs == ["theirs"]
    first.restore()
