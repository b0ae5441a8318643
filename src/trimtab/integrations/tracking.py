"""A record whose lines also go to experiment trackers, asynchronously: trackers can neither delay nor damage it."""

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

from trimtab.core import validation
from trimtab.core.errors import ValueGivenError
from trimtab.core.record import End, Event, Header, Line, RecordWriter, StepRecord
from trimtab.distributed.process_group import job_position
from trimtab.integrations.trackers import CUT_OFF, Tracker, parameters, row

CAPACITY_LINES = 2000  # Forty times the number of lines that a run writes at once.
WAIT_S = 10.0
_LINES_AT_ONCE = 100


class TrackedRecord(RecordWriter):
    """A `RecordWriter` that also sends lines to trackers, each with its own queue and daemon thread.

    Trackers run only on rank 0 and only in the process that created them, not in forks. Lines that a slow tracker does
    not take are dropped and counted. A tracker that raises is not called again. Both cases are recorded once as an
    event "tracker" with the code "tracker.raised", "tracker.timeout" or "tracker.slow", and warned of when the record
    is closed.

    Args:
        path: as in `RecordWriter`.
        header: as in `RecordWriter`.
        trackers: the trackers.
        continues: as in `RecordWriter`.
        capacity: largest number of lines waiting for a tracker; further lines are dropped.
        wait_s: time limit of `close` in seconds, for all trackers together to take the remaining lines.

    Raises:
        ValueGivenError: an invalid tracker, or a number out of range; no file was created.
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
        capacity = validation.integer("capacity", capacity)
        self._wait_s = validation.number("wait_s", wait_s, low=0)
        self._process, self._step, self._reason = os.getpid(), 0, CUT_OFF
        self._feeds: tuple[TrackerQueue, ...] = ()
        self._errors: dict[TrackerQueue, str] = {}
        super().__init__(path, header, continues=continues)
        if _rank() == 0:
            self._feeds = tuple(TrackerQueue(each, header, capacity) for each in given)
        if self._feeds:  # A hanging thread keeps objects alive, so that an unclosed file would not be flushed.
            weakref.finalize(self, self._file.close)

    def write(self, line: Line) -> None:
        """Append a line to the file and offer it to the trackers."""
        if isinstance(line, Header) or not self._feeds or os.getpid() != self._process:
            super().write(line)
            return
        if not self.is_open_ended:
            for feed in self._feeds:
                self._note(feed, "tracker.raised", feed.failure)
        super().write(line)
        self._follow(line)

    def _follow(self, line: Line) -> None:
        match line:
            case End(reason=reason):  # Sent by `close`, since the owner may still write.
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

    def _note(self, feed: TrackerQueue, code: str, error: str) -> None:
        if not error or feed in self._errors:
            return
        self._errors[feed] = error
        if not self.is_open_ended:  # An open-ended file holds lines of an earlier run, which this event would replace.
            super().write(Event("tracker", self._step, {"tracker": feed.name, "code": code, "error": error}))

    def close(self) -> None:
        """Wait up to `wait_s` for trackers to take the remaining lines, then close the file; may be called twice.

        Warns:
            RuntimeWarning: for each tracker that failed or lost lines, after closing the file.
        """
        feeds, self._feeds = self._feeds, ()
        try:
            if feeds and os.getpid() == self._process:
                self._leave(feeds)
        finally:
            super().close()
        errors, self._errors = self._errors, {}
        for feed, error in errors.items():
            lost = f"The tracker missed {feed.num_lost} of {feed.num_offered} lines; the record has all lines."
            warnings.warn(f"Tracker {feed.name} failed: {error}. {lost}", RuntimeWarning, stacklevel=2)

    def _leave(self, feeds: tuple[TrackerQueue, ...]) -> None:
        try:
            self.flush()  # Written lines are safe, whatever interrupts the wait.
        finally:  # Even with a full disk, trackers must receive the end of the run.
            deadline = time.monotonic() + self._wait_s
            for feed in feeds:
                feed.end(self._reason)
            for feed in feeds:
                feed.wait(deadline)
        for feed in feeds:
            self._note(feed, "tracker.raised", feed.failure)
            if feed.is_running:
                self._note(feed, "tracker.timeout", f"not finished {self._wait_s:g} s after the end of the run")
            elif feed.num_lost:
                self._note(feed, "tracker.slow", "slower than the run")


class TrackerQueue:
    """Queue and thread of one tracker. A single other thread may offer lines; only `wait` blocks.

    Attributes:
        failure: error raised by the tracker, or "".
        num_offered: number of lines offered.
    """

    def __init__(self, tracker: Tracker, header: Header, capacity: int) -> None:
        self.name, self.failure = type(tracker).__name__, ""
        self.num_offered = self._num_sent = 0
        self._tracker, self._header, self._capacity = tracker, header, capacity
        # One extra place, so that the end reason always fits.
        self._queue: queue.Queue[tuple[int, Line] | str] = queue.Queue(capacity + 1)
        self._thread = threading.Thread(target=self._run, name=f"trimtab-{self.name}", daemon=True)
        self._thread.start()

    @property
    def num_lost(self) -> int:
        """Number of offered lines that the tracker has not taken."""
        return self.num_offered - self._num_sent

    @property
    def is_running(self) -> bool:
        """True while the tracker is working or hanging."""
        return self._thread.is_alive()

    def offer(self, step: int, line: Line) -> None:
        """Queue a line, or drop it if the queue is full."""
        self.num_offered += 1
        if not self.failure and self._queue.qsize() < self._capacity:
            self._queue.put_nowait((step, line))

    def end(self, reason: str) -> None:
        """Ask the tracker to end after the queued lines; no line may be offered afterwards."""
        self._queue.put_nowait(reason)

    def wait(self, deadline: float) -> None:
        """Wait for the tracker to end, until `time.monotonic()` reaches `deadline`."""
        self._thread.join(max(0.0, deadline - time.monotonic()))

    def _run(self) -> None:
        try:
            self._tracker.begin(self._header.name, parameters(self._header))
            while (reason := self._pass_on()) is None:
                pass
            self._tracker.end(reason)
        except BaseException as error:  # Includes SystemExit, so that no error of a tracker leaves the thread.
            self.failure = _without_secrets(f"{type(error).__name__}: {error}")[:500]

    def _pass_on(self) -> str | None:
        """Send the queued lines, waiting for at least one; return the end reason once reached, else None."""
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
        expected = "a list of trackers (objects with the methods begin, log and end)"
        raise ValueGivenError("trackers", got=f"{trackers!r:.80}", expected=expected, code="tracker.invalid")
    return given


def _rank() -> int:
    """Return this process's rank in its process group, or as set by a launcher."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else job_position().rank


def _without_secrets(text: str) -> str:
    """Return an error's text without user names and passwords in URLs."""
    return re.sub(r"//[^/\s@]+@", "//***@", text)
