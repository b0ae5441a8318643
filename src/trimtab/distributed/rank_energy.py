"""Energy of several ranks: assigns every meter to a single rank, and sums the readings."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.distributed as dist

from trimtab.core.energy_reading import OTHER_RANKS, Energy, MeterFacts, Provenance, absent_energy
from trimtab.distributed.cpu_affinity import node
from trimtab.distributed.process_group import gather_objects, job_position
from trimtab.energy.energy_meter import Meter
from trimtab.energy.meter_selection import Metering, ReadCounters, find_meter, reads_alone, uuid_of, with_idle


class MeterPlacement(NamedTuple):
    """Placement of a rank: machine, local rank, and unique name of its GPU, or ""."""

    node: str
    local_rank: int
    device: str = ""


@dataclass(frozen=True)
class RankMeter:
    """Meter of a rank, with descriptions of the rank's and the job's measurement.

    Args:
        meter: this rank's meter; a null meter if other ranks read all of the counters.
        own: description of this rank's measurement, with counters of other ranks listed as uncounted.
        job: description of all ranks' measurement, the same on every rank.
        is_reader: this rank reads a counter.
    """

    meter: Meter
    own: MeterFacts
    job: MeterFacts
    is_reader: bool = True

    def of_all(self, own: Energy, total: Callable[[float], float]) -> Energy:
        """Return the energy of all ranks together; absent if a reading rank has no value."""
        if self.job.is_absent:  # the same on all ranks, so no rank waits in the collective
            return absent_energy(self.job.reason, own.seconds)
        part = 0.0 if not self.is_reader else math.nan if own.joules is None else own.joules
        joules = total(part)
        if math.isfinite(joules) and joules > 0:
            return Energy(own.seconds, joules, self.job.provenance, self.job.sources)
        return absent_energy(
            own.reason if self.is_reader and own.reason else "another rank's energy meter failed", own.seconds
        )


def meter_of_rank(device: torch.device, metering: Metering | None = None, *, idle: bool = False) -> RankMeter:
    """Return this rank's meter, with every counter of a machine read by a single rank; a collective.

    Args:
        idle: measure idle power during a second in which all ranks do nothing.
    """
    metering = metering or Metering()
    seats = gather_objects(MeterPlacement(node(), job_position().local_rank, _name(device)))
    reads = reads_alone(device) if len(seats) == 1 else reads_of(seats, dist.get_rank(), metering)
    found = find_meter(device, metering, reads=reads)
    found = with_idle(found) if idle else found
    each = gather_objects(None if reads.nothing else found.facts)
    readers = [(seat.node, facts) for seat, facts in zip(seats, each, strict=True) if facts is not None]
    own, job = found.facts, _together(readers)
    if len(readers) > 1 and not own.is_absent:
        own = replace(own, uncounted=(*own.uncounted, OTHER_RANKS))
    return RankMeter(found.meter, own, job, not reads.nothing)


def reads_of(seats: Sequence[MeterPlacement], rank: int, metering: Metering | None = None) -> ReadCounters:
    """Return the counters to read on a rank: the lowest rank of a machine reads the CPU, the lowest of a GPU the GPU.

    A quantity of the whole machine, for instance given watts, is counted by the machine's lowest rank.
    """
    own = seats[rank]
    order = sorted(range(len(seats)), key=lambda i: (seats[i].local_rank, i))
    beside = [i for i in order if seats[i].node == own.node]
    same = [i for i in beside if seats[i].device == own.device]
    is_of_machine = metering is not None and metering.is_of_machine
    return ReadCounters(beside[0] == rank, bool(own.device) and not is_of_machine and same[0] == rank)


def _name(device: torch.device) -> str:
    """Return the GPU's unique name; "" for a CPU."""
    return uuid_of(device) if device.type == "cuda" else ""


def _together(readers: Sequence[tuple[str, MeterFacts]]) -> MeterFacts:
    """Return the joint description of the ranks' meters: absent if any is absent."""
    facts = [each for _, each in readers]
    if len(facts) == 1:
        return facts[0]
    if missing := [each for each in facts if each.is_absent]:
        return missing[0]
    is_estimated = any(each.provenance is Provenance.ESTIMATED for each in facts)
    several = len({machine for machine, _ in readers}) > 1
    idle_w = [each.idle_w for each in facts if each.idle_w is not None]

    def named(names: Callable[[MeterFacts], Sequence[str]]) -> tuple[str, ...]:
        said = (f"{name} on {machine}" if several else name for machine, each in readers for name in names(each))
        return tuple(dict.fromkeys(said))

    return MeterFacts(
        Provenance.ESTIMATED if is_estimated else Provenance.MEASURED,
        named(lambda each: each.sources),
        math.fsum(idle_w) if len(idle_w) == len(facts) else None,
        "",
        named(lambda each: each.uncounted),
        tuple(dict.fromkeys(limit for each in facts for limit in each.limits)),
    )
