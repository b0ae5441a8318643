"""A record that trackers follow: each line is in the file first, and a tracker can neither hold it up nor harm it."""

from __future__ import annotations

import contextlib
import os
import queue
import re
import threading
import time
import warnings
import weakref
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch.distributed as dist

from trimtab.core import checks
from trimtab.core.errors import ValueGivenError
from trimtab.core.record import End, Event, Header, Line, RecordWriter, StepRecord
from trimtab.distributed.process_group import place
from trimtab.integrations.tracked_values import parameters, row
from trimtab.integrations.trackers import CUT_OFF, Tracker

CAPACITY_LINES = 2000  # forty times what a run hands over at once
WAIT_S = 10.0
_LINES_AT_ONCE = 100


class TrackedRecord(RecordWriter):
    """A `RecordWriter` whose lines also go to trackers, by a queue and a daemon thread of each.

    Only rank 0 tracks, and only the process that made it, not one forked from it. What a tracker does not take is
    dropped and counted. One that raises is called no more. Either is noted once as an event "tracker", and warned of
    when the record is closed.

    Args:
        path, header, continues: as in `RecordWriter`.
        trackers: where to send lines too.
        capacity: lines that may wait for a tracker; further ones are dropped.
        wait_s: how long `close` waits at most, for all trackers together, until they have taken what is left.

    Raises:
        ValueGivenError: something is no tracker, or a number is out of range; no file was made.
    """

    def __init__(
        self,
        path: str | Path,
        header: Header,
        trackers: Iterable[Tracker],
        *,
        continues: bool = False,
        capacity: int = CAPACITY_LINES,
        wait_s: float = WAIT_S,
    ) -> None:
        given = _checked(trackers)
        capacity = checks.integer("capacity", capacity)
        self._wait_s = checks.number("wait_s", wait_s, low=0)
        self._process, self._step, self._reason = os.getpid(), 0, CUT_OFF
        self._feeds: tuple[Feed, ...] = ()
        self._troubles: dict[Feed, str] = {}
        super().__init__(path, header, continues=continues)
        if _rank() == 0:
            self._feeds = tuple(Feed(each, header, capacity) for each in given)
        if self._feeds:  # a thread that hangs keeps what it sees alive: a file that nobody closed would not be flushed
            weakref.finalize(self, self._file.close)

    def write(self, line: Line) -> None:
        """Append one line to the file, and offer it to the trackers."""
        if isinstance(line, Header) or not self._feeds or os.getpid() != self._process:
            super().write(line)
            return
        if not self._is_open_ended:
            for feed in self._feeds:
                self._note(feed, feed.failure)
        super().write(line)
        self._follow(line)

    def _follow(self, line: Line) -> None:
        match line:
            case End(reason=reason):  # sent on closing: its owner may still write
                self._reason = reason
                return
            case StepRecord(index=index):
                step, self._step = index, index + 1
            case Event():
                step = self._step = max(self._step, line.step)
            case _:
                step = self._step
        for feed in self._feeds:
            feed.offer(step, line)

    def _note(self, feed: Feed, trouble: str) -> None:
        if not trouble or feed in self._troubles:
            return
        self._troubles[feed] = trouble
        if not self._is_open_ended:  # else it holds an earlier run's lines, which this one would replace
            super().write(Event("tracker", self._step, {"tracker": feed.name, "trouble": trouble}))

    def close(self) -> None:
        """Let trackers take what is left, for so many seconds, and close the file; may be called twice.

        Warns:
            RuntimeWarning: of each tracker that failed or lost lines, once the file is closed.
        """
        feeds, self._feeds = self._feeds, ()
        try:
            if feeds and os.getpid() == self._process:
                self._leave(feeds)
        finally:
            super().close()
        troubles, self._troubles = self._troubles, {}
        for feed, trouble in troubles.items():
            lost = f"it did not take {feed.num_lost} of {feed.num_offered} lines, which are in the record"
            warnings.warn(f"{feed.name}: {trouble}; {lost}", RuntimeWarning, stacklevel=2)

    def _leave(self, feeds: tuple[Feed, ...]) -> None:
        try:
            self.flush()  # what was written is safe, whatever ends the wait
        finally:  # a tracker that is not told of the end would be cut off, and a full disk is no reason for that
            deadline = time.monotonic() + self._wait_s
            for feed in feeds:
                feed.end(self._reason)
            for feed in feeds:
                feed.wait(deadline)
        for feed in feeds:
            late = f"it had not ended after {self._wait_s:g} s" if feed.is_running else ""
            slow = "it was slower than the run" if feed.num_lost else ""
            self._note(feed, feed.failure or late or slow)


