"""Whether ranks share what each should have for itself: then their times say nothing of how they scale."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from trimtab.measure.cores import node, own_cores, quotas


@dataclass(frozen=True)
class Seat:
    """Where a rank runs.

    Args:
        node: the machine. cores: numbers of those it is bound to. threads: that it computes with. device: its GPU's own
            name; "" where it has none. quotas: cores by the control group that is allowed no more.
    """

    node: str
    cores: tuple[int, ...]
    threads: int
    device: str = ""
    quotas: Mapping[str, float] = field(default_factory=dict)


def crowded() -> str:
    """Return what ranks share that should have one each: "cores", "devices", or ""; all ranks call it, and wait."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return shared([_own()])
    seats: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(seats, _own())
    return shared(seats)


def shared(seats: Sequence[Seat]) -> str:
    """Return what ranks in these seats share: "cores", "devices", or ""."""
    nodes = {seat.node: [each for each in seats if each.node == seat.node] for seat in seats}
    if any(seat.device for seat in seats):
        return "devices" if any(len({each.device for each in own}) < len(own) for own in nodes.values()) else ""
    return "cores" if any(_share_cores(own) for own in nodes.values()) else ""


def _share_cores(seats: Sequence[Seat]) -> bool:
    """Return whether threads of one machine outnumber some cores that they cannot leave, or a quota."""
    bound = [frozenset(seat.cores) for seat in seats]
    for room in {*bound, frozenset[int]().union(*bound)}:
        if sum(seat.threads for seat, own in zip(seats, bound, strict=True) if own <= room) > len(room):
            return True
    limits = {group: cores for seat in seats for group, cores in seat.quotas.items()}
    return any(sum(seat.threads for seat in seats if group in seat.quotas) > cores for group, cores in limits.items())


def _own() -> Seat:
    device = _device() if torch.cuda.is_available() else ""
    return Seat(node(), tuple(sorted(own_cores())), torch.get_num_threads(), device, quotas())


def _device() -> str:
    """Return the current device's own name, which is the same whatever number a process sees it by."""
    index = torch.cuda.current_device()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    # A part of a device may have the whole one's.
    part = visible[index] if index < len(visible) and visible[index].startswith("MIG-") else ""
    return f"{torch.cuda.get_device_properties(index).uuid}{part}"
