"""All-gather of small host values between ranks, sent without waiting."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import struct
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trimtab.core.errors import RankError
from trimtab.distributed.cpu_affinity import node
from trimtab.distributed.launch import SILENT, ranks_failed
from trimtab.distributed.process_group import gather_objects, has_peers, job_store, time_limit_s, words_of_all
from trimtab.measure.gradient_norms import is_sharded
from trimtab.training.gradient_sync import UNREDUCED, data_parallel
from trimtab.training.metadata_exchange import Figures, Gathered

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store


T = TypeVar("T")

# Seconds to answer a roll call. All ranks whose wait for a rank failed take part within moments of each other, except
# those whose own time limit began later.
_ANSWER_S = 3.0
# Words in torch's errors of a collective that lost a rank.
_SIGNS = ("gloo", "nccl")
_PREFIX = "trimtab/trouble"
# With more ranks, sending to each takes longer than a collective.
MOST_RANKS = 16
# Maximum values per message: pending messages fit a socket's buffer, so sending never blocks.
WIDEST = 1024
_HEAD = struct.Struct("=QI")  # message number, number of values
_WHO = struct.Struct("=I")
_MEETING_S = 10.0  # seconds for a rank to connect, once all are present
# Per job (its world group): sets of ranks that could not be connected.
_apart: WeakKeyDictionary[dist.ProcessGroup, set[tuple[int, ...]]] = WeakKeyDictionary()
_numbers = itertools.count()


class ErrorStore:
    """Errors that ranks publish in the job's store, to be raised on all ranks; `number` identifies the run."""

    def __init__(self, number: int) -> None:
        self._rank, self._ranks = dist.get_rank(), dist.get_world_size()
        self._prefix = f"{_PREFIX}/{number}"
        self._has_told = False

    def tell(self, error: BaseException) -> None:
        """Publish the error that ends this rank, unless a different rank caused or also raises the same error."""
        if not (isinstance(error, RankError) and error.code != UNREDUCED):
            text = f"{type(error).__name__}: {str(error).partition(chr(10))[0][:300]}"
            with self._store() as store:
                store.set(f"{self._prefix}/{self._rank}", text)
                self._has_told = True

    def recovered(self) -> None:
        """Withdraw the published error after a recovery."""
        if self._has_told:
            with self._store() as store:
                store.delete_key(f"{self._prefix}/{self._rank}")
            self._has_told = False

    def explained(self, error: BaseException) -> BaseException:
        """Return the cause of an error in a collective: the error or silence of a rank; unrelated errors unchanged."""
        text = str(error).lower()
        is_lost = isinstance(error, dist.DistError)
        is_lost = is_lost or (isinstance(error, RuntimeError) and any(sign in text for sign in _SIGNS))
        if not is_lost or isinstance(error, RankError):
            return error
        said, silent = self._roll_call()
        if said:
            return ranks_failed(said)
        if silent:
            found = _no_answer(silent, self._ranks)
            is_first = all(rank in silent for rank in range(self._rank))
            return found if is_first else found.echoed()
        return error

    def _roll_call(self) -> tuple[dict[int, str], list[int]]:
        """Return the published errors by rank, and the ranks that neither published an error nor answer."""
        said: dict[int, str] = {}
        silent: list[int] = []
        with self._store() as store:
            store.set(f"{self._prefix}/here/{self._rank}", "")
            for rank in range(self._ranks):
                if rank == self._rank:
                    continue
                if store.check([f"{self._prefix}/{rank}"]):
                    said[rank] = store.get(f"{self._prefix}/{rank}").decode()
                else:
                    try:
                        store.wait([f"{self._prefix}/here/{rank}"], timedelta(seconds=_ANSWER_S))
                    except (RuntimeError, dist.DistError):
                        silent.append(rank)
            return said, silent
        return {}, [0] if self._rank else []  # without a launcher, rank 0's process holds the store

    @contextlib.contextmanager
    def _store(self) -> Iterator[Store]:
        """Use the store; errors of an unreachable store are ignored."""
        with contextlib.suppress(RuntimeError, dist.DistError):
            yield job_store()


