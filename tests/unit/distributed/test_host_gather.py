"""How ranks of one machine meet, what they say over sockets, and that all do without where one cannot."""

from __future__ import annotations

import gc
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from trimtab.distributed import host_gather as module
from trimtab.distributed.host_gather import MOST_RANKS, SocketMesh, host_mesh


class World:
    """A job."""


class Threads:
    """What `torch.distributed` says to a thread that stands for a rank; a group is the tuple of its ranks."""

    def __init__(self, ranks: int) -> None:
        self.group = SimpleNamespace(WORLD=World())
        self.own = threading.local()
        self.gathered = 0
        self._said: dict[int, object] = {}
        self._lap = threading.Barrier(ranks, timeout=60)

    def get_process_group_ranks(self, group):
        return list(group)

    def get_world_size(self, group):
        return len(group)

    def get_rank(self, group):
        return group.index(self.own.rank)

    def gather_objects(self, own, group):
        self._said[self.own.rank] = own
        if self._lap.wait() == 0:
            self.gathered += 1
        found = [self._said[rank] for rank in group]
        self._lap.wait()
        return found


class Job:
    """Threads that call `host_mesh` together."""

    def __init__(self, ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ranks, self.dist = tuple(range(ranks)), Threads(ranks)
        monkeypatch.setattr(module, "dist", self.dist)
        monkeypatch.setattr(module, "gather_objects", self.dist.gather_objects)

    def meet(self):
        """Return the mesh of each rank."""
        with ThreadPoolExecutor(len(self.ranks)) as pool:
            return list(pool.map(self._one, self.ranks))

    def _one(self, rank):
        self.dist.own.rank = rank
        return host_mesh(self.ranks, 5.0)

    def rank(self):
        return self.dist.own.rank


@pytest.fixture
def three(monkeypatch, tmp_path):
    monkeypatch.setattr(module.tempfile, "tempdir", str(tmp_path))
    return Job(3, monkeypatch)


@pytest.fixture
def sockets(monkeypatch):
    """Return every socket that the meeting makes or accepts."""
    made = []

    class Kept(socket.socket):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            made.append(self)

    monkeypatch.setattr(module.socket, "socket", Kept)
    return made


def is_apart(job: Job, sockets: list[socket.socket], gathered: int) -> None:
    """Require that all ranks fall back alike, leave nothing open, and do not ask again."""
    assert job.meet() == [None] * 3
    assert job.dist.gathered == gathered
    assert [each for each in sockets if each.fileno() >= 0] == []
    assert job.meet() == [None] * 3
    assert job.dist.gathered == gathered


def test_ranks_of_one_machine_meet_and_hear_each_other(three, tmp_path):
    found = three.meet()
    answers = [mesh.ask([float(rank)]) for rank, mesh in enumerate(found)]
    assert [answer() for answer in answers] == [[[0.0], [1.0], [2.0]]] * 3
    assert list(tmp_path.iterdir()) == []
    for each in found:
        each.close()


def test_more_ranks_than_a_mesh_is_for_ask_nothing(monkeypatch):
    job = Job(MOST_RANKS + 1, monkeypatch)
    assert job.meet() == [None] * (MOST_RANKS + 1)
    assert job.dist.gathered == 0


@pytest.mark.parametrize(("name", "rank", "other"), [("node", 1, "other"), ("_listening", 2, (None, ""))])
def test_a_rank_on_another_machine_or_without_a_folder(three, sockets, monkeypatch, name, rank, other):
    made = getattr(module, name) if name == "_listening" else lambda: "one"
    monkeypatch.setattr(module, name, lambda *args: other if three.rank() == rank else made(*args))
    is_apart(three, sockets, gathered=1)


def test_a_rank_that_does_not_see_the_others_folders_is_not_waited_for(three, sockets, monkeypatch):
    def meets(*_args):
        pytest.fail("a rank connects, which others cannot see")

    monkeypatch.setattr(module, "_connected", meets)
    seen = module.os.access
    monkeypatch.setattr(module.os, "access", lambda path, mode: three.rank() != 1 and seen(path, mode))
    is_apart(three, sockets, gathered=2)


@pytest.mark.parametrize(("method", "error"), [("connect", ConnectionRefusedError), ("sendall", BrokenPipeError)])
def test_a_rank_that_cannot_connect_or_goes_before_it_says_who_it_is(three, sockets, monkeypatch, method, error):
    monkeypatch.setattr(module, "_MEETING_S", 0.2)
    called = getattr(module.socket.socket, method)

    def fails(self, *given):
        if three.rank() == 2:
            raise error
        called(self, *given)

    monkeypatch.setattr(module.socket.socket, method, fails)
    is_apart(three, sockets, gathered=3)


def test_a_caller_that_says_nothing_is_no_rank(tmp_path):
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as caller:
        listener.bind(str(tmp_path / "meet"))
        listener.listen(2)
        caller.connect(str(tmp_path / "meet"))
        caller.close()
        assert module._connected(listener, ["", ""], rank=0) == {}


def test_a_job_after_it_asks_again(three, monkeypatch):
    monkeypatch.setattr(module, "node", lambda: str(three.rank()))
    assert three.meet() == [None] * 3
    three.dist.group.WORLD = World()
    assert three.meet() == [None] * 3
    assert three.dist.gathered == 2


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
