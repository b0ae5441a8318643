"""Checkpoints of several ranks: rank 0 searches and commits, and each rank reads and writes its own files.

The folder must be on a file system shared by all ranks.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch

from trimtab.checkpoint import atomic_directory
from trimtab.checkpoint.manifest import SavedCheckpoint, prefix_of, said_of
from trimtab.checkpoint.sharded_checkpoint import merge_shards
from trimtab.checkpoint.state_files import digest_of, read_state, write_state
from trimtab.checkpoint.verified_read import VerifiedReader
from trimtab.core.errors import FormatError, LoopError, RankError, SaveError, TrimtabError, ValueGivenError
from trimtab.core.serialization import quoted, to_jsonable, unquoted
from trimtab.distributed.launched_rank import ENDED
from trimtab.distributed.process_group import from_first, limited_to, time_limit_s, words_at_work
from trimtab.measure.gradient_norms import is_flat_sharded, is_sharded
from trimtab.plans.plan import Plan
from trimtab.state.random_state import derived_random_state
from trimtab.training.metadata_exchange import MetadataExchange

T = TypeVar("T")

_WRITES, _FAILED = "at ", "no "
_OF_EACH = ("data", "record", "also", "shards")  # parts of a run's state written by every rank, in addition to buffers


class RankCommunication:
    """Communication between the ranks of a run; a single process is the case of one rank.

    Attributes:
        rank: Rank of this process.
        num: Number of ranks.
        verified: Cache of the state files read during verification on this rank.
    """

    _asked = itertools.count()  # number of exchanges so far; equal on every rank

    def __init__(self, exchange: MetadataExchange) -> None:
        self.num = exchange.num_ranks
        self.rank = torch.distributed.get_rank() if self.num > 1 else 0
        self.verified = VerifiedReader()
        # Read now: the time limit applies only while the run starts, and a trainer may have set a longer one.
        self._limit_s = time_limit_s()

    @property
    def is_first(self) -> bool:
        """True on rank 0, which searches for checkpoints and commits them."""
        return self.rank == 0

    def first(self, make: Callable[[], str], about: str) -> str:
        """Return the result of `make` on rank 0; an error on rank 0 is raised on all ranks.

        Args:
            about: Topic of the exchange, used as a key: ranks that are out of step wait instead of mixing up results.
        """
        if self.num == 1:
            return make()
        with limited_to(self._limit_s):
            return from_first(make, self._topic(about))

    def together(self, make: Callable[[], T], about: str) -> T:
        """Call `make` on every rank, wait for all ranks, and return the local result.

        There is no time limit for a rank that is alive. An error of the local `make` is raised unchanged.

        Raises:
            RankError: A rank shows no sign of life.
            FormatError: `make` failed on another rank.
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
                raise FormatError(
                    f"rank {rank}",
                    got=word,
                    problem=f"Rank {rank} failed ({word}).",
                    hint=f"Fix the error of rank {rank}; the other ranks stopped because of it.",
                    code=ENDED,
                )
        return made[0]

    def each(self, word: str, about: str) -> list[str]:
        """Return the string of every rank, ordered by rank."""
        return [word] if self.num == 1 else self._words(lambda: word, about)

    def require_one_epoch(self, epoch: int) -> None:
        """Raise `LoopError` on all ranks if a checkpoint is saved in different epochs."""
        found = self.each(str(epoch), "checkpoint")
        if len(set(found)) > 1:
            listed = ", ".join(f"epoch {each} on rank {rank}" for rank, each in enumerate(found))
            raise LoopError(
                "checkpoint",
                got=listed,
                expected="the same epoch on all ranks",
                problem=f"The checkpoint was requested in different epochs: {listed}.",
                hint="Leave the loop over run.windows() at the same step on all ranks and keep no reference to its "
                "iterator, or call run.interrupt() to end the loop early.",
                code="checkpoint.epochs_differ",
            )

    def _words(self, make: Callable[[], str], about: str) -> list[str]:
        with limited_to(self._limit_s):
            return words_at_work(make, self._topic(about))

    def _topic(self, about: str) -> str:
        return f"kept/{next(RankCommunication._asked)}/{about}"

    def write(
        self,
        parent: Path,
        name: str,
        state: Mapping[str, Any],
        about: Mapping[str, Any],
        shards: Callable[[Path], None] | None = None,
    ) -> None:
        """Commit a checkpoint with the state of every rank.

        Args:
            about: Manifest metadata.
            shards: Writes the sharded tensors into the folder; called on all ranks at the same time.

        Raises:
            SaveError, FormatError: A rank could not write. Raised on all ranks.
            RankError: A rank was lost.
        """

        def fill(folder: Path) -> None:
            """Write this rank's files together with the other ranks; a failure is raised on all ranks."""
            own = self._without_what_is_alike(state, name)
            self.together(lambda: _saved(lambda: write_state(folder, own, prefix_of(self.rank))), f"{name}/state")
            if shards is not None:
                self.together(lambda: _saved(lambda: shards(folder)), f"{name}/shards")

        if self.num == 1:
            atomic_directory.write(parent, name, fill, about)
            return
        failure: Exception | None = None
        try:
            self._commit(parent, name, fill, about) if self.is_first else self._add(name, fill)
        except RankError:  # a lost rank cannot take part in the agreement below
            raise
        except Exception as error:
            failure = error

        def agree() -> None:
            if failure is not None:
                raise failure

        self.together(agree, f"{name}/over")

    def _without_what_is_alike(self, state: Mapping[str, Any], name: str) -> Mapping[str, Any]:
        """Drop the user's additional state from this rank's files if rank 0 writes an identical copy."""
        # An average of the weights is as large as the model and usually identical on every rank.
        if self.num == 1:
            return state

        def mark() -> str:
            try:
                return digest_of(state.get("also"))
            except Exception:  # raised again, and shared with the other ranks, when the state is written
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
            _saved(lambda: atomic_directory.write(parent, name, told, about, last))
        finally:
            if not said:  # the other ranks still wait for the folder's path
                self.first(lambda: _FAILED, f"{name}/where")

    def _add(self, name: str, fill: Callable[[Path], None]) -> None:
        where = self.first(str, f"{name}/where")
        if where == _FAILED:
            return  # rank 0 raises the reason
        if not where.startswith(_WRITES):
            raise RankError(
                "rank 0",
                got=repr(where),
                problem=f"Rank 0 sent {where!r} instead of the path of the checkpoint folder.",
                hint="Run the same version of trimtab on all ranks.",
                code="ranks.unexpected_message",
            )
        fill(unquoted(where.removeprefix(_WRITES)))
        self.together(lambda: None, f"{name}/commit")

    def read(self, folder: Path, saved: int) -> dict[str, Any]:
        """Return this rank's state from a checkpoint.

        A rank beyond the saved ranks uses the files of rank `self.rank % saved`, with newly derived global random
        states. The random states from the start of the epoch are kept, because they determine the sample order. Such a
        rank starts a new record and uses rank 0's copy of the user's additional state.

        Args:
            saved: Number of ranks that wrote the checkpoint.
        """
        state: dict[str, Any] = read_state(folder, taken=self.verified.take(folder))
        of = self.rank % saved
        if of:
            own = read_state(folder, prefix_of(of))
            # Older checkpoints have no record per rank, and only rank 0's copy of the user's additional state.
            state |= {"data": own["data"], "record": own.get("record")}
            if "also" in own and self.rank < saved:
                state["also"] = own["also"]
            state["model"]["own"] |= own["buffers"]["own"]
            # The number of non-persistent buffers can differ between ranks.
            state["model"]["hidden"] = own["buffers"]["hidden"]
        if "shards" in state:
            state["shards"] = merge_shards(
                read_state(folder, prefix_of(each))["shards"] if each else state["shards"] for each in range(saved)
            )
        if self.rank >= saved:
            state["record"] = None
            here = state["data"]["here"]
            here["random"] = derived_random_state(here["random"], self.rank)
        return state

    def own(self, state: dict[str, Any], buffers: Callable[[], Mapping[str, Any]]) -> dict[str, Any]:
        """Return the part of the state written by this rank.

        Rank 0 writes everything. Other ranks write their buffers, data position with random states, record, additional
        user state and non-tensor optimizer state of their shards.
        """
        if self.is_first:
            return state
        return {"buffers": buffers()} | {name: state[name] for name in _OF_EACH if name in state}


