"""A rank that works while the others wait says that it lives, so that work may take long and a dead rank may not."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
import weakref
from collections.abc import Iterator

import torch.distributed as dist

_BEAT_S = 2.0
_SOONEST_S, _LATEST_S = 0.001, 0.25  # between two looks, which are made less often the longer it takes
_HEAR_S = 4 * _LATEST_S
# What this rank has written, and how many read it; of each job, whose store must be free to end.
_written: weakref.WeakKeyDictionary[dist.Store, list[tuple[str, int]]] = weakref.WeakKeyDictionary()


class Silence(Exception):
    """Nothing was heard for longer than the limit."""


@contextlib.contextmanager
def beating(store: dist.Store, key: str, limit_s: float) -> Iterator[None]:
    """Count a key up every few seconds while the block runs, several times within the limit.

    Args:
        store: that the others look into. key: of what they wait for. limit_s: as they have it.
    """
    is_over = threading.Event()

    def beat() -> None:
        with contextlib.suppress(RuntimeError):  # a store that is gone is found by what the block's end says there
            while not is_over.wait(min(_BEAT_S, limit_s / 4)):
                store.add(_beats(key), 1)

    thread = threading.Thread(target=beat, name="trimtab heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join(limit_s)


def awaited(store: dist.Store, key: str, limit_s: float) -> str:
    """Return what is written under a key, however long it takes, while its writer's heart beats.

    Args:
        limit_s: seconds between two signs of life, at the most.

    Raises:
        Silence: no sign for longer, or the store is gone.
    """
    news: queue.SimpleQueue[str | RuntimeError | None] = queue.SimpleQueue()
    is_over = threading.Event()
    # Apart, as a store that lies in a process that was stopped answers nothing, not even that time is over.
    threading.Thread(target=_look, args=(store, key, news, is_over), name="trimtab listener", daemon=True).start()
    try:
        while (found := news.get(timeout=limit_s)) is None:
            pass
    except queue.Empty:
        raise Silence(f"no sign of life for {limit_s:g} s") from None
    finally:
        is_over.set()
    if isinstance(found, RuntimeError):
        raise Silence("the end of what it talks through") from found
    return found


def _look(
    store: dist.Store, key: str, news: queue.SimpleQueue[str | RuntimeError | None], is_over: threading.Event
) -> None:
    """Put what is written, once; None whenever the count has changed; an error of the store."""
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


def say(store: dist.Store, key: str, text: str, readers: int) -> None:
    """Write under a key what so many ranks await, and remove what was written before and all of them have heard."""
    store.set(key, text)
    before = _written.get(store, [])
    _written[store] = [each for each in before if not _is_removed(store, *each)] + [(key, readers)]


def _is_removed(store: dist.Store, key: str, readers: int) -> bool:
    """Return whether a key is no longer there: nobody who has heard it looks again."""
    if store.add(_heard(key), 0) < readers:
        return False
    for each in (key, _beats(key), _heard(key)):
        store.delete_key(each)
    return True


def last_words(store: dist.Store, key: str, text: str, others: int) -> None:
    """Write under a key, and give so many ranks that look a moment to hear it: the store may end with this process."""
    end = time.monotonic() + _HEAR_S
    with contextlib.suppress(RuntimeError):  # where the store is gone, nobody hears them
        store.set(key, text)
        while store.add(_heard(key), 0) < others and time.monotonic() < end:
            time.sleep(_SOONEST_S)


def _heard(key: str) -> str:
    return f"{key}/heard"


def _beats(key: str) -> str:
    return f"{key}/beats"
