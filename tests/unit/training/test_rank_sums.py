"""Figures of a window that ranks combine: weights of the loss, gradient noise, and the rank that others wait for."""

from __future__ import annotations

import pytest
import torch

from trimtab.adaptive_batch.gradient_noise_scale import window_noise
from trimtab.training.noise_monitor import noise_of_sums
from trimtab.training.rank_sync import AgreedWindow, RankWeights, StragglerDetector


class Two:
    """Two ranks, as one of them sees them."""

    num_ranks = 2

    def __init__(self, others: float, agreed: AgreedWindow) -> None:
        self._others, self._agreed = others, agreed

    def most(self, value: float) -> float:
        return max(value, self._others)

    def agreed(self) -> AgreedWindow:
        return self._agreed


def weigh(rows: int, others: float, agreed: AgreedWindow, count: float | torch.Tensor) -> RankWeights:
    weights = RankWeights(Two(others, agreed), 16)
    weights.open(rows, 2)
    weights.weigh(torch.tensor(1.0, requires_grad=True), count, rows)
    return weights


def test_ranks_of_other_rows_than_each_other_have_one_reference():
    agreed = AgreedWindow(24, 3.0, 1)
    many, few = weigh(20, 4.0, agreed, 2.0), weigh(4, 20.0, agreed, 1.0)
    assert many.divisor == few.divisor
    assert many.correction == few.correction == 2 * many.divisor / 3.0


@pytest.mark.parametrize("terms", [0.0, torch.tensor(0.0, dtype=torch.float64)])
def test_a_window_without_terms_leaves_gradients_of_zero_as_they_are(terms):
    correction = weigh(4, 4.0, AgreedWindow(8, terms, 1), 0.0).correction
    factor = correction.float() if isinstance(correction, torch.Tensor) else correction
    assert torch.equal(torch.zeros(3) * factor, torch.zeros(3))


@pytest.mark.parametrize("kind", [float, torch.tensor])
def test_a_ranks_share_makes_its_mean_a_part_of_all_terms(kind):
    weights = weigh(20, 4.0, AgreedWindow(24, kind(8.0), 1), kind(2.0))
    assert float(weights.share) == 2 * 2.0 / 8.0


def test_a_rank_has_its_fraction_of_terms_or_samples():
    weights = RankWeights(Two(4.0, AgreedWindow(20, 20, 1)), 16)
    weights.open(4, 1)
    weights.weigh(torch.tensor(1.0, requires_grad=True), None, 4)
    assert weights.share == 2 * 4 / 20
    assert weigh(4, 4.0, AgreedWindow(8, 0.0, 1), 0.0).share == 0.0


@pytest.mark.parametrize(("first", "rest"), [(0.0, 1.0), (4096.0, 1.0)])
def test_the_reference_of_a_rank_that_goes_on_is_that_of_one_that_was_not_cut_off(first, rest):
    before = RankWeights(Two(64.0, AgreedWindow(32, first, 1)), 16)
    before.open(16, 2)
    before.weigh(torch.tensor(1.0, requires_grad=True), first, 16)
    before.close()
    after = RankWeights(Two(2.0**20, AgreedWindow(32, rest, 1)), 16)
    after.load_state_dict(before.state_dict())
    for weights in (before, after):
        weights.open(16, 2)
        weights.weigh(torch.tensor(1.0, requires_grad=True), rest, 16)
    assert after.divisor == before.divisor
    assert after.state_dict() == before.state_dict()


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
    assert vars(noise_of_sums(each)) == pytest.approx(vars(expected))


def test_a_rank_without_terms_adds_nothing_and_ranks_without_any_say_nothing():
    one, none = figures_of(gradients()[0], SIZES[0], 1.0), [0.0, 0.0, 0.0, 0.0, 0.0, 1.0]
    assert noise_of_sums([one, none]) == noise_of_sums([one])
    assert noise_of_sums([none, none]) is None


def told(windows) -> list:
    straggler = StragglerDetector()
    return [late for seconds in windows if (late := straggler.add(seconds)) is not None]


def test_a_rank_that_is_last_in_twenty_windows_is_named_once():
    (late,) = told([(0.010, 0.031, 0.012)] * 100)
    assert late == (1, 0.031, 0.011)


@pytest.mark.parametrize(
    "windows",
    [
        [(0.010, 0.031, 0.012)] * 19,  # too few windows
        [(0.010, 0.031), *[(0.010, 0.011)] * 3] * 50,  # now and then
        [(0.03, 0.01), (0.01, 0.03)] * 50,  # two in turns
        [(0.0001, 0.0005)] * 100,  # a little of a short window
    ],
)
def test_now_and_then_is_not_late(windows):
    assert not told(windows)


def test_another_rank_may_be_named_later():
    found = told([(0.03, 0.01)] * 40 + [(0.01, 0.03)] * 40)
    assert [rank for rank, _, _ in found] == [0, 1]
