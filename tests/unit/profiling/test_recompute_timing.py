"""What recomputing takes of a micro-batch: a line in its rows, as whole steps show it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from trimtab.core.profile import Candidate
from trimtab.profiling import block_profile
from trimtab.profiling.block_profile import line_through, measure_seconds, num_steps
from trimtab.profiling.training_loop import TrainingLoop


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


@pytest.mark.parametrize("splits", [True, False])
def test_noise_makes_nothing_free(monkeypatch, splits):
    """Steps that recompute were as fast as others, by chance: half of a forward is taken for it, a tenth in part."""
    monkeypatch.setattr(block_profile, "_longer", lambda *_: (1.0, [-0.1, -0.2]))
    model = nn.Linear(4, 4)
    subject = TrainingLoop(
        model, torch.optim.SGD(model.parameters(), lr=0.1), lambda m, b: m(b).sum(), torch.randn(16, 4)
    )
    given = {"splits": splits, "forward_s": 0.4}
    step_s, (whole, part) = measure_seconds(subject, Candidate("fp32", "keep", False, 8), [(), ()], **given)
    assert step_s == 1.0
    for rows in (8, 4, 1):
        assert whole.at(rows) == pytest.approx(0.5 * 0.4 * rows / 8)
        assert part.at(rows) == pytest.approx(0.1 * 0.4 * rows / 8)


def test_steps_are_counted_before_they_are_taken():
    """Of long steps three turns of three ways at two sizes; of short ones more of them."""
    assert num_steps(1.0) == 2 * 3 * 3 + 14
    assert num_steps(0.2) == 2 * 3 * 6 + 14
    assert num_steps(0.01) == num_steps(0.0) == 2 * 3 * 11 + 14
