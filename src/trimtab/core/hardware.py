"""Devices and their published peak performance. Unknown figures are None."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from trimtab.core.errors import ValueGivenError


@dataclass(frozen=True)
class DeviceSpec:
    """Specification of a device.

    Args:
        name: the device's own name, such as "NVIDIA H100 80GB HBM3".
        kind: "cpu" or "cuda".
        memory_bytes: memory that a process may use, or None.
        peak_flops: dense FLOP/s by dtype (fp32, tf32, bf16, fp16); a missing dtype is unknown.
        bandwidth_bytes_s: memory bandwidth in bytes per second, or None.
        source: source of the peaks; "unknown" if there are none.
        num_threads: torch's CPU threads (0 for an accelerator).
    """

    name: str
    kind: str
    memory_bytes: int | None = None
    peak_flops: Mapping[str, float] = field(default_factory=dict)
    bandwidth_bytes_s: float | None = None
    source: str = "unknown"
    num_threads: int = 0

    def peak(self, precision: str) -> float | None:
        """Return the dense peak in FLOP/s for a precision, or None if unknown."""
        return self.peak_flops.get(precision)

    def utilisation(self, flops_per_s: float, precision: str) -> float | None:
        """Return achieved / peak FLOP/s (MFU for model FLOP/s, HFU if recomputation is counted); None if unknown."""
        peak = self.peak(precision)
        return None if not peak else flops_per_s / peak


@dataclass(frozen=True)
class Peaks:
    """Row of the device table: dense FLOP/s by dtype (tensor cores, fp32 accumulation), bytes/s, bytes and source."""

    match: str
    flops: Mapping[str, float]
    bandwidth_bytes_s: float
    source: str
    memory_bytes: int


def _row(match: str, fp32: float, tf32: float | None, half: float, bandwidth: float, size: int, source: str) -> Peaks:
    flops = {"fp32": fp32 * 1e12, "bf16": half * 1e12, "fp16": half * 1e12}
    if tf32 is not None:
        flops["tf32"] = tf32 * 1e12
    return Peaks(match, flops, bandwidth * 1e9, source, size * 10**9)


# Dense figures, without sparsity. The first row whose words all occur in the device's name is used, unless the name
# also contains a word of another product (or a slice) of that family.
_OTHER_PRODUCTS = frozenset({"NVL", "TI", "D", "LAPTOP", "MIG"})
PEAKS: tuple[Peaks, ...] = (
    _row("H200", 67, 494.7, 989.4, 4800, 141, "NVIDIA H200 data sheet, SXM, dense"),
    _row("H100 PCIe", 51.2, 378, 756, 2000, 80, "NVIDIA H100 data sheet, PCIe, dense"),
    _row("H100", 67, 494.7, 989.4, 3350, 80, "NVIDIA H100 data sheet, SXM, dense"),
    _row("A100 80GB PCIe", 19.5, 156, 312, 1935, 80, "NVIDIA A100 80GB data sheet, PCIe, dense"),
    _row("A100 80GB", 19.5, 156, 312, 2039, 80, "NVIDIA A100 80GB data sheet, SXM, dense"),
    _row("A100", 19.5, 156, 312, 1555, 40, "NVIDIA A100 40GB data sheet, dense"),
    _row("L40S", 91.6, 183, 362, 864, 48, "NVIDIA L40S data sheet, dense"),
    _row("L4", 30.3, 60, 121, 300, 24, "NVIDIA L4 data sheet, dense"),
    _row("RTX 4090", 82.6, 82.6, 165.2, 1008, 24, "NVIDIA Ada GPU architecture paper, dense, fp32 accumulation"),
    _row("RTX 3090", 35.6, 35.6, 71, 936, 24, "NVIDIA GA102 architecture paper, dense, fp32 accumulation"),
)


def lookup_peaks(name: str) -> Peaks | None:
    """Return the table's row for a device name, or None for an unknown device."""
    words = name.upper().replace("-", " ").split()
    if _OTHER_PRODUCTS & set(words):
        return None
    for row in PEAKS:
        if all(any(word == w or w in word.split("_") for word in words) for w in row.match.upper().split()):
            return row
    return None


def absent_device(name: str) -> DeviceSpec:
    """Return the specification of a device in the table, such as "A100 80GB" or "H100 SXM".

    Raises:
        ValueGivenError: the device is not in the table.
    """
    row = lookup_peaks(name)
    if row is None:
        known = ", ".join(row.match for row in PEAKS)
        raise ValueGivenError("device", got=f"{name!r:.60}", expected=f"a known device: {known}")
    return DeviceSpec(name, "cuda", row.memory_bytes, row.flops, row.bandwidth_bytes_s, row.source)
