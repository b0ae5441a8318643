"""How ranks are joined: one hop of a ring, measured or as published."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from trimtab.core import checks
from trimtab.core.errors import ValueGivenError


@dataclass(frozen=True)
class Link:
    """What joins ranks, as one hop of a ring sees it: per rank, and in one direction.

    Args:
        name: "nvlink:H100", "ib:NDR", "gloo of 2 ranks".
        latency_s: seconds that a hop takes whatever it carries.
        bytes_per_s: that a rank sends while it receives as many.
        source: where both figures come from; "assumed" of one that nobody published.
        calibrated: whether they were measured here, rather than read from a data sheet.
        scatters: whether a reduce-scatter sends each rank its shard alone; over torch's gloo it is an all-reduce of the
            whole, of which each rank keeps a shard (ProcessGroupGloo.cpp).

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
        for field in ("name", "source"):
            if not isinstance(value := getattr(self, field), str) or not value:
                raise ValueGivenError(f"link.{field}", given=repr(value), expected="a few words")
        checks.number("link.latency_s", self.latency_s, low=0)
        checks.number("link.bytes_per_s", self.bytes_per_s, low=0, open_low=True)
        for field in ("calibrated", "scatters"):
            if not isinstance(value := getattr(self, field), bool):
                raise ValueGivenError(f"link.{field}", given=repr(value), expected="true or false")


# Latencies of a hop of the ring, as NCCL itself reckons with (2.30, src/graph/tuning.cc: hwLatencies, ring, Simple, the
# protocol of large messages), and what the kernel's TCP is taken to need, of which there is no such table.
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
# Published figures, by the name that `--link` takes.
LINKS: Mapping[str, Link] = {link.name: link for link in _ROWS}
# Which of them a name alone means; "nvlink" is the device's own.
USUAL: Mapping[str, str] = {"ib": "ib:NDR", "ethernet": "ethernet:100"}
_NODES = re.compile(r"\s*(\d{1,4})\s*x\s*([^+]+)\+(.+)", re.IGNORECASE)
# Products of the same families that are joined otherwise: by PCIe, or by bridges in pairs.
_OTHER_PRODUCTS = frozenset({"PCIE", "NVL", "MIG"})


def absent_link(name: str, device_name: str = "") -> Link:
    """Return a link of the table: "nvlink" (the device's own), "ib", "ethernet", or one such as "ib:HDR".

    Raises:
        ValueGivenError: the table does not have it, or the device has no NVLink that is known.
    """
    wanted = name.strip().lower() if isinstance(name, str) else ""
    wanted = _nvlink_of(device_name) if wanted == "nvlink" else USUAL.get(wanted, wanted)
    for known, link in LINKS.items():
        if known.lower() == wanted.lower():
            return link
    given = f"{name!r:.60}" + (f" of {device_name!r:.60}" if device_name else "")
    raise ValueGivenError("link", given=given, expected="one of " + ", ".join(_names()))


def ring_link(name: str, device_name: str, ranks: int) -> Link:
    """Return a link as `absent_link` does, or that of nodes: "8 x nvlink + ib:NDR", by what joins eight and theirs.

    Ranks that fit on one node are joined by what is inside of it.

    Raises:
        ValueGivenError: as `absent_link`; a node of no ranks.
    """
    found = _NODES.fullmatch(name) if isinstance(name, str) else None
    if found is None:
        return absent_link(name, device_name)
    ranks_of_node = checks.integer("link.ranks_of_node", int(found[1]))
    inside, between = (absent_link(part.strip(), device_name) for part in found.group(2, 3))
    return inside if ranks <= ranks_of_node else over_nodes(inside, between, ranks_of_node)


def over_nodes(inside: Link, between: Link, ranks_of_node: int) -> Link:
    """Return the one hop that a ring over several nodes is made of, where each rank has a port of its own.

    NCCL makes as many rings as ports (src/graph/tuning.cc: a bus is as wide as its channels together), each of which
    leaves and enters a node once and goes through its ranks over the link inside: together they are as wide as a
    node's ports, or as what joins its ranks, and of a node's hops one has the latency of the network.

    Args:
        between: of a rank's port. ranks_of_node: ranks, and ports, of each node.

    Raises:
        ValueGivenError: a node of no ranks.
    """
    checks.integer("ranks_of_node", ranks_of_node)
    latency_s = ((ranks_of_node - 1) * inside.latency_s + between.latency_s) / ranks_of_node
    bytes_per_s = min(inside.bytes_per_s, ranks_of_node * between.bytes_per_s)
    name = f"{ranks_of_node} x {inside.name} + {between.name}"
    measured = inside.calibrated and between.calibrated
    return Link(name, latency_s, bytes_per_s, f"{inside.source}; {between.source}", calibrated=measured)


def _nvlink_of(device_name: str) -> str:
    """Return the name of a device's NVLink; "" where it is not known."""
    words = device_name.upper().replace("-", " ").replace("_", " ").split()
    if _OTHER_PRODUCTS & set(words):
        return ""
    return next((name for name in LINKS if name.startswith("nvlink:") and name.split(":")[1] in words), "")


def _names() -> list[str]:
    devices = ", ".join(name.split(":")[1] for name in LINKS if name.startswith("nvlink:"))
    return [f"nvlink (where the device is {devices})", *USUAL, *LINKS]


@dataclass(frozen=True)
class Calibration:
    """A process group as it was timed, the same figures on every rank.

    Args:
        link: of its all-reduces. miss: by how much the worst of them is missed, as a share of its seconds.
        overlap_share: of communication that runs beside computation, how much is hidden by it, from 0 to 1.
        cast_s_per_byte: seconds to make bf16 of a byte of fp32, and fp32 of it again.
        hook_s: seconds that a bucket of DDP's takes longer where it is sent in bf16, however few its bytes: the host's,
            of a hook that is Python's.
    """

    link: Link
    miss: float = 0.0
    overlap_share: float = 1.0
    cast_s_per_byte: float = 0.0
    hook_s: float = 0.0

    def __post_init__(self) -> None:
        checks.number("calibration.miss", self.miss, low=0)
        checks.number("calibration.overlap_share", self.overlap_share, low=0, high=1)
        for name in ("cast_s_per_byte", "hook_s"):
            checks.number(f"calibration.{name}", getattr(self, name), low=0)
