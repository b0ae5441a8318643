"""CPU cores available to this process: affinity, and quotas of control groups."""

from __future__ import annotations

import contextlib
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from trimtab.distributed.process_group import gather_objects

_GROUPS, _OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
_BOOT = Path("/proc/sys/kernel/random/boot_id")


def node() -> str:
    """Return an identifier of this machine, equal in all its containers if the kernel provides a boot id."""
    with contextlib.suppress(OSError):
        return _BOOT.read_text(encoding="ascii").strip()
    return platform.node()


def own_cores() -> frozenset[int]:
    """Return the core numbers in this process's affinity mask, or all cores if there is no affinity support."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def quotas(groups: Path = _GROUPS, own: Path = _OWN) -> dict[str, float]:
    """Return the CPU quotas of this process's control group and its parents.

    Supports cgroup v2 (`cpu.max`) and v1 (`cpu.cfs_quota_us`), see docs.kernel.org, cgroup-v2 and sched-bwc.

    Returns:
        Quota in cores, by an identifier of the group on this machine. Groups without a limit are left out.
    """
    found = dict[str, float]()
    for folder in _folders(groups, own):
        limit = _limit(folder)
        if limit is not None:
            status = folder.stat()
            found[f"{status.st_dev}:{status.st_ino}"] = limit
    return found


def _folders(groups: Path, own: Path) -> list[Path]:
    """Return the directories of this process's groups and their parents."""
    try:
        lines = own.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    found: list[Path] = []
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and "cpu" not in controllers.split(","):
            continue
        roots = (groups / controllers, groups / "cpu") if controllers else (groups,)
        root = next((each for each in roots if each.is_dir()), groups)
        # A container may see group names of the host, while only the root is mounted.
        parts = [part for part in path.split("/") if part not in ("", "..")]
        above = [root.joinpath(*parts[:depth]) for depth in range(len(parts), -1, -1)]
        found += [folder for folder in above if folder.is_dir()]
    return found


def _limit(folder: Path) -> float | None:
    """Return a group's quota in cores, or None without a readable limit."""
    with contextlib.suppress(OSError, ValueError, ZeroDivisionError):
        if (newer := folder / "cpu.max").exists():
            quota, period = newer.read_text(encoding="ascii").split()
        else:
            quota, period = (
                (folder / f"cpu.cfs_{name}_us").read_text(encoding="ascii") for name in ("quota", "period")
            )
        return int(quota) / int(period) if int(quota) > 0 else None
    return None


# Oversubscription: detects ranks on shared cores or a shared GPU, where scaling measurements are meaningless.


@dataclass(frozen=True)
class RankPlacement:
    """Placement of a rank.

    Args:
        cores: indices of the allowed cores (CPU affinity).
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
    device = _device() if torch.cuda.is_available() else ""
    own = RankPlacement(node(), tuple(sorted(own_cores())), torch.get_num_threads(), device, quotas())
    return resource_of_placements(gather_objects(own))


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


def _device() -> str:
    """Return the current GPU's unique name, independent of its index in this process."""
    index = torch.cuda.current_device()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    # A MIG partition may have the UUID of the whole device.
    part = visible[index] if index < len(visible) and visible[index].startswith("MIG-") else ""
    return f"{torch.cuda.get_device_properties(index).uuid}{part}"
