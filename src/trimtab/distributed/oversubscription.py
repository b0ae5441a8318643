"""Oversubscription: detects ranks on shared cores or a shared GPU, where scaling measurements are meaningless."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from trimtab.measure.cpu_affinity import node, own_cores, quotas


@dataclass(frozen=True)
class RankPlacement:
    """Placement of a rank.

    Args:
        node: machine.
        cores: indices of the allowed cores (CPU affinity).
        threads: number of compute threads.
        device: unique name of the GPU; "" without a GPU.
        quotas: core limits by control group.
    """

    node: str
    cores: tuple[int, ...]
    threads: int
    device: str = ""
    quotas: Mapping[str, float] = field(default_factory=dict)


def oversubscribed_resource() -> str:
    """Return the oversubscribed resource, "cores" or "devices", or ""; a collective."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return resource_of_placements([_own()])
    seats: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(seats, _own())
    return resource_of_placements(seats)


def resource_of_placements(seats: Sequence[RankPlacement]) -> str:
    """Return the oversubscribed resource for these placements: "cores", "devices", or ""."""
    nodes = {seat.node: [each for each in seats if each.node == seat.node] for seat in seats}
    if any(seat.device for seat in seats):
        return "devices" if any(len({each.device for each in own}) < len(own) for own in nodes.values()) else ""
    return "cores" if any(_share_cores(own) for own in nodes.values()) else ""


def _share_cores(seats: Sequence[RankPlacement]) -> bool:
    """Return True if a machine has more threads than cores, within the allowed cores or a quota."""
    bound = [frozenset(seat.cores) for seat in seats]
    for room in {*bound, frozenset[int]().union(*bound)}:
        if sum(seat.threads for seat, own in zip(seats, bound, strict=True) if own <= room) > len(room):
            return True
    limits = {group: cores for seat in seats for group, cores in seat.quotas.items()}
    return any(sum(seat.threads for seat in seats if group in seat.quotas) > cores for group, cores in limits.items())


def _own() -> RankPlacement:
    device = _device() if torch.cuda.is_available() else ""
    return RankPlacement(node(), tuple(sorted(own_cores())), torch.get_num_threads(), device, quotas())


def _device() -> str:
    """Return the current GPU's unique name, independent of its index in this process."""
    index = torch.cuda.current_device()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    # A MIG partition may have the UUID of the whole device.
    part = visible[index] if index < len(visible) and visible[index].startswith("MIG-") else ""
    return f"{torch.cuda.get_device_properties(index).uuid}{part}"
