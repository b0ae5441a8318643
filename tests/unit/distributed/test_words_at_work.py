"""Words between ranks of what takes long: waited for while a heart beats, and removed once they were heard."""

from __future__ import annotations

import threading
import time

import pytest
import torch.distributed as dist
from raising import raises

from trimtab.core.errors import RankError
from trimtab.distributed import process_group


@pytest.fixture
def store():
    return dist.HashStore()


def heard_by(store, key, limit_s=5.0):
    """Return a rank's thread that awaits a word, begun."""
    rank = threading.Thread(target=process_group.await_value, args=(store, key, limit_s))
    rank.start()
    return rank


def test_a_word_that_all_have_heard_is_removed_with_the_next(store):
    process_group.write_value(store, "one", "1", readers=2)
    for rank in [heard_by(store, "one"), heard_by(store, "one")]:
        rank.join()
    process_group.write_value(store, "two", "2", readers=2)
    assert not store.check(["one"])
    assert store.get("two") == b"2"


def test_a_word_that_one_has_not_heard_stays(store):
    process_group.write_value(store, "one", "1", readers=2)
    heard_by(store, "one").join()
    process_group.write_value(store, "two", "2", readers=2)
    assert store.check(["one"])  # of one that is gone `get` would wait
    assert store.get("one") == b"1"
    heard_by(store, "one").join()
    process_group.write_value(store, "three", "3", readers=2)
    assert not store.check(["one"])


def test_a_word_may_take_longer_than_silence_does(store):
    with process_group.send_heartbeats(store, "slow", 0.4):
        late = threading.Timer(1.0, process_group.write_value, (store, "slow", "done", 1))
        late.start()
        assert process_group._word_of(store, 1, "slow", 0.4) == "done"
        late.join()


def test_a_rank_that_is_silent_is_named(store):
    start = time.monotonic()
    with raises(RankError, code="ranks.silent", field="rank 3"):
        process_group._word_of(store, 3, "never", 0.3)
    assert time.monotonic() - start < 5
