"""The processor's own energy counters (RAPL), as Linux shows them under /sys/class/powercap.

Zones `intel-rapl:N` (of AMD's processors too) are packages; `intel-rapl:N:M` are parts. Cores and uncore are in their
package; memory (`dram`) is not, and is added; `psys`, the platform, holds the packages, and is read only where there
are none. `intel-rapl-mmio` shows the same packages a second time. Counters wrap around at a range of their own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from trimtab.core.energy import PowerLimit, Provenance
from trimtab.measure.energy import MeterLost, NoMeter

ROOT = Path("/sys/class/powercap")
# More than any package takes: by it a counter may wrap around so soon, and what is above it was a counter begun anew.
MOST_W = 1000.0
_READABLE = "since 2020 Linux lets root alone read it: `chmod a+r`, by root, on the energy_uj files lets you"


@dataclass(frozen=True)
class Zone:
    """A counter: its name, such as "package-0" or "package-0 dram", its folder, and the joules at which it wraps."""

    name: str
    folder: Path
    range_j: float

    def read(self) -> float:
        """Return what it shows, in joules.

        Raises:
            MeterLost: it cannot be read.
        """
        return _microjoules(self.name, self.folder / "energy_uj") / 1e6


def zones(root: Path = ROOT) -> tuple[Zone, ...]:
    """Return the counters that add up to the machine's processors and memory, each once.

    Raises:
        MeterLost: there are none, or one of them cannot be read.
    """
    if not root.is_dir():
        raise MeterLost(f"there is no {root}: a virtual machine or a container is not shown the processor's counters")
    folders = {path: _name(path) for path in sorted(root.glob("intel-rapl*:*")) if path.name.count(":") == 1}
    own = {path: name for path, name in folders.items() if path.name.startswith("intel-rapl:")}
    packages: dict[str, Path] = {}
    for path, name in (own | folders).items():
        if name.startswith("package"):
            packages.setdefault(name, path)  # a mirror has the name of what it mirrors
    platform = {name: path for path, name in own.items() if name == "psys"}
    found = [zone for name, path in (packages or platform).items() for zone in _with_memory(name, path)]
    if not found:
        raise MeterLost(f"{root} has no RAPL package: the kernel's intel_rapl module is not there, or not loaded")
    for zone in found:
        zone.read()
    return tuple(found)


def _with_memory(name: str, folder: Path) -> Iterator[Zone]:
    yield Zone(name, folder, _range_j(name, folder))
    for part in sorted(folder.glob(f"{folder.name}:*")):
        if _name(part) == "dram":
            yield Zone(f"{name} dram", part, _range_j(f"{name} dram", part))


def _name(folder: Path) -> str:
    try:
        return (folder / "name").read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as error:  # it may be one that belongs to the sum
        raise MeterLost(f"what {folder.name} counts cannot be told ({type(error).__name__} of its name)") from None


def _range_j(name: str, folder: Path) -> float:
    found = _microjoules(name, folder / "max_energy_range_uj") / 1e6
    if not found > 0:
        raise MeterLost(f"the counter of {name} does not say at what it wraps around")
    return found


def _microjoules(name: str, path: Path) -> int:
    try:
        return int(path.read_text(encoding="utf-8"))
    except PermissionError:
        raise MeterLost(f"the counter of {name} may not be read: {_READABLE}") from None
    except (OSError, ValueError) as error:
        raise MeterLost(f"the counter of {name} is gone, or is no number ({type(error).__name__})") from None


class Rapl:
    """Joules of all packages and their memory; of everything that runs there, by whomever.

    Attributes:
        period_s: half of the shortest time in which a counter can wrap around: read more seldom, it is lost.

    Raises:
        MeterLost: there is no counter, or one that may not be read.
    """

    provenance = Provenance.MEASURED

    def __init__(self, root: Path = ROOT, clock: Callable[[], float] = time.monotonic) -> None:
        self._zones, self._clock = zones(root), clock
        self.sources: tuple[str, ...] = tuple(f"rapl {zone.name}" for zone in self._zones)
        self.period_s = min(zone.range_j for zone in self._zones) / MOST_W / 2
        self._total, self._read_at = 0.0, clock()
        self._last = [zone.read() for zone in self._zones]

    def joules(self) -> float:
        """Return the joules since it was made, over any number of times that a counter wrapped around.

        Raises:
            MeterLost: a counter is gone, was begun anew, or was not read for longer than `period_s`.
        """
        passed_s, now = self._clock() - self._read_at, [zone.read() for zone in self._zones]
        pairs = zip(self._zones, now, self._last, strict=True)
        steps = [(zone, (after - before) % zone.range_j) for zone, after, before in pairs]
        self._last, self._read_at = now, self._read_at + passed_s
        if passed_s > self.period_s:
            raise MeterLost(
                f"rapl was not read for {passed_s:.3g} s, and may wrap around twice in {self.period_s:.3g} s"
            )
        for zone, step in steps:
            if step > MOST_W * (passed_s + 1.0):  # one more, as a counter is renewed when it comes to it
                raise MeterLost(f"the counter of {zone.name} was begun anew")
        self._total += sum(step for _, step in steps)
        return self._total

    def limits(self) -> tuple[PowerLimit, ...]:
        """Return the long-term power limit of each package that tells it."""
        return tuple(_limits(self._zones))


def _limits(found: tuple[Zone, ...]) -> Iterator[PowerLimit]:
    for zone in found:
        watts, highest = (
            _watts_or_none(zone, name) for name in ("constraint_0_power_limit_uw", "constraint_0_max_power_uw")
        )
        if watts is not None and not zone.name.endswith("dram"):
            yield PowerLimit(zone.name, watts, None, highest)


def _watts_or_none(zone: Zone, name: str) -> float | None:
    """Return the watts that a file of a zone tells; None where it cannot be read, or tells none."""
    try:
        watts = _microjoules(zone.name, zone.folder / name) / 1e6
    except MeterLost:
        return None
    return watts if watts > 0 else None


def rapl(root: Path = ROOT) -> Rapl | NoMeter:
    """Return the processor's meter, or one that says why there is none."""
    try:
        return Rapl(root)
    except MeterLost as reason:
        return NoMeter(str(reason))
