"""Devices and interconnects with their published performance. Unknown figures are None."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from trimtab.core import validation
from trimtab.core.errors import ValueGivenError


@dataclass(frozen=True)
class Link:
    """Interconnect of ranks, as a single hop of a ring, per rank and direction.

    Args:
        name: such as "nvlink:H100", "ib:NDR" or "gloo of 2 ranks".
        latency_s: seconds per hop, independent of the message size.
        bytes_per_s: bandwidth of a rank that sends and receives at the same time.
        source: source of both figures; "assumed" if none is published.
        calibrated: True if measured on this machine, False if from a data sheet.
        scatters: True if a reduce-scatter sends each rank only its shard. Over gloo, torch runs an all-reduce of the
            whole tensor and each rank keeps a shard (ProcessGroupGloo.cpp).

    Raises:
        ValueGivenError: a figure is out of range.
    """

    name: str
    latency_s: float
    bytes_per_s: float
    source: str
    calibrated: bool = False
    scatters: bool = True

    def __post_init__(self) -> None:
        for name in ("name", "source"):
            if not isinstance(value := getattr(self, name), str) or not value:
                raise ValueGivenError(f"link.{name}", got=repr(value), expected="a non-empty string")
        validation.number("link.latency_s", self.latency_s, low=0)
        validation.number("link.bytes_per_s", self.bytes_per_s, low=0, open_low=True)
        for name in ("calibrated", "scatters"):
            if not isinstance(value := getattr(self, name), bool):
                raise ValueGivenError(f"link.{name}", got=repr(value), expected="true or false")


@dataclass(frozen=True)
class HostLink:
    """Bandwidth between a device and pinned host memory, measured on this machine.

    Args:
        to_host_bytes_s, to_device_bytes_s: bytes per second in each direction.

    Raises:
        ValueGivenError: a figure is out of range.
    """

    to_host_bytes_s: float
    to_device_bytes_s: float

    def __post_init__(self) -> None:
        for name in ("to_host_bytes_s", "to_device_bytes_s"):
            validation.number(f"host_link.{name}", getattr(self, name), low=0, open_low=True)


# Latency of a ring hop in NCCL's own cost model (2.30, src/graph/tuning.cc: hwLatencies, ring, Simple, the protocol
# of large messages), and an assumed latency for the kernel's TCP, which has no published table.
_NVLINK_S, _NETWORK_S, _TCP_S = 3.4e-6, 14e-6, 30e-6


def _nvlink(device: str, giga: float, source: str) -> Link:
    said = f"{source}: {2 * giga:g} GB/s in both directions; latency: NCCL's tuning table"
    return Link(f"nvlink:{device}", _NVLINK_S, giga * 1e9, said)


def _network(name: str, latency_s: float, giga_bits: float, source: str) -> Link:
    return Link(name, latency_s, giga_bits * 1e9 / 8, source)


_ROWS = (
    _nvlink("A100", 300, "NVIDIA A100 data sheet, SXM"),
    _nvlink("H100", 450, "NVIDIA H100 data sheet, SXM"),
    _nvlink("H200", 450, "NVIDIA H200 data sheet, SXM"),
    _nvlink("B200", 900, "NVIDIA DGX B200 data sheet, by GPU"),
    _network(
        "ib:NDR", _NETWORK_S, 400, "NVIDIA DGX H100 data sheet, a port for each GPU; latency: NCCL's tuning table"
    ),
    _network(
        "ib:HDR", _NETWORK_S, 200, "NVIDIA DGX A100 data sheet, a port for each GPU; latency: NCCL's tuning table"
    ),
    _network("ethernet:100", _TCP_S, 100, "IEEE 802.3ba, a port for each rank; latency assumed, of TCP in one rack"),
    _network("ethernet:25", _TCP_S, 25, "IEEE 802.3by, a port for each rank; latency assumed, of TCP in one rack"),
)
# Published links, by the value of `--link`.
LINKS: Mapping[str, Link] = {link.name: link for link in _ROWS}
# Default link of a family; "nvlink" means the link of the device.
USUAL: Mapping[str, str] = {"ib": "ib:NDR", "ethernet": "ethernet:100"}
_NODES = re.compile(r"\s*(\d{1,4})\s*x\s*([^+]+)\+(.+)", re.IGNORECASE)
# Products of the same families without NVLink between all GPUs: connected by PCIe, or by bridges in pairs.
_PRODUCTS_WITHOUT_NVLINK = frozenset({"PCIE", "NVL", "MIG"})


def absent_link(name: str, device_name: str = "") -> Link:
    """Return a known link: "nvlink" (that of the device), "ib", "ethernet", or a full name such as "ib:HDR".

    Raises `ValueGivenError` for a link that is not in `LINKS`, or if the NVLink of the device is unknown.
    """
    wanted = name.strip().lower() if isinstance(name, str) else ""
    wanted = _nvlink_of(device_name) if wanted == "nvlink" else USUAL.get(wanted, wanted)
    for known, link in LINKS.items():
        if known.lower() == wanted.lower():
            return link
    given = f"{name!r:.60}" + (f" for the device {device_name!r:.60}" if device_name else "")
    raise ValueGivenError("link", got=given, expected="one of " + ", ".join(_names()))


def ring_link(name: str, device_name: str, ranks: int) -> Link:
    """Return a known link, or that of several nodes: "8 x nvlink + ib:NDR" means 8 ranks per node and a network.

    The link inside the node if all ranks fit on one. Raises `ValueGivenError` as `absent_link`, or without ranks.
    """
    found = _NODES.fullmatch(name) if isinstance(name, str) else None
    if found is None:
        return absent_link(name, device_name)
    ranks_of_node = validation.integer("link.ranks_of_node", int(found[1]))
    inside, between = (absent_link(part.strip(), device_name) for part in found.group(2, 3))
    return inside if ranks <= ranks_of_node else over_nodes(inside, between, ranks_of_node)


def over_nodes(inside: Link, between: Link, ranks_of_node: int) -> Link:
    """Return the equivalent single hop of a ring over several nodes, with a network port per rank.

    NCCL makes a ring per port (src/graph/tuning.cc: the bus bandwidth is the sum over channels).
    Each ring enters and leaves a node once, and passes through the node's ranks over the inner link. The total
    bandwidth is therefore the smaller of the node's ports together and the inner link, and one hop per node has the
    network's latency.
    """
    validation.integer("ranks_of_node", ranks_of_node)
    latency_s = ((ranks_of_node - 1) * inside.latency_s + between.latency_s) / ranks_of_node
    bytes_per_s = min(inside.bytes_per_s, ranks_of_node * between.bytes_per_s)
    name = f"{ranks_of_node} x {inside.name} + {between.name}"
    measured = inside.calibrated and between.calibrated
    return Link(name, latency_s, bytes_per_s, f"{inside.source}; {between.source}", calibrated=measured)


def _nvlink_of(device_name: str) -> str:
    """Return the name of a device's NVLink; "" if unknown."""
    words = device_name.upper().replace("-", " ").replace("_", " ").split()
    if _PRODUCTS_WITHOUT_NVLINK & set(words):
        return ""
    return next((name for name in LINKS if name.startswith("nvlink:") and name.split(":")[1] in words), "")


