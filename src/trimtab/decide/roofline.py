"""Seconds of a step on a device that is not here: each operator by what it computes or what it moves.

An operator takes as long as the slower of the two (Williams et al. 2009), at a stated share of the device's peaks, and
no less than it takes to start one. It is a guess from a data sheet, and says so wherever it is shown.
"""

from __future__ import annotations

from collections.abc import Iterable

from trimtab.core.hardware import DeviceSpec
from trimtab.core.work import Line, Operation, StepWork

# Shares of the peaks that large operators reach, and seconds below which none is run.
COMPUTE, BANDWIDTH = 0.7, 0.8
STARTING_S = {"cuda": 4e-6, "cpu": 4e-6}


def step_seconds(work: StepWork, device: DeviceSpec, precision: str, rows: int, num_micro_batches: int) -> float | None:
    """Return seconds of an optimizer step, or None where a peak of the device is not known.

    Args:
        precision: of matrix products; operators say their own, but for tf32, which is fp32 to them.
        rows: of a micro-batch.
    """
    micro_batch = seconds_of(work.micro_batch, device, precision, rows)
    step = seconds_of(work.step, device, precision, rows)
    return None if micro_batch is None or step is None else num_micro_batches * micro_batch + step


def seconds_of(operations: Iterable[Operation], device: DeviceSpec, precision: str, rows: int) -> float | None:
    """Return seconds of some operators of a micro-batch; arguments as of `step_seconds`."""
    if not device.bandwidth_bytes_s:
        return None
    total = 0.0
    for operation in operations:
        flops, moved = _at(operation.flops, rows), _at(operation.moved_bytes, rows)
        peak = device.peak("tf32" if (precision, operation.precision) == ("tf32", "fp32") else operation.precision)
        if flops > 0 and not peak:
            return None
        computing_s = flops / (COMPUTE * peak) if peak else 0.0
        moving_s = moved / (BANDWIDTH * device.bandwidth_bytes_s)
        total += operation.count * max(computing_s, moving_s, STARTING_S.get(device.kind, 0.0))
    return total


def _at(line: Line, rows: int) -> float:
    base, slope = line
    return max(0.0, base + slope * rows)