class Feed:
    """One tracker's queue and thread. One other thread may offer lines; it never waits, except in `wait`.

    Attributes:
        failure: what the tracker raised, or "". num_offered: lines so far.
    """

    def __init__(self, tracker: Tracker, header: Header, capacity: int) -> None:
        self.name, self.failure = type(tracker).__name__, ""
        self.num_offered = self._num_sent = 0
        self._tracker, self._header, self._capacity = tracker, header, capacity
        # One place more than lines may take: it is for the reason of the end, which always fits.
        self._queue: queue.Queue[tuple[int, Line] | str] = queue.Queue(capacity + 1)
        self._thread = threading.Thread(target=self._run, name=f"trimtab-{self.name}", daemon=True)
        self._thread.start()

    @property
    def num_lost(self) -> int:
        """Lines that were offered, and that the tracker has not taken."""
        return self.num_offered - self._num_sent

    @property
    def is_running(self) -> bool:
        """Whether the tracker has more to do, or hangs."""
        return self._thread.is_alive()

    def offer(self, step: int, line: Line) -> None:
        """Queue a line for the tracker, or drop it where too many wait."""
        self.num_offered += 1
        if not self.failure and self._queue.qsize() < self._capacity:
            self._queue.put_nowait((step, line))

    def end(self, reason: str) -> None:
        """Ask the tracker to end once it has taken what waits; nothing is offered after this."""
        self._queue.put_nowait(reason)

    def wait(self, deadline: float) -> None:
        """Wait for the tracker's end, until `time.monotonic()` is this."""
        self._thread.join(max(0.0, deadline - time.monotonic()))

    def _run(self) -> None:
        try:
            self._tracker.begin(self._header.name, parameters(self._header))
            while (reason := self._pass_on()) is None:
                pass
            self._tracker.end(reason)
        except BaseException as error:  # SystemExit too: whatever a tracker raises ends here
            self.failure = _without_secrets(f"{type(error).__name__}: {error}")[:500]

    def _pass_on(self) -> str | None:
        """Send what waits, one line at least; returns the reason of the end once that is reached."""
        waiting = [self._queue.get(), *self._at_hand()]
        if rows := [row(*each) for each in waiting if isinstance(each, tuple)]:
            self._tracker.log(rows)
            self._num_sent += len(rows)
        last = waiting[-1]
        return last if isinstance(last, str) else None

    def _at_hand(self) -> Iterator[tuple[int, Line] | str]:
        with contextlib.suppress(queue.Empty):
            for _ in range(_LINES_AT_ONCE - 1):
                yield self._queue.get_nowait()


def _checked(trackers: object) -> tuple[Tracker, ...]:
    given = tuple(trackers) if isinstance(trackers, Iterable) else (trackers,)
    are_trackers = all(isinstance(each, Tracker) and not isinstance(each, type) for each in given)
    if not are_trackers or not isinstance(trackers, Iterable):
        expected = "a list of trackers, each with begin, log and end"
        raise ValueGivenError("trackers", given=f"{trackers!r:.80}", expected=expected)
    return given


def _rank() -> int:
    """Return this process's rank, of its group where it has joined one, else as a launcher says."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else place().rank


def _without_secrets(text: str) -> str:
    """Return an error's text without the user and password that an address in it may hold."""
    return re.sub(r"//[^/\s@]+@", "//***@", text)
