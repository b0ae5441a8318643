"""Interface for coordination between ranks, and its single-process implementation."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from trimtab.core.serialization import read_json, to_json, write_whole

T = TypeVar("T")
M = TypeVar("M")


class BlockLength:
    """Length of a block in steps."""

    def __init__(self, least_steps: int, seconds: float) -> None:
        self._least_steps, self._seconds = least_steps, seconds

    def goes_on(self, steps: int, seconds: float) -> bool:
        """Return True if a block with this number of steps and seconds needs another step."""
        return steps < self._least_steps or seconds < self._seconds

    def ended(self, steps: int, seconds: float) -> None:
        """Record the length of a finished block."""


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

    def in_turn(self, make: Callable[[], T]) -> T:
        """Call `make` on rank 0 first, then on all ranks, so that rank 0's downloads are available to the rest."""
        return make()

    def pace(self, least_steps: int, seconds: float) -> BlockLength:
        """Return the block length controller; block lengths agree on all ranks."""
        return BlockLength(least_steps, seconds)

    def draw_apart(self, seed: int) -> None:
        """Seed random generators differently per rank from here on."""

    def attempt(self, make: Callable[[], T]) -> T | None:
        """Return the result of `make`, possibly with collectives; None on all ranks after an exception on any rank."""
        try:
            return make()
        except Exception:
            return None

    @contextlib.contextmanager
    def entering(self) -> Iterator[None]:
        """Build an arm inside the block, on all ranks."""
        yield

    def may_leave(self, error: Exception) -> bool:
        """Return True if an arm with this error may be dropped while the others continue."""
        return True

    def ended(self, error: BaseException) -> BaseException:
        """Publish the error that ends this rank; return the root cause, possibly the error of a different rank."""
        return error


ALONE = Coordinator()
