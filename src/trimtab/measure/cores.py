"""What cores this process may use: those it is bound to, and how many of them the quotas of its groups leave."""

from __future__ import annotations

import contextlib
import os
import platform
from pathlib import Path

_GROUPS, _OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
_BOOT = Path("/proc/sys/kernel/random/boot_id")


def node() -> str:
    """Return what tells this machine from others: the same in all its containers, where the kernel says so."""
    with contextlib.suppress(OSError):
        return _BOOT.read_text(encoding="ascii").strip()
    return platform.node()


def own_cores() -> frozenset[int]:
    """Return the numbers of the cores that this process is bound to; all there are, where none can be."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def quotas(groups: Path = _GROUPS, own: Path = _OWN) -> dict[str, float]:
    """Return the cores' worth of time that control groups allow, from this process's own group upwards.

    Of both versions: `cpu.max`, and `cpu.cfs_quota_us` (docs.kernel.org, cgroup-v2 and sched-bwc).

    Args:
        groups: where they are mounted. own: the file that names this process's.

    Returns:
        Cores by what tells a group from others on this machine; nothing of a group without a limit.
    """
    found = dict[str, float]()
    for folder in _folders(groups, own):
        limit = _limit(folder)
        if limit is not None:
            status = folder.stat()
            found[f"{status.st_dev}:{status.st_ino}"] = limit
    return found


def _folders(groups: Path, own: Path) -> list[Path]:
    """Return the folders of this process's groups, and of those above.

    In a container they may be named as they are outside of it, where only the mounted root is there.
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
    """Return a group's quota in cores; None where it has none, or says nothing that can be read."""
    with contextlib.suppress(OSError, ValueError, ZeroDivisionError):
        if (newer := folder / "cpu.max").exists():
            quota, period = newer.read_text(encoding="ascii").split()
        else:
            quota, period = (
                (folder / f"cpu.cfs_{name}_us").read_text(encoding="ascii") for name in ("quota", "period")
            )
        return int(quota) / int(period) if int(quota) > 0 else None
    return None