def _no_answer(silent: Sequence[int], ranks: int) -> RankError:
    """Return the error for ranks without an answer to a roll call."""
    names = f"Rank {silent[0]}" if len(silent) == 1 else f"Ranks {', '.join(map(str, silent))}"
    problem = f"{names} of {ranks} ranks {'does' if len(silent) == 1 else 'do'} not respond."
    error = RankError(f"rank {silent[0]}", got="no answer", problem=problem, hint=_SILENT, code=SILENT)
    error.ranks = tuple(silent)
    return error


_SILENT = (
    "Check the rank's log and its machine: the process was killed, hangs, or the machine failed. A rank also does not "
    "respond while it works alone for longer than the time limit, for instance on an evaluation, a save or an upload: "
    "do such work on all ranks, or raise the limit with trimtab.process_group(timeout_s=...)."
)


class SocketMesh:
    """Sockets from a rank to the other ranks on a machine, without threads; all send the same number of messages."""

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
        answer = self._awaited[number] = PendingGather(self, {self._rank: own})
        return answer

    def complete(self, said: dict[int, list[float]]) -> Gathered:
        """Return the values of all ranks for a message; `DistNetworkError` if one is gone or exceeds the time limit."""
        for peer in self._peers:
            while peer not in said:
                try:
                    found, count = _HEAD.unpack(self._bytes(peer, _HEAD.size))
                    figures = struct.unpack(f"={count}d", self._bytes(peer, 8 * count))
                except OSError as error:
                    raise dist.DistNetworkError(f"no message from rank {peer}: {error}") from error
                if (answer := self._awaited.get(found)) is not None:  # otherwise nobody can request the message
                    answer.said[peer] = list(figures)
        return [said[rank] for rank in sorted(said)]

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

    def __init__(self, mesh: SocketMesh, said: dict[int, list[float]]) -> None:
        self._mesh, self.said = mesh, said

    def __call__(self) -> Gathered:
        """Return the values of all ranks, by rank."""
        return self._mesh.complete(self.said)


