"""How much a rank has sent, by which ranks tell whether all stand at the same place among their collectives."""

from __future__ import annotations

import contextlib

import torch
import torch.distributed as dist

from trimtab.distributed.process_group import backends


def num_sent() -> list[int]:
    """Return how many collectives this rank has begun on the job's group, by type of device, and groups it has made.

    Alike on all ranks, whatever is under way ends by itself; else what some sent waits for the others' next. A backend
    that does not count is left out.
    """
    group, distributed = dist.group.WORLD, dist.distributed_c10d
    found = [distributed._world.group_count]
    for kind in sorted(backends()):
        with contextlib.suppress(RuntimeError):
            found.append(group._get_backend(torch.device(kind))._get_sequence_number_for_group())
    return found
