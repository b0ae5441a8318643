"""Joules of several ranks: who reads which meter, and one reduction."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from trimtab.core.energy import Energy, Provenance, absent
from trimtab.distributed.process_group import place
from trimtab.measure.cores import node
from trimtab.measure.meters import Reads, Seat, reads_of


def reads_here(device: torch.device) -> Reads:
    """Return what this rank reads, so that each meter is read once; all ranks call it, and wait."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return Reads(device=device.type == "cuda")
    uuid = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""
    seats: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(seats, Seat(node(), place().local_rank, uuid))
    return reads_of(seats, dist.get_rank())


def of_all_ranks(own: Energy, reads: Reads, total: Callable[[float], float]) -> Energy:
    """Return what all ranks took together; absent as soon as one that reads does not know its part.

    Args:
        own: what this rank read. total: the sum of a figure over ranks, which waits for all of them.
    """
    part = 0.0 if reads.nothing else math.nan if own.joules is None else own.joules
    joules = total(part)
    if math.isfinite(joules) and joules > 0:
        # A rank that reads nothing does not know how others do; who writes the record, rank 0, always reads.
        kind = Provenance.MEASURED if own.joules is None else own.provenance
        return Energy(own.seconds, joules, kind, own.sources)
    return absent(own.reason if own.joules is None and not reads.nothing else "a rank has no meter", own.seconds)
