"""Selection of the energy meter: GPU, CPU, a user's meter, constant power, or none."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from trimtab.core import validation
from trimtab.core.energy_reading import WINDOW_S, MeterFacts, PowerLimit, Provenance
from trimtab.core.errors import ValueGivenError
from trimtab.core.objective import Budget, Objective
from trimtab.energy.energy_meter import EnergyClock, GivenWatts, Meter, NoMeter, SeveralMeters
from trimtab.energy.nvml import nvml
from trimtab.energy.rapl import ROOT, rapl

WITHOUT_METER = ("refuse", "renormalise")
_BY_OTHERS = "another rank reads the meter of this machine"


@dataclass(frozen=True)
class ReadCounters:
    """Counters read by this process: its machine's CPU, and its own device.

    With several ranks on a machine, whole-machine meters are read by the rank that reads the CPU.
    """

    processor: bool = True
    device: bool = True

    @property
    def nothing(self) -> bool:
        """True if other ranks read all counters."""
        return not (self.processor or self.device)


@dataclass(frozen=True)
class Metering:
    """Settings for energy measurement.

    Args:
        watts: Power of the whole machine in watts, for an estimate instead of a meter. Results are labelled as
            estimates.
        meter: User's meter, used instead of the built-in ones. With several ranks, one rank per machine reads it.
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
            raise ValueGivenError(
                "energy_watts",
                got="watts and a meter",
                expected="either watts or a meter",
                hint="Pass watts for an estimate, or a meter for measurements.",
                code="energy.watts_and_meter",
            )

    @property
    def is_of_machine(self) -> bool:
        """True if the meter covers the whole machine, so that no device counter is added."""
        return self.watts is not None or self.meter is not None


@dataclass(frozen=True)
class SelectedMeter:
    """A meter with its facts for reports."""

    meter: Meter
    facts: MeterFacts


def reads_alone(device: torch.device) -> ReadCounters:
    """Return the counters read by a process that trains alone on a device."""
    return ReadCounters(device=device.type == "cuda")


def find_meter(
    device: torch.device, metering: Metering | None = None, *, reads: ReadCounters | None = None, library: Any = None
) -> SelectedMeter:
    """Return the meter for training on a device.

    A GPU needs its own counter, to which the CPU's is added if available. A CPU needs its counter.

    Raises:
        ValueGivenError: The user's meter lacks a required attribute.
    """
    metering, reads = metering or Metering(), reads or reads_alone(device)
    own = None if metering.meter is None else _checked(metering.meter)
    if reads.nothing or (metering.is_of_machine and not reads.processor):
        return _as_found(NoMeter(_BY_OTHERS))
    if metering.watts is not None:
        return _as_found(GivenWatts(metering.watts))
    if own is not None:
        return _as_found(own)
    return _of_device(device, reads, rapl(metering.root) if reads.processor else None, library)


def elsewhere_meter(device: str) -> SelectedMeter:
    """Return the absent meter of a target device that is not in this machine."""
    return _as_found(
        NoMeter(f"{device} is not in this machine, and its data sheet does not contain the energy of a step")
    )


def measurable(
    objective: Objective, budget: Budget, found: SelectedMeter, without: str = "refuse"
) -> tuple[Objective, MeterFacts]:
    """Return the objective that the meter can score, and the meter's facts.

    Raises:
        ValueGivenError: Energy has a weight or limit, there is no meter, and `without` does not allow dropping the
            weight.
    """
    if not found.facts.is_absent or (objective.energy == 0 and budget.energy is None):
        return objective, found.facts
    if without == "renormalise" and budget.energy is None:
        return objective.without_energy(), replace(found.facts, left_out=objective.energy)
    raise ValueGivenError(
        "energy",
        got=f"no energy meter ({found.facts.reason})",
        expected="a machine with an energy meter",
        problem=f"The objective or the budget contains energy, which cannot be measured: {found.facts.reason}.",
        hint="Remove energy, or pass Metering(watts=...) for an estimate. "
        'Metering(without="renormalise") drops the weight of energy from the objective, but no limit.',
        code="energy.no_meter",
    )


def _of_device(device: torch.device, reads: ReadCounters, processor: Any, library: Any) -> SelectedMeter:
    if not reads.device:
        return _as_found(processor)
    index = device.index if device.index is not None else torch.cuda.current_device()
    gpu = nvml(index, uuid=uuid_of(index), library=library)
    if isinstance(gpu, NoMeter) or processor is None:
        return _as_found(gpu)
    if isinstance(processor, NoMeter):
        found = _as_found(gpu)
        return replace(found, facts=replace(found.facts, uncounted=(f"the CPU: {processor.reason}",)))
    return _as_found(SeveralMeters((gpu, processor)), limits=_limits(gpu) + _limits(processor))


def uuid_of(index: int) -> str:
    """Return a GPU's UUID from torch, or "" if torch has none."""
    found = getattr(torch.cuda.get_device_properties(index), "uuid", None)
    return "" if found is None else str(found)


def _as_found(meter: Meter, limits: tuple[PowerLimit, ...] | None = None) -> SelectedMeter:
    reason = meter.reason if isinstance(meter, NoMeter) else ""
    limits = _limits(meter) if limits is None else limits
    uncounted = tuple(getattr(meter, "uncounted", ()))
    return SelectedMeter(meter, MeterFacts(meter.provenance, tuple(meter.sources), None, reason, uncounted, limits))


def _limits(meter: Any) -> tuple[PowerLimit, ...]:
    return meter.limits() if hasattr(meter, "limits") else ()


def _checked(meter: Meter) -> Meter:
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
    return meter


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
