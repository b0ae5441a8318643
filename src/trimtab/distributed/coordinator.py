"""Coordination of several ranks: rank 0's files and all clock-dependent decisions are shared with all ranks."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar, cast

import torch
import torch.distributed as dist

from trimtab.core.errors import RankError
from trimtab.core.serialization import from_json, read_json, to_json, write_whole
from trimtab.distributed.cpu_affinity import oversubscribed_resource
from trimtab.distributed.host_gather import RankExchange
from trimtab.distributed.launched_rank import ranks_failed
from trimtab.distributed.process_group import from_first, time_limit_s, words_at_work, words_of_all

T = TypeVar("T")
M = TypeVar("M")
# Larger than the difference between any two seeds of paired runs.
_STREAMS = 1_000_003
_turns = itertools.count()  # the same on all ranks, because they call in the same order


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

    def in_turn(self, make: Callable[[], T]) -> T:
        own, failure = list[T](), None

        def made() -> str:
            own.append(make())
            return ""

        def made_after() -> str:
            nonlocal failure
            try:
                return "" if own else made()
            except Exception as error:  # Sent as a result, because rank 0 would otherwise wait until the time limit.
                failure = error
                return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"

        from_first(made)
        # finished ranks wait for the others without a time limit
        said = words_at_work(made_after, f"in_turn/{next(_turns)}")
        if failure is not None:
            raise failure
        if failed := {rank: words for rank, words in enumerate(said) if words}:
            raise ranks_failed(failed)
        return own[0]

    def draw_apart(self, seed: int) -> None:
        if self.rank:
            torch.manual_seed(seed + _STREAMS * self.rank)

    def attempt(self, make: Callable[[], T]) -> T | None:
        self._attempts += 1
        made, failure = None, None
        try:
            with self._exchange.explaining():
                made = make()
        except RankError:
            raise
        except Exception as error:
            failure = error
        # A failed rank may have left the others inside a collective, which ends only when this rank does.
        limit_s = time_limit_s() / 4 if failure else time_limit_s()
        try:
            said = words_of_all(f"attempt/{self._attempts}", "failed" if failure else "made", limit_s)
        except (RuntimeError, dist.DistError) as silence:
            raise failure or silence from None
        return made if all(each == "made" for each in said) else None

    def ended(self, error: BaseException) -> BaseException:
        return self._exchange.failed(error)

    def close(self) -> None:
        self._exchange.close()
