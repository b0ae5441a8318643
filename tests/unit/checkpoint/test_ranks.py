"""What a rank of a kept run makes of what rank 0 says."""

from __future__ import annotations

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from trimtab.checkpoint.ranks import KeptRanks
from trimtab.checkpoint.state_files import write_state
from trimtab.core.errors import FormatError, RankError
from trimtab.measure.random_state import loading_random_state, random_state


@pytest.fixture
def second(monkeypatch):
    """Return the second of two ranks; rank 0 says what is in its list."""
    ranks = KeptRanks(SimpleNamespace(num_ranks=1))
    ranks.num, ranks.rank, said = 2, 1, []
    monkeypatch.setattr(ranks, "first", lambda make, about: said.pop(0))
    return ranks, said


@pytest.mark.parametrize("where", ["", "elsewhere"])
def test_no_rank_writes_where_it_was_not_told_to(second, tmp_path, monkeypatch, where):
    monkeypatch.chdir(tmp_path)
    ranks, said = second
    said.append(where)
    with pytest.raises(RankError, match="expected the folder that all write into"):
        ranks.write(tmp_path, "step-1", {"weights": torch.ones(2)}, {"step": 1})
    assert list(tmp_path.iterdir()) == []


def test_a_failure_of_another_rank_is_everyones(second, monkeypatch):
    ranks, _ = second
    monkeypatch.setattr("trimtab.checkpoint.ranks.words_at_work", lambda make, topic: ["OSError: no room", make()])
    with pytest.raises(FormatError, match="rank 0: given OSError: no room"):
        ranks.together(lambda: 1, "a part")


def test_a_failure_of_its_own_is_raised_as_it_is(second, monkeypatch):
    ranks, _ = second
    monkeypatch.setattr("trimtab.checkpoint.ranks.words_at_work", lambda make, topic: ["OSError: no room", make()])

    def fails():
        raise KeyError("weights")

    with pytest.raises(KeyError, match="weights"):
        ranks.together(fails, "a part")


def test_what_is_asked_of_has_a_name_of_its_own(second):
    ranks, _ = second
    assert len({ranks._topic("step-1/where"), ranks._topic("step-1/where"), ranks._topic("step-2/where")}) == 3


def test_ranks_that_are_added_have_random_numbers_of_their_own_and_the_same_each_time(second, tmp_path):
    """By every global generator; those that are a rank's own already are left to it."""
    ranks, _ = second
    here = random_state()
    write_state(tmp_path, {"data": {"here": {"random": here}}})

    def drawn(rank):
        ranks.rank = rank
        loading_random_state(ranks.read(tmp_path, 1)["data"]["here"]["random"])()
        return [torch.rand(()).item(), random.random(), np.random.rand()]

    try:
        of_ranks = [drawn(rank) for rank in (0, 1, 2, 3)]
        assert [len(set(numbers)) for numbers in zip(*of_ranks, strict=True)] == [4, 4, 4]
        assert drawn(2) == of_ranks[2]
        loading_random_state(here)()
        assert [torch.rand(()).item(), random.random(), np.random.rand()] == of_ranks[0]
    finally:
        loading_random_state(here)()
