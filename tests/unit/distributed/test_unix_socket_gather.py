"""What ranks of one machine say to each other over sockets."""

from __future__ import annotations

import gc
import socket
import threading

import pytest
import torch.distributed as dist

from trimtab.distributed.host_gather import SocketMesh


def meshes(ranks: int, timeout_s: float = 5.0) -> list[SocketMesh]:
    ends: list[dict[int, socket.socket]] = [{} for _ in range(ranks)]
    for one in range(ranks):
        for other in range(one):
            ends[one][other], ends[other][one] = socket.socketpair()
    return [SocketMesh(peers, rank, timeout_s) for rank, peers in enumerate(ends)]


@pytest.fixture
def two():
    found = meshes(2)
    yield found
    for each in found:
        each.close()


def test_every_rank_hears_all_figures_to_the_bit_in_the_order_of_ranks():
    found = meshes(3)
    said = [[1 / 3, float("inf")], [2.0**60 + 1, -0.0], [5e-324, 7]]
    answers = [mesh.ask(figures) for mesh, figures in zip(found, said, strict=True)]
    assert [answer() for answer in answers] == [said] * 3
    assert answers[0]() == said  # asked twice, it waits for nothing
    for each in found:
        each.close()


def test_what_was_asked_first_may_be_waited_for_last(two):
    late, soon = ([mesh.ask([number + rank]) for rank, mesh in enumerate(two)] for number in (10, 20))
    assert soon[0]() == [[20], [21]]
    assert late[0]() == [[10], [11]]


def test_an_answer_that_nobody_waits_for_is_not_kept(two):
    for _ in range(3):
        dropped = [mesh.ask([1.0]) for mesh in two]
    del dropped
    gc.collect()
    answers = [mesh.ask([2.0]) for mesh in two]
    assert answers[0]() == [[2.0], [2.0]]
    assert list(two[0]._awaited) == [3]


def test_waiting_ends_as_the_other_says_it(two):
    first = two[0].ask([1.0])
    second = threading.Timer(0.05, two[1].ask, [[2.0]])
    second.start()
    assert first() == [[1.0], [2.0]]
    second.join()


def test_what_a_rank_said_before_it_left_is_heard_and_then_it_is_missed(two):
    two[1].ask([2.0])
    two[1].close()
    assert two[0].ask([1.0])() == [[1.0], [2.0]]
    missed = two[0].ask([1.0])
    with pytest.raises(dist.DistNetworkError, match="rank 1: the connection is closed"):
        missed()


def test_a_rank_that_is_silent_is_given_up():
    found = meshes(2, timeout_s=0.05)
    with pytest.raises(dist.DistNetworkError, match="rank 1: timed out"):
        found[0].ask([1.0])()
    for each in found:
        each.close()
