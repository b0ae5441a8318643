"""Selection of the energy meter: GPU, CPU, a user's meter, constant power, or none."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from trimtab.core import validation
from trimtab.core.energy_reading import WINDOW_S, MeterFacts, Provenance
from trimtab.core.errors import ValueGivenError
from trimtab.core.objective import Budget, Objective
from trimtab.energy.energy_meter import EnergyClock, GivenWatts, Meter, NoMeter, SeveralMeters, limits_of
from trimtab.energy.nvml import nvml
from trimtab.energy.rapl import ROOT, rapl

WITHOUT_METER = ("refuse", "renormalise")


@dataclass(frozen=True)
class ReadCounters:
    """Counters read by this process: CPU of the machine (or a whole-machine meter), and device of the process."""

    processor: bool = True
    device: bool = True

    @property
    def nothing(self) -> bool:
        """True if this process reads no counter, because another rank reads all."""
        return not (self.processor or self.device)


@dataclass(frozen=True)
class Metering:
    """Settings for energy measurement.

    Args:
        watts: Power of the whole machine in watts, for an estimate instead of a meter. Results are labelled as
            estimates.
        meter: User's meter, used instead of built-in meters; read by a single rank per machine.
        without: Behaviour if energy has a weight in the objective and no meter exists. "refuse" raises. "renormalise"
            drops the weight and records this in the plan. A limit on energy is always refused.
        root: Directory with the kernel's CPU energy counters.

    Raises:
        ValueGivenError: Invalid watts, both watts and a meter, or an unknown value of `without`.
    """

    watts: float | None = None
    meter: Meter | None = None
    without: str = "refuse"
    root: Path = ROOT

    def __post_init__(self) -> None:
        validation.one_of("metering.without", self.without, WITHOUT_METER)
        if self.watts is not None:
            validation.number("energy_watts", self.watts, low=0, open_low=True)
        if self.watts is not None and self.meter is not None:
            hint = "Pass watts for an estimate, or a meter for measurements."
            raise ValueGivenError(
                "energy_watts", problem="Both watts and a meter are given.", hint=hint, code="energy.watts_and_meter"
            )

    @property
    def is_of_machine(self) -> bool:
        """True if the meter covers the whole machine; device counters are then not added."""
        return self.watts is not None or self.meter is not None


@dataclass(frozen=True)
class SelectedMeter:
    """A meter with its facts for reports."""

    meter: Meter
    facts: MeterFacts


def reads_alone(device: torch.device) -> ReadCounters:
    """Return the counters read by a process without other ranks."""
    return ReadCounters(device=device.type == "cuda")


def find_meter(
    device: torch.device, metering: Metering | None = None, *, reads: ReadCounters | None = None, library: Any = None
) -> SelectedMeter:
    """Return the meter for training on a device.

    A GPU needs a counter; the CPU's counter is added if available. A CPU needs a counter.

    Raises:
        ValueGivenError: The user's meter lacks a required attribute.
    """
    metering, reads = metering or Metering(), reads or reads_alone(device)
    if metering.meter is not None:
        _require_meter(metering.meter)
    if reads.nothing or (metering.is_of_machine and not reads.processor):
        return _selected(NoMeter("another rank reads the meter of this machine"))
    if metering.watts is not None:
        return _selected(GivenWatts(metering.watts))
    if metering.meter is not None:
        return _selected(metering.meter)
    processor = rapl(metering.root) if reads.processor else None
    if processor is not None and not reads.device:
        return _selected(processor)
    gpu = nvml(uuid_of(device), library=library)
    if processor is None or isinstance(gpu, NoMeter):
        return _selected(gpu)
    if isinstance(processor, NoMeter):
        return _selected(gpu, f"the CPU: {processor.reason}")
    return _selected(SeveralMeters((gpu, processor)))


def _require_meter(meter: Meter) -> None:
    is_one = isinstance(meter, Meter) and meter.provenance in (Provenance.MEASURED, Provenance.ESTIMATED)
    if not is_one or isinstance(getattr(meter, "uncounted", ()), str):
        raise ValueGivenError(
            "meter",
            got=f"{meter!r:.80}",
            expected="an object with provenance (measured or estimated), sources, period_s and joules(), whose "
            "uncounted is a tuple if it exists",
            hint="See docs/energy.md for an example of a meter.",
            code="meter.invalid",
        )


def uuid_of(device: torch.device) -> str:
    """Return a GPU's UUID."""
    return str(torch.cuda.get_device_properties(device).uuid)


def _selected(meter: Meter, *uncounted: str) -> SelectedMeter:
    reason = meter.reason if isinstance(meter, NoMeter) else ""
    uncounted = (*getattr(meter, "uncounted", ()), *uncounted)
    facts = MeterFacts(meter.provenance, tuple(meter.sources), None, reason, uncounted, limits_of(meter))
    return SelectedMeter(meter, facts)


def elsewhere_meter(device: str) -> SelectedMeter:
    """Return the absent meter of a target device outside this machine."""
    reason = f"{device} is not in this machine, and its data sheet does not contain the energy of a step"
    return _selected(NoMeter(reason))


def measurable(
    objective: Objective, budget: Budget, found: SelectedMeter, without: str = "refuse"
) -> tuple[Objective, MeterFacts]:
    """Return the objective without unmeasurable terms, and the meter's facts.

    Raises `ValueGivenError` without a meter, unless energy does not count or `without` allows dropping the weight.
    """
    if not found.facts.is_absent or (objective.energy == 0 and budget.energy is None):
        return objective, found.facts
    if without == "renormalise" and budget.energy is None:
        return objective.without_energy(), replace(found.facts, left_out=objective.energy)
    raise ValueGivenError(
        "energy",
        problem=f"The objective or the budget contains energy, which cannot be measured: {found.facts.reason}.",
        hint="Remove energy, or pass Metering(watts=...) for an estimate. "
        'Metering(without="renormalise") drops the weight of energy from the objective, but no limit.',
        code="energy.no_meter",
    )


def with_idle(found: SelectedMeter, sleep: Callable[[float], None] = time.sleep) -> SelectedMeter:
    """Return the meter with the idle power in watts, measured while this process sleeps for `WINDOW_S`.

    Returned unchanged unless the meter is a measured one.
    """
    if found.meter.provenance is not Provenance.MEASURED:
        return found
    clock = EnergyClock(found.meter)
    clock.start()
    while clock.seconds < WINDOW_S:
        sleep(WINDOW_S / 4)
        clock.tick()
    return replace(found, facts=replace(found.facts, idle_w=clock.read().watts))
