"""Energy meters through Zeus, for AMD GPUs and Apple chips. Only this module uses zeus (written for version 0.16).

Zeus's monitor is not used: it synchronizes the device at every reading, starts processes for CPU counters, and returns
an empty result on failure. The device classes used here have none of these effects.
"""

from __future__ import annotations

import importlib
import math
from typing import Any

from trimtab.core import validation
from trimtab.core.energy_reading import Provenance
from trimtab.core.errors import ValueGivenError
from trimtab.energy.energy_meter import MeterLost

# Disjoint parts of an Apple chip; the CPU total includes cores and clusters.
_APPLE = ("cpu_total_mj", "dram_mj", "gpu_mj", "gpu_sram_mj", "ane_mj")
_USE_WATTS = "Pass the power in watts instead, for an estimate: trimtab.Metering(watts=...)."


class _ZeusMeter:
    """A device of Zeus, opened and read once at creation."""

    provenance, period_s = Provenance.MEASURED, math.inf

    def __init__(self, opener: str, source: str, library: Any, *given: int) -> None:
        self.sources: tuple[str, ...] = (source,)
        self._given = given
        try:
            library = library or importlib.import_module("zeus.device")
        except ImportError:
            problem = f"{type(self).__name__} needs the package zeus, which is not installed."
            raise _refused(problem, "Run `pip install 'trimtab[zeus]'`.", "zeus.not_installed") from None
        try:
            self._device = getattr(library, opener)()
        except Exception as error:  # the exception classes differ between versions of Zeus
            problem = f"Zeus finds no device with the counter {source!r} ({type(error).__name__}: {error})."
            raise _refused(problem, _USE_WATTS, "zeus.no_device") from None
        try:
            self.joules()
        except MeterLost as error:
            problem = f"The counter {source!r} cannot be read: {error}."
            raise _refused(problem, _USE_WATTS, "zeus.not_readable") from None

    def joules(self) -> float:
        """Return the energy in joules; `MeterLost` if the device is unreadable, or reports none of the known parts."""
        try:
            found = self._device.get_total_energy_consumption(*self._given)
        except Exception as error:  # the exception classes differ between versions of Zeus
            raise MeterLost(f"Zeus failed ({type(error).__name__}: {error})", code="zeus.failed") from None
        return self._millijoules(found) / 1e3

    def _millijoules(self, found: Any) -> float:
        return float(found)


class ZeusGpu(_ZeusMeter):
    """Energy meter of a GPU since its driver was loaded; includes the work of other processes.

    Args:
        index: Zeus's GPU index, relative to CUDA_VISIBLE_DEVICES or HIP_VISIBLE_DEVICES.

    Raises:
        ValueGivenError: Zeus is not installed, or cannot read a counter of this GPU.
    """

    uncounted: tuple[str, ...] = ("the CPU, and other GPUs",)

    def __init__(self, index: int = 0, *, library: Any = None) -> None:
        validation.integer("index", index, low=0)
        super().__init__("get_gpus", f"zeus gpu {index}", library, index)


class ZeusApple(_ZeusMeter):
    """Energy meter of an Apple chip: CPU, memory, GPU and neural engine.

    Raises:
        ValueGivenError: Zeus is not installed, or this is not an Apple chip.
    """

    def __init__(self, *, library: Any = None) -> None:
        super().__init__("get_soc", "zeus apple silicon", library)

    def _millijoules(self, found: Any) -> float:
        parts = [part for name in _APPLE if (part := getattr(found, name, None)) is not None]
        if not parts:
            reason = f"Zeus returned no known energy counter of this chip: {found!r:.200}"
            raise MeterLost(reason, code="zeus.no_counter")
        return math.fsum(parts)


def _refused(problem: str, hint: str, code: str) -> ValueGivenError:
    return ValueGivenError("meter", problem=problem, hint=hint, code=code)
