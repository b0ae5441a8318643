"""What a rank of a kept run makes of what rank 0 says, and for how long ranks wait for each other."""

from __future__ import annotations

import contextlib
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from raising import raises

from trimtab.checkpoint.atomic_directory import prefix_of
from trimtab.checkpoint.config import require_supported
from trimtab.checkpoint.manager import RankCommunication
from trimtab.checkpoint.state_files import digest_of, read_state, write_state
from trimtab.core.errors import FormatError, RankError, ValueGivenError
from trimtab.core.files import set_apart
from trimtab.distributed.process_group import TIMEOUT_S, limited_to, time_limit_s
from trimtab.integrations import trainer_rules
from trimtab.plans.plan import Plan
from trimtab.state.random_state import loading_random_state, random_state


@pytest.fixture
def second(monkeypatch):
    """Return the second of two ranks; rank 0 says what is in its list."""
    ranks = RankCommunication(SimpleNamespace(num_ranks=1))
    ranks.num, ranks.rank, said = 2, 1, []
    monkeypatch.setattr(ranks, "first", lambda make, about: said.pop(0))
    return ranks, said


@pytest.fixture
def begun(tmp_path):
    """Return the folder that rank 0 has made for a checkpoint."""
    folder = set_apart(tmp_path / "step-1")
    folder.mkdir()
    return folder


@pytest.mark.parametrize("where", ["", "elsewhere"])
def test_no_rank_writes_where_it_was_not_told_to(second, tmp_path, monkeypatch, where):
    monkeypatch.chdir(tmp_path)
    ranks, said = second
    monkeypatch.setattr("trimtab.checkpoint.manager.words_at_work", lambda make, topic: ["", make()])
    said.append(where)
    with raises(RankError, code="ranks.unexpected_message", field="rank 0"):
        ranks.write(tmp_path / "step-1", {"weights": torch.ones(2)}, {"step": 1})
    assert list(tmp_path.iterdir()) == []


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


@pytest.mark.parametrize("is_alike", [True, False])
def test_what_is_kept_too_is_written_once_where_it_is_alike_to_the_bit(second, tmp_path, begun, monkeypatch, is_alike):
    """An average of weights would else be there as often as there are ranks."""
    ranks, said = second
    first = {"mean": torch.zeros(2)}
    own = {"mean": torch.zeros(2) if is_alike else -torch.zeros(2)}
    words = {"also": digest_of(first)}
    monkeypatch.setattr(
        "trimtab.checkpoint.manager.words_at_work",
        lambda make, topic: [words.get(topic.rpartition("/")[2], ""), make()],
    )
    said.append(str(begun))
    ranks.write(tmp_path / "step-1", {"data": torch.ones(1), "also": own}, {"step": 1})
    assert ("also" in read_state(begun, prefix_of(1))) is not is_alike


def test_what_is_kept_too_and_cannot_be_written_is_refused_as_it_is_written(second, tmp_path, begun, monkeypatch):
    ranks, said = second
    monkeypatch.setattr("trimtab.checkpoint.manager.words_at_work", lambda make, topic: ["", make()])
    said.append(str(begun))
    with raises(FormatError, code="state.unsupported_type", field="state['also']"):
        ranks.write(tmp_path / "step-1", {"data": torch.ones(1), "also": {1}}, {"step": 1})


OWN = {"record": {"end": 2}, "also": {"of": 1}}


@pytest.mark.parametrize(
    ("rank", "own", "record", "also"),
    [(1, OWN, {"end": 2}, 1), (1, {"record": None}, None, 0), (1, {}, None, 0), (2, OWN, None, 0), (3, OWN, None, 0)],
    ids=["its own", "rank 0's too", "of before they were written", "one that is added", "and one more"],
)
def test_a_rank_reads_its_own_record_and_what_it_keeps_too(second, tmp_path, rank, own, record, also):
    ranks, _ = second
    model, data = {"own": {}, "hidden": {}}, {"here": {"random": random_state()}}
    write_state(tmp_path, {"data": data, "model": model, "record": {"end": 1}, "also": {"of": 0}})
    write_state(tmp_path, {"data": data, "buffers": model} | own, prefix_of(1))
    ranks.rank = rank
    found = ranks.read(tmp_path, 2)
    assert (found["record"], found["also"]["of"]) == (record, also)


@pytest.mark.parametrize(("world", "is_refused"), [(4, True), (2, False)])
def test_ranks_that_are_a_part_of_the_job_are_refused(monkeypatch, world, is_refused):
    """As of DistributedDataParallel(model, process_group=part): a rank's files go by its place in the whole job."""
    model, part = torch.nn.Linear(1, 1), SimpleNamespace(num_ranks=2, has_peers=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: world)
    refused = raises(ValueGivenError, code="checkpoints.part_of_job", field="checkpoints")
    with refused if is_refused else contextlib.nullcontext() as caught:
        require_supported(model, optimizer, Plan.fixed(4), part, background=False)
    if caught is not None:
        assert (caught.value.got, caught.value.expected) == ("2 ranks", "4 ranks")


@pytest.fixture
def limits(monkeypatch):
    """How long words were waited for, in turn."""
    found = []

    def from_first(make, topic):
        found.append(time_limit_s())
        return make()

    def words_at_work(make, topic):
        return [from_first(make, topic)]

    monkeypatch.setattr("trimtab.checkpoint.manager.from_first", from_first)
    monkeypatch.setattr("trimtab.checkpoint.manager.words_at_work", words_at_work)
    return found


def asked_of_all(ranks: RankCommunication) -> list[object]:
    ranks.num = 2
    return [
        ranks.first(lambda: "there", "where"),
        ranks.each(lambda: "word", "words"),
        ranks.together(lambda: 1, "made"),
    ]


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
