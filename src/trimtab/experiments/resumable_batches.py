"""Resumable batches of a task."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from trimtab.core import validation
from trimtab.core.errors import ValueGivenError
from trimtab.core.stateful import require_keys
from trimtab.distributed.sharded_loader import shard
from trimtab.tasks.placement import prefetch
from trimtab.tasks.task import TaskData


class ResumableBatches:
    """This rank's shard of a run's batches, as a resumable loader of a single epoch.

    Args:
        data: data of the task.
        device: device of the batches.
        seed: seed of the data order.
        batch_size: batch size of the whole job.
        steps: number of batches in the epoch.
        may_differ: True to allow different data on resuming.
    """

    def __init__(
        self, data: TaskData, device: torch.device, *, seed: int, batch_size: int, steps: int, may_differ: bool = False
    ) -> None:
        self._data, self._device, self._may_differ = data, device, may_differ
        self._seed, self._batch_size, self._steps = seed, batch_size, steps
        self._drawn = 0

    def __iter__(self) -> Iterator[Any]:
        """Yield the remaining batches of the epoch."""
        whole = self._data.batches(self._seed, self._batch_size, begin=self._drawn)
        for batch in prefetch(shard(itertools.islice(whole, max(0, self._steps - self._drawn))), self._device):
            self._drawn += 1  # Counted when taken, because batches are also prefetched.
            yield batch

    def state_dict(self) -> dict[str, Any]:
        """Return the number of batches taken, with the identity of the data."""
        return {"drawn": self._drawn, **self._identity()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume after the batches taken.

        Raises:
            ValueGivenError: the seed, batch size or data differ.
            FormatError: the state is malformed.
        """
        identity = self._identity()
        require_keys("state.data.loader", state, ("drawn", *identity))
        for name, here in identity.items():
            if state[name] != here and not (name == "data" and self._may_differ):
                raise ValueGivenError(
                    f"resume: {name}",
                    got=repr(here),
                    expected=f"{state[name]!r}, as in the checkpoint",
                    hint="Pass the value that the run started with, or start a new run in another folder.",
                    code=f"resume.{name}_differs",
                )
        self._drawn = validation.integer("state.data.loader.drawn", state["drawn"], low=0)

    def _identity(self) -> dict[str, Any]:
        return {"seed": self._seed, "batch_size": self._batch_size, "data": self._data.source.sha256}
