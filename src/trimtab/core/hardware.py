"""Devices and their published peaks. What is not known is None, never a guess."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from trimtab.core.errors import ValueGivenError


@dataclass(frozen=True)
class DeviceSpec:
    """One device as a plan sees it.

    Args:
        name: the device's own name, e.g. "NVIDIA H100 80GB HBM3".
        kind: "cpu" or "cuda".
        memory_bytes: memory a process may use, or None.
        peak_flops: dtype (fp32, tf32, bf16, fp16) -> dense FLOP/s; a missing dtype is unknown.
        bandwidth_bytes_s: memory bandwidth, or None.
        source: where the peaks come from; "unknown" when there are none.
        num_threads: CPU threads torch uses (0 on an accelerator).
    """

    name: str
    kind: str
    memory_bytes: int | None = None
    peak_flops: Mapping[str, float] = field(default_factory=dict)
    bandwidth_bytes_s: float | None = None
    source: str = "unknown"
    num_threads: int = 0

    def peak(self, precision: str) -> float | None:
        """Return the dense peak in FLOP/s for a precision, or None when it is not known."""
        return self.peak_flops.get(precision)

    def utilisation(self, flops_per_s: float, precision: str) -> float | None:
        """Return achieved / peak: MFU for model FLOP/s, HFU when recomputation is counted too; None if unknown."""
        peak = self.peak(precision)
        return None if not peak else flops_per_s / peak


@dataclass(frozen=True)
class Peaks:
    """A row of the table: dense FLOP/s by dtype (tensor cores, fp32 accumulation), bytes/s, bytes, where they stand."""

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


# Dense figures, without sparsity. The first row whose every word is in the device's name is taken, unless the name
# also says that it is another product (or a slice) of that family.
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
    """Return the table's row for a device name, or None: an unknown device stays unknown."""
    words = name.upper().replace("-", " ").split()
    if _OTHER_PRODUCTS & set(words):
        return None
    for row in PEAKS:
        if all(any(word == w or w in word.split("_") for word in words) for w in row.match.upper().split()):
            return row
    return None


def absent_device(name: str) -> DeviceSpec:
    """Return a device of the table by its name, such as "A100 80GB" or "H100 SXM".

    Raises:
        ValueGivenError: the table does not have it.
    """
    row = lookup_peaks(name)
    if row is None:
        known = ", ".join(row.match for row in PEAKS)
        raise ValueGivenError("device", given=f"{name!r:.60}", expected=f"one whose peaks are known: {known}")
    return DeviceSpec(name, "cuda", row.memory_bytes, row.flops, row.bandwidth_bytes_s, row.source)
