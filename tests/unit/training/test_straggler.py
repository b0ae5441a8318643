"""Which rank the others wait for."""

from __future__ import annotations

from trimtab.training.rank_sync import StragglerDetector


def told(windows) -> list:
    straggler = StragglerDetector()
    return [late for seconds in windows if (late := straggler.add(seconds)) is not None]


def test_a_rank_that_is_last_in_twenty_windows_is_named_once():
    (late,) = told([(0.010, 0.031, 0.012)] * 100)
    assert (late.rank, late.seconds, late.others_s) == (1, 0.031, 0.011)
    assert not told([(0.010, 0.031, 0.012)] * 19)


def test_now_and_then_is_not_late():
    assert not told([(0.010, 0.031), *[(0.010, 0.011)] * 3] * 50)


def test_two_in_turns_are_not():
    assert not told([(0.03, 0.01), (0.01, 0.03)] * 50)


def test_a_little_of_a_short_window_is_not():
    assert not told([(0.0001, 0.0005)] * 100)


def test_another_rank_may_be_named_later():
    found = told([(0.03, 0.01)] * 40 + [(0.01, 0.03)] * 40)
    assert [late.rank for late in found] == [0, 1]
