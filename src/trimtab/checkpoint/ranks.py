"""What the ranks of a kept run do together: rank 0 looks and commits, each writes and reads what is its own.

All of them reach the folder: it lies on a disk that they share.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch

from trimtab.checkpoint import envelope
from trimtab.checkpoint.file_names import prefix_of
from trimtab.checkpoint.read_once import ReadOnce
from trimtab.checkpoint.said import Saved, said_of
from trimtab.checkpoint.shards import merged
from trimtab.checkpoint.state_files import digest_of, read_state, write_state
from trimtab.core.codec import to_jsonable
from trimtab.core.errors import FormatError, LoopError, RankError, SaveError, TrimtabError, ValueGivenError
from trimtab.core.plan import Plan
from trimtab.core.printable import quoted, unquoted
from trimtab.distributed.at_work import words_at_work
from trimtab.distributed.process_group import from_first, limited_to, time_limit_s
from trimtab.measure.random_state import derived_random_state
from trimtab.measure.sharded_norms import is_flat_sharded, is_sharded
from trimtab.runtime.exchange import Exchange

T = TypeVar("T")

_WRITES, _FAILED = "at ", "no "
_OF_EACH = ("data", "record", "also", "shards")  # of a run's state, beside buffers


class KeptRanks:
    """The ranks of a run; one process is a job of one.

    Attributes:
        rank: this one. num: of them. verified: the state of rank 0, where this one has verified it.
    """

    _asked = itertools.count()  # the same on every rank, of all runs of the job

    def __init__(self, exchange: Exchange) -> None:
        self.num = exchange.num_ranks
        self.rank = torch.distributed.get_rank() if self.num > 1 else 0
        self.verified = ReadOnce()
        self._limit_s = time_limit_s()  # of the run, which a host may wait longer in than what follows its start

    @property
    def is_first(self) -> bool:
        """Whether this is the one that looks and commits."""
        return self.rank == 0

    def first(self, make: Callable[[], str], about: str) -> str:
        """Return what rank 0 makes; raises on all where it fails there.

        Args:
            about: what it is: ranks that ask of another thing get no answer, and no wrong one.
        """
        if self.num == 1:
            return make()
        with limited_to(self._limit_s):
            return from_first(make, self._topic(about))

    def together(self, make: Callable[[], T], about: str) -> T:
        """Return what this rank makes once every rank has made its own, however long the slowest takes.

        Raises:
            RankError: a rank gives no sign of life. FormatError: another rank failed. Whatever `make` raises.
        """
        if self.num == 1:
            return make()
        made, failure = list[T](), list[Exception]()

        def tried() -> str:
            try:
                made.append(make())
            except Exception as error:
                failure.append(error)
                return f"{type(error).__name__}: {error}"
            return ""

        said = self._words(tried, about)
        if failure:
            raise failure[0]
        for rank, word in enumerate(said):
            if word:
                raise FormatError(f"rank {rank}", given=word, expected="every rank to go on with the run")
        return made[0]

    def each(self, word: str, about: str) -> list[str]:
        """Return what every rank says, by rank."""
        return [word] if self.num == 1 else self._words(lambda: word, about)

    def require_alike(self, word: str, about: str, expected: str) -> None:
        """Raise `LoopError` on all ranks where they say unlike words."""
        said = self.each(word, about)
        if len(set(said)) > 1:
            raise LoopError(about, given=f"of the ranks, in turn, {', '.join(said)}", expected=expected)

    def _words(self, make: Callable[[], str], about: str) -> list[str]:
        with limited_to(self._limit_s):
            return words_at_work(make, self._topic(about))

    def _topic(self, about: str) -> str:
        return f"kept/{next(KeptRanks._asked)}/{about}"

    def write(
        self,
        parent: Path,
        name: str,
        state: Mapping[str, Any],
        about: Mapping[str, Any],
        shards: Callable[[Path], None] | None = None,
    ) -> None:
        """Commit a checkpoint of what every rank has.

        Args:
            shards: writes, called by all ranks at once, what they hold in shards.

        Raises:
            SaveError, FormatError: on all ranks, where one of them could not write. RankError: a rank is lost.
        """

        def fill(folder: Path) -> None:
            """Write this rank's part, once with the others; raises on all where one fails."""
            own = self._without_what_is_alike(state, name)
            self.together(lambda: _saved(lambda: write_state(folder, own, prefix_of(self.rank))), f"{name}/state")
            if shards is not None:
                self.together(lambda: _saved(lambda: shards(folder)), f"{name}/shards")

        if self.num == 1:
            envelope.write(parent, name, fill, about)
            return
        failure: Exception | None = None
        try:
            self._commit(parent, name, fill, about) if self.is_first else self._add(name, fill)
        except RankError:  # there is nobody to agree with
            raise
        except Exception as error:
            failure = error
        self.together(lambda: _raise(failure), f"{name}/over")

    def _without_what_is_alike(self, state: Mapping[str, Any], name: str) -> Mapping[str, Any]:
        """Leave out of a rank's state what the user keeps too, where rank 0 writes the same to the bit.

        An average of weights is as large as the model, and most often alike on every rank.
        """
        if self.num == 1:
            return state

        def mark() -> str:
            try:
                return digest_of(state.get("also"))
            except Exception:  # which is raised where it is written, and told to the others there
                return f"of rank {self.rank} alone"

        said = self._words(mark, f"{name}/also")
        is_alike = not self.is_first and said[self.rank] == said[0]
        return {part: each for part, each in state.items() if part != "also"} if is_alike else state

    def _commit(self, parent: Path, name: str, fill: Callable[[Path], None], about: Mapping[str, Any]) -> None:
        said: list[str] = []

        def told(folder: Path) -> None:
            said.append(self.first(lambda: _WRITES + quoted(folder), f"{name}/where"))
            fill(folder)

        def last(commits: Callable[[], None]) -> None:
            self.together(commits, f"{name}/commit")

        try:
            _saved(lambda: envelope.write(parent, name, told, about, last))
        finally:
            if not said:  # the others still wait to be told where
                self.first(lambda: _FAILED, f"{name}/where")

    def _add(self, name: str, fill: Callable[[Path], None]) -> None:
        where = self.first(str, f"{name}/where")
        if where == _FAILED:
            return  # rank 0 says why
        if not where.startswith(_WRITES):
            raise RankError("rank 0", given=repr(where), expected="the folder that all write into")
        fill(unquoted(where.removeprefix(_WRITES)))
        self.together(lambda: None, f"{name}/commit")

    def read(self, folder: Path, saved: int) -> dict[str, Any]:
        """Return the state of this rank in a checkpoint of so many: the run's, and what is its own.

        A rank beyond those that were saved takes what is its own from one that was, with global random numbers of its
        own from here on. Those that the pass under way began with stay: the order of its rows follows from them. Its
        record begins, and what the user keeps too is rank 0's.
        """
        state: dict[str, Any] = read_state(folder, taken=self.verified.take(folder))
        of = self.rank % saved
        if of:
            own = read_state(folder, prefix_of(of))
            # What was saved before ranks wrote more of their own has no record, and of what is kept too rank 0's.
            state |= {"data": own["data"], "record": own.get("record")}
            if "also" in own and self.rank < saved:
                state["also"] = own["also"]
            state["model"]["own"] |= own["buffers"]["own"]
            state["model"]["hidden"] = own["buffers"]["hidden"]  # which another rank may have more of
        if "shards" in state:
            state["shards"] = merged(
                read_state(folder, prefix_of(each))["shards"] if each else state["shards"] for each in range(saved)
            )
        if self.rank >= saved:
            state["record"] = None
            here = state["data"]["here"]
            here["random"] = derived_random_state(here["random"], self.rank)
        return state

    def own(self, state: dict[str, Any], buffers: Callable[[], Mapping[str, Any]]) -> dict[str, Any]:
        """Return what this rank writes of its state: rank 0 all, another its place, random numbers and buffers.

        What is no tensor of its shards' state is its own too, and so are its record and what the user keeps too.
        """
        if self.is_first:
            return state
        return {"buffers": buffers()} | {name: state[name] for name in _OF_EACH if name in state}


