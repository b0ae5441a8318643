"""CPU energy counters (RAPL) from Linux's /sys/class/powercap.

The zones `intel-rapl:N` are CPU packages (also for AMD), and `intel-rapl:N:M` are parts of a package. Core and uncore
are included in the package. Memory (`dram`) is not and is added. `psys` (platform) includes the packages and is used
only without packages. `intel-rapl-mmio` mirrors the packages. Every counter has a range, after which it wraps around.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from trimtab.core.energy_reading import PowerLimit, Provenance
from trimtab.energy.energy_meter import MeterLost, NoMeter

ROOT = Path("/sys/class/powercap")
# Upper bound for a package's power. It gives the minimum time to a wrap-around, and detects a counter that was reset.
MOST_W = 1000.0


class RaplZone(NamedTuple):
    """A counter: name such as "package-0" or "package-0 dram", sysfs folder, and wrap-around range in joules."""

    name: str
    folder: Path
    range_j: float

    def joules(self) -> float:
        """Return the counter in joules."""
        return _millionths(self.name, self.folder / "energy_uj")


def zones(root: Path = ROOT) -> tuple[RaplZone, ...]:
    """Return the counters of the machine's CPUs and memory, without double counting."""
    if not root.is_dir():
        reason = f"{root} does not exist; virtual machines and containers usually have no access to CPU energy counters"
        raise MeterLost(reason, code="rapl.missing")
    # A mirror has the same name as the original, which comes first.
    top = sorted(root.glob("intel-rapl:*")) + sorted(root.glob("intel-rapl-*:*"))
    named: dict[str, Path] = {}
    for folder in top:
        if folder.name.count(":") == 1:
            named.setdefault(_name(folder), folder)
    packages = {name: folder for name, folder in named.items() if name.startswith("package")}
    platform = {name: folder for name, folder in named.items() if name == "psys"}
    found = []
    for name, folder in (packages or platform).items():
        memory = [part for part in sorted(folder.glob(f"{folder.name}:*")) if _name(part) == "dram"]
        found += [_zone(name, folder), *(_zone(f"{name} dram", part) for part in memory)]
    if not found:
        reason = f"{root} contains no RAPL package; the kernel module intel_rapl is missing or not loaded"
        raise MeterLost(reason, code="rapl.missing")
    return tuple(found)


def _name(folder: Path) -> str:
    try:
        return (folder / "name").read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as error:  # an unknown zone might belong to the sum
        reason = f"the name of the RAPL zone {folder.name} could not be read ({type(error).__name__})"
        raise MeterLost(reason, code="rapl.unknown_zone") from None


def _zone(name: str, folder: Path) -> RaplZone:
    range_j = _millionths(name, folder / "max_energy_range_uj")
    if not range_j > 0:
        reason = f"the RAPL counter of {name} has a range of {range_j:g} J, so it is unknown when it wraps around"
        raise MeterLost(reason, code="rapl.invalid_counter")
    return RaplZone(name, folder, range_j)


def _millionths(name: str, path: Path) -> float:
    try:
        return int(path.read_text(encoding="utf-8")) / 1e6
    except PermissionError:
        how = "Linux allows only root to read it; as root, run `chmod a+r` on the energy_uj files"
        raise MeterLost(f"the RAPL counter of {name} is not readable ({how})", code="rapl.not_readable") from None
    except (OSError, ValueError) as error:
        reason = f"the RAPL counter of {name} is missing or not an integer ({type(error).__name__})"
        raise MeterLost(reason, code="rapl.invalid_counter") from None


class Rapl:
    """Energy meter of all CPU packages and their memory; includes the work of all processes.

    Attributes:
        period_s: Maximum seconds between readings: half the minimum time in which a counter can wrap around.

    Raises:
        MeterLost: No counter exists, or a counter is unreadable.
    """

    provenance = Provenance.MEASURED

    def __init__(self, root: Path = ROOT, clock: Callable[[], float] = time.monotonic) -> None:
        self._zones, self._clock = zones(root), clock
        self.sources: tuple[str, ...] = tuple(f"rapl {zone.name}" for zone in self._zones)
        self.period_s = min(zone.range_j for zone in self._zones) / MOST_W / 2
        self._total, self._read_at = 0.0, clock()
        self._last = [zone.joules() for zone in self._zones]

    def joules(self) -> float:
        """Return the energy in joules since creation. Wrap-arounds are handled."""
        passed_s, before = self._clock() - self._read_at, self._last
        self._last = [zone.joules() for zone in self._zones]
        self._read_at += passed_s
        if passed_s > self.period_s:
            reason = f"the RAPL counters were not read for {passed_s:.3g} s (limit {self.period_s:.3g} s), and may have"
            raise MeterLost(f"{reason} wrapped around", code="meter.read_too_late")
        steps = [(now - then) % zone.range_j for zone, now, then in zip(self._zones, self._last, before, strict=True)]
        for zone, step in zip(self._zones, steps, strict=True):
            if step > MOST_W * (passed_s + 1.0):  # plus 1 s, because counters are updated with a delay
                raise MeterLost(f"the RAPL counter of {zone.name} was reset", code="rapl.reset")
        self._total += sum(steps)
        return self._total

    def limits(self) -> tuple[PowerLimit, ...]:
        """Return the long-term power limits, if reported, by package."""
        packages = [zone for zone in self._zones if not zone.name.endswith("dram")]
        found = [(zone.name, _watts(zone, "power_limit"), _watts(zone, "max_power")) for zone in packages]
        return tuple(PowerLimit(name, watts, None, highest) for name, watts, highest in found if watts is not None)


def _watts(zone: RaplZone, kind: str) -> float | None:
    """Return a limit in watts; None if the limit is unreadable or 0."""
    try:
        return _millionths(zone.name, zone.folder / f"constraint_0_{kind}_uw") or None
    except MeterLost:
        return None


def rapl(root: Path = ROOT) -> Rapl | NoMeter:
    """Return the CPU's meter, or an absent meter with the reason."""
    try:
        return Rapl(root)
    except MeterLost as reason:
        return NoMeter(str(reason), code=reason.code)
