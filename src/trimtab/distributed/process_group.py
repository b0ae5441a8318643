"""Process group of a launched job: joined from environment variables, with trimtab's time limit."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import queue
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist

from trimtab.core import validation
from trimtab.core.errors import RankError, ValueGivenError
from trimtab.distributed.launch import rank_lost, ranks_failed

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

T = TypeVar("T")

# Seconds after which an awaited rank counts as dead. torch's defaults are 10 and 30 minutes.
TIMEOUT_S = 60.0
# Additional seconds for NCCL, which aborts the process without a message: trimtab's own error should come first.
_AFTER_S = 30.0
ENVIRONMENT = "ranks.environment"  # code of errors in variables set by launchers
_BEAT_S = 2.0  # between two heartbeats, in long time limits
_SOONEST_S, _LATEST_S = 0.001, 0.25  # seconds between two polls, increasing with the waiting time
_HEAR_S = 4 * _LATEST_S
# Keys written by this rank with their number of readers, per store; weak, because a store must be free to end.
_written: weakref.WeakKeyDictionary[Store, list[tuple[str, int]]] = weakref.WeakKeyDictionary()
_numbers = itertools.count()  # the same on all ranks, because they call in the same order
_is_apart = False
_joined_s: float | None = None
_has_joined = False
# Variables for rank, world size and local rank, by launcher.
_LAUNCHERS = {
    "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
    # The size of an srun step, not of the job: a script run by sbatch is a single process.
    "SLURM": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"),
}


@dataclass(frozen=True)
class JobPosition:
    """Position of this process in its job."""

    rank: int = 0
    num_ranks: int = 1
    local_rank: int = 0


def job_position(environment: Mapping[str, str] | None = None) -> JobPosition:
    """Return this process's position by launcher variables, else rank 0 of 1; `ValueGivenError` if they are invalid."""
    variables = os.environ if environment is None else environment
    for rank, number, local in _LAUNCHERS.values():
        if rank in variables and number in variables:
            found = JobPosition(*(_number(name, variables.get(name, "0")) for name in (rank, number, local)))
            if found.rank >= found.num_ranks:
                problem = f"{rank}={found.rank} is not below {number}={found.num_ranks}."
                hint = "Start the ranks with torchrun or srun, which set both variables."
                raise ValueGivenError(rank, problem=problem, hint=hint, code=ENVIRONMENT)
            return found
    return JobPosition()


def is_launched(environment: Mapping[str, str] | None = None) -> bool:
    """Return True if a launcher started this process, even as the only rank."""
    variables = os.environ if environment is None else environment
    return any(rank in variables and number in variables for rank, number, _ in _LAUNCHERS.values())


@contextlib.contextmanager
def process_group(timeout_s: float | None = None) -> Iterator[JobPosition]:
    """Join the job's process group inside the block: gloo for CPU tensors, NCCL for CUDA, one device per rank.

    Does nothing without a launcher. An existing process group is kept; the time limit then applies to trimtab's own
    communication, not to collectives of the existing group.

    Args:
        timeout_s: seconds after which an awaited rank counts as dead; default: 60, or the value of the enclosing block.
    """
    found = job_position()
    limit_s = time_limit_s() if timeout_s is None else validation.number("timeout_s", timeout_s, low=0, open_low=True)
    if found.num_ranks == 1 or dist.is_initialized():
        with limited_to(limit_s):
            yield found
        return
    _require_meeting_point()
    if torch.cuda.is_available():
        torch.cuda.set_device(found.local_rank % torch.cuda.device_count())
    names = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    limit = timedelta(seconds=limit_s + (_AFTER_S if "nccl" in names else 0.0))
    dist.init_process_group(names, rank=found.rank, world_size=found.num_ranks, timeout=limit)
    global _has_joined
    _has_joined = dist.is_initialized()
    try:
        if "nccl" in names:
            limit_host(limit_s)
        with limited_to(limit_s):
            yield found
    except BaseException:
        # NCCL would otherwise wait for collectives of a lost rank.
        abort = getattr(dist.distributed_c10d, "_abort_process_group", None)
        (abort if abort is not None and "nccl" in backends().values() else dist.destroy_process_group)()
        raise
    dist.destroy_process_group()


def limit_host(seconds: float) -> None:
    """Set the time limit of the world group's CPU backend; the CUDA backend keeps its own."""
    host, world = torch.device("cpu"), dist.group.WORLD
    assert world is not None
    # torch has no public name for either; its own `_set_pg_timeout` would change NCCL's limit too.
    world._get_backend(host)._set_default_timeout(timedelta(seconds=seconds))


def has_joined() -> bool:
    """Return True if `process_group` made this process a rank; gloo's threads may outlive the group."""
    return _has_joined


def backends() -> dict[str, str]:
    """Return the world group's backend by device type: {"cpu": "gloo"}."""
    return dict(each.split(":") for each in dist.get_backend_config().split(","))


