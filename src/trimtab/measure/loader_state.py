"""A loader lent for a few batches: the order of its epochs to come, and its workers, are afterwards as they were."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader

from trimtab.core.errors import ValueGivenError


@contextlib.contextmanager
def borrowed(data: Any) -> Iterator[Any]:
    """Yield what to draw from in place of `data`; on leaving, the loader's torch generators are put back.

    Those are what the loader, its sampler, its batch sampler and the sampler below that hold as `generator`. Persistent
    workers that the drawing starts end once neither what was yielded nor its iterator is held. Not put back: an
    iterator, which is that much further on; other state of a sampler or data set; the random state inside persistent
    workers that were there before, which only private attributes of the loader would spare.
    """
    generators = [] if isinstance(data, Iterator) else generators_of(data)
    states = [(generator, generator.get_state()) for generator in generators]
    try:
        yield _without_lasting_workers(data)
    finally:
        for generator, state in states:
            generator.set_state(state)


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


def _without_lasting_workers(data: Any) -> Any:
    """Return a shallow copy of a loader with persistent workers, else `data` itself.

    Such a loader keeps its first iterator, and with it the workers; a copy keeps it only as long as itself. Workers
    that are there already are shared.
    """
    return copy.copy(data) if _has_lasting_workers(data) else data


def _has_lasting_workers(data: Any) -> bool:
    return isinstance(data, DataLoader) and data.persistent_workers and data.num_workers > 0


def require_state_kept(data: Any) -> None:
    """Raise `ValueGivenError` for a loader whose workers carry random numbers from one pass into the next.

    Those started anew would begin others, in another order of the rows. One with `load_state_dict()` sees to it itself.
    """
    if _has_lasting_workers(getattr(data, "wrapped", data)) and not callable(getattr(data, "load_state_dict", None)):
        raise ValueGivenError(
            "loader",
            given="persistent_workers=True, in a run with checkpoints",
            expected="workers that begin with each pass, as those of a run that goes on do",
            way_out="DataLoader(..., persistent_workers=False), or a loader that has state_dict and load_state_dict.",
        )
