"""What recomputing takes of a micro-batch: a line in its rows, as whole steps show it."""

from __future__ import annotations

import pytest

from trimtab.calibrate.recompute_seconds import line_through


def test_a_line_goes_through_both_points():
    line = line_through([(16, 0.9), (4, 0.3)])
    assert line.at(16) == pytest.approx(0.9)
    assert line.at(4) == pytest.approx(0.3)
    assert line.at(8) == pytest.approx(0.5)
    assert line.fixed_s == pytest.approx(0.1)


def test_of_one_size_seconds_go_by_rows():
    line = line_through([(16, 0.8)])
    assert line.at(4) == pytest.approx(0.2)
    assert line.at(0) == 0.0


def test_more_rows_never_take_less():
    """Noise, on steps of which a call is all that costs: the mean of the two."""
    line = line_through([(16, 0.02), (4, 0.04)])
    assert line.at(16) == line.at(1) == pytest.approx(0.03)


def test_none_takes_less_than_nothing():
    """Where it grows faster than its rows, as beyond a cache, fewer rows take their share of the larger size's."""
    line = line_through([(16, 1.6), (4, 0.1)])
    assert line.at(0) == 0.0
    assert line.at(16) == pytest.approx(1.6)
    assert line.at(4) == pytest.approx(0.4)
    noise = line_through([(16, -0.01), (4, -0.03)])
    assert noise.at(16) == noise.at(1) == 0.0
    assert line_through([(16, -0.01)]).at(16) == 0.0
