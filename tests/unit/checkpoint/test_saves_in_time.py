"""Saves beside the training: one at a time, none lost; and when several ranks save by seconds."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

from trimtab.checkpoint import manager
from trimtab.checkpoint.config import Checkpoints
from trimtab.checkpoint.manager import AsyncSaver, SaveInterval


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


def kept(monkeypatch, window_s, windows, *, every_s=600.0):
    """Return what two ranks do whose windows take so long: (window, seconds since the last save), and what was asked.

    Args:
        window_s: takes a window's number.
    """
    now, said, asked = [0.0], {}, []
    monkeypatch.setattr(manager, "time", SimpleNamespace(monotonic=lambda: now[0]))

    def first(make, about):
        said[about] = make()
        asked.append(about)
        return said[about]

    ranks = [SimpleNamespace(num=2, first=first), SimpleNamespace(num=2, first=lambda make, about: said.pop(about))]
    both = [SaveInterval(Checkpoints("unused", every_s=every_s), each) for each in ranks]
    saves, last_s = [], 0.0
    for window in range(1, windows + 1):
        now[0] += window_s(window)
        due = [each.is_due(window) for each in both]
        assert due == [each.is_due(window) for each in both]
        assert due[0] == due[1]
        assert not said, "a rank does not ask what the other does"
        if due[0]:
            saves.append((window, now[0] - last_s))
            last_s = now[0]
            for each in both:
                each.begun(window)
    return saves, asked


@pytest.mark.parametrize("long_s", [600.0, 900.0])
def test_windows_that_take_as_long_are_each_saved(monkeypatch, long_s):
    saves, _ = kept(monkeypatch, lambda window: long_s, 4)
    assert saves == [(window, long_s) for window in (1, 2, 3, 4)]


def test_even_windows_are_saved_at_the_first_end_after_the_seconds_and_the_clock_is_looked_at_rarely(monkeypatch):
    saves, asked = kept(monkeypatch, lambda window: 0.5, 3700)
    assert saves == [(1200, 600.0), (2400, 600.0), (3600, 600.0)]
    assert len(asked) < 3 * 24


@pytest.mark.parametrize("after", [3, 6, 40, 1000])
@pytest.mark.parametrize("slower", [4, 20])
def test_windows_that_get_slower_stretch_the_time_to_the_next_save_within_bounds(monkeypatch, after, slower):
    saves, _ = kept(monkeypatch, lambda window: 0.5 * (slower if window > after else 1), after + 1500)
    (_, first_s), (_, second_s) = saves[:2]
    assert 600 <= first_s <= 600 * (1 + slower / 8) + 0.5 * slower
    assert 600 <= second_s <= 600 + 0.5 * slower  # by the pace that is theirs now


def test_windows_of_any_length_are_saved_by_both_ranks_alike(monkeypatch):
    saves, _ = kept(monkeypatch, lambda window: (window * 7919 % 97) / 10, 3000, every_s=60.0)
    assert len(saves) > 100
    assert all(60 <= seconds < 60 + 2 * 60 for _, seconds in saves)
