"""All-gather of small values between ranks of a machine over Unix sockets, without waking threads.

gloo runs collectives in threads. If the computation uses all cores, gloo's threads compete for them: for two ranks with
a single thread each on two cores, a gloo collective cost some tenths of a millisecond per step (docs/LOG.md).
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

from trimtab.measure.cpu_affinity import node
from trimtab.runtime.metadata_exchange import Figures, Gathered

# With more ranks, sending to each takes longer than a collective.
MOST_RANKS = 16
# Maximum values per message: pending messages fit a socket's buffer, so sending never blocks.
WIDEST = 1024
_HEAD = struct.Struct("=QI")  # message number, number of values
_WHO = struct.Struct("=I")
_MEETING_S = 10.0  # seconds for a rank to connect, once all are present
# Per job (its world group): sets of ranks that could not be connected.
_apart: WeakKeyDictionary[dist.ProcessGroup, set[tuple[int, ...]]] = WeakKeyDictionary()


class SocketMesh:
    """Sockets from a rank to the other ranks on a machine; all ranks send the same number of messages.

    Args:
        peers: a connected socket per rank.
        rank: this rank.
        timeout_s: time limit for a message.
    """

    def __init__(self, peers: Mapping[int, socket.socket], rank: int, timeout_s: float) -> None:
        self._peers, self._rank = dict(sorted(peers.items())), rank
        for each in self._peers.values():
            each.settimeout(timeout_s)
        self._read = {peer: each.makefile("rb") for peer, each in self._peers.items()}
        self._asked = 0
        self._awaited: WeakValueDictionary[int, PendingGather] = WeakValueDictionary()
        self._lost: set[int] = set()

    def ask(self, figures: Figures) -> PendingGather:
        """Send this rank's values without waiting; return a function that waits for the values of all ranks.

        A lost rank raises only in the returned function.
        """
        own, number = list(map(float, figures)), self._asked
        self._asked += 1
        message = _HEAD.pack(number, len(own)) + struct.pack(f"={len(own)}d", *own)
        for peer in self._peers.keys() - self._lost:
            try:
                self._peers[peer].sendall(message)
            except OSError:
                self._lost.add(peer)
        answer = self._awaited[number] = PendingGather(self, number, {self._rank: own})
        return answer

    def complete(self, number: int, said: dict[int, list[float]]) -> Gathered:
        """Return the values of all ranks for a message; waits for missing values.

        Args:
            number: message number.
            said: values received so far, by rank.

        Raises:
            DistNetworkError: a rank is gone or exceeded the time limit.
        """
        for peer in self._peers:
            while peer not in said:
                self._receive(peer)
        return [said[rank] for rank in sorted(said)]

    def _receive(self, peer: int) -> None:
        """Read the next message of a rank; messages that nobody can request any more are dropped."""
        try:
            number, count = _HEAD.unpack(self._bytes(peer, _HEAD.size))
            figures = struct.unpack(f"={count}d", self._bytes(peer, 8 * count))
        except OSError as error:
            raise dist.DistNetworkError(f"no message from rank {peer}: {error}") from error
        if (answer := self._awaited.get(number)) is not None:
            answer.said[peer] = list(figures)

    def _bytes(self, peer: int, count: int) -> bytes:
        found = self._read[peer].read(count)
        if len(found) < count:
            raise ConnectionResetError("the connection is closed")
        return found

    def close(self) -> None:
        """Close the sockets; sent messages can still be read."""
        for reader in self._read.values():
            reader.close()
        for peer in self._peers.values():
            peer.close()


class PendingGather:
    """Pending values of a message, with the values received so far."""

    def __init__(self, mesh: SocketMesh, number: int, said: dict[int, list[float]]) -> None:
        self._mesh, self._number, self.said = mesh, number, said

    def __call__(self) -> Gathered:
        """Return the values of all ranks, by rank."""
        return self._mesh.complete(self._number, self.said)


def host_mesh(group: dist.ProcessGroup, timeout_s: float) -> SocketMesh | None:
    """Connect the ranks of a group on a single machine; None on all ranks if impossible. A collective.

    After a failure, the same ranks are not tried again in the job.

    Args:
        group: gloo process group.
        timeout_s: time limit for a message.
    """
    if dist.get_world_size(group) > MOST_RANKS:
        return None
    world = dist.group.WORLD
    assert world is not None
    # Keyed by members: all members of a group agree on its entry, while different groups may overlap.
    ranks, apart = tuple(dist.get_process_group_ranks(group)), _apart.setdefault(world, set())
    if ranks in apart:
        return None
    found = _met(group)
    if found is None:
        apart.add(ranks)
        return None
    return SocketMesh(found, dist.get_rank(group), timeout_s)


def _met(group: dist.ProcessGroup) -> dict[int, socket.socket] | None:
    """Return a socket per other rank; None on all ranks if any socket is missing on any rank."""
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    with contextlib.ExitStack() as meeting, contextlib.ExitStack() as held:
        listener, path = _listening(meeting, ranks)
        seats = _said_by_all((node(), path), group)
        paths = [each for _, each in seats]
        if len({machine for machine, _ in seats}) > 1 or not all(paths):
            return None
        # Containers on a machine have separate folders, in which a connection would wait forever.
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
    """Return a listening socket and its path, accessible to this user only; an empty path if not possible."""
    try:
        folder = meeting.enter_context(tempfile.TemporaryDirectory(prefix="trimtab-"))
        listener = meeting.enter_context(socket.socket(socket.AF_UNIX))
        path = str(Path(folder) / "meet")
        listener.bind(path)
        listener.listen(ranks)
    except (OSError, AttributeError):  # the path is too long, or the system has no Unix sockets
        return None, ""
    return listener, path


def _connected(listener: socket.socket, paths: list[str], rank: int) -> dict[int, socket.socket]:
    """Return a socket per other rank: connects to lower ranks, and accepts connections from higher ranks.

    Incomplete if a rank cannot be reached, does not connect, or does not identify itself.
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
    """Set the connection timeout of a socket, and close the socket if the block raises."""
    try:
        made.settimeout(_MEETING_S)
        yield made
    except BaseException:
        made.close()
        raise
