"""Energy counter of a GPU through NVML. Only this module uses nvidia-ml-py."""

from __future__ import annotations

import importlib
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trimtab.core.energy_reading import PowerLimit, Provenance
from trimtab.energy.energy_meter import MeterLost, NoMeter

# For a GPU without an energy counter, power is sampled and interpolated linearly, over at most this many seconds.
SAMPLED_S = 2.0
# NVML errors for a missing feature, or a driver too old for the query.
_NONE = ("NVML_ERROR_NOT_SUPPORTED", "NVML_ERROR_FUNCTION_NOT_FOUND")
_MIG = "and the energy counter covers the whole GPU, including the work of other slices"


def load() -> Any:
    """Return the module `pynvml`.

    Raises:
        MeterLost: nvidia-ml-py is not installed.
    """
    try:
        return importlib.import_module("pynvml")
    except ImportError:
        reason = "the package nvidia-ml-py is not installed (pip install 'trimtab[energy]')"
        raise MeterLost(reason, code="nvml.not_installed") from None


def position(ordinal: int, uuids: Sequence[str], names: Sequence[str], environment: Mapping[str, str]) -> int:
    """Return the NVML index of a CUDA device.

    CUDA numbers the devices in CUDA_VISIBLE_DEVICES, NVML numbers all devices.

    Args:
        uuids: UUIDs of all GPUs in NVML's order, by PCI bus.

    Raises:
        MeterLost: The device is unknown, ambiguous, or a MIG slice.
    """
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    is_by_bus = environment.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID" or len(set(names)) < 2
    order = "CUDA numbers GPUs of different models in another order than NVML (set CUDA_DEVICE_ORDER=PCI_BUS_ID)"
    entries = [str(i) for i in range(len(uuids))] if visible is None else [e.strip() for e in visible.split(",")]
    if not 0 <= ordinal < len(entries):
        found = f"NVML finds {len(uuids)} GPUs" if visible is None else f"CUDA_VISIBLE_DEVICES={visible!r}"
        raise MeterLost(f"cuda:{ordinal} does not exist ({found})", code="nvml.unknown_gpu")
    entry = entries[ordinal]
    if entry.upper().startswith("MIG-"):
        raise MeterLost(f"cuda:{ordinal} is a MIG slice, {_MIG}", code="nvml.mig")
    if entry.isdecimal() and int(entry) < len(uuids):
        if not is_by_bus:
            raise MeterLost(order, code="nvml.device_order")
        return int(entry)
    return _of_uuid(entry, uuids, f"{entry!r} of CUDA_VISIBLE_DEVICES={visible!r}")


def _of_uuid(uuid: str, uuids: Sequence[str], name: str) -> int:
    """Return the index of the GPU whose UUID starts with `uuid`. CUDA accepts such prefixes."""
    wanted = uuid.lower() if uuid.lower().startswith("gpu-") else f"gpu-{uuid.lower()}"
    found = [index for index, each in enumerate(uuids) if uuid and each.lower().startswith(wanted)]
    if len(found) != 1:
        reason = f"{name} matches {len(found)} of the {len(uuids)} GPUs that NVML finds, instead of one"
        raise MeterLost(reason, code="nvml.unknown_gpu")
    return found[0]


