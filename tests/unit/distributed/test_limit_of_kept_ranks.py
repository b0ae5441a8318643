"""For how long ranks wait for each other in a checkpoint: as long as in all else of the run that it is of."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from trimtab.checkpoint.rank_checkpoints import RankCommunication
from trimtab.distributed.process_group import TIMEOUT_S, limited_to, time_limit_s
from trimtab.integrations import trainer_rules


@pytest.fixture
def limits(monkeypatch):
    """How long words were waited for, in turn."""
    found = []

    def from_first(make, topic):
        found.append(time_limit_s())
        return make()

    def words_at_work(make, topic):
        return [from_first(make, topic)]

    monkeypatch.setattr("trimtab.checkpoint.rank_checkpoints.from_first", from_first)
    monkeypatch.setattr("trimtab.checkpoint.rank_checkpoints.words_at_work", words_at_work)
    return found


def asked_of_all(ranks: RankCommunication) -> list[object]:
    ranks.num = 2
    return [ranks.first(lambda: "there", "where"), ranks.each("word", "words"), ranks.together(lambda: 1, "made")]


def test_a_hosts_checkpoints_wait_as_long_as_its_runs_do(limits, monkeypatch):
    monkeypatch.setattr(trainer_rules, "start", lambda *_: RankCommunication(SimpleNamespace(num_ranks=1)))
    assert asked_of_all(trainer_rules.start_in_process_group(None, None, None)) == ["there", ["word"], 1]
    assert limits == [trainer_rules.LIMIT_S] * 3
    assert time_limit_s() == TIMEOUT_S


def test_the_limit_is_that_of_the_start_whatever_holds_later(limits):
    ranks = RankCommunication(SimpleNamespace(num_ranks=1))
    with limited_to(7.0):
        asked_of_all(ranks)
        assert time_limit_s() == 7.0
    assert limits == [TIMEOUT_S] * 3