def _require_meeting_point() -> None:
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        names = " and ".join(missing)
        raise ValueGivenError(
            names,
            problem=f"This process is a rank of several, but {names} {'is' if len(missing) == 1 else 'are'} not set.",
            hint="Start the ranks with torchrun, which sets the address of rank 0's machine and a free port there. "
            "Before srun, run: export MASTER_ADDR=$(hostname) MASTER_PORT=29500.",
            code=ENVIRONMENT,
        )
    address, port = os.environ["MASTER_ADDR"], _number("MASTER_PORT", os.environ["MASTER_PORT"])
    if not 0 < port < 2**16:
        hint = "Set a free port of rank 0's machine, the same on every rank."
        raise ValueGivenError("MASTER_PORT", got=str(port), expected="from 1 to 65535", hint=hint, code=ENVIRONMENT)
    try:
        socket.getaddrinfo(address, port)  # torch itself would retry for minutes
    except (OSError, UnicodeError) as error:
        problem = f"This machine cannot resolve MASTER_ADDR={address!r} ({error})."
        hint = "Check the spelling and the DNS of this machine, or set the IP address of rank 0's machine."
        raise ValueGivenError("MASTER_ADDR", problem=problem, hint=hint, code=ENVIRONMENT) from error


@contextlib.contextmanager
def limited_to(seconds: float) -> Iterator[None]:
    """Set the time limit for awaited ranks in exchanges that begin inside the block."""
    global _joined_s
    before, _joined_s = _joined_s, seconds
    try:
        yield
    finally:
        _joined_s = before


def time_limit_s() -> float:
    """Return the seconds after which an awaited rank counts as dead."""
    return TIMEOUT_S if _joined_s is None else _joined_s


def _number(name: str, value: str) -> int:
    if not (value.isascii() and value.isdigit()):
        hint = "Start the ranks with torchrun or srun, which set this variable."
        raise ValueGivenError(name, got=repr(value), expected="a whole number", hint=hint, code=ENVIRONMENT)
    return int(value)


def job_store() -> Store:
    """Return the job's store, for messages outside of collectives."""
    found: Store = dist.distributed_c10d._get_default_store()  # torch has no public name for it
    return found


def words_of_all(topic: str, own: str, limit_s: float) -> list[str]:
    """Return a text from every rank through the store, which works while a rank is blocked in a collective.

    Args:
        topic: unique name within a job.

    Raises:
        RuntimeError, dist.DistError: a rank sent nothing within the limit, or the store is gone.
    """
    store, prefix = job_store(), f"trimtab/{topic}"
    store.set(f"{prefix}/{dist.get_rank()}", own)
    keys = [f"{prefix}/{rank}" for rank in range(dist.get_world_size())]
    store.wait(keys, timedelta(seconds=limit_s))
    return [store.get(key).decode() for key in keys]


def total(value: float) -> float:
    """Return the sum of a number over ranks; a collective."""
    return _reduced(value, dist.ReduceOp.SUM)


def max_over_ranks(seconds: float) -> float:
    """Return the maximum of a number over ranks; a collective."""
    return _reduced(seconds, dist.ReduceOp.MAX)


def _reduced(value: float, op: Any) -> float:
    if not (dist.is_available() and dist.is_initialized()):
        return value
    kinds = backends()  # A process group of the loop may lack the CPU.
    found = torch.tensor(value, dtype=torch.float64, device="cpu" if "cpu" in kinds else next(iter(kinds)))
    dist.all_reduce(found, op=op)
    return float(found)


def is_first_rank() -> bool:
    """Return True for rank 0, and without a process group."""
    return not (dist.is_available() and dist.is_initialized() and dist.get_rank())


def has_peers() -> bool:
    """Return True if this process is a rank of several."""
    return bool(dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1)


