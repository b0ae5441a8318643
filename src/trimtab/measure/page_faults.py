"""What freed memory costs that was handed back to the system: page faults of a step, and seconds of one.

Memory taken from the system again is mapped and cleared page by page when it is first written. Both figures are cheap
to have, and estimate what a step could gain by keeping its memory, before anything is tried. How many faults there are
depends on what else the process holds: they are of this process, now.
"""

from __future__ import annotations

import functools
import itertools
import math
import mmap
import statistics
import time
from collections.abc import Callable

import torch

from trimtab.measure.timing import time_call

try:
    import resource
except ImportError:  # not on Windows
    resource = None  # type: ignore[assignment]

_PROBE_BYTES = 32 * 2**20
_REPEATS = 5
# A call that had this many more asked the system for memory; a thread's stack or a buffer that grew has a few.
_SETTLED, _MOST_CALLS = 256, 3


def num_faults() -> int | None:
    """Return the page faults of this process so far that read nothing from disk; None where nobody counts them."""
    return None if resource is None else int(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)


def time_settled(function: Callable[[], object], device: torch.device) -> float:
    """Return wall-clock seconds of a call that had its memory already; of the last of a few, where none has.

    A process that retains its memory asks for more until what it does next fits what there is in pieces: its first
    steps do, those after them do not. So what is measured of it does not hold a step that did.
    """
    took_s = math.nan
    for _ in range(_MOST_CALLS):
        before = num_faults()
        took_s = time_call(function, device)
        after = num_faults()
        if before is None or after is None or after - before < _SETTLED:
            break
    return took_s


@functools.cache
def fault_s() -> float | None:
    """Return seconds that one page fault costs: fresh memory written for the first time, against the second, and freed.

    The median of a few; None where faults are not counted, or what was measured is no price.
    """
    try:
        found = [cost for cost in (_probe() for _ in range(_REPEATS)) if cost is not None]
    except (OSError, ValueError):  # no memory to be had for it
        return None
    price = statistics.median(found) if found else 0.0
    return price if price > 0 else None


def _probe() -> float | None:
    before = num_faults()
    if before is None:
        return None
    fresh = mmap.mmap(-1, _PROBE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # as the C allocator maps it
    pages = torch.frombuffer(fresh, dtype=torch.float32)  # written by as many threads as operators use
    times = [time.perf_counter()]
    for _ in range(2):
        pages.fill_(1.0)
        times.append(time.perf_counter())
    after = num_faults()
    del pages
    fresh.close()
    times.append(time.perf_counter())
    first, second, freed = (later - earlier for earlier, later in itertools.pairwise(times))
    return None if after is None or after <= before else (first - second + freed) / (after - before)
