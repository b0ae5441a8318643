"""Rooflines (Williams et al. 2009): an operator takes as long as the slower of what it computes and what it moves.

Of a step on a device that is not here its seconds, at a stated share of the device's peaks, and no less than it takes
to start an operator: a guess from a data sheet, which says so wherever it is shown. Of one that was measured here, the
least that its operators can take by the whole peaks, and which of the two bounds them.
"""

from __future__ import annotations

from collections.abc import Iterable

from trimtab.core.hardware import DeviceSpec
from trimtab.core.phases import Roof
from trimtab.core.work import Line, Operation, Seen, StepWork

# Shares of the peaks that large operators reach, and seconds below which none is run.
COMPUTE, BANDWIDTH = 0.7, 0.8
STARTING_S = {"cuda": 4e-6, "cpu": 4e-6}


def step_seconds(work: StepWork, device: DeviceSpec, precision: str, rows: int, num_micro_batches: int) -> float | None:
    """Return seconds of an optimizer step, or None where a peak of the device is not known.

    Args:
        precision: of matrix products; operators say their own, but for tf32 by a plan, which is fp32 to them.
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
        computing_s = _computing_s(flops, operation.precision, device, precision)
        if computing_s is None:
            return None
        moving_s = moved / (BANDWIDTH * device.bandwidth_bytes_s)
        total += operation.count * max(computing_s / COMPUTE, moving_s, STARTING_S.get(device.kind, 0.0))
    return total


def roof_of(seen: Iterable[Seen], device: DeviceSpec, precision: str) -> Roof | None:
    """Return what bounds some operators as they ran, or None where a peak of the device is not known.

    Args:
        precision: of the step's matrix products, as of `step_seconds`.
    """
    if not device.bandwidth_bytes_s:
        return None
    compute_s = memory_s = all_flops = all_moved = 0.0
    for kind, flops, moved in seen:
        computing_s, moving_s = _computing_s(flops, kind, device, precision), moved / device.bandwidth_bytes_s
        if computing_s is None:
            return None
        if computing_s > moving_s:
            compute_s += computing_s
        else:
            memory_s += moving_s
        all_flops, all_moved = all_flops + flops, all_moved + moved
    return Roof(compute_s, memory_s, all_flops, all_moved)


def _computing_s(flops: float, kind: str, device: DeviceSpec, precision: str) -> float | None:
    """Return seconds of an operator's FLOP at the whole peak of its kind, or None where there are some and no peak.

    A convolution of kind "tf32" is one that torch lets run so in a step of fp32; a device that has no TF32 computes it
    in fp32.
    """
    peak = device.peak("tf32" if (precision, kind) == ("tf32", "fp32") else kind)
    if not peak and kind == "tf32":
        peak = device.peak("fp32")
    if not peak:
        return None if flops > 0 else 0.0
    return flops / peak


def _at(line: Line, rows: int) -> float:
    base, slope = line
    return max(0.0, base + slope * rows)
