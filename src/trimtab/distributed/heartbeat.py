"""Heartbeats in the job's store: work of any length is awaited while its rank is alive, and a dead rank is detected."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_BEAT_S = 2.0
_SOONEST_S, _LATEST_S = 0.001, 0.25  # seconds between two polls, increasing with the waiting time
_HEAR_S = 4 * _LATEST_S
# Keys written by this rank with their number of readers, per store; weak, because a store must be free to end.
_written: weakref.WeakKeyDictionary[Store, list[tuple[str, int]]] = weakref.WeakKeyDictionary()


class HeartbeatTimeout(Exception):
    """No heartbeat within the time limit."""


@contextlib.contextmanager
def send_heartbeats(store: Store, key: str, limit_s: float) -> Iterator[None]:
    """Increment a heartbeat counter while the block runs, several times per time limit.

    Args:
        store: store of the job.
        key: key awaited by the readers.
        limit_s: time limit of the readers.
    """
    is_over = threading.Event()

    def beat() -> None:
        with contextlib.suppress(RuntimeError):  # a lost store raises at the next write of the caller
            while not is_over.wait(min(_BEAT_S, limit_s / 4)):
                store.add(_beats(key), 1)

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
        store: store of the job.
        key: key to wait for.
        limit_s: maximum seconds between two heartbeats.

    Raises:
        Silence: no heartbeat within the limit, or the store is gone.
    """
    news: queue.SimpleQueue[str | RuntimeError | None] = queue.SimpleQueue()
    is_over = threading.Event()
    # In a thread, because a store in a stopped process does not even return a timeout.
    threading.Thread(target=_look, args=(store, key, news, is_over), name="trimtab listener", daemon=True).start()
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


def _look(store: Store, key: str, news: queue.SimpleQueue[str | RuntimeError | None], is_over: threading.Event) -> None:
    """Put the value once found, None for every new heartbeat, or an error of the store."""
    wait_s, last = _SOONEST_S, -1
    try:
        while not is_over.is_set():
            if store.check([key]):
                found = store.get(key).decode()
                with contextlib.suppress(RuntimeError):
                    store.add(_heard(key), 1)
                news.put(found)
                return
            if (count := store.add(_beats(key), 0)) != last:
                last = count
                news.put(None)
            time.sleep(wait_s)
            wait_s = min(2 * wait_s, _LATEST_S)
    except RuntimeError as error:
        news.put(error)


def write_value(store: Store, key: str, text: str, readers: int) -> None:
    """Write a value for a number of readers, and delete earlier values that all readers have fetched."""
    store.set(key, text)
    before = _written.get(store, [])
    _written[store] = [each for each in before if not _is_removed(store, *each)] + [(key, readers)]


def _is_removed(store: Store, key: str, readers: int) -> bool:
    """Delete a key if all readers have fetched it; return True if deleted."""
    if store.add(_heard(key), 0) < readers:
        return False
    for each in (key, _beats(key), _heard(key)):
        store.delete_key(each)
    return True


def last_words(store: Store, key: str, text: str, others: int) -> None:
    """Write a value, and wait briefly for its readers, because the store may end with this process."""
    end = time.monotonic() + _HEAR_S
    with contextlib.suppress(RuntimeError):  # Without a store there are no readers.
        store.set(key, text)
        while store.add(_heard(key), 0) < others and time.monotonic() < end:
            time.sleep(_SOONEST_S)


def _heard(key: str) -> str:
    return f"{key}/heard"


def _beats(key: str) -> str:
    return f"{key}/beats"
