"""A machine's meters, made up: a powercap tree, NVIDIA's module, and a clock that is set."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path


class Clock:
    """Seconds, as they are set."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Tree:
    """A powercap folder; `tree.add("intel-rapl:0", "package-0")`, `tree.show("intel-rapl:0", joules)`."""

    def __init__(self, root: Path) -> None:
        self.root = root / "powercap"
        self.root.mkdir()

    def add(self, zone: str, name: str, *, joules: float = 1.0, range_j: float | None = 262_143.0, **more: int) -> None:
        folder = self._folder(zone)
        folder.mkdir(parents=True)
        (folder / "name").write_text(f"{name}\n")
        if range_j is not None:
            (folder / "max_energy_range_uj").write_text(f"{round(range_j * 1e6)}\n")
        for file, value in more.items():
            (folder / file).write_text(f"{value}\n")
        self.show(zone, joules)

    def show(self, zone: str, joules: float) -> None:
        (self._folder(zone) / "energy_uj").write_text(f"{round(joules * 1e6)}\n")

    def file(self, zone: str, name: str = "energy_uj") -> Path:
        return self._folder(zone) / name

    def _folder(self, zone: str) -> Path:
        top = ":".join(zone.split(":")[:2])
        return self.root / top if zone == top else self.root / top / zone


class NVMLError(Exception):
    def __init__(self, value: int, text: str = "") -> None:
        super().__init__(text or f"error {value}")
        self.value = value


@dataclass
class Gpu:
    uuid: str
    millijoules: int | None = 1_000_000
    milliwatts: int = 100_000
    mig: int | None = None
    limits: tuple[int, int, int] | None = (700_000, 200_000, 700_000)
    is_lost: bool = False
    is_denied: bool = False
    is_old: bool = False  # its driver knows neither counters nor slices


@dataclass
class Library:
    """NVIDIA's module, as far as it is used; `starts` False: no driver."""

    gpus: list[Gpu] = field(default_factory=list)
    starts: bool = True

    NVMLError = NVMLError
    NVML_ERROR_NOT_SUPPORTED = 3
    NVML_ERROR_NO_PERMISSION = 4
    NVML_ERROR_LIBRARY_NOT_FOUND = 12
    NVML_ERROR_FUNCTION_NOT_FOUND = 13
    NVML_ERROR_GPU_IS_LOST = 15
    NVML_DEVICE_MIG_ENABLE = 1

    def nvmlInit(self) -> None:
        if not self.starts:
            raise NVMLError(self.NVML_ERROR_LIBRARY_NOT_FOUND, "NVML Shared Library Not Found")

    def nvmlDeviceGetCount(self) -> int:
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Gpu:
        return self.gpus[index]

    def nvmlDeviceGetUUID(self, gpu: Gpu) -> str:
        return gpu.uuid

    def nvmlDeviceGetMigMode(self, gpu: Gpu) -> list[int]:
        self._require_known(gpu)
        return [self._told(gpu.mig), 0]

    def nvmlDeviceGetTotalEnergyConsumption(self, gpu: Gpu) -> int:
        if gpu.is_lost:
            raise NVMLError(self.NVML_ERROR_GPU_IS_LOST, "GPU is lost")
        if gpu.is_denied:
            raise NVMLError(self.NVML_ERROR_NO_PERMISSION, "Insufficient Permissions")
        self._require_known(gpu)
        return self._told(gpu.millijoules)

    def nvmlDeviceGetPowerUsage(self, gpu: Gpu) -> int:
        return gpu.milliwatts

    def nvmlDeviceGetPowerManagementLimit(self, gpu: Gpu) -> int:
        return self._told(gpu.limits)[0]

    def nvmlDeviceGetPowerManagementLimitConstraints(self, gpu: Gpu) -> list[int]:
        return list(self._told(gpu.limits)[1:])

    def _require_known(self, gpu: Gpu) -> None:
        if gpu.is_old:
            raise NVMLError(self.NVML_ERROR_FUNCTION_NOT_FOUND, "Function Not Found")

    def _told(self, value):
        if value is None:
            raise NVMLError(self.NVML_ERROR_NOT_SUPPORTED, "Not Supported")
        return value