def _names() -> list[str]:
    devices = ", ".join(name.split(":")[1] for name in LINKS if name.startswith("nvlink:"))
    return [f"nvlink (only with the devices {devices})", *USUAL, *LINKS]


@dataclass(frozen=True)
class LinkCalibration:
    """Measured communication costs of a process group, identical on all ranks.

    Args:
        link: link fitted to its all-reduces.
        miss: largest relative error of the fit, as a fraction of an all-reduce's seconds.
        overlap_share: fraction of communication that concurrent computation hides, from 0 to 1.
        cast_s_per_byte: seconds to convert a byte of fp32 to bf16 and back.
        hook_s: extra seconds per DDP bucket for sending bf16, independent of its size: the CPU time of a Python
            communication hook.
    """

    link: Link
    miss: float = 0.0
    overlap_share: float = 1.0
    cast_s_per_byte: float = 0.0
    hook_s: float = 0.0

    def __post_init__(self) -> None:
        validation.number("calibration.miss", self.miss, low=0)
        validation.number("calibration.overlap_share", self.overlap_share, low=0, high=1)
        for name in ("cast_s_per_byte", "hook_s"):
            validation.number(f"calibration.{name}", getattr(self, name), low=0)


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
        native: half precisions with CPU instructions; () if unknown.
    """

    name: str
    kind: str
    memory_bytes: int | None = None
    peak_flops: Mapping[str, float] = field(default_factory=dict)
    bandwidth_bytes_s: float | None = None
    source: str = "unknown"
    num_threads: int = 0
    native: tuple[str, ...] = ()

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
    flops = {"fp32": fp32 * 1e12, "fp16": half * 1e12}
    if tf32 is not None:
        flops |= {"tf32": tf32 * 1e12, "bf16": half * 1e12}  # NVIDIA introduced both together.
    return Peaks(match, flops, bandwidth * 1e9, source, size * 10**9)


# Dense figures, without sparsity. The first row whose words all occur in the device's name is used, unless the name
# also contains a word of another product (or a slice) of that family.
_OTHER_PRODUCTS = frozenset({"NVL", "TI", "D", "LAPTOP", "MIG"})
PEAKS: tuple[Peaks, ...] = (
    _row("B200", 75, 1125, 2250, 8000, 180, "NVIDIA HGX and DGX B200 data sheets, by GPU, dense"),
    _row("H200", 67, 494.7, 989.4, 4800, 141, "NVIDIA H200 data sheet, SXM, dense"),
    _row("H100 PCIe", 51.2, 378, 756, 2000, 80, "NVIDIA H100 data sheet, PCIe, dense"),
    _row("H100", 67, 494.7, 989.4, 3350, 80, "NVIDIA H100 data sheet, SXM, dense"),
    _row("A100 80GB PCIe", 19.5, 156, 312, 1935, 80, "NVIDIA A100 80GB data sheet, PCIe, dense"),
    _row("A100 80GB", 19.5, 156, 312, 2039, 80, "NVIDIA A100 80GB data sheet, SXM, dense"),
    _row("A100", 19.5, 156, 312, 1555, 40, "NVIDIA A100 40GB data sheet, dense"),
    _row("L40S", 91.6, 183, 362, 864, 48, "NVIDIA L40S data sheet, dense"),
    _row("L4", 30.3, 60, 121, 300, 24, "NVIDIA L4 data sheet, dense"),
    _row("A10", 31.2, 62.5, 125, 600, 24, "NVIDIA A10 data sheet, dense"),
    _row("V100 SXM2 32GB", 15.7, None, 125, 900, 32, "NVIDIA V100 data sheet, SXM2, fp32 accumulation"),
    _row("V100 SXM2", 15.7, None, 125, 900, 16, "NVIDIA V100 data sheet, SXM2, fp32 accumulation"),
    _row("T4", 8.1, None, 65, 300, 16, "NVIDIA T4 data sheet"),
    _row(
        "RTX 5090", 104.8, 104.8, 209.5, 1792, 32, "NVIDIA RTX Blackwell architecture paper, dense, fp32 accumulation"
    ),
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
    """Return a device in the table, such as "A100 80GB" or "H100 SXM"; `ValueGivenError` for another name."""
    row = lookup_peaks(name)
    if row is None:
        import difflib  # for this error alone

        known = [row.match for row in PEAKS]
        near = difflib.get_close_matches(name.upper(), known, n=1)
        hint = f"Did you mean {near[0]}?" if near else ""
        raise ValueGivenError("device", got=f"{name!r:.60}", expected=f"a known device: {', '.join(known)}", hint=hint)
    return DeviceSpec(name, "cuda", row.memory_bytes, row.flops, row.bandwidth_bytes_s, row.source)