def gather_objects(own: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Return a picklable value of every rank, by rank; a collective."""
    if not has_peers():
        return [own]
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, own, group=group)
    return found


def is_apart() -> bool:
    """Return True while all ranks wait for this rank; collectives are then forbidden."""
    return _is_apart


def from_first(make: Callable[[], str], topic: str = "") -> str:
    """Return the result of `make` on rank 0 to all ranks; the wait lasts as long as rank 0 sends heartbeats.

    Args:
        topic: unique name within a job; without a topic, all ranks must call in the same order.

    Raises:
        RankError: on the remaining ranks: rank 0 failed, or sent no heartbeat within the time limit.
    """
    if not has_peers():
        return make()
    global _is_apart
    store, key = job_store(), f"trimtab/from_first/{topic or next(_numbers)}"
    if dist.get_rank() == 0:
        try:
            with send_heartbeats(store, key, time_limit_s()):
                _is_apart = True
                made = make()
        except BaseException as error:
            _last_words(store, key, f"!{type(error).__name__}: {error}")
            raise
        finally:
            _is_apart = False
        _write_value(store, key, "=" + made, dist.get_world_size() - 1)
        return made
    try:
        found = await_value(store, key, time_limit_s())
    except HeartbeatTimeout as silence:
        lost = rank_lost(0, str(silence))
        raise (lost if dist.get_rank() == 1 else lost.echoed()) from silence
    if found[0] == "!":
        raise ranks_failed({0: found[1:]})
    return found[1:]


def first_ended_by(error: RankError, kind: type[Exception]) -> bool:
    """Return True if the error reports an exception of a class, raised on rank 0 in `from_first`."""
    return 0 in error.ranks and error.cause == kind.__name__


def words_at_work(make: Callable[[], str], topic: str) -> list[str]:
    """Return the results of `make` of all ranks; waits for the slowest.

    Works of any length are awaited, as in `from_first`. Rank 0 collects and redistributes the results, so store traffic
    grows linearly with the number of ranks.

    Raises:
        RankError: a rank failed, or sent no heartbeat within the time limit.
    """
    store, limit_s, rank = job_store(), time_limit_s(), dist.get_rank()
    keys = [f"trimtab/at_work/{topic}/{each}" for each in range(dist.get_world_size())]

    def all_said() -> str:
        own = make()
        return json.dumps([own, *(_word_of(store, each, keys[each], limit_s) for each in range(1, len(keys)))])

    if rank:
        with send_heartbeats(store, keys[rank], limit_s):
            own = make()
        _write_value(store, keys[rank], own, readers=1)
    return list(json.loads(from_first(all_said, topic)))


def _word_of(store: Store, rank: int, key: str, limit_s: float) -> str:
    try:
        return await_value(store, key, limit_s)
    except HeartbeatTimeout as silence:
        raise rank_lost(rank, str(silence)) from silence


# Heartbeats in the job's store: work of any length is awaited while its rank is alive, and a dead rank is detected.


class HeartbeatTimeout(Exception):
    """No heartbeat within the time limit."""


@contextlib.contextmanager
def send_heartbeats(store: Store, key: str, limit_s: float) -> Iterator[None]:
    """Increment a heartbeat counter while the block runs, several times per time limit.

    Args:
        limit_s: time limit of the readers.
    """
    is_over = threading.Event()

    def beat() -> None:
        with contextlib.suppress(RuntimeError):  # a lost store raises at the next write of the caller
            while not is_over.wait(min(_BEAT_S, limit_s / 4)):
                store.add(f"{key}/beats", 1)

    thread = threading.Thread(target=beat, name="trimtab heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join(limit_s)


def await_value(store: Store, key: str, limit_s: float) -> str:
    """Return the value of a key, waiting as long as its writer sends heartbeats.

    Args:
        limit_s: maximum seconds between two heartbeats.

    Raises:
        HeartbeatTimeout: no heartbeat within the limit, or the store is gone.
    """
    news: queue.SimpleQueue[str | RuntimeError | None] = queue.SimpleQueue()
    is_over = threading.Event()

    def look() -> None:
        """Put the value once found, None for every new heartbeat, or an error of the store."""
        wait_s, last = _SOONEST_S, -1
        try:
            while not is_over.is_set():
                if store.check([key]):
                    news.put(store.get(key).decode())
                    store.add(f"{key}/heard", 1)
                    return
                if (count := store.add(f"{key}/beats", 0)) != last:
                    last = count
                    news.put(None)
                time.sleep(wait_s)
                wait_s = min(2 * wait_s, _LATEST_S)
        except RuntimeError as error:
            news.put(error)

    # In a thread, because a store in a stopped process does not even return a timeout.
    threading.Thread(target=look, name="trimtab listener", daemon=True).start()
    try:
        while (found := news.get(timeout=limit_s)) is None:
            pass
    except queue.Empty:
        raise HeartbeatTimeout(f"no heartbeat for {limit_s:g} s") from None
    finally:
        is_over.set()
    if isinstance(found, RuntimeError):
        raise HeartbeatTimeout("the connection to the job's TCPStore ended") from found
    return found


def _write_value(store: Store, key: str, text: str, readers: int) -> None:
    """Write a value for a number of readers, and delete earlier values that all readers have fetched."""
    store.set(key, text)
    before = _written.get(store, [])
    _written[store] = [each for each in before if not _is_removed(store, *each)] + [(key, readers)]


def _is_removed(store: Store, key: str, readers: int) -> bool:
    """Delete a key if all readers have fetched it; return True if deleted."""
    if store.add(f"{key}/heard", 0) < readers:
        return False
    for each in (key, f"{key}/beats", f"{key}/heard"):
        store.delete_key(each)
    return True


def _last_words(store: Store, key: str, text: str) -> None:
    """Write a value, and wait briefly for its readers, because the store may end with this process."""
    end = time.monotonic() + _HEAR_S
    with contextlib.suppress(RuntimeError):  # Without a store there are no readers.
        store.set(key, text)
        while store.add(f"{key}/heard", 0) < dist.get_world_size() - 1 and time.monotonic() < end:
            time.sleep(_SOONEST_S)
