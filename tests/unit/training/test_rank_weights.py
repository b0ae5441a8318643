"""Weights of one of several ranks: one reference for all of them, and numbers where a window has no terms."""

from __future__ import annotations

import pytest
import torch

from trimtab.training.rank_sync import AgreedWindow, RankWeights


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


def test_a_rank_of_a_mean_has_its_rows_share():
    weights = RankWeights(Two(4.0, AgreedWindow(20, 20, 1)), 16)
    weights.open(4, 1)
    weights.weigh(torch.tensor(1.0, requires_grad=True), None, 4)
    assert weights.share == 2 * 4 / 20


def test_of_a_window_without_terms_a_share_is_a_number():
    assert weigh(4, 4.0, AgreedWindow(8, 0.0, 1), 0.0).share == 0.0


@pytest.mark.parametrize(("first", "rest"), [(0.0, 1.0), (4096.0, 1.0)])
def test_the_reference_of_a_rank_that_goes_on_is_that_of_one_that_was_not_cut_off(first, rest):
    """Of a first window without terms too: what ranks agreed upon then serves until one has some."""
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
