"""Cost of returning freed memory to the operating system: page faults per step, and seconds per page fault.

Memory obtained again is mapped and zeroed page by page on first write. Both figures are cheap to measure and predict
the gain from keeping freed memory. The number of faults depends on the state of this process.
"""

from __future__ import annotations

import functools
import itertools
import math
import mmap
import statistics
from collections.abc import Callable

import torch

from trimtab.measure.timing import clock_s, time_call

try:
    import resource
except ImportError:  # not on Windows
    resource = None  # type: ignore[assignment]

_PROBE_BYTES = 32 * 2**20
_REPEATS = 5
# More page faults than this mean new memory; a growing stack or buffer causes only a few.
_SETTLED, _MOST_CALLS = 256, 3


def num_faults() -> int | None:
    """Return this process's number of page faults without disk access, or None if the system does not count them."""
    return None if resource is None else int(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)


def time_settled(function: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of a call without new memory; after `_MOST_CALLS` attempts, those of the last call.

    With freed memory kept, a process still grows in its first steps, until the kept pieces fit. Such steps are not
    representative.
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
    """Return the seconds per page fault: first minus second write to fresh memory, plus the release.

    The median of several probes; None if page faults are not counted or the result is not positive.
    """
    try:
        found = [cost for cost in (_probe() for _ in range(_REPEATS)) if cost is not None]
    except (OSError, ValueError):  # out of memory
        return None
    price = statistics.median(found) if found else 0.0
    return price if price > 0 else None


def _probe() -> float | None:
    before = num_faults()
    if before is None:
        return None
    fresh = mmap.mmap(-1, _PROBE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # mapped as by the C allocator
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
