"""Draws that belong to a row: the published generator, to the bit, and the same whatever batch a row is in."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.paper.cifar10 import augment
from trimtab.tasks.task import DataSource, SampleDraws, TaskData

MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15
SOURCE = DataSource("made here", "here", "0" * 64)


def mixed(z: int) -> int:
    """SplitMix64's finaliser in plain integers."""
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def by_hand(seed: int, epoch: int, row: int, high: int, draw: int) -> int:
    of_run = mixed((mixed(seed * GOLDEN & MASK) + (epoch + 1) * 0xBF58476D1CE4E5B9) & MASK)
    key = mixed((of_run + (row + 1) * GOLDEN) & MASK)
    return (mixed((key + draw * GOLDEN) & MASK) >> 32) * high >> 32


def test_the_finaliser_is_the_published_one():
    """The first numbers of SplitMix64 from seed 1234567, as its implementations give them."""
    states = [(1234567 + i * GOLDEN) & MASK for i in range(1, 4)]
    assert [mixed(state) for state in states] == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
    ]


@given(
    seed=st.integers(0, 2**63),
    epoch=st.integers(0, 10_000),
    rows=st.lists(st.integers(0, 2**40), min_size=1, max_size=8),
    high=st.integers(1, 2**31),
)
def test_every_draw_is_what_plain_integers_give(seed, epoch, rows, high):
    draws = SampleDraws(seed, epoch, torch.tensor(rows))
    for draw in (1, 2):
        assert draws.integers(high).tolist() == [by_hand(seed, epoch, row, high, draw) for row in rows]


@given(order=st.permutations(range(12)), cut=st.integers(1, 11))
def test_a_row_draws_the_same_in_any_company(order, cut):
    rows = torch.tensor(order)
    whole = SampleDraws(3, 2, rows)
    parts = [SampleDraws(3, 2, part) for part in (rows[:cut], rows[cut:])]
    for _ in range(3):
        assert torch.equal(whole.integers(9), torch.cat([part.integers(9) for part in parts]))
    assert torch.equal(whole.chance(0.5), torch.cat([part.chance(0.5) for part in parts]))


def test_draws_are_even_and_not_tied_to_one_another():
    draws = SampleDraws(0, 0, torch.arange(90_000))
    first, second = draws.integers(9), draws.integers(9)
    cells = torch.bincount(first * 9 + second, minlength=81).double()
    expected = 90_000 / 81
    chi2 = float(((cells - expected) ** 2 / expected).sum())
    assert 45 < chi2 < 125  # 80 degrees of freedom: 99.8% of chance lies within
    for share in (0.0, 0.25, 1.0):
        assert float(draws.chance(share).double().mean()) == pytest.approx(share, abs=0.006)
    again = SampleDraws(0, 1, torch.arange(90_000)).integers(9)
    assert float((again == first).double().mean()) == pytest.approx(1 / 9, abs=0.005)


def images(rows: int = 48) -> TaskData:
    made = torch.randint(256, (rows, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    return TaskData((made, torch.arange(rows)), ((made, torch.arange(rows)),), SOURCE, augment)


def by_label(batches: list[tuple[torch.Tensor, ...]]) -> torch.Tensor:
    """Return the images in the order of the data set."""
    found, labels = (torch.cat(parts) for parts in zip(*batches, strict=True))
    return found[labels.argsort()]


@pytest.mark.parametrize("batch_size", [1, 4, 6, 24])
def test_an_epoch_looks_the_same_in_every_batch_size(batch_size):
    data = images()
    for epoch in range(2):
        taken = [
            list(itertools.islice(data.batches(7, rows), epoch * 48 // rows, (epoch + 1) * 48 // rows))
            for rows in (48, batch_size)
        ]
        assert torch.equal(by_label(taken[0]), by_label(taken[1]))


def test_epochs_and_seeds_look_different():
    data = images()
    first, second = itertools.islice(data.batches(7, 48), 2)
    other = next(data.batches(8, 48))
    assert not torch.equal(by_label([first]), by_label([second]))
    assert not torch.equal(by_label([first]), by_label([other]))
    plain = images()
    augmented = [labels for _, labels in itertools.islice(plain.batches(7, 8), 12)]
    bare = TaskData(plain.columns, plain.held_out, SOURCE)
    assert all(torch.equal(a, b[1]) for a, b in zip(augmented, bare.batches(7, 8), strict=False))
