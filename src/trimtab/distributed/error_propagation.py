"""Error propagation: a failing rank publishes its exception in the job's store, to be raised on all ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

import torch.distributed as dist

from trimtab.core.errors import RankError
from trimtab.distributed.launched_rank import SILENT, ranks_failed
from trimtab.distributed.process_group import job_store
from trimtab.runtime.gradient_sync import UNREDUCED

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

# Seconds to answer a roll call. All ranks whose wait for a rank failed take part within moments of each other, except
# those whose own time limit began later.
_ANSWER_S = 3.0
# Words in torch's errors of a collective that lost a rank.
_SIGNS = ("gloo", "nccl")
_PREFIX = "trimtab/trouble"


class ErrorStore:
    """Error messages of ranks in the job's store; `number` identifies the run, the same on every rank."""

    def __init__(self, number: int) -> None:
        self._rank, self._ranks = dist.get_rank(), dist.get_world_size()
        self._prefix = f"{_PREFIX}/{number}"
        self._has_told = False

    def tell(self, error: BaseException) -> None:
        """Publish the error that ends this rank, unless a different rank caused or also raises the same error."""
        if not (isinstance(error, RankError) and error.code != UNREDUCED):
            text = f"{type(error).__name__}: {str(error).partition(chr(10))[0][:300]}"
            with self._store() as store:
                store.set(f"{self._prefix}/{self._rank}", text)
                self._has_told = True

    def recovered(self) -> None:
        """Withdraw the published error after a recovery."""
        if self._has_told:
            with self._store() as store:
                store.delete_key(f"{self._prefix}/{self._rank}")
            self._has_told = False

    def explained(self, error: BaseException) -> BaseException:
        """Return the cause of an error in a collective: the error or silence of a rank; unrelated errors unchanged."""
        text = str(error).lower()
        is_lost = isinstance(error, dist.DistError)
        is_lost = is_lost or (isinstance(error, RuntimeError) and any(sign in text for sign in _SIGNS))
        if not is_lost or isinstance(error, RankError):
            return error
        said, silent = self._roll_call()
        if said:
            return ranks_failed(said)
        if silent:
            found = _no_answer(silent, self._ranks)
            is_first = all(rank in silent for rank in range(self._rank))
            return found if is_first else found.echoed()
        return error

    def _roll_call(self) -> tuple[dict[int, str], list[int]]:
        """Return the published errors by rank, and the ranks that neither published an error nor answer."""
        said: dict[int, str] = {}
        silent: list[int] = []
        with self._store() as store:
            store.set(f"{self._prefix}/here/{self._rank}", "")
            for rank in range(self._ranks):
                if rank == self._rank:
                    continue
                if store.check([f"{self._prefix}/{rank}"]):
                    said[rank] = store.get(f"{self._prefix}/{rank}").decode()
                elif not self._answers(store, rank):
                    silent.append(rank)
            return said, silent
        return {}, [0] if self._rank else []  # without a launcher, rank 0's process holds the store

    def _answers(self, store: Store, rank: int) -> bool:
        try:
            store.wait([f"{self._prefix}/here/{rank}"], timedelta(seconds=_ANSWER_S))
        except (RuntimeError, dist.DistError):
            return False
        return True

    @contextlib.contextmanager
    def _store(self) -> Iterator[Store]:
        """Use the store; errors of an unreachable store are ignored."""
        with contextlib.suppress(RuntimeError, dist.DistError):
            yield job_store()


def _no_answer(silent: Sequence[int], ranks: int) -> RankError:
    """Return the error for ranks without an answer to a roll call."""
    one = len(silent) == 1
    names = f"Rank {silent[0]}" if one else f"Ranks {', '.join(map(str, silent))}"
    error = RankError(
        f"rank {silent[0]}",
        got="no answer",
        problem=f"{names} of {ranks} ranks {'does' if one else 'do'} not respond.",
        hint=_SILENT,
        code=SILENT,
    )
    error.ranks = tuple(silent)
    return error


_SILENT = (
    "Check the rank's log and its machine: the process was killed, hangs, or the machine failed. A rank also does not "
    "respond while it works alone for longer than the time limit, for instance on an evaluation, a save or an upload: "
    "do such work on all ranks, or raise the limit with trimtab.process_group(timeout_s=...)."
)
