"""Placement of training data: on the device if it is small enough, otherwise in host memory with prefetching."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from trimtab.core.choice import Choice, Effect, Rejected
from trimtab.core.units import format_bytes
from trimtab.tasks.task import TaskData

# Largest fraction of the free device memory that data may take. Model and activations need the rest.
MOST = 0.1
RESIDENT, HOST = "device", "host"
_NAMES = {"cuda": "GPU", "cpu": "processor"}


def device_here() -> torch.device:
    """Return the device that runs tasks: the GPU if available, otherwise the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def placement(num_bytes: int, kind: str, free_bytes: int | None, *, augments: bool = False) -> Choice:
    """Choose the placement of training data, with the reason.

    Args:
        num_bytes: Size of the data.
        kind: Device type, such as "cuda".
        free_bytes: Free device memory before training; None if the device uses host memory.
        augments: True if samples are augmented on the device, which changes the rounding of their values.
    """
    device = _NAMES.get(kind, kind)
    if free_bytes is None:
        return Choice(
            HOST, f"trained on the {device}: {format_bytes(num_bytes)} are where they are used", Effect.BITWISE
        )
    share = f"{format_bytes(num_bytes)} against {format_bytes(free_bytes)} free on the {device}"
    if num_bytes <= MOST * free_bytes:
        lost = (Rejected(HOST, "each batch would be copied"),)
        mark = Effect.ROUNDING if augments else Effect.BITWISE
        return Choice(RESIDENT, f"{share}, beside what a step takes", mark, changed=True, rejected=lost)
    reason = f"{share}, more than a tenth: batches are copied from pinned memory, one ahead"
    return Choice(HOST, reason, Effect.BITWISE, rejected=(Rejected(RESIDENT, "it would take memory from the step"),))


def placement_of(data: TaskData, device: torch.device) -> Choice:
    """Choose the placement of `data` for training on `device` from the memory that is free now."""
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else None
    num_bytes = sum(column.nbytes for column in data.columns)
    return placement(num_bytes, device.type, free, augments=data.augment is not None)


def place_data(data: TaskData, device: torch.device) -> tuple[TaskData, Choice]:
    """Move the columns of `data` to their placement and return the data and the choice.

    Batches are identical for both placements. Augmented batches may differ by rounding, because a GPU may fuse two
    operations into a single rounding.
    """
    choice = placement_of(data, device)
    if choice.value == HOST:
        return data, choice
    return replace(data, columns=tuple(column.to(device) for column in data.columns)), choice


def prefetch(batches: Iterable[Any], device: torch.device) -> Iterator[Any]:
    """Prefetch batches: on CUDA, copy the next batch from pinned memory while the current batch is used.

    Draws a batch ahead of the consumer. Passes batches unchanged if they are already on the GPU, are not tuples of
    tensors, or if `device` is not a CUDA device.
    """
    return _ahead(iter(batches), device) if device.type == "cuda" else iter(batches)


def _ahead(batches: Iterator[Any], device: torch.device) -> Iterator[Any]:
    stream: Any = torch.cuda.Stream(device)
    waiting = _sent(next(batches, None), device, stream)
    while waiting is not None:
        following = _sent(next(batches, None), device, stream)
        batch, is_there = waiting
        if is_there is not None:
            here: Any = torch.cuda.current_stream(device)
            here.wait_event(is_there)
            for tensor in batch:
                tensor.record_stream(here)
        yield batch
        waiting = following


def _sent(batch: Any, device: torch.device, stream: Any) -> tuple[Any, Any] | None:
    """Queue the copy of `batch` to the device.

    Returns:
        The batch and the CUDA event of its arrival, or the unchanged batch and None if no copy is needed. None if
        `batch` is None.
    """
    if batch is None:
        return None
    if not isinstance(batch, tuple) or not all(isinstance(t, Tensor) and t.device.type == "cpu" for t in batch):
        return batch, None
    with torch.cuda.stream(stream):
        sent = tuple(tensor.pin_memory().to(device, non_blocking=True) for tensor in batch)
        return sent, stream.record_event()