def host_mesh(group: dist.ProcessGroup, timeout_s: float) -> SocketMesh | None:
    """Connect the ranks of a group on a single machine; None on all ranks if impossible. A collective.

    After a failure, the same ranks are not tried again in the job.
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
        seats = gather_objects((node(), path), group)
        paths = [each for _, each in seats]
        if len({machine for machine, _ in seats}) > 1 or not all(paths):
            return None
        # Containers on a machine have separate folders, in which a connection would wait forever.
        if not all(gather_objects(all(os.access(each, os.W_OK) for each in paths), group)):
            return None
        assert listener is not None
        found = _connected(listener, paths, rank)
        for each in found.values():
            held.enter_context(each)
        if not all(gather_objects(len(found) == ranks - 1, group)):
            return None
        held.pop_all()
    return found


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
    """Return a socket per other rank: connects to lower ranks, and accepts connections from higher ranks."""
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


def connect(model: nn.Module) -> RankExchange | None:
    """Return the exchange between the ranks that reduce a model's gradients; None for a single rank.

    None also for a model without DDP or FSDP2, which may still reduce gradients by hand if `has_peers` is True.
    """
    if not has_peers():
        return None
    parallel = data_parallel(model)
    group: dist.ProcessGroup | None
    if parallel is not None:
        group = parallel.process_group
    elif is_sharded(model):
        group = dist.group.WORLD
    else:
        return None
    return RankExchange(group) if dist.get_world_size(group) > 1 else None


class RankExchange:
    """Gathers values of all ranks on the host, without waiting for a device.

    Ranks on a single machine use sockets, others a separate gloo group, created on first use. The order relative to the
    model's collectives is therefore free, and trimtab's time limit applies instead of the model's group's.

    Args:
        group: process group of the ranks; None: all ranks.
    """

    has_peers = True

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._timeout_s = time_limit_s()
        self._trouble = ErrorStore(next(_numbers))
        self.num_ranks = dist.get_world_size(group)
        self._of = group
        self._group: dist.ProcessGroup | None = None
        self._mesh: SocketMesh | None = None
        self._put: Callable[[], Gathered] | None = None

    def ask(self, figures: Figures) -> Callable[[], Gathered]:
        self._meet()
        if self._mesh is not None and len(figures) <= WIDEST:
            answer: Callable[[], Gathered] = self._mesh.ask(figures)
        else:
            answer = self._gathering(figures)

        def wait() -> Gathered:
            try:
                return answer()
            except RuntimeError as error:  # a rank is gone or exceeded the time limit
                raise self.failed(error) from error

        return wait

    def _meet(self) -> None:
        if self._group is None:
            self._group = self._connected()
            self._mesh = host_mesh(self._group, self._timeout_s)

    def texts(self, own: str) -> list[str]:
        try:
            self._meet()
            return gather_objects(own, self._group)
        except RuntimeError as error:
            raise self.failed(error) from error

    def _gathering(self, figures: Figures) -> Callable[[], Gathered]:
        own = torch.tensor(list(figures), dtype=torch.float64)
        gathered = [torch.empty_like(own) for _ in range(self.num_ranks)]
        work: dist.Work = dist.all_gather(gathered, own, group=self._group, async_op=True)

        def wait() -> Gathered:
            work.wait()
            return [each.tolist() for each in gathered]

        return wait

    def put(self, figures: Figures) -> None:
        self._put = self.ask(figures)

    def take(self) -> Gathered | None:
        put, self._put = self._put, None
        return None if put is None else put()

    def share(self, figures: Figures) -> Gathered:
        return self.ask(figures)()

    def sum(self, value: Tensor) -> Tensor:
        total = value.detach().clone()
        dist.all_reduce(total, group=self._of)
        return total

    def failed(self, error: BaseException) -> BaseException:
        reason = self._trouble.explained(error)
        self._trouble.tell(reason)
        return reason

    @contextlib.contextmanager
    def explaining(self) -> Iterator[None]:
        """Raise a `RankError` with the lost rank in place of torch's error from a collective; unrelated errors pass."""
        try:
            yield
        except RuntimeError as error:
            reason = self._trouble.explained(error)
            if reason is error:
                raise
            self._trouble.tell(reason)
            raise reason from error

    def attempt(
        self, make: Callable[[], T], topic: str, report: Callable[[Exception | None], str]
    ) -> tuple[T | None, Exception | None, list[str]]:
        """Return the result of `make` or its exception, and the reports of all ranks; a collective.

        Args:
            make: may contain collectives.
            topic: unique name within a job.
            report: returns a text for this rank's exception, or for success (None).

        Raises:
            RankError: another rank ended or sent no answer.
            Exception: of this rank, if another rank waits inside a collective, which ends only with this rank.
        """
        made, failure = None, None
        try:
            with self.explaining():
                made = make()
        except RankError:
            raise
        except Exception as error:
            failure = error
        limit_s = time_limit_s() / 4 if failure else time_limit_s()
        try:
            return made, failure, words_of_all(topic, report(failure), limit_s)
        except (RuntimeError, dist.DistError) as silence:
            cause = failure or silence
            if (reason := self.failed(cause)) is cause:
                raise cause from None
            raise reason from cause

    def recovered(self) -> None:
        self._trouble.recovered()

    def close(self) -> None:
        self._put = None
        if self._mesh is not None:
            self._mesh.close()
        if self._group is not None:
            dist.destroy_process_group(self._group)
        self._group = self._mesh = None

    def _connected(self) -> dist.ProcessGroup:
        ranks = dist.get_process_group_ranks(self._of or dist.group.WORLD)
        limit = timedelta(seconds=self._timeout_s)
        # Only for part of the ranks: local synchronisation names a group after its members, so that a second group of
        # all ranks would have the same name.
        is_part = len(ranks) < dist.get_world_size()
        made: dist.ProcessGroup = dist.new_group(ranks, limit, "gloo", use_local_synchronization=is_part)
        return made
