"""Coordination of several ranks: rank 0's files and all clock-dependent decisions are shared with all ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar, cast

import torch
import torch.distributed as dist

from trimtab.core.serialization import from_json, read_json, to_json, write_whole
from trimtab.distributed.cpu_affinity import oversubscribed_resource
from trimtab.distributed.host_gather import RankExchange
from trimtab.distributed.process_group import from_first

T = TypeVar("T")
M = TypeVar("M")
# Larger than the difference between any two seeds of paired runs.
_STREAMS = 1_000_003


class Coordinator:
    """Coordinator of a single process.

    Attributes:
        num_ranks: world size.
        rank: this rank; only rank 0 writes files and prints.
        crowded: oversubscribed resource, "cores" or "devices"; or "".
    """

    num_ranks, rank, crowded = 1, 0, ""

    def each(self, figure: float) -> list[float]:
        """Return a number of every rank, by rank; a collective."""
        return [figure]

    def made(self, kind: type[T], make: Callable[[], M]) -> M:
        """Return a value created on rank 0 to all ranks; of type `kind`, or None."""
        return make()

    def read(self, kind: type[T], path: Path) -> T | None:
        """Return the contents of a file on rank 0 to all ranks; None if there is no file."""
        return self.made(kind, lambda: read_json(kind, path) if path.exists() else None)

    def write(self, path: Path, value: object, indent: int | None = None) -> None:
        """Write a value to a file on rank 0."""
        write_whole(path, to_json(value, indent=indent))

    def draw_apart(self, seed: int) -> None:
        """Seed random generators differently per rank from here on."""

    def attempt(self, make: Callable[[], T]) -> T | None:
        """Return the result of `make`, possibly with collectives; None on all ranks after an exception on any rank."""
        try:
            return make()
        except Exception:
            return None

    def ended(self, error: BaseException) -> BaseException:
        """Publish the error that ends this rank; return the root cause, possibly the error of a different rank."""
        return error


ALONE = Coordinator()


class RankCoordinator(Coordinator):
    """Coordinator of several ranks; an error on a rank ends all ranks."""

    def __init__(self) -> None:
        self._exchange = RankExchange(None)
        self.num_ranks, self.rank = dist.get_world_size(), dist.get_rank()
        self._attempts = 0
        with self._exchange.explaining():
            self.crowded = oversubscribed_resource()

    def each(self, figure: float) -> list[float]:
        return [figures[0] for figures in self._exchange.share([figure])]

    def made(self, kind: type[T], make: Callable[[], M]) -> M:
        text = from_first(lambda: to_json(make()))
        return cast(M, None if text == "null" else from_json(kind, text))

    def write(self, path: Path, value: object, indent: int | None = None) -> None:
        if self.rank == 0:
            super().write(path, value, indent)

    def draw_apart(self, seed: int) -> None:
        if self.rank:
            torch.manual_seed(seed + _STREAMS * self.rank)

    def attempt(self, make: Callable[[], T]) -> T | None:
        self._attempts += 1
        topic = f"attempt/{self._attempts}"
        made, _, said = self._exchange.attempt(make, topic, lambda error: "failed" if error else "made")
        return made if all(each == "made" for each in said) else None

    def ended(self, error: BaseException) -> BaseException:
        return self._exchange.failed(error)

    def close(self) -> None:
        self._exchange.close()
