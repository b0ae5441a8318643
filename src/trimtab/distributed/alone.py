"""What is asked of the ranks of a comparison, and how one process answers: it agrees with itself."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from trimtab.core.codec import read_json, to_json, write_whole

T = TypeVar("T")
M = TypeVar("M")


class Pace:
    """How many steps a block has.

    Args:
        least_steps: at the least. seconds: that it lasts, about.
    """

    def __init__(self, least_steps: int, seconds: float) -> None:
        self._least_steps, self._seconds = least_steps, seconds

    def goes_on(self, steps: int, seconds: float) -> bool:
        """Return whether a block of so many steps and seconds has another one."""
        return steps < self._least_steps or seconds < self._seconds

    def ended(self, steps: int, seconds: float) -> None:
        """Note what a block took."""


class Together:
    """One process, which agrees with itself.

    Attributes:
        rank: this one; 0 alone writes and tells. crowded: what ranks share that should have one
            each, "cores" or "devices"; or "".
    """

    num_ranks, rank, crowded = 1, 0, ""

    def each(self, figure: float) -> list[float]:
        """Return a figure of every rank, by rank; waits for all of them."""
        return [figure]

    def made(self, kind: type[T], make: Callable[[], M]) -> M:
        """Return a value that rank 0 makes, on all: one of a kind, or None."""
        return make()

    def read(self, kind: type[T], path: Path) -> T | None:
        """Return the value of a file as rank 0 finds it; None where there is no file."""
        return self.made(kind, lambda: read_json(kind, path) if path.exists() else None)

    def write(self, path: Path, value: object, indent: int | None = None) -> None:
        """Have rank 0 write a value to a file."""
        write_whole(path, to_json(value, indent=indent))

    def in_turn(self, make: Callable[[], T]) -> T:
        """Return what each rank makes for itself, rank 0 before the others: what it fetches, they find."""
        return make()

    def pace(self, least_steps: int, seconds: float) -> Pace:
        """Return what says how long blocks are, the same on every rank."""
        return Pace(least_steps, seconds)

    def draw_apart(self, seed: int) -> None:
        """Have each rank draw its own random numbers from here on, where all have drawn the same until now."""

    def attempt(self, make: Callable[[], T]) -> T | None:
        """Return what each rank makes, by steps of all of them; None on all where it raised on one."""
        try:
            return make()
        except Exception:
            return None

    @contextlib.contextmanager
    def entering(self) -> Iterator[None]:
        """Build an arm inside the block, on all ranks."""
        yield

    def may_leave(self, error: Exception) -> bool:
        """Return whether an arm that raised this leaves, and the others go on."""
        return True

    def ended(self, error: BaseException) -> BaseException:
        """Tell the others what this rank ends with; returns what is behind it: the error, or another rank's end."""
        return error


ALONE = Together()
