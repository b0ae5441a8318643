"""Times on a device: synchronized calls, stamps of steps, overhead, page faults; and asynchronous copies of scalars."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import math
import mmap
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

try:
    import resource
except ImportError:  # not on Windows
    resource = None  # type: ignore[assignment]

_Stamp = float | torch.cuda.Event


class OverheadTimer:
    """Timer of the overhead that measuring adds to a step, on the host and in the CUDA stream.

    `host_s` counts host seconds during the measured work, `outside_s` before and after it.
    """

    def __init__(self) -> None:
        self.host_s = self.outside_s = 0.0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._marks: list[tuple[float, int]] = []

    @contextlib.contextmanager
    def span(self, device: torch.device) -> Iterator[None]:
        """Time the context as overhead, on the host and in the device's stream."""
        start, begin = time.perf_counter(), stamp(device)
        try:
            yield
        finally:
            end = stamp(device)
            if begin is not None and end is not None:
                self._events.append((begin, end))
            self.host_s += time.perf_counter() - start

    def read(self) -> float:
        """Return the total overhead in seconds: the larger of host and device time. Waits for the device."""
        return max(self.host_s + self.outside_s, self._device_s())

    def mark(self) -> None:
        """Save the current overhead."""
        self._marks.append((self.host_s, len(self._events)))

    def amid(self, since: int | None = None) -> float:
        """Return the slow-down of the measured work in seconds, by the device's clock if there is one.

        None for `since` gives the total; else the time from a mark to the last mark.
        """
        if since is None:
            return self._device_s() if self._events else self.host_s
        (start_s, start), (end_s, end) = self._marks[since], self._marks[-1]
        return self._device_s(slice(start, end)) if self._events else end_s - start_s

    def _device_s(self, which: slice = slice(None)) -> float:
        if self._events:
            self._events[-1][1].synchronize()
        milliseconds: float = sum(begin.elapsed_time(end) for begin, end in self._events[which])
        return milliseconds / 1e3


def stamp(device: torch.device) -> torch.cuda.Event | None:
    """Record and return an event in the device's current stream; None for a device other than CUDA."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


@dataclass(frozen=True)
class StepSeconds:
    """Seconds of every loader batch but the last, of the window up to the end of the step, and for drawing batches."""

    batch_s: tuple[float, ...]
    window_s: float
    drawing_s: float


class StepTimer:
    """Time stamps of a window; on CUDA, events that are read later."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stamps: list[_Stamp] = []
        self._aside: list[_Stamp] = []
        self._drawing: list[_Stamp] = []

    @contextlib.contextmanager
    def drawing(self) -> Iterator[None]:
        """Time the drawing of the next window's batches."""
        start = self._now()
        yield
        self._drawing = [start, self._now()]

    def open(self) -> None:
        """Mark the start of a window."""
        self._stamps, self._aside = [self._now()], []

    def begin(self) -> None:
        """Mark the start of a loader batch."""
        self._stamps.append(self._now())

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Exclude the time inside the context from the window."""
        self._aside = [self._now()]
        yield
        self._aside.append(self._now())

    def drop(self) -> None:
        """Discard the stamps of a skipped or unmeasured window."""
        self._stamps, self._aside, self._drawing = [], [], []

    def end(self) -> StepTimeStamps:
        """Mark the end of the step, and return the stamps for later reading."""
        found = StepTimeStamps([*self._stamps, self._now()], self._aside, self._drawing)
        self.drop()
        return found

    def _now(self) -> _Stamp:
        event = stamp(self._device)
        return time.perf_counter() if event is None else event


class StepTimeStamps:
    """Time stamps of a completed window."""

    def __init__(self, stamps: list[_Stamp], *others: list[_Stamp]) -> None:
        self._stamps, self._others = stamps, others

    def wait(self) -> None:
        """Wait for the end of the window on the device."""
        wait_for(self._stamps[-1])

    def read(self) -> StepSeconds:
        """Return the times; waits only for the end of this window."""
        self.wait()
        each = [seconds_between(before, after) for before, after in itertools.pairwise(self._stamps)]
        aside_s, drawing_s = (seconds_between(*both) if both else 0.0 for both in self._others)
        return StepSeconds(tuple(each[1:-1]), sum(each) - aside_s, drawing_s)


def wait_for(stamp: _Stamp) -> None:
    """Wait until the device has passed a time stamp."""
    if isinstance(stamp, torch.cuda.Event):
        stamp.synchronize()


def seconds_between(before: Any, after: Any) -> float:
    """Return the seconds between two time stamps of the same clock. Events must have completed."""
    if isinstance(before, torch.cuda.Event):
        return float(before.elapsed_time(after)) / 1e3
    return float(after - before)


class AsyncScalar:
    """Asynchronous host copy of a small tensor (pinned memory, non-blocking)."""

    def __init__(self, values: Tensor) -> None:
        self._host, self._arrived = values.detach(), None
        if values.is_cuda:
            self._host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._host.copy_(values.detach(), non_blocking=True)
            self._arrived = stamp(values.device)

    def read(self) -> list[float]:
        """Return the values. Waits only for the copy, not for later work on the device."""
        if self._arrived is not None:
            self._arrived.synchronize()
        values: list[float] = self._host.double().reshape(-1).tolist()
        return values


def synchronize(device: torch.device) -> None:
    """Wait for all queued work of a CUDA device; no effect on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# Clock of timed calls. Beside other processes the wall clock counts their work too.

