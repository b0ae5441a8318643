"""What several ranks say of one window's noise, together."""

from __future__ import annotations

import pytest
import torch

from trimtab.adaptive_batch.gradient_noise_scale import window_noise
from trimtab.training.noise_monitor import NoiseSums

# rows of each micro-batch, of each rank
SIZES = ((3, 3), (5, 1))


def gradients():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(len(rows), 4, generator=generator, dtype=torch.float64) for rows in SIZES]


def figures_of(each, rows, norm2):
    """Return a rank's figures, of a mean over rows."""
    m = torch.tensor(rows, dtype=torch.float64)
    return [float((each.square().sum(1) * m).sum()), float(m.sum()), float(len(rows)), float(m.sum()), len(rows), norm2]


def test_terms_weigh_alike_on_whatever_rank_they_are():
    """Micro-batch j of rank r weighs `m_j / sum of all m`."""
    found, rows = gradients(), [m for sizes in SIZES for m in sizes]
    m, g = torch.tensor(rows, dtype=torch.float64), torch.cat(found)
    w = m / m.sum()
    norm2 = float((w[:, None] * g).sum(0).square().sum())
    spread, squares = float((w * (1 - w) / m).sum()), float((w**2 / m).sum())
    expected = window_noise(float((w * g.square().sum(1)).sum()), norm2, spread, squares, len(g))
    each = [figures_of(one, sizes, norm2) for one, sizes in zip(found, SIZES, strict=True)]
    assert vars(NoiseSums.of_ranks(each).noise()) == pytest.approx(vars(expected))


def test_a_rank_without_terms_adds_nothing_and_ranks_without_any_say_nothing():
    one, none = figures_of(gradients()[0], SIZES[0], 1.0), [0.0, 0.0, 0.0, 0.0, 0.0, 1.0]
    assert NoiseSums.of_ranks([one, none]).noise() == NoiseSums.of_ranks([one]).noise()
    assert NoiseSums.of_ranks([none, none]).noise() is None
