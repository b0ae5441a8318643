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
_WAY_OUT = "Pass the power in watts instead, for an estimate: trimtab.Metering(watts=...)."


class ZeusGpu:
    """Energy meter of a GPU since its driver was loaded; includes the work of other processes.

    Args:
        index: Zeus's GPU index, relative to CUDA_VISIBLE_DEVICES or HIP_VISIBLE_DEVICES.

    Raises:
        ValueGivenError: Zeus is not installed, or cannot read a counter of this GPU.
    """

    provenance, period_s = Provenance.MEASURED, math.inf
    uncounted: tuple[str, ...] = ("the CPU, and other GPUs",)

    def __init__(self, index: int = 0, *, library: Any = None) -> None:
        self._index = validation.integer("index", index, low=0)
        self.sources: tuple[str, ...] = (f"zeus gpu {index}",)
        self._device = _opened(self, "get_gpus", library)

    def joules(self) -> float:
        """Return the energy in joules.

        Raises:
            MeterLost: The GPU is unreadable.
        """
        millijoules: float = _asked(self._device, self._index)
        return millijoules / 1e3


class ZeusApple:
    """Energy meter of an Apple chip: CPU, memory, GPU and neural engine.

    Raises:
        ValueGivenError: Zeus is not installed, or this is not an Apple chip.
    """

    provenance, period_s = Provenance.MEASURED, math.inf
    sources: tuple[str, ...] = ("zeus apple silicon",)

    def __init__(self, *, library: Any = None) -> None:
        self._device = _opened(self, "get_soc", library)

    def joules(self) -> float:
        """Return the energy in joules.

        Raises:
            MeterLost: The chip is unreadable, or reports none of the known parts.
        """
        found = _asked(self._device)
        parts = [part for name in _APPLE if (part := getattr(found, name, None)) is not None]
        if not parts:
            reason = f"Zeus returned no known energy counter of this chip: {found!r:.200}"
            raise MeterLost(reason, code="zeus.no_counter")
        return math.fsum(parts) / 1e3


def _opened(meter: ZeusGpu | ZeusApple, name: str, library: Any) -> Any:
    """Return Zeus's device after a successful test reading."""
    try:
        library = library or importlib.import_module("zeus.device")
    except ImportError:
        raise ValueGivenError(
            "meter",
            got="no package zeus",
            expected="the package zeus",
            problem=f"{type(meter).__name__} needs the package zeus, which is not installed.",
            hint="Run `pip install 'trimtab[zeus]'`.",
            code="zeus.not_installed",
        ) from None
    expected = f"a device with the counter {meter.sources[0]!r}"
    try:
        meter._device = getattr(library, name)()
    except Exception as error:  # the exception classes differ between versions of Zeus
        raise ValueGivenError(
            "meter",
            got=f"{type(error).__name__}: {error}",
            expected=expected,
            problem=f"Zeus finds no device with the counter {meter.sources[0]!r} ({type(error).__name__}: {error}).",
            hint=_WAY_OUT,
            code="zeus.no_device",
        ) from None
    try:
        meter.joules()
    except MeterLost as error:
        raise ValueGivenError(
            "meter",
            got=str(error),
            expected=expected,
            problem=f"The counter {meter.sources[0]!r} cannot be read: {error}.",
            hint=_WAY_OUT,
            code="zeus.not_readable",
        ) from None
    return meter._device


def _asked(device: Any, *given: Any) -> Any:
    try:
        return device.get_total_energy_consumption(*given)
    except Exception as error:  # the exception classes differ between versions of Zeus
        raise MeterLost(f"Zeus failed ({type(error).__name__}: {error})", code="zeus.failed") from None