LOADED = 0.8  # A smaller fraction of a processor per thread means that other processes need the processors.
_PROBES, _PROBE_S, _PROBED_BYTES, _PROBE_KEPT_S = 3, 0.04, 2**22, 10.0
_probed: tuple[int, float, float] | None = None  # Threads, time and result of the last probe.
_timed_threads = 0  # Number of threads while calls are timed by processor time; 0 for the wall clock.


def processor_fraction(num_threads: int) -> float:
    """Return the fraction of a processor that each of several threads gets: 1 on an idle machine.

    The median of `_PROBES` measurements of computing threads; kept for `_PROBE_KEPT_S` seconds.
    """
    global _probed
    if _probed is None or _probed[0] != num_threads or time.monotonic() - _probed[1] > _PROBE_KEPT_S:
        fraction = statistics.median(_probed_fraction(num_threads) for _ in range(_PROBES))
        _probed = num_threads, time.monotonic(), fraction
    return _probed[2]


def _probed_fraction(num_threads: int) -> float:
    fractions: list[float] = []
    data = bytes(_PROBED_BYTES)

    def compute() -> None:
        start, start_cpu = time.perf_counter(), time.thread_time()
        while (taken_s := time.perf_counter() - start) < _PROBE_S:
            hashlib.sha256(data).digest()  # Runs without Python's global lock.
        fractions.append((time.thread_time() - start_cpu) / taken_s)

    threads = [threading.Thread(target=compute) for _ in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return min(1.0, statistics.fmean(fractions))


@contextlib.contextmanager
def loaded_machine_clock(device: torch.device) -> Iterator[float | None]:
    """Time calls on a CPU by processor time, on the free threads, while other processes load the machine.

    A thread that has to wait for a processor holds up all others at the end of every parallel operation, so that a step
    takes many times its usual seconds. Yields the fraction of a processor per thread; None if the machine is idle, or
    for another device, where nothing changes.
    """
    global _timed_threads  # A process has one clock; planning sessions wait for each other.
    threads = torch.get_num_threads()
    fraction = processor_fraction(threads) if device.type == "cpu" and _timed_threads == 0 else 1.0
    if fraction >= LOADED:
        yield None
        return
    _timed_threads = max(1, int(fraction * threads))
    try:
        torch.set_num_threads(_timed_threads)
        yield fraction
    finally:
        _timed_threads = 0
        torch.set_num_threads(threads)


def load_began(device: torch.device) -> bool:
    """Return True if other processes load the machine while calls on this CPU are timed by the wall clock."""
    return device.type == "cpu" and _timed_threads == 0 and processor_fraction(torch.get_num_threads()) < LOADED


def is_timed_by_processor() -> bool:
    """Return True while calls are timed by processor time."""
    return _timed_threads > 0


def clock_s() -> float:
    """Return the clock of timed calls in seconds: wall-clock time, or processor time per thread on a loaded machine."""
    return time.process_time() / _timed_threads if _timed_threads else time.perf_counter()


def time_call(function: Callable[[], object], device: torch.device, repeats: int = 1) -> float:
    """Return the mean seconds per call over `repeats` consecutive calls, by the clock of timed calls."""
    synchronize(device)
    start = clock_s()
    for _ in range(repeats):
        function()
    synchronize(device)
    return (clock_s() - start) / repeats


_AGREE = 0.1  # Relative difference of the two shortest calls at which the least time is known.
_FEWEST_CALLS, _MOST_CALLS, _LONGEST_S = 3, 200, 1.0


def least_seconds(function: Callable[[], object], device: torch.device) -> float:
    """Return the least seconds of a call, repeated until the two shortest calls agree within a tenth.

    Other processes add time to a call and never remove time. A call that was interrupted once can take a thousand
    times as long, so a single timing is unreliable on a busy machine. Ends after a second, but not before three calls.
    """
    times: list[float] = []
    begin = time.perf_counter()
    while len(times) < _MOST_CALLS:
        times.append(time_call(function, device))
        best = sorted(times)[:2]
        if len(times) >= _FEWEST_CALLS and best[1] <= (1 + _AGREE) * best[0]:
            break
        if len(times) >= _FEWEST_CALLS and time.perf_counter() - begin > _LONGEST_S:
            break
    return min(times)


class PhaseClock:
    """Seconds by phase (data, forward, backward, optimizer), synchronized at every boundary.

    The synchronization prevents overlap on an accelerator, so phases are measured separately from throughput.
    """

    def __init__(self, device: torch.device) -> None:
        self.seconds: dict[str, float] = {}
        self._device = device

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time of the block to a phase."""
        synchronize(self._device)
        start = clock_s()
        yield
        synchronize(self._device)
        self.seconds[name] = self.seconds.get(name, 0.0) + clock_s() - start


# Cost of returning freed memory to the operating system. Memory obtained again is mapped and zeroed page by page on
# first write. Page faults per step and seconds per page fault predict the gain from keeping freed memory.

_FRESH_BYTES, _FRESH_PROBES = 32 * 2**20, 5
# More page faults than this mean new memory; a growing stack or buffer causes only a few.
_SETTLED, _MOST_ATTEMPTS = 256, 3


def num_faults() -> int | None:
    """Return this process's number of page faults without disk access, or None if the system does not count them."""
    return None if resource is None else int(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)


def time_settled(function: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of a call without new memory; after `_MOST_ATTEMPTS` attempts, those of the last call.

    With freed memory kept, a process still grows in its first steps, until the kept pieces fit. Such steps are not
    representative.
    """
    took_s = math.nan
    for _ in range(_MOST_ATTEMPTS):
        before = num_faults()
        took_s = time_call(function, device)
        after = num_faults()
        if before is None or after is None or after - before < _SETTLED:
            break
    return took_s


@functools.cache
def fault_s() -> float | None:
    """Return the seconds per page fault: first minus second write to fresh memory, plus the release.

    The median of several probes; None if page faults are not counted or the result is not positive.
    """
    try:
        found = [cost for cost in (_probe() for _ in range(_FRESH_PROBES)) if cost is not None]
    except (OSError, ValueError):  # out of memory
        return None
    price = statistics.median(found) if found else 0.0
    return price if price > 0 else None


def _probe() -> float | None:
    before = num_faults()
    if before is None:
        return None
    fresh = mmap.mmap(-1, _FRESH_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # mapped as by the C allocator
    pages = torch.frombuffer(fresh, dtype=torch.float32)  # written by all threads, as operators do
    times = [clock_s()]
    for _ in range(2):
        pages.fill_(1.0)
        times.append(clock_s())
    after = num_faults()
    del pages
    fresh.close()
    times.append(clock_s())
    first, second, freed = (later - earlier for earlier, later in itertools.pairwise(times))
    return None if after is None or after <= before else (first - second + freed) / (after - before)
