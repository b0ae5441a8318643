"""Bandwidth test of a job's link: all-reduces, timed alone and during a computation."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist

from trimtab.core.hardware import LinkCalibration
from trimtab.distributed.ddp import mean_in_bf16
from trimtab.distributed.process_group import backends, max_over_ranks
from trimtab.measure.timing import time_call
from trimtab.planner.communication_cost import fit

# Bytes of the timed all-reduces, from latency-bound to bandwidth-bound.
_SIZES = tuple(2**power for power in (12, 16, 19, 21, 23))
_TIMES, _CAST_BYTES, _SIDE = 5, 2**22, 256
_LONGEST_S = 0.1  # seconds of an all-reduce after which larger sizes are skipped: a slow link is known by then


def calibrate(device: torch.device) -> LinkCalibration:
    """Return the job's link, measured in up to ten seconds; `ValueGivenError` if times describe none. A collective."""
    points = []
    for size in _SIZES:
        whole = torch.zeros(size // 4, device=device)
        points.append((float(size), max_over_ranks(_seconds(partial(dist.all_reduce, whole), device))))
        if points[-1][1] > _LONGEST_S and len(points) >= 3:
            break
    ranks = dist.get_world_size()
    name = backends()[device.type]
    link, miss = fit(points, ranks, f"{name} of {ranks} ranks", scatters=name != "gloo")
    whole = torch.zeros(_CAST_BYTES // 4, device=device)
    cast_s = max_over_ranks(_seconds(lambda: whole.copy_(whole.bfloat16()), device)) / _CAST_BYTES
    # Overhead of the plan's bf16 communication hook for a small bucket, relative to a plain all-reduce.
    bucket = torch.zeros(_SIZES[0] // 4, device=device)
    sent = bucket.bfloat16()
    hooked_s = max_over_ranks(_seconds(lambda: mean_in_bf16(bucket).wait(), device))
    plain_s = max_over_ranks(_seconds(lambda: dist.all_reduce(sent, async_op=True).wait(), device))
    overlap = _overlap(device, int(points[-1][0]))
    return LinkCalibration(link, miss, overlap, cast_s, max(0.0, hooked_s - plain_s))


def _seconds(run: Callable[[], object], device: torch.device) -> float:
    """Return the median seconds of a call, after a warm-up call."""
    run()
    return statistics.median(time_call(run, device) for _ in range(_TIMES))


def _overlap(device: torch.device, size: int) -> float:
    """Return the fraction of an all-reduce hidden by a computation of similar duration; minimum over ranks."""
    sent, factor = torch.zeros(size // 4, device=device), torch.full((_SIDE, _SIDE), 1e-3, device=device)
    count = 1

    def compute() -> None:
        for _ in range(count):
            torch.mm(factor, factor)

    def both() -> None:
        work = dist.all_reduce(sent, async_op=True)
        compute()
        work.wait()

    sending_s = max_over_ranks(_seconds(lambda: dist.all_reduce(sent), device))
    count = max(1, round(sending_s / max_over_ranks(_seconds(compute, device))))
    computing_s = max_over_ranks(_seconds(compute, device))

    together_s = max_over_ranks(_seconds(both, device))
    hidden_s = sending_s + computing_s - together_s
    return min(1.0, max(0.0, hidden_s / min(sending_s, computing_s)))
