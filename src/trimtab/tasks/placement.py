"""Where training data lies: on the device, where it fits, or on the host, and batches are copied ahead of use."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from trimtab.core.choice import Choice, Mark, Rejected
from trimtab.core.units import format_bytes
from trimtab.tasks.task import TaskData

# Of what is free before anything else is there: a model and its activations want the rest.
MOST = 0.1
RESIDENT, HOST = "device", "host"
_NAMES = {"cuda": "GPU", "cpu": "processor"}


def device_here() -> torch.device:
    """Return what a task is measured on: this machine's GPU, where it has one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def placement(num_bytes: int, kind: str, free_bytes: int | None, *, augments: bool = False) -> Choice:
    """Return where so many bytes of training data are to lie, and why.

    Args:
        kind: of device. free_bytes: of its memory, as measured before training; None where that is the host's.
        augments: whether rows are augmented there, whose arithmetic is then the device's: same maths, other rounding.
    """
    device = _NAMES.get(kind, kind)
    if free_bytes is None:
        return Choice(HOST, f"trained on the {device}: {format_bytes(num_bytes)} are where they are used", Mark.EXACT)
    share = f"{format_bytes(num_bytes)} against {format_bytes(free_bytes)} free on the {device}"
    if num_bytes <= MOST * free_bytes:
        lost = (Rejected(HOST, "each batch would be copied"),)
        mark = Mark.ROUNDING if augments else Mark.EXACT
        return Choice(RESIDENT, f"{share}, beside what a step takes", mark, changed=True, losers=lost)
    reason = f"{share}, more than a tenth: batches are copied from pinned memory, one ahead"
    return Choice(HOST, reason, Mark.EXACT, losers=(Rejected(RESIDENT, "it would take memory from the step"),))


def placement_of(data: TaskData, device: torch.device) -> Choice:
    """Return where data is to lie for training on a device, by what is free there now."""
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else None
    num_bytes = sum(column.nbytes for column in data.columns)
    return placement(num_bytes, device.type, free, augments=data.augment is not None)


def placed(data: TaskData, device: torch.device) -> tuple[TaskData, Choice]:
    """Return the data with its columns where they belong for a device, and the choice.

    Batches stay the same; those that are augmented to rounding, as a device may fuse what a processor rounds twice.
    """
    choice = placement_of(data, device)
    if choice.value == HOST:
        return data, choice
    return replace(data, columns=tuple(column.to(device) for column in data.columns)), choice


def ahead(batches: Iterable[Any], device: torch.device) -> Iterator[Any]:
    """Yield the batches, on CUDA with the next one's copy under way; other devices take them as they come.

    One batch more than was asked for is drawn. Batches that lie there already, and what is no tuple of tensors, pass
    through.
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
    """Return a batch with its copy to the device queued, and the event of its arrival, or None; None of no batch."""
    if batch is None:
        return None
    if not isinstance(batch, tuple) or not all(isinstance(t, Tensor) and t.device.type == "cpu" for t in batch):
        return batch, None
    with torch.cuda.stream(stream):
        sent = tuple(tensor.pin_memory().to(device, non_blocking=True) for tensor in batch)
        return sent, stream.record_event()
