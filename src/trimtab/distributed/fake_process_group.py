"""A fake process group for tracing, without real ranks; the job's groups are restored afterwards.

torch keeps process groups in module globals. Only this file uses the private names.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from trimtab.core.errors import DependencyError, ValueGivenError

# Groups are named by a running number, from 0 in the job, and looked up by name outside of the replaced tables.
_NUMBER = 10**6
# DTensor caches results by mesh, and treats meshes of the same shape and names as equal.
_MESH_NAMES = ("ranks_that_are_absent",)
_TABLES = ("_pg_map", "_pg_names", "_pg_group_ranks", "_pg_backend_config", "_tags_to_pg", "_pg_to_tag")
_NEEDED = ("_World", "_update_default_pg", "_unregister_process_group", "_backend", "_default_pg_init_method")


@contextlib.contextmanager
def absent_ranks(ranks: int) -> Iterator[None]:
    """Act as rank 0 of a fake process group inside the block, also if this process is a rank of a real job.

    The job's groups are set aside, not destroyed, and must not be used inside the block.

    Raises:
        ValueGivenError: a single rank.
        DependencyError: torch has no fake process group, or its groups in an unknown place.
    """
    if ranks < 2:
        hint = "Pass the planned number of ranks; a single process needs no trace of other ranks."
        raise ValueGivenError("ranks", got=str(ranks), expected="2 or more", hint=hint)
    store = _store()
    hook = sys.excepthook
    try:
        with mock.patch.multiple(c10d, **_emptied()):
            try:
                _begin(store, ranks)
                yield
            finally:
                _forget()
    finally:
        sys.excepthook = hook
        c10d._update_default_pg(c10d._world.default_pg)  # torch stores the rank outside of the replaced tables.


def mesh_of_all(kind: str, ranks: int) -> DeviceMesh:
    """Return a mesh of the fake ranks, distinct from the job's meshes."""
    return init_device_mesh(kind, (ranks,), mesh_dim_names=_MESH_NAMES)


def _store() -> Any:
    try:
        from torch.testing._internal.distributed.fake_pg import FakeStore
    except ImportError:
        raise _unknown_torch() from None
    return FakeStore()


def _begin(store: Any, ranks: int) -> None:
    try:
        c10d.init_process_group("fake", store=store, rank=0, world_size=ranks)
    except Exception as error:
        raise _unknown_torch(f"{type(error).__name__}: {error}") from error


def _emptied() -> dict[str, Any]:
    """Return empty replacements for torch's tables of process groups."""
    if not all(hasattr(c10d, name) for name in (*_TABLES, *_NEEDED, "_world", "_group_count")):
        raise _unknown_torch()
    kept = {name: getattr(c10d, name) for name in ("_backend", "_default_pg_init_method")}
    return {"_world": c10d._World(), "_group_count": _NUMBER, **kept} | {name: {} for name in _TABLES}


def _forget() -> None:
    """Unregister the groups made in the block; torch's own function would destroy all of the job's."""
    for group, name in list(c10d._world.pg_names.items()):
        group.shutdown()
        c10d._unregister_process_group(name)  # type: ignore[attr-defined]


def _unknown_torch(reason: str = "its process groups are stored in unknown attributes") -> DependencyError:
    return DependencyError(
        "torch",
        got=torch.__version__,
        problem=f"trimtab cannot trace the memory of several ranks with torch {torch.__version__} ({reason}).",
        hint="Install torch 2.13.",
        code="torch.version_unsupported",
    )
