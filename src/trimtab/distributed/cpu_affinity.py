"""Placement of ranks: detects ranks on shared cores or a shared GPU, which make scaling figures meaningless."""

from __future__ import annotations

import contextlib
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from trimtab.distributed.process_group import gather_objects
from trimtab.measure.machine import own_cores

_BOOT = Path("/proc/sys/kernel/random/boot_id")


def node() -> str:
    """Return an identifier of this machine, equal in all its containers if the kernel provides a boot id."""
    with contextlib.suppress(OSError):
        return _BOOT.read_text(encoding="ascii").strip()
    return platform.node()


class RankPlacement(NamedTuple):
    """Machine, allowed cores, threads and GPU ("" without a GPU) of a rank."""

    node: str
    cores: frozenset[int]
    threads: int
    device: str = ""


def oversubscribed_resource() -> str:
    """Return the oversubscribed resource, "cores" or "devices", or ""; a collective."""
    device = _device() if torch.cuda.is_available() else ""
    return resource_of_placements(gather_objects(RankPlacement(node(), own_cores(), torch.get_num_threads(), device)))


def resource_of_placements(seats: Sequence[RankPlacement]) -> str:
    """Return the oversubscribed resource for placements of ranks: "cores", "devices", or ""."""
    nodes = {seat.node: [each for each in seats if each.node == seat.node] for seat in seats}
    if any(seat.device for seat in seats):
        return "devices" if any(len({each.device for each in own}) < len(own) for own in nodes.values()) else ""
    for own in nodes.values():
        bound = [seat.cores for seat in own]
        for room in {*bound, frozenset[int]().union(*bound)}:
            if sum(seat.threads for seat in own if seat.cores <= room) > len(room):
                return "cores"
    return ""


def _device() -> str:
    """Return the current GPU's unique name, independent of its index in this process."""
    index = torch.cuda.current_device()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    # A MIG partition may have the UUID of the whole device.
    part = visible[index] if index < len(visible) and visible[index].startswith("MIG-") else ""
    return f"{torch.cuda.get_device_properties(index).uuid}{part}"
