"""Devices that trimtab does not read itself, through Zeus: AMD's GPUs, Apple's chips. The one module that adapts zeus.

Zeus's monitor is not used: that waits for the device at every reading, starts processes for the processor's counters,
and shows an empty result where it can read none. A device's own counter does not. Written against zeus 0.16.
"""

from __future__ import annotations

import importlib
import math
from typing import Any

from trimtab.core import checks
from trimtab.core.energy import Provenance
from trimtab.core.errors import ValueGivenError
from trimtab.measure.energy import MeterLost

# Of an Apple chip, the parts that no other one is in: cores and clusters are in the processor's total.
_APPLE = ("cpu_total_mj", "dram_mj", "gpu_mj", "gpu_sram_mj", "ane_mj")
_WAY_OUT = "Give watts instead, which are labelled as an estimate: trimtab.Metering(watts=...)."


class ZeusGpu:
    """Joules of one GPU, and of everything that runs there, since its driver was loaded.

    Args:
        index: Zeus's number of it, which counts those that CUDA_VISIBLE_DEVICES or HIP_VISIBLE_DEVICES leave.
        library: `zeus.device`; None: it is imported.

    Raises:
        ValueGivenError: Zeus is not installed, or reads no counter of such a GPU.
    """

    provenance, period_s = Provenance.MEASURED, math.inf
    uncounted: tuple[str, ...] = ("the processor, and other GPUs: it reads one",)

    def __init__(self, index: int = 0, *, library: Any = None) -> None:
        self._index = checks.integer("index", index, low=0)
        self.sources: tuple[str, ...] = (f"zeus gpu {index}",)
        self._device = _opened(self, "get_gpus", library)

    def joules(self) -> float:
        """Return the joules it has counted.

        Raises:
            MeterLost: the GPU cannot be read.
        """
        return _asked(self._device, self._index) / 1e3


class ZeusApple:
    """Joules of an Apple chip: processor, memory, GPU and neural engine.

    Args:
        library: `zeus.device`; None: it is imported.

    Raises:
        ValueGivenError: Zeus is not installed, or this is no such chip.
    """

    provenance, period_s = Provenance.MEASURED, math.inf
    sources: tuple[str, ...] = ("zeus apple silicon",)

    def __init__(self, *, library: Any = None) -> None:
        self._device = _opened(self, "get_soc", library)

    def joules(self) -> float:
        """Return the joules it has counted.

        Raises:
            MeterLost: it cannot be read, or tells none of its parts.
        """
        said = _asked(self._device)
        parts = [part for name in _APPLE if (part := getattr(said, name, None)) is not None]
        if not parts:
            raise MeterLost(f"Zeus tells no part of this chip that is known: {said!r:.200}")
        return math.fsum(parts) / 1e3


def _opened(meter: ZeusGpu | ZeusApple, name: str, library: Any) -> Any:
    """Return Zeus's device, which has been read once.

    Raises:
        ValueGivenError: it is missing, or cannot be read.
    """
    try:
        library = library or importlib.import_module("zeus.device")
    except ImportError:
        way_out = "pip install 'trimtab[zeus]'"
        raise ValueGivenError("meter", given="no zeus", expected="the package zeus", way_out=way_out) from None
    expected = f"a device whose counter {meter.sources[0]!r} names"
    try:
        meter._device = getattr(library, name)()
    except Exception as error:  # of its own tree, which differs between versions
        given = f"none that Zeus finds ({type(error).__name__}: {error})"
        raise ValueGivenError("meter", given=given, expected=expected, way_out=_WAY_OUT) from None
    try:
        meter.joules()
    except MeterLost as error:
        raise ValueGivenError(
            "meter", given=f"none that can be read ({error})", expected=expected, way_out=_WAY_OUT
        ) from None
    return meter._device


def _asked(device: Any, *given: Any) -> Any:
    try:
        return device.get_total_energy_consumption(*given)
    except Exception as error:  # of its own tree, which differs between versions
        raise MeterLost(f"Zeus says: {type(error).__name__}: {error}") from None
