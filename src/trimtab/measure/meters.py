"""Which meter this process reads: of its device, of the processor beside it, a user's own, watts as given, or none."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from trimtab.core import checks
from trimtab.core.energy import WINDOW_S, MeterFacts, PowerLimit, Provenance
from trimtab.core.errors import ValueGivenError
from trimtab.core.objective import Budget, Objective
from trimtab.measure.energy import EnergyClock, GivenWatts, Meter, NoMeter, SeveralMeters
from trimtab.measure.nvml import nvml
from trimtab.measure.rapl import ROOT, rapl


@dataclass(frozen=True)
class Reads:
    """What a process reads: its machine's processor, its own device. Of what is of a whole machine, the processor's."""

    processor: bool = True
    device: bool = True

    @property
    def nothing(self) -> bool:
        """Whether others read all that this process could."""
        return not (self.processor or self.device)


WITHOUT_METER = ("refuse", "renormalise")


@dataclass(frozen=True)
class Metering:
    """How joules are to be known.

    Args:
        watts: to estimate with, of the whole machine, whatever meter there is; all that is made of it says so.
        meter: one of the user's own, in place of those that are looked for; of several ranks it is read by one of each
            machine.
        without: where energy is weighed and nothing counts it, "refuse" raises; "renormalise" leaves energy out, lets
            the other weights count alone, and says so in the plan. A limit on energy is refused either way.
        root: where the kernel shows the processor's counters.

    Raises:
        ValueGivenError: watts that are none, both of them, or another word.
    """

    watts: float | None = None
    meter: Meter | None = None
    without: str = "refuse"
    root: Path = ROOT

    def __post_init__(self) -> None:
        checks.one_of("metering.without", self.without, WITHOUT_METER)
        if self.watts is not None:
            checks.number("energy_watts", self.watts, low=0, open_low=True)
        if self.watts is not None and self.meter is not None:
            raise ValueGivenError("energy_watts", given="watts and a meter", expected="the one or the other")

    @property
    def is_of_machine(self) -> bool:
        """Whether it is of a whole machine: no device of it is read beside."""
        return self.watts is not None or self.meter is not None


@dataclass(frozen=True)
class Found:
    """A meter, and what is said of it."""

    meter: Meter
    facts: MeterFacts


def reads_alone(device: torch.device) -> Reads:
    """Return what a process reads that trains on a device, with no other rank beside it."""
    return Reads(device=device.type == "cuda")


def find_meter(
    device: torch.device, metering: Metering | None = None, *, reads: Reads | None = None, library: Any = None
) -> Found:
    """Return the meter of what trains on a device.

    On a GPU its own counter has to be there, the processor's is added where it is; on a CPU the processor's has to be.

    Args:
        reads: of several ranks; None: there is one. library: in place of NVIDIA's module.

    Raises:
        ValueGivenError: a meter that is none.
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


def elsewhere_meter(device: str) -> Found:
    """Return the meter of a device that is not here: none."""
    return _as_found(NoMeter(f"{device} is not here, and no data sheet tells what a step takes"))


def measurable(
    objective: Objective, budget: Budget, found: Found, without: str = "refuse"
) -> tuple[Objective, MeterFacts]:
    """Return the weights that can be scored with a meter, and what is to be said of it.

    Raises:
        ValueGivenError: energy is weighed or limited, nothing counts it, and no way out was accepted.
    """
    if not found.facts.is_absent or (objective.energy == 0 and budget.energy is None):
        return objective, found.facts
    if without == "renormalise" and budget.energy is None:
        return objective.without_energy(), replace(found.facts, left_out=objective.energy)
    raise ValueGivenError(
        "energy",
        given=f"a weight or limit on energy, which is not measured here ({found.facts.reason})",
        expected="a machine with an energy meter",
        way_out='Leave energy out; or Metering(without="renormalise") does, where it is weighed and not limited, and '
        "says so; or Metering(watts=...) estimates.",
    )


_BY_OTHERS = "another rank reads it"


def _of_device(device: torch.device, reads: Reads, processor: Any, library: Any) -> Found:
    if not reads.device:
        return _as_found(processor)
    index = device.index if device.index is not None else torch.cuda.current_device()
    gpu = nvml(index, uuid=uuid_of(index), library=library)
    if isinstance(gpu, NoMeter) or processor is None:
        return _as_found(gpu)
    if isinstance(processor, NoMeter):
        found = _as_found(gpu)
        return replace(found, facts=replace(found.facts, uncounted=(f"the processor: {processor.reason}",)))
    return _as_found(SeveralMeters((gpu, processor)), limits=_limits(gpu) + _limits(processor))


def uuid_of(index: int) -> str:
    """Return a GPU's UUID as torch tells it, or "" where it does not."""
    found = getattr(torch.cuda.get_device_properties(index), "uuid", None)
    return "" if found is None else str(found)


def _as_found(meter: Meter, limits: tuple[PowerLimit, ...] | None = None) -> Found:
    reason = meter.reason if isinstance(meter, NoMeter) else ""
    limits = _limits(meter) if limits is None else limits
    uncounted = tuple(getattr(meter, "uncounted", ()))
    return Found(meter, MeterFacts(meter.provenance, tuple(meter.sources), None, reason, uncounted, limits))


def _limits(meter: Any) -> tuple[PowerLimit, ...]:
    return meter.limits() if hasattr(meter, "limits") else ()


def _checked(meter: Meter) -> Meter:
    is_one = isinstance(meter, Meter) and meter.provenance in (Provenance.MEASURED, Provenance.ESTIMATED)
    if not is_one or isinstance(getattr(meter, "uncounted", ()), str):
        expected = "what has provenance (measured or estimated), sources, period_s and joules(); uncounted, a tuple"
        raise ValueGivenError("meter", given=f"{meter!r:.80}", expected=expected, way_out="See docs/energy.md.")
    return meter


def with_idle(found: Found, sleep: Callable[[float], None] = time.sleep) -> Found:
    """Return it with the watts of a second in which this process does nothing; as it is, where nothing is measured."""
    if found.meter.provenance is not Provenance.MEASURED:
        return found
    clock = EnergyClock(found.meter)
    clock.start()
    while clock.seconds < WINDOW_S:
        sleep(WINDOW_S / 4)
        clock.tick()
    return replace(found, facts=replace(found.facts, idle_w=clock.read().watts))
