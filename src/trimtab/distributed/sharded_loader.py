"""Sharded loader: every rank takes its samples of every batch of a common loader, without duplicates or losses."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, get_worker_info

from trimtab.core.errors import BatchError, ValueGivenError
from trimtab.distributed.process_group import gather_objects, is_apart
from trimtab.distributed.rank_consistency import DIFFER, dataset_facts, differing_texts, text_of
from trimtab.state.data_state import has_known_iteration, is_stateful, rebuilt_loader
from trimtab.training.batch import BY_CONTAINERS, BatchSplitting, EmptyBatch, iterate


def samples_of_rank(rows: int, rank: int, num_ranks: int) -> slice:
    """Return the slice of a rank's samples in a batch; sizes differ by at most 1, with larger ones first."""
    each, more = divmod(rows, num_ranks)
    start = rank * each + min(rank, more)
    return slice(start, start + each + (rank < more))


class ShardedLoader:
    """Loader that splits whole batches and keeps this rank's samples."""

    def __init__(
        self, loader: Iterable[Any], rank: int, num_ranks: int, batching: BatchSplitting = BY_CONTAINERS
    ) -> None:
        self.wrapped, self._rank, self._num_ranks, self._batching = loader, rank, num_ranks, batching

    def __len__(self) -> int:
        return len(self.wrapped)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        def part(batch: Any) -> Any:
            whole = self._batching.require(batch)
            rows = samples_of_rank(whole, self._rank, self._num_ranks)
            return self._batching.part(batch, rows.start, rows.stop, whole) if rows.stop > rows.start else EmptyBatch()

        return map(part, iterate("loader", self.wrapped))  # Iteration begins at once, as with the loader itself.


class _StatefulShardedLoader(ShardedLoader):
    """Sharded loader with a data position: `state_dict` and `load_state_dict` of the wrapped loader."""

    wrapped: Any

    def state_dict(self) -> Any:
        return self.wrapped.state_dict()

    def load_state_dict(self, state: Any) -> None:
        self.wrapped.load_state_dict(state)


class _RankBatchSampler:
    """Batch sampler that yields only this rank's indices."""

    def __init__(self, batches: Iterable[Sequence[int]], dataset: Any, rank: int, num_ranks: int) -> None:
        self.wrapped, self._rank, self._num_ranks = batches, rank, num_ranks
        self._facts = dataset_facts(dataset)

    def __len__(self) -> int:
        return len(self.wrapped)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Sequence[int]]:
        is_first = True
        for batch in self.wrapped:
            if is_first:
                _require_one_order(batch, self._facts)
                self._facts = {}  # compared in the first epoch only
            is_first = False
            yield batch[samples_of_rank(len(batch), self._rank, self._num_ranks)]


class _Collate:
    """The loader's `collate_fn`, extended to empty batches."""

    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self._collate = collate

    def __call__(self, rows: list[Any]) -> Any:
        return self._collate(rows) if rows else EmptyBatch()


class _RankWorkerSeed:
    """The loader's `worker_init_fn`, preceded by a rank-dependent seed of the worker's random generators."""

    def __init__(self, rank: int, then: Callable[[int], None] | None) -> None:
        self._rank, self._then = rank, then

    def __call__(self, worker: int) -> None:
        found = get_worker_info()
        if self._rank and found is not None:
            # torch seeds workers of equally seeded ranks equally: sample j of a batch would get the same augmentation.
            seed = torch.initial_seed() + self._rank * found.num_workers  # workers of a rank have consecutive seeds
            torch.manual_seed(seed)
            random.seed(seed)
            np.random.seed(seed % 2**32)
        if self._then is not None:
            self._then(worker)


def shard(
    loader: Iterable[Any],
    rank: int | None = None,
    num_ranks: int | None = None,
    *,
    count: Callable[[Any], int] | None = None,
    split: Callable[[Any, int, int], Any] | None = None,
) -> Iterable[Any]:
    """Return a loader of this rank's samples of every batch; all ranks construct the same loader.

    For a `DataLoader` over a map-style dataset, only this rank's samples are loaded, with the same number of workers;
    worker seeds differ between ranks. The order must be the same on every rank, and is compared in the first epoch. For
    any different loader, including subclasses, whole batches are drawn and split, and the order is not compared.
    `state_dict` and `load_state_dict` are forwarded if present.

    Args:
        loader: yields batches of the whole job.
        rank: this process's rank; default: from its process group.
        num_ranks: world size; default: from its process group.
        count: returns the number of samples in a batch, as in `trimtab.plan`.
        split: returns a part of a batch, as in `trimtab.plan`.

    Raises:
        ValueGivenError: `rank` is not below `num_ranks`, or the loader has a `DistributedSampler`.
        BatchError: while iterating, the order differs between ranks.
    """
    batching = BatchSplitting(count, split)
    is_one_of_several = dist.is_available() and dist.is_initialized()
    ranks = num_ranks if num_ranks is not None else dist.get_world_size() if is_one_of_several else 1
    own = rank if rank is not None else dist.get_rank() if is_one_of_several else 0
    if not 0 <= own < ranks:
        hint = "Pass the rank of this process, and the number of ranks as num_ranks."
        raise ValueGivenError("rank", got=f"{own}", expected=f"from 0 to {ranks - 1}", hint=hint)
    if ranks == 1:
        return loader
    samplers = getattr(loader, "sampler", None), getattr(getattr(loader, "batch_sampler", None), "sampler", None)
    if any(isinstance(each, DistributedSampler) for each in samplers):
        raise ValueGivenError(
            "loader",
            problem="The loader has a DistributedSampler, so its batches are already divided between the ranks.",
            hint="Use shuffle=True with the same seeded generator on all ranks instead of the sampler, or leave out "
            "trimtab.shard.",
            code="loader.already_sharded",
        )
    has_indices = isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset)
    is_known = has_known_iteration(loader)
    if not isinstance(loader, DataLoader) or not (is_known and has_indices) or loader.batch_sampler is None:
        return (_StatefulShardedLoader if is_stateful(loader) else ShardedLoader)(loader, own, ranks, batching)
    return rebuilt_loader(
        loader,
        batch_sampler=_RankBatchSampler(loader.batch_sampler, loader.dataset, own, ranks),
        collate_fn=_Collate(loader.collate_fn),
        worker_init_fn=_RankWorkerSeed(own, loader.worker_init_fn),
    )


def _require_one_order(batch: Sequence[int], facts: Mapping[str, Any]) -> None:
    """Raise `BatchError` on every rank if the first batch's order or the dataset differs; a collective."""
    if not (dist.is_available() and dist.is_initialized()) or is_apart():
        return
    said = gather_objects([text_of(value) for value in (list(batch), *facts.values())])
    for name, *texts in zip(("order of samples", *facts), *said, strict=False):
        if len(set(texts)) > 1:
            differences = differing_texts(name, texts)
            raise BatchError(
                "loader",
                problem=f"The ranks' loaders differ, so samples would be missed or repeated: {differences}.",
                hint="Use the same dataset and seed on all ranks: "
                "DataLoader(..., generator=torch.Generator().manual_seed(seed)).",
                code=DIFFER,
            )
