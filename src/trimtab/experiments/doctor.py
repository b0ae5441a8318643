"""Diagnosis of the machine: measurable quantities, supported precisions and missing packages."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass

from trimtab.core.energy_reading import MeterFacts, PowerLimit
from trimtab.core.units import format_bytes, format_count
from trimtab.energy.meter_selection import find_meter, with_idle
from trimtab.measure.machine import device_spec, environment
from trimtab.settings.precision import precision_refusal
from trimtab.tasks.placement import device_here

_EXTRAS = {"rich": "cli", "typer": "cli", "jinja2": "cli", "sklearn": "tasks"}


@dataclass(frozen=True)
class DiagnosisLine:
    """A line of the diagnosis: subject, availability, and a figure or a hint."""

    name: str
    ok: bool
    detail: str


def energy_finding(meter: MeterFacts) -> DiagnosisLine:
    """Return the energy meter with its devices' power limits (read, never set), or the reason for its absence."""
    limits = [f"power limit of {each.device}: {each.watts:.0f} W{_settable(each)}" for each in meter.limits]
    said = f"; {', '.join(limits)} (read only)" if limits else ""
    return DiagnosisLine("energy", not meter.is_absent, meter.describe() + said)


def _settable(limit: PowerLimit) -> str:
    bounds = [f"{watts:.0f}" for watts in (limit.lowest_w, limit.highest_w) if watts is not None]
    if limit.lowest_w is None:
        return f" (driver maximum {bounds[0]} W)" if bounds else ""
    return f" (driver range {' to '.join(bounds)} W)"


def diagnose() -> Iterator[DiagnosisLine]:
    """Yield all findings; takes a second or two to time the CPU's peak FLOP/s."""
    found = environment()
    yield DiagnosisLine("python", True, found["python"])
    yield DiagnosisLine("torch", True, found["torch"])
    device = device_here()
    spec = device_spec(device)
    yield DiagnosisLine("device", True, f"{spec.name}, {format_bytes(spec.memory_bytes)}")
    if device.type == "cpu":
        yield DiagnosisLine("cuda", False, "no CUDA device, so tf32 and GPU memory are not measured")
        yield DiagnosisLine("threads", True, f"{spec.num_threads} of {os.cpu_count()} cores")
    for precision in ("fp32", "tf32", "bf16", "fp16"):
        refusal = precision_refusal(spec, precision)
        peak = f"{format_count(spec.peak(precision))}FLOP/s peak ({spec.source})"
        yield DiagnosisLine(f"precision {precision}", refusal is None, peak if refusal is None else refusal.text)
    counted = "allocator statistics" if device.type == "cuda" else "counted allocated bytes, repeatable to about 1%"
    yield DiagnosisLine("memory figures", True, counted)
    yield energy_finding(with_idle(find_meter(device)).facts)
    for package, extra in _EXTRAS.items():
        there = importlib.util.find_spec(package) is not None
        yield DiagnosisLine(package, there, "installed" if there else f"missing: pip install 'trimtab[{extra}]'")
    yield DiagnosisLine("compiler", shutil.which("g++") is not None, "for torch.compile on a CPU")
