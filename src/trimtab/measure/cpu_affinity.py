"""CPU cores available to this process: affinity, and quotas of control groups."""

from __future__ import annotations

import contextlib
import os
import platform
from pathlib import Path

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

    Args:
        groups: Mount point of the control groups.
        own: File with this process's groups.

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
    """Return the directories of this process's groups and their parents.

    A container may see group names of the host, while only the root is mounted.
    """
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
