"""Temporary use of a data loader: afterwards workers and the order of the next epochs are unchanged."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader


@contextlib.contextmanager
def draw_and_restore_loader(data: Any) -> Iterator[Any]:
    """Yield an object to draw from in place of `data`; on exit, restore the loader's torch generators and position.

    Covered generators are the `generator` attributes of the loader, its samplers and batch sampler. A loader with
    `state_dict` and `load_state_dict` restores its position through them. Persistent workers started here end when
    the yielded object and all its iterators are deleted.

    Not restored: an iterator, which has advanced; other state of samplers and datasets; random state inside existing
    persistent workers, which only private attributes of the loader could protect.
    """
    goes_on = isinstance(data, Iterator)
    generators = [] if goes_on else generators_of(data)
    states = [(generator, generator.get_state()) for generator in generators]
    lent = data if goes_on else _without_lasting(data)
    place = data.state_dict() if lent is data and not goes_on and is_stateful(data) else None
    try:
        yield lent
    finally:
        if place is not None:
            data.load_state_dict(place)
        for generator, state in states:
            generator.set_state(state)


def is_stateful(loader: Any) -> bool:
    """Return True if a loader can save and restore its position."""
    inner = getattr(loader, "base_dataloader", loader)  # Accelerate's wrapper has both methods for any inner loader
    return callable(getattr(inner, "state_dict", None)) and callable(getattr(inner, "load_state_dict", None))


def generators_of(data: Any) -> list[torch.Generator]:
    """Return the distinct torch generators of a loader, including samplers and a wrapped loader."""
    found, seen, waiting = list[torch.Generator](), set[int](), [data]
    while waiting:
        holder = waiting.pop(0)
        if holder is None or id(holder) in seen:
            continue
        seen.add(id(holder))
        generator = getattr(holder, "generator", None)
        if isinstance(generator, torch.Generator) and not any(generator is each for each in found):
            found.append(generator)
        waiting += [getattr(holder, name, None) for name in ("batch_sampler", "sampler", "wrapped")]
    return found


def _without_lasting(data: Any) -> Any:
    """Return a shallow copy if a loader keeps its iterator (persistent workers or position), else `data`.

    The kept iterator then lives as long as the copy. Existing workers are shared. A wrapper that shards a loader across
    ranks (`wrapped`) is copied too.
    """
    held = getattr(data, "wrapped", None)
    if isinstance(held, DataLoader) and (lent := _without_lasting(held)) is not held:
        data = copy.copy(data)
        data.wrapped = lent
        return data
    keeps_one = isinstance(data, DataLoader) and (has_lasting_workers(data) or is_stateful(data))
    return copy.copy(data) if keeps_one else data


def has_lasting_workers(data: Any) -> bool:
    """Return True if a loader's workers persist between epochs."""
    return isinstance(data, DataLoader) and data.persistent_workers and data.num_workers > 0
