"""Energy counter of a GPU through NVML. Only this module uses nvidia-ml-py."""

from __future__ import annotations

import contextlib
import importlib
import math
import time
from collections.abc import Callable
from typing import Any

from trimtab.core.energy_reading import PowerLimit, Provenance
from trimtab.energy.energy_meter import MeterLost, NoMeter

# For a GPU without an energy counter, power is sampled and interpolated linearly, over at most this many seconds.
SAMPLED_S = 2.0


def load() -> Any:
    """Return the module `pynvml`; `MeterLost` if nvidia-ml-py is not installed."""
    try:
        return importlib.import_module("pynvml")
    except ImportError:
        reason = "the package nvidia-ml-py is not installed (pip install 'trimtab[energy]')"
        raise MeterLost(reason, code="nvml.not_installed") from None


class Nvml:
    """Energy meter of a GPU; includes the work of other processes.

    Args:
        uuid: UUID of the GPU, with or without the prefix "GPU-". CUDA and NVML number GPUs differently.

    Raises:
        MeterLost: The library, driver or GPU is missing, or the GPU is in MIG mode.
    """

    provenance = Provenance.MEASURED

    def __init__(self, uuid: str, *, library: Any = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._library, self._clock = library or load(), clock
        self._call("nvmlInit")
        self._handle, self._device = self._found(uuid)
        mode = self._call("nvmlDeviceGetMigMode", self._handle, or_none=True)
        if mode is not None and mode[0] == self._library.NVML_DEVICE_MIG_ENABLE:
            reason = "in MIG mode, and the energy counter covers the whole GPU, including the work of other slices"
            raise MeterLost(f"{self._device} is {reason}", code="nvml.mig")
        self._has_counter = self._call("nvmlDeviceGetTotalEnergyConsumption", self._handle, or_none=True) is not None
        self.period_s = math.inf if self._has_counter else SAMPLED_S
        how = "" if self._has_counter else f" power, sampled at least every {SAMPLED_S:g} s"
        self.sources: tuple[str, ...] = (f"nvml {self._device}{how}",)
        self._total = 0.0
        self._sample = (0.0, 0.0) if self._has_counter else self._sampled()

    def _found(self, uuid: str) -> tuple[Any, str]:
        """Return the handle and the name of the GPU with a UUID, such as "gpu 0"."""
        wanted = uuid.lower().removeprefix("gpu-")
        for index in range(self._call("nvmlDeviceGetCount")):
            with contextlib.suppress(MeterLost):  # another GPU may have failed
                handle = self._call("nvmlDeviceGetHandleByIndex", index)
                if self._call("nvmlDeviceGetUUID", handle).lower().removeprefix("gpu-") == wanted:
                    return handle, f"gpu {index}"
        raise MeterLost(f"NVML finds no GPU with the UUID {uuid}", code="nvml.unknown_gpu")

    def _sampled(self) -> tuple[float, float]:
        """Return the power in watts and the time of the sample in seconds."""
        return self._call("nvmlDeviceGetPowerUsage", self._handle) / 1e3, self._clock()

    def joules(self) -> float:
        """Return the energy in joules since the driver was loaded, or since creation if power is sampled."""
        if self._has_counter:
            return float(self._call("nvmlDeviceGetTotalEnergyConsumption", self._handle)) / 1e3
        (before_w, then), self._sample = self._sample, self._sampled()
        now_w, now = self._sample
        if now - then > SAMPLED_S:
            reason = f"the power of {self._device} was not sampled for {now - then:.3g} s (limit {SAMPLED_S:g} s)"
            raise MeterLost(reason, code="meter.read_too_late")
        self._total += (before_w + now_w) / 2 * (now - then)
        return self._total

    def limits(self) -> tuple[PowerLimit, ...]:
        """Return the power limit if the driver reports it."""
        watts = []
        with contextlib.suppress(MeterLost):
            watts.append(self._call("nvmlDeviceGetPowerManagementLimit", self._handle) / 1e3)
            bounds = self._call("nvmlDeviceGetPowerManagementLimitConstraints", self._handle)
            watts += [each / 1e3 for each in bounds]
        return (PowerLimit(self._device, *watts),) if watts else ()

    def _call(self, name: str, *given: Any, or_none: bool = False) -> Any:
        """Return the answer of NVML; with `or_none`, None if the GPU lacks the feature or the driver is too old."""
        library = self._library
        missing = (library.NVML_ERROR_NOT_SUPPORTED, library.NVML_ERROR_FUNCTION_NOT_FOUND)
        try:
            return getattr(library, name)(*given)
        except library.NVMLError as error:
            if or_none and getattr(error, "value", None) in missing:
                return None
            raise MeterLost(f"NVML failed ({error})", code="nvml.failed") from None


def nvml(uuid: str, *, library: Any = None) -> Nvml | NoMeter:
    """Return a GPU's meter, or an absent meter with the reason."""
    try:
        return Nvml(uuid, library=library)
    except MeterLost as reason:
        return NoMeter(str(reason), code=reason.code)
