"""Energy counter of a GPU through NVML. Only this module uses nvidia-ml-py."""

from __future__ import annotations

import contextlib
import importlib
import math
from typing import Any

from trimtab.core.energy_reading import PowerLimit, Provenance
from trimtab.energy.energy_meter import MeterLost, NoMeter


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
        MeterLost: The library, driver, GPU or counter is missing, or the GPU is in MIG mode.
    """

    provenance, period_s = Provenance.MEASURED, math.inf

    def __init__(self, uuid: str, *, library: Any = None) -> None:
        self._library = library or load()
        self._call("nvmlInit")
        self._handle, self._device = self._found(uuid)
        try:
            is_divided = self._call("nvmlDeviceGetMigMode", self._handle)[0] == self._library.NVML_DEVICE_MIG_ENABLE
        except MeterLost:  # GPUs without MIG do not answer
            is_divided = False
        if is_divided:
            reason = "in MIG mode, and the energy counter covers the whole GPU, including the work of other slices"
            raise MeterLost(f"{self._device} is {reason}", code="nvml.mig")
        self.sources: tuple[str, ...] = (f"nvml {self._device}",)
        self.joules()

    def _found(self, uuid: str) -> tuple[Any, str]:
        """Return the handle and the name of the GPU with a UUID, such as "gpu 0"."""
        wanted = uuid.lower().removeprefix("gpu-")
        for index in range(self._call("nvmlDeviceGetCount")):
            with contextlib.suppress(MeterLost):  # another GPU may have failed
                handle = self._call("nvmlDeviceGetHandleByIndex", index)
                if self._call("nvmlDeviceGetUUID", handle).lower().removeprefix("gpu-") == wanted:
                    return handle, f"gpu {index}"
        raise MeterLost(f"NVML finds no GPU with the UUID {uuid}", code="nvml.unknown_gpu")

    def joules(self) -> float:
        """Return the energy in joules since the driver was loaded."""
        return float(self._call("nvmlDeviceGetTotalEnergyConsumption", self._handle)) / 1e3

    def limits(self) -> tuple[PowerLimit, ...]:
        """Return the power limit if the driver reports it."""
        watts = []
        with contextlib.suppress(MeterLost):
            watts.append(self._call("nvmlDeviceGetPowerManagementLimit", self._handle) / 1e3)
            bounds = self._call("nvmlDeviceGetPowerManagementLimitConstraints", self._handle)
            watts += [each / 1e3 for each in bounds]
        return (PowerLimit(self._device, *watts),) if watts else ()

    def _call(self, name: str, *given: Any) -> Any:
        """Return the answer of NVML, or raise `MeterLost`."""
        try:
            return getattr(self._library, name)(*given)
        except self._library.NVMLError as error:
            raise MeterLost(f"NVML failed ({error})", code="nvml.failed") from None


def nvml(uuid: str, *, library: Any = None) -> Nvml | NoMeter:
    """Return a GPU's meter, or an absent meter with the reason."""
    try:
        return Nvml(uuid, library=library)
    except MeterLost as reason:
        return NoMeter(str(reason), code=reason.code)
