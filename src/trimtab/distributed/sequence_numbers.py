"""Sequence numbers of collectives, to check that all ranks are at the same point."""

from __future__ import annotations

import contextlib

import torch
import torch.distributed as dist

from trimtab.distributed.process_group import backends


def num_sent() -> list[int]:
    """Return the number of groups created, and of collectives started on the world group by device type.

    If equal on all ranks, pending collectives complete normally; otherwise a pending collective would match a later one
    of a different rank. Backends without a count are left out.
    """
    group, distributed = dist.group.WORLD, dist.distributed_c10d
    assert group is not None
    found = [distributed._world.group_count]
    for kind in sorted(backends()):
        with contextlib.suppress(RuntimeError):
            found.append(group._get_backend(torch.device(kind))._get_sequence_number_for_group())  # type: ignore[attr-defined]
    return found
