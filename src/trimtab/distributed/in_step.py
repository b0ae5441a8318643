"""Several ranks in step: what rank 0 finds in files and what clocks decide is said to all, so that all do the same."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist

from trimtab.core.codec import from_json, to_json
from trimtab.core.errors import RankError, UsageError
from trimtab.distributed.alone import M, Pace, T, Together
from trimtab.distributed.at_work import words_at_work
from trimtab.distributed.crowding import crowded
from trimtab.distributed.exchange import RankExchange
from trimtab.distributed.launched import ENDED
from trimtab.distributed.process_group import from_first, time_limit_s, words_of_all

# Apart by more than any two seeds of races are.
_STREAMS = 1_000_003
_turns = itertools.count()  # the same on every rank, which take them in the same order


class _Ahead(Pace):
    """A number of steps that is known before a block begins, by what the one before took on the slowest rank."""

    def __init__(self, least_steps: int, seconds: float) -> None:
        super().__init__(least_steps, seconds)
        self._steps = least_steps

    def goes_on(self, steps: int, seconds: float) -> bool:
        """Return whether a block of so many steps has another one, whatever this rank's clock says."""
        return steps < self._steps

    def ended(self, steps: int, seconds: float) -> None:
        """Decide how many the next one has."""
        if steps and seconds > 0:
            self._steps = max(self._least_steps, math.ceil(self._seconds * steps / seconds))


class Ranks(Together):
    """One of several ranks.

    What ends one of them ends all, but an arm that every rank refuses alike as it is built.
    """

    def __init__(self) -> None:
        self._exchange = RankExchange(None)
        self.num_ranks, self.rank = dist.get_world_size(), dist.get_rank()
        self._entered, self._attempts, self._refused = 0, 0, None
        with self._exchange.explaining():
            self.crowded = crowded()

    def each(self, figure: float) -> list[float]:
        """Return a figure of every rank, by rank; waits for all of them."""
        return [figures[0] for figures in self._exchange.share([figure])]

    def made(self, kind: type[T], make: Callable[[], M]) -> M:
        """Return a value that rank 0 makes, on all: one of a kind, or None."""
        text = from_first(lambda: to_json(make()))
        return cast(M, None if text == "null" else from_json(kind, text))

    def write(self, path: Path, value: object, indent: int | None = None) -> None:
        """Have rank 0 write a value to a file."""
        if self.rank == 0:
            super().write(path, value, indent)

    def in_turn(self, make: Callable[[], T]) -> T:
        """Return what each rank makes for itself, rank 0 before the others: what it fetches, they find.

        Waits for all of them, for as long as each gives signs of life.

        Raises:
            RankError: another rank failed, or is silent for longer than the time limit. Exception: as `make` raised it.
        """
        own, failure = list[T](), None

        def made() -> str:
            own.append(make())
            return ""

        def made_after() -> str:
            nonlocal failure
            try:
                return "" if own else made()
            except Exception as error:  # told as a word: rank 0 would wait for one until the time limit
                failure = error
                return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"

        from_first(made)
        said = words_at_work(made_after, f"in_turn/{next(_turns)}")  # who is done waits, however long the others take
        if failure is not None:
            raise failure
        _require_none_ended(said)
        return own[0]

    def pace(self, least_steps: int, seconds: float) -> Pace:
        """Return what says how long blocks are, the same on every rank."""
        return _Ahead(least_steps, seconds)

    def draw_apart(self, seed: int) -> None:
        """Have each rank draw its own random numbers from here on, where all have drawn the same until now."""
        if self.rank:
            torch.manual_seed(seed + _STREAMS * self.rank)

    def attempt(self, make: Callable[[], T]) -> T | None:
        """Return what each rank makes, by steps of all of them; None on all where it raised on one.

        Raises:
            RankError: a rank ended, or is silent. Exception: as raised, where the others still wait for this rank.
        """
        self._attempts += 1
        made, failure = None, None
        try:
            with self._exchange.explaining():
                made = make()
        except RankError:
            raise
        except Exception as error:
            failure = error
        # One that failed may have left the others inside a collective, which only its end ends.
        limit_s = time_limit_s() / 4 if failure else time_limit_s()
        try:
            said = words_of_all(f"attempt/{self._attempts}", "failed" if failure else "made", limit_s)
        except (RuntimeError, dist.DistError) as silence:
            raise failure or silence from None
        return made if all(each == "made" for each in said) else None

    @contextlib.contextmanager
    def entering(self) -> Iterator[None]:
        """Build an arm inside the block, on all ranks."""
        self._entered += 1
        try:
            yield
        except UsageError as error:
            self._refused = error if self._all_say(f"{type(error).__name__}: {error}") else None
            raise

    def _all_say(self, refusal: str) -> bool:
        """Return whether every rank refuses so."""
        try:
            # Before those that wait inside a collective give this rank up.
            said = words_of_all(f"refused/{self._entered}", refusal, time_limit_s() / 4)
        except (RuntimeError, dist.DistError):
            return False
        return all(each == refusal for each in said)

    def may_leave(self, error: Exception) -> bool:
        """Return whether every rank refused this arm alike."""
        return error is self._refused

    def ended(self, error: BaseException) -> BaseException:
        """Tell the others what this rank ends with; returns what is behind it: the error, or another rank's end."""
        return self._exchange.failed(error)

    def close(self) -> None:
        """Give up what was made to talk."""
        self._exchange.close()


def _require_none_ended(said: Sequence[str]) -> None:
    """Raise `RankError` where a rank said what it ends with."""
    ended = [f"rank {rank} with {words}" for rank, words in enumerate(said) if words]
    if ended:
        raise RankError(
            "rank",
            given=f"the end of {'; '.join(ended)}",
            expected="all ranks to go on",
            way_out="Mend that; the others stopped because of it.",
            code=ENDED,
        ).echoed()
