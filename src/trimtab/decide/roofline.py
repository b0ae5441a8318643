"""Roofline model (Williams et al. 2009): an operator's time is the maximum of its compute time and its memory time.

For a target device, predicts step seconds at a given fraction of the data-sheet peaks, and at least the time to launch
an operator; reports mark the result as an estimate. For measured operators, returns the minimum time at full peaks, and
the binding resource.
"""

from __future__ import annotations

from collections.abc import Iterable

from trimtab.core.hardware import DeviceSpec
from trimtab.core.operator_costs import Line, Operation, Seen, StepWork
from trimtab.core.step_phases import RooflineBound

# Fractions of the peaks that large operators reach, and least seconds per operator.
COMPUTE, BANDWIDTH = 0.7, 0.8
STARTING_S = {"cuda": 4e-6, "cpu": 4e-6}


def step_seconds(work: StepWork, device: DeviceSpec, precision: str, rows: int, num_micro_batches: int) -> float | None:
    """Return the seconds of an optimizer step; None if a peak of the device is unknown.

    Args:
        work: operators of a micro-batch and of the optimizer step.
        device: device data sheet.
        precision: precision of matrix products. Operators have their own precision, except that "tf32" from a plan is
            recorded as fp32.
        rows: samples per micro-batch.
        num_micro_batches: micro-batches per step.
    """
    micro_batch = seconds_of(work.micro_batch, device, precision, rows)
    step = seconds_of(work.step, device, precision, rows)
    return None if micro_batch is None or step is None else num_micro_batches * micro_batch + step


def seconds_of(operations: Iterable[Operation], device: DeviceSpec, precision: str, rows: int) -> float | None:
    """Return the seconds of some operators of a micro-batch; arguments as in `step_seconds`."""
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


def roof_of(seen: Iterable[Seen], device: DeviceSpec, precision: str) -> RooflineBound | None:
    """Return the roofline of measured operators; None if a peak of the device is unknown.

    Args:
        seen: (kind, FLOP, bytes) per operator.
        device: device data sheet.
        precision: precision of the step's matrix products, see `step_seconds`.
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
    return RooflineBound(compute_s, memory_s, all_flops, all_moved)


def _computing_s(flops: float, kind: str, device: DeviceSpec, precision: str) -> float | None:
    """Return the seconds of an operator's FLOP at full peak; None if the peak is unknown and FLOP is not 0.

    A convolution of kind "tf32" is a convolution that torch runs in TF32 within an fp32 step; devices without TF32
    compute it in fp32.
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
