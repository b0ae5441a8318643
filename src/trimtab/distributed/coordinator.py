"""Interface for coordination between ranks, and its single-process implementation."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from trimtab.core.serialization import read_json, to_json, write_whole

T = TypeVar("T")
M = TypeVar("M")


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
