"""CPU energy counters (RAPL) from Linux's /sys/class/powercap.

The zones `intel-rapl:N` are CPU packages (also for AMD), and `intel-rapl:N:M` are their parts. Core and uncore are
included in the package. Memory (`dram`) is not and is added. `psys` (platform) includes the packages and is used only
if there are none. `intel-rapl-mmio` mirrors the packages. Each counter wraps around at its own range.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from trimtab.core.energy_reading import PowerLimit, Provenance
from trimtab.energy.energy_meter import MeterLost, NoMeter

ROOT = Path("/sys/class/powercap")
# Upper bound for a package's power. It gives the minimum time to a wrap-around, and detects a counter that was reset.
MOST_W = 1000.0
_READABLE = "Linux allows only root to read it; as root, run `chmod a+r` on the energy_uj files"


@dataclass(frozen=True)
class RaplZone:
    """A counter: name such as "package-0" or "package-0 dram", sysfs folder, and wrap-around range in joules."""

    name: str
    folder: Path
    range_j: float

    def read(self) -> float:
        """Return the counter in joules.

        Raises:
            MeterLost: The counter is unreadable.
        """
        return _microjoules(self.name, self.folder / "energy_uj") / 1e6


def zones(root: Path = ROOT) -> tuple[RaplZone, ...]:
    """Return the counters that add up to the machine's CPUs and memory without double counting.

    Raises:
        MeterLost: There are no counters, or a counter is unreadable.
    """
    if not root.is_dir():
        reason = f"{root} does not exist; virtual machines and containers usually have no access to CPU energy counters"
        raise MeterLost(reason, code="rapl.missing")
    folders = {path: _name(path) for path in sorted(root.glob("intel-rapl*:*")) if path.name.count(":") == 1}
    own = {path: name for path, name in folders.items() if path.name.startswith("intel-rapl:")}
    packages: dict[str, Path] = {}
    for path, name in (own | folders).items():
        if name.startswith("package"):
            packages.setdefault(name, path)  # a mirror has the same name as the original
    platform = {name: path for path, name in own.items() if name == "psys"}
    found = [zone for name, path in (packages or platform).items() for zone in _with_memory(name, path)]
    if not found:
        reason = f"{root} contains no RAPL package; the kernel module intel_rapl is missing or not loaded"
        raise MeterLost(reason, code="rapl.missing")
    for zone in found:
        zone.read()
    return tuple(found)


def _with_memory(name: str, folder: Path) -> Iterator[RaplZone]:
    yield RaplZone(name, folder, _range_j(name, folder))
    for part in sorted(folder.glob(f"{folder.name}:*")):
        if _name(part) == "dram":
            yield RaplZone(f"{name} dram", part, _range_j(f"{name} dram", part))


def _name(folder: Path) -> str:
    try:
        return (folder / "name").read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as error:  # an unknown zone might belong to the sum
        reason = f"the name of the RAPL zone {folder.name} could not be read ({type(error).__name__})"
        raise MeterLost(reason, code="rapl.unknown_zone") from None


def _range_j(name: str, folder: Path) -> float:
    found = _microjoules(name, folder / "max_energy_range_uj") / 1e6
    if not found > 0:
        reason = f"the RAPL counter of {name} has a range of {found:g} J, so it is unknown when it wraps around"
        raise MeterLost(reason, code="rapl.invalid_counter")
    return found


def _microjoules(name: str, path: Path) -> int:
    try:
        return int(path.read_text(encoding="utf-8"))
    except PermissionError:
        reason = f"the RAPL counter of {name} is not readable ({_READABLE})"
        raise MeterLost(reason, code="rapl.not_readable") from None
    except (OSError, ValueError) as error:
        reason = f"the RAPL counter of {name} is missing or not an integer ({type(error).__name__})"
        raise MeterLost(reason, code="rapl.invalid_counter") from None


class Rapl:
    """Energy meter of all CPU packages and their memory; includes the work of other processes.

    Attributes:
        period_s: Maximum seconds between readings: half the minimum time in which a counter can wrap around.

    Raises:
        MeterLost: There is no counter, or it is unreadable.
    """

    provenance = Provenance.MEASURED

    def __init__(self, root: Path = ROOT, clock: Callable[[], float] = time.monotonic) -> None:
        self._zones, self._clock = zones(root), clock
        self.sources: tuple[str, ...] = tuple(f"rapl {zone.name}" for zone in self._zones)
        self.period_s = min(zone.range_j for zone in self._zones) / MOST_W / 2
        self._total, self._read_at = 0.0, clock()
        self._last = [zone.read() for zone in self._zones]

    def joules(self) -> float:
        """Return the energy in joules since creation. Wrap-arounds are handled.

        Raises:
            MeterLost: A counter is unreadable, was reset, or was not read for longer than `period_s`.
        """
        passed_s, now = self._clock() - self._read_at, [zone.read() for zone in self._zones]
        pairs = zip(self._zones, now, self._last, strict=True)
        steps = [(zone, (after - before) % zone.range_j) for zone, after, before in pairs]
        self._last, self._read_at = now, self._read_at + passed_s
        if passed_s > self.period_s:
            reason = f"the RAPL counters were not read for {passed_s:.3g} s (limit {self.period_s:.3g} s), and may have"
            raise MeterLost(f"{reason} wrapped around", code="meter.read_too_late")
        for zone, step in steps:
            if step > MOST_W * (passed_s + 1.0):  # plus 1 s, because counters are updated with a delay
                raise MeterLost(f"the RAPL counter of {zone.name} was reset", code="rapl.reset")
        self._total += sum(step for _, step in steps)
        return self._total

    def limits(self) -> tuple[PowerLimit, ...]:
        """Return the long-term power limit of each package that reports it."""
        found = []
        for zone in self._zones:
            watts, highest = (_watts_or_none(zone, f"constraint_0_{kind}_uw") for kind in ("power_limit", "max_power"))
            if watts is not None and not zone.name.endswith("dram"):
                found.append(PowerLimit(zone.name, watts, None, highest))
        return tuple(found)


def _watts_or_none(zone: RaplZone, name: str) -> float | None:
    """Return the watts in a zone's file; None if the file is unreadable or contains 0."""
    try:
        watts = _microjoules(zone.name, zone.folder / name) / 1e6
    except MeterLost:
        return None
    return watts if watts > 0 else None


def rapl(root: Path = ROOT) -> Rapl | NoMeter:
    """Return the CPU's meter, or an absent meter with the reason."""
    try:
        return Rapl(root)
    except MeterLost as reason:
        return NoMeter(str(reason), code=reason.code)
