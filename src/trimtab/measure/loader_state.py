"""A loader lent for a few batches: the order of its epochs to come, and its workers, are afterwards as they were."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader


@contextlib.contextmanager
def borrowed(data: Any) -> Iterator[Any]:
    """Yield what to draw from in place of `data`; on leaving, the loader's torch generators and its place are put back.

    Those are what the loader, its sampler, its batch sampler and the sampler below that hold as `generator`. The place
    is what a loader with `state_dict` and `load_state_dict` says. Persistent
    workers that the drawing starts end once neither what was yielded nor its iterator is held. Not put back: an
    iterator, which is that much further on; other state of a sampler or data set; the random state inside persistent
    workers that were there before, which only private attributes of the loader would spare.
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
    """Return whether a loader can be told where to go on."""
    inner = getattr(loader, "base_dataloader", loader)  # Accelerate's wrapper has both, whatever it wraps
    return callable(getattr(inner, "state_dict", None)) and callable(getattr(inner, "load_state_dict", None))


def generators_of(data: Any) -> list[torch.Generator]:
    """Return the torch generators of a loader, its samplers and what it deals out, each once."""
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
    """Return a shallow copy of a loader that keeps its iterator, with the workers or the place in it; else `data`.

    The copy keeps it only as long as itself. Workers that are there already are shared. What deals such a loader out
    (`wrapped`) is copied with it.
    """
    held = getattr(data, "wrapped", None)
    if isinstance(held, DataLoader) and (lent := _without_lasting(held)) is not held:
        data = copy.copy(data)
        data.wrapped = lent
        return data
    keeps_one = isinstance(data, DataLoader) and (has_lasting_workers(data) or is_stateful(data))
    return copy.copy(data) if keeps_one else data


def has_lasting_workers(data: Any) -> bool:
    """Return whether a loader's workers live on from one pass into the next."""
    return isinstance(data, DataLoader) and data.persistent_workers and data.num_workers > 0
