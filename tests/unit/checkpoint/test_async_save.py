"""Saves beside the training: one at a time, none lost, and no failure either."""

from __future__ import annotations

import threading

import pytest

from trimtab.checkpoint.manager import AsyncSaver


def fail():
    raise OSError(28, "No space left on device")


@pytest.fixture
def background():
    made = AsyncSaver()
    yield made
    made.end()


def test_one_is_under_way_and_the_next_waits_for_it(background):
    may_end, seen, running = threading.Event(), [], []

    def write(name):
        running.append(name)
        assert may_end.wait(10)
        seen.append((name, [*running]))
        running.remove(name)

    background.begin(lambda: write("first"))
    assert not seen
    threading.Timer(0.02, may_end.set).start()
    background.begin(lambda: write("second"))
    assert seen == [("first", ["first"])]
    background.wait()
    assert seen == [("first", ["first"]), ("second", ["second"])]


@pytest.mark.parametrize("ask", [AsyncSaver.wait, lambda background: background.begin(lambda: None)])
def test_a_failure_is_seen_at_the_next_call_once(background, ask):
    background.begin(fail)
    with pytest.raises(OSError, match="No space left"):
        ask(background)
    background.begin(lambda: None)
    background.wait()


def test_a_failure_outlives_the_thread(background):
    background.begin(fail)
    background.end()
    with pytest.raises(OSError, match="No space left"):
        background.wait()


def test_an_interrupted_wait_does_not_forget_the_save(background, monkeypatch):
    may_end = threading.Event()
    background.begin(lambda: may_end.wait(10) and fail())

    def interrupted(timeout=None):
        raise KeyboardInterrupt

    monkeypatch.setattr(background._under_way, "result", interrupted)
    with pytest.raises(KeyboardInterrupt):
        background.wait()
    monkeypatch.undo()
    may_end.set()
    with pytest.raises(OSError, match="No space left"):
        background.wait()


def test_a_failure_that_nobody_asks_for_is_told():
    background = AsyncSaver()
    background.begin(fail)
    background.end()
    with pytest.warns(RuntimeWarning, match="No space left"):
        background.__del__()
    background._under_way = None


def test_threads_do_not_grow():
    before = threading.active_count()
    for _ in range(20):
        background = AsyncSaver()
        background.begin(lambda: None)
        background.begin(lambda: None)
        assert threading.active_count() <= before + 1
        background.wait()
        background.end()
    assert threading.active_count() == before
