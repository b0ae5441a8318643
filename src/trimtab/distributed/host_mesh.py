"""Figures between ranks of one machine, over sockets of their own: a few words that wake no thread.

A collective of gloo is made by its threads. Beside a computation that has every core they run in its place: to two
ranks of one thread each, on two cores, asking by one cost some tenths of a millisecond a window (docs/LOG.md).
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch.distributed as dist

from trimtab.measure.cores import node
from trimtab.runtime.exchange import Figures, Gathered

# Of more ranks each would send by itself for longer than a collective takes.
MOST_RANKS = 16
# Figures of a message: what is under way at once fits a socket's buffer, so that nobody waits to send.
WIDEST = 1024
_HEAD = struct.Struct("=QI")  # the number of a message, and of its figures
_WHO = struct.Struct("=I")
_MEETING_S = 10.0  # for a rank to connect in, once all are known to be there
# Of each job, as the group of all its ranks: ranks, by their numbers in it, that could not be connected.
_apart: WeakKeyDictionary[dist.ProcessGroup, set[tuple[int, ...]]] = WeakKeyDictionary()


class HostMesh:
    """What one rank says to each of the others, and they to it; each as often.

    Args:
        peers: a connected socket for each other rank. rank: of this one. timeout_s: after which one that is waited for
            is given up.
    """

    def __init__(self, peers: Mapping[int, socket.socket], rank: int, timeout_s: float) -> None:
        self._peers, self._rank = dict(sorted(peers.items())), rank
        for each in self._peers.values():
            each.settimeout(timeout_s)
        self._read = {peer: each.makefile("rb") for peer, each in self._peers.items()}
        self._asked = 0
        self._awaited: WeakValueDictionary[int, Answer] = WeakValueDictionary()
        self._lost: set[int] = set()

    def ask(self, figures: Figures) -> Answer:
        """Send this rank's figures without waiting; returns what waits for those of every rank.

        A peer that is gone is noticed by who waits for it.
        """
        own, number = list(map(float, figures)), self._asked
        self._asked += 1
        message = _HEAD.pack(number, len(own)) + struct.pack(f"={len(own)}d", *own)
        for peer in self._peers.keys() - self._lost:
            try:
                self._peers[peer].sendall(message)
            except OSError:
                self._lost.add(peer)
        answer = self._awaited[number] = Answer(self, number, {self._rank: own})
        return answer

    def complete(self, number: int, said: dict[int, list[float]]) -> Gathered:
        """Return a message's figures of every rank; waits for those that are not in `said`.

        Raises:
            DistNetworkError: a rank is gone, or was waited for too long.
        """
        for peer in self._peers:
            while peer not in said:
                self._receive(peer)
        return [said[rank] for rank in sorted(said)]

    def _receive(self, peer: int) -> None:
        """Read a peer's next message, and keep it where somebody may yet ask for it."""
        try:
            number, count = _HEAD.unpack(self._bytes(peer, _HEAD.size))
            figures = struct.unpack(f"={count}d", self._bytes(peer, 8 * count))
        except OSError as error:
            raise dist.DistNetworkError(f"rank {peer} was waited for: {error}") from error
        if (answer := self._awaited.get(number)) is not None:
            answer.said[peer] = list(figures)

    def _bytes(self, peer: int, count: int) -> bytes:
        found = self._read[peer].read(count)
        if len(found) < count:
            raise ConnectionResetError("its connection is closed")
        return found

    def close(self) -> None:
        """Close the sockets; what was sent can still be read."""
        for each in (*self._read.values(), *self._peers.values()):
            each.close()


class Answer:
    """What ranks say in one message, waited for when it is called. `said`: what has come."""

    def __init__(self, mesh: HostMesh, number: int, said: dict[int, list[float]]) -> None:
        self._mesh, self._number, self.said = mesh, number, said

    def __call__(self) -> Gathered:
        """Return every rank's figures, by rank."""
        return self._mesh.complete(self._number, self.said)


def host_mesh(group: dist.ProcessGroup, timeout_s: float) -> HostMesh | None:
    """Connect the ranks of a group that are on one machine; None on all where they are not, or cannot be connected.

    Every rank calls it. Ranks that once could not be connected are not asked again in their job.

    Args:
        group: of gloo.
    """
    if dist.get_world_size(group) > MOST_RANKS:
        return None
    # All members of a group know the same of it, while two groups may share but a few of them.
    ranks, apart = tuple(dist.get_process_group_ranks(group)), _apart.setdefault(dist.group.WORLD, set())
    if ranks in apart:
        return None
    found = _met(group)
    if found is None:
        apart.add(ranks)
        return None
    return HostMesh(found, dist.get_rank(group), timeout_s)


def _met(group: dist.ProcessGroup) -> dict[int, socket.socket] | None:
    """Return a socket for each other rank; None on all ranks where one of them lacks any."""
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    with contextlib.ExitStack() as meeting, contextlib.ExitStack() as held:
        listener, path = _listening(meeting, ranks)
        seats = _said_by_all((node(), path), group)
        paths = [each for _, each in seats]
        if len({machine for machine, _ in seats}) > 1 or not all(paths):
            return None
        # Containers of one machine have folders of their own: who is called there would wait for nobody.
        if not all(_said_by_all(all(os.access(each, os.W_OK) for each in paths), group)):
            return None
        assert listener is not None
        found = _connected(listener, paths, rank)
        for each in found.values():
            held.enter_context(each)
        if not all(_said_by_all(len(found) == ranks - 1, group)):
            return None
        held.pop_all()
    return found


def _said_by_all(own: Any, group: dist.ProcessGroup) -> list[Any]:
    said: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(said, own, group=group)
    return said


def _listening(meeting: contextlib.ExitStack, ranks: int) -> tuple[socket.socket | None, str]:
    """Return a socket that others can find by a path, which this user alone may; no path where there can be none."""
    try:
        folder = meeting.enter_context(tempfile.TemporaryDirectory(prefix="trimtab-"))
        listener = meeting.enter_context(socket.socket(socket.AF_UNIX))
        path = str(Path(folder) / "meet")
        listener.bind(path)
        listener.listen(ranks)
    except (OSError, AttributeError):  # a path that is too long, or a system without such sockets
        return None, ""
    return listener, path


def _connected(listener: socket.socket, paths: list[str], rank: int) -> dict[int, socket.socket]:
    """Return a socket for each other rank: this one calls those before it, and is called by those after it.

    Fewer, where a rank cannot be called, does not call, or does not say who it is.
    """
    found: dict[int, socket.socket] = {}
    listener.settimeout(_MEETING_S)
    with contextlib.suppress(OSError, struct.error):
        for peer, path in enumerate(paths[:rank]):
            with _unless_failed(socket.socket(socket.AF_UNIX)) as called:
                called.connect(path)
                called.sendall(_WHO.pack(rank))
            found[peer] = called
        while len(found) < len(paths) - 1:
            with _unless_failed(listener.accept()[0]) as caller:
                (peer,) = _WHO.unpack(caller.recv(_WHO.size, socket.MSG_WAITALL))
            found[peer] = caller
    return found


@contextlib.contextmanager
def _unless_failed(made: socket.socket) -> Iterator[socket.socket]:
    """Give a socket the time of a meeting; it is closed where that fails."""
    try:
        made.settimeout(_MEETING_S)
        yield made
    except BaseException:
        made.close()
        raise
