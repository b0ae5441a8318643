"""What several ranks say of one window's noise, together."""

from __future__ import annotations

import pytest
import torch

from trimtab.decide.noise import window_noise
from trimtab.runtime.noise_monitor import NoiseSums

# rows of each micro-batch, of each rank
SIZES = ((3, 3), (5, 1))


def gradients():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(len(rows), 4, generator=generator, dtype=torch.float64) for rows in SIZES]


def figures_of(each, rows, norm2):
    """Return a rank's figures, of a mean over rows."""
    m = torch.tensor(rows, dtype=torch.float64)
    return [float((each.square().sum(1) * m).sum()), float(m.sum()), float(len(rows)), float(m.sum()), len(rows), norm2]


def test_ranks_weigh_alike_whatever_rows_they_have():
    """A reduction takes the mean over ranks, not over rows: micro-batch j of rank r weighs `m_j / (R m_r)`."""
    found, weights, rows = gradients(), [], []
    for sizes in SIZES:
        weights += [m / (len(SIZES) * sum(sizes)) for m in sizes]
        rows += sizes
    w, m, g = torch.tensor(weights, dtype=torch.float64), torch.tensor(rows, dtype=torch.float64), torch.cat(found)
    norm2 = float((w[:, None] * g).sum(0).square().sum())
    spread, squares = float((w * (1 - w) / m).sum()), float((w**2 / m).sum())
    expected = window_noise(float((w * g.square().sum(1)).sum()), norm2, spread, squares, len(g))
    each = [figures_of(one, sizes, norm2) for one, sizes in zip(found, SIZES, strict=True)]
    assert vars(NoiseSums.of_ranks(each).noise()) == pytest.approx(vars(expected))


def test_a_rank_without_terms_makes_a_window_say_nothing():
    """Its gradient is in the mean, and is none of any row."""
    one = figures_of(gradients()[0], SIZES[0], 1.0)
    assert NoiseSums.of_ranks([one, [0.0, 0.0, 0.0, 0.0, 0.0, 1.0]]).noise() is None
    assert NoiseSums.of_ranks([one]).noise() is not None
