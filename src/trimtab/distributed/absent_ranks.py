"""A process group whose other ranks are not there, for the time of a trace; a job's own groups are as before after it.

torch keeps its groups in one place of a process. What is private of it is used here alone.
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

# Groups are named by their number, the job's from 0 on, and are looked up by that name outside of what is put aside.
_NUMBER = 10**6
# DTensor remembers results by their mesh, and takes meshes of one shape and the same names for one.
_MESH_NAMES = ("ranks_that_are_absent",)
_TABLES = ("_pg_map", "_pg_names", "_pg_group_ranks", "_pg_backend_config", "_tags_to_pg", "_pg_to_tag")
_NEEDED = ("_World", "_update_default_pg", "_unregister_process_group", "_backend", "_default_pg_init_method")


@contextlib.contextmanager
def absent_ranks(ranks: int) -> Iterator[None]:
    """Be rank 0 of so many, the others of which are not there, also where this process is one of a job's ranks.

    The job's groups are put aside meanwhile, not ended: nothing may be asked of them inside.

    Raises:
        ValueGivenError: one rank. DependencyError: a torch that has no group without peers, or its groups elsewhere.
    """
    if ranks < 2:
        raise ValueGivenError("ranks", given=str(ranks), expected="2 or more")
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
        c10d._update_default_pg(c10d._world.default_pg)  # the rank is kept outside of what was put aside


def mesh_of_all(kind: str, ranks: int) -> DeviceMesh:
    """Return a mesh of ranks that are absent, which is told from the job's own."""
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
    """Return what stands for torch's groups: none."""
    if not all(hasattr(c10d, name) for name in (*_TABLES, *_NEEDED, "_world", "_group_count")):
        raise _unknown_torch()
    kept = {name: getattr(c10d, name) for name in ("_backend", "_default_pg_init_method")}
    return {"_world": c10d._World(), "_group_count": _NUMBER, **kept} | {name: {} for name in _TABLES}


def _forget() -> None:
    """Take the groups made meanwhile out of what is looked up by name; ended torch's way, all of a job's would be."""
    for group, name in list(c10d._world.pg_names.items()):
        group.shutdown()
        c10d._unregister_process_group(name)


def _unknown_torch(why: str = "it has its process groups in an unknown place") -> DependencyError:
    given = f"{torch.__version__}: {why}"
    return DependencyError("torch", given=given, expected="one whose groups are known", way_out="Use torch 2.13.")