def found_of(found: envelope.Found | None) -> str:
    """Return what rank 0 found, for the others."""
    if found is None or found.folder is None or found.manifest is None:
        return json.dumps(None)
    return json.dumps(to_jsonable(Saved(quoted(found.folder), said_of(found.folder, found.manifest))))


def require_kept(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    plan: Plan,
    exchange: Exchange,
    *,
    background: bool,
) -> None:
    """Raise `ValueGivenError` for ranks whose run cannot be kept."""
    expected = (
        "one process, or ranks that share the model by a plan (zero_stage), DistributedDataParallel or fully_shard"
    )
    if exchange.num_ranks == 1 and exchange.has_peers:
        raise ValueGivenError("checkpoints", given="one of several ranks that nothing joins", expected=expected)
    if background and (exchange.num_ranks > 1 or is_sharded(model)):
        given = "True, on several ranks or of a model in shards"
        raise ValueGivenError("checkpoints.background", given=given, expected="False there")
    if exchange.num_ranks == 1:
        return
    if (world := torch.distributed.get_world_size()) != exchange.num_ranks:
        raise ValueGivenError(
            "checkpoints",
            given=f"a model that {exchange.num_ranks} of the job's {world} ranks share",
            expected="one that all of them share: what each has of its own is known by its place in the job",
            way_out="DistributedDataParallel(model) without process_group, or a job for each part.",
        )
    foreign = {
        "DeepSpeed's shards": plan.engine.value == "deepspeed",
        "a model in FSDP1, whose shards are flat": is_flat_sharded(model),
        "a ZeroRedundancyOptimizer": type(optimizer).__name__ == "ZeroRedundancyOptimizer",
    }
    for given, is_there in foreign.items():
        if is_there:
            raise ValueGivenError("checkpoints", given=given, expected=expected)


def is_in_shards(model: torch.nn.Module, plan: Plan, exchange: Exchange) -> bool:
    """Return whether a run's tensors are in shards: of ranks none holds them all."""
    return is_sharded(model) or (exchange.num_ranks > 1 and bool(plan.zero_stage.value))


def _raise(failure: Exception | None) -> None:
    if failure is not None:
        raise failure


def _saved(does: Callable[[], object]) -> None:
    """Do it; raises `SaveError` for what is none of the house's errors, whatever it is: the others wait for a word."""
    try:
        does()
    except TrimtabError:
        raise
    except OSError as error:
        raise SaveError("checkpoint", given=str(error), expected="a disk that takes it") from error
    except Exception as error:
        given = f"{type(error).__name__}: {error}"
        raise SaveError("checkpoint", given=given, expected="what can be written") from error