class Nvml:
    """Energy meter of a GPU; includes the work of other processes.

    Args:
        uuid: UUID from torch; "" to use CUDA_VISIBLE_DEVICES instead.

    Raises:
        MeterLost: The library, driver or GPU is missing, or the GPU is in MIG mode.
    """

    provenance = Provenance.MEASURED

    def __init__(
        self,
        ordinal: int = 0,
        *,
        uuid: str = "",
        library: Any = None,
        environment: Mapping[str, str] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._library, self._clock = load() if library is None else library, clock
        self._call("nvmlInit")
        found = [self._opened(i, is_needed=not uuid) for i in range(self._call("nvmlDeviceGetCount"))]
        handles, uuids, names = ([each[part] for each in found] for part in range(3))
        variables = os.environ if environment is None else environment
        at = _of_uuid(uuid, uuids, f"cuda:{ordinal}") if uuid else position(ordinal, uuids, names, variables)
        self._handle, self.uuid, self._device = handles[at], uuids[at], f"gpu {at}"
        self._refuse_slices()
        self._total, self._last_mw, self._read_at = 0.0, 0, clock()
        self._has_counter = self._counts()
        self.period_s = math.inf if self._has_counter else SAMPLED_S
        how = "" if self._has_counter else f" power, sampled at least every {SAMPLED_S:g} s"
        self.sources: tuple[str, ...] = (f"nvml {self._device}{how}",)

    def _opened(self, index: int, *, is_needed: bool) -> tuple[Any, str, str]:
        """Return a GPU's handle, UUID and name; empty values for an inaccessible GPU that is not needed."""
        try:
            handle = self._call("nvmlDeviceGetHandleByIndex", index)
            uuid, name = (self._call(f"nvmlDeviceGet{what}", handle) for what in ("UUID", "Name"))
            return handle, *(each.decode() if isinstance(each, bytes) else each for each in (uuid, name))
        except MeterLost:
            if is_needed:  # CUDA numbers this GPU too
                raise
            return None, "", ""

    def joules(self) -> float:
        """Return the energy in joules since the driver was loaded, or since creation if power is sampled.

        Raises:
            MeterLost: The GPU is unreachable, or its power was not sampled often enough.
        """
        if self._has_counter:
            return float(self._call("nvmlDeviceGetTotalEnergyConsumption", self._handle)) / 1e3
        before, then = self._last_mw, self._read_at
        self._last_mw, self._read_at = self._call("nvmlDeviceGetPowerUsage", self._handle), self._clock()
        passed_s = self._read_at - then
        if passed_s > SAMPLED_S:
            reason = f"the power of {self._device} was not sampled for {passed_s:.3g} s (limit {SAMPLED_S:g} s)"
            raise MeterLost(reason, code="meter.read_too_late")
        self._total += (before + self._last_mw) / 2e3 * passed_s
        return self._total

    def limits(self) -> tuple[PowerLimit, ...]:
        """Return the power limit if the driver reports it."""
        try:
            now = self._call("nvmlDeviceGetPowerManagementLimit", self._handle)
        except MeterLost:
            return ()
        try:
            low, high = self._call("nvmlDeviceGetPowerManagementLimitConstraints", self._handle)
        except MeterLost:
            return (PowerLimit(self._device, now / 1e3),)
        return (PowerLimit(self._device, now / 1e3, low / 1e3, high / 1e3),)

    def _counts(self) -> bool:
        """Return True if the GPU has an energy counter; otherwise take a first power sample."""
        try:
            self._library.nvmlDeviceGetTotalEnergyConsumption(self._handle)
        except self._library.NVMLError as error:
            if not self._is_none(error):
                raise MeterLost(self._why(error), code="nvml.failed") from None
            self._last_mw = self._call("nvmlDeviceGetPowerUsage", self._handle)
            self._read_at = self._clock()
            return False
        return True

    def _refuse_slices(self) -> None:
        try:
            current, _ = self._library.nvmlDeviceGetMigMode(self._handle)
        except self._library.NVMLError as error:
            if self._is_none(error):  # the GPU has no MIG mode
                return
            raise MeterLost(self._why(error), code="nvml.failed") from None
        if current == self._library.NVML_DEVICE_MIG_ENABLE:
            raise MeterLost(f"{self._device} is in MIG mode, {_MIG}", code="nvml.mig")

    def _call(self, name: str, *given: Any) -> Any:
        try:
            return getattr(self._library, name)(*given)
        except self._library.NVMLError as error:
            raise MeterLost(self._why(error), code="nvml.failed") from None

    def _is_none(self, error: Any) -> bool:
        return getattr(error, "value", None) in [getattr(self._library, code) for code in _NONE]

    @staticmethod
    def _why(error: Exception) -> str:
        return f"NVML failed ({error})"


def nvml(ordinal: int = 0, *, uuid: str = "", library: Any = None) -> Nvml | NoMeter:
    """Return a GPU's meter, or an absent meter with the reason."""
    try:
        return Nvml(ordinal, uuid=uuid, library=library)
    except MeterLost as reason:
        return NoMeter(str(reason), code=reason.code)