def found_of(found: atomic_directory.NewestDirectory | None) -> str:
    """Return rank 0's search result as JSON for the other ranks."""
    if found is None or found.folder is None or found.manifest is None:
        return json.dumps(None)
    return json.dumps(to_jsonable(SavedCheckpoint(quoted(found.folder), said_of(found.folder, found.manifest))))


def require_kept(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    plan: Plan,
    exchange: MetadataExchange,
    *,
    background: bool,
) -> None:
    """Raise `ValueGivenError` if the ranks' setup does not support checkpoints."""
    supported = "DistributedDataParallel, fully_shard (FSDP2), or a plan with a zero_stage and torch's engine"
    if exchange.num_ranks == 1 and exchange.has_peers:
        raise ValueGivenError(
            "checkpoints",
            got="a model without a distributed wrapper",
            problem=f"This process is one of {torch.distributed.get_world_size()} ranks, but its model is trained on "
            "this rank only, so the ranks cannot write one checkpoint.",
            hint=f"Use {supported}, or train in one process.",
            code="checkpoints.ranks_not_joined",
        )
    if background and (exchange.num_ranks > 1 or is_sharded(model)):
        raise ValueGivenError(
            "checkpoints.background",
            got="True",
            expected="False",
            problem="Background saves are not supported with several ranks or a sharded model.",
            hint="Use Checkpoints(..., background=False).",
            code="checkpoints.background_unsupported",
        )
    if exchange.num_ranks == 1:
        return
    if (world := torch.distributed.get_world_size()) != exchange.num_ranks:
        raise ValueGivenError(
            "checkpoints",
            got=f"{exchange.num_ranks} ranks",
            expected=f"{world} ranks",
            problem=f"Only {exchange.num_ranks} of the job's {world} ranks train this model; a checkpoint needs all.",
            hint="Use DistributedDataParallel(model) without process_group, or start a separate job for each model.",
            code="checkpoints.part_of_job",
        )
    unsupported = {
        "DeepSpeed's shards": plan.engine.value == "deepspeed",
        "FSDP1 (FullyShardedDataParallel)": is_flat_sharded(model),
        "a ZeroRedundancyOptimizer": type(optimizer).__name__ == "ZeroRedundancyOptimizer",
    }
    for name, is_used in unsupported.items():
        if is_used:
            raise ValueGivenError(
                "checkpoints",
                got=name,
                expected=supported,
                problem=f"Checkpoints do not support {name}.",
                hint=f"Use {supported}.",
                code="checkpoints.sharding_unsupported",
            )


def is_in_shards(model: torch.nn.Module, plan: Plan, exchange: MetadataExchange) -> bool:
    """Return True if no rank holds all tensors of the run."""
    return is_sharded(model) or (exchange.num_ranks > 1 and bool(plan.zero_stage.value))


def _saved(does: Callable[[], object]) -> None:
    """Call `does` and convert unexpected exceptions to `SaveError`: other ranks wait for a result in any case."""
    try:
        does()
    except TrimtabError:
        raise
    except OSError as error:
        raise not_saved(str(error)) from error
    except Exception as error:
        raise not_saved(f"{type(error).__name__}: {error}") from error


def not_saved(reason: str) -> SaveError:
    """Return the error for a failed save."""
    return SaveError(
        "checkpoint",
        got=reason,
        problem=f"The checkpoint could not be written ({reason}).",
        hint="Fix the cause and save again; earlier checkpoints are intact.",
    )
