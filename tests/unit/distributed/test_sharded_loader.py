"""A loader's batches dealt out to ranks: every row once, in the loader's order."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from raising import raises
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    TensorDataset,
    get_worker_info,
)
from torchdata.stateful_dataloader import StatefulDataLoader

import trimtab
from trimtab.core.errors import UsageError
from trimtab.distributed.sharded_loader import samples_of_rank
from trimtab.training.batch import EmptyBatch


@given(st.integers(0, 100), st.integers(1, 17))
def test_shares_are_the_rows_in_order_and_differ_by_one_at_most(rows, ranks):
    shares = [range(rows)[samples_of_rank(rows, rank, ranks)] for rank in range(ranks)]
    assert [row for share in shares for row in share] == list(range(rows))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(2, 5))
def test_each_batch_is_dealt_out_whole(sizes, ranks):
    batches = [torch.arange(100 * index, 100 * index + rows) for index, rows in enumerate(sizes)]
    dealt = [list(trimtab.shard(batches, rank, ranks)) for rank in range(ranks)]
    for parts, batch in zip(zip(*dealt, strict=True), batches, strict=True):
        kept = [part for part in parts if not isinstance(part, EmptyBatch)]
        assert torch.equal(torch.cat(kept), batch)


@pytest.mark.parametrize("workers", [0, 1])
def test_of_a_dataset_only_this_ranks_rows_are_loaded(workers):
    rows = torch.arange(11)
    whole = DataLoader(TensorDataset(rows), batch_size=3, num_workers=workers, shuffle=False)
    dealt = [list(trimtab.shard(whole, rank, 4)) for rank in range(4)]
    assert len(trimtab.shard(whole, 0, 4)) == 4
    for index, batch in enumerate(whole):
        parts = [part[index] for part in dealt]
        assert isinstance(parts[3], EmptyBatch)
        assert torch.equal(torch.cat([part[0] for part in parts if not isinstance(part, EmptyBatch)]), batch[0])


def test_one_process_has_its_loader_back_and_an_unknown_rank_is_refused():
    loader = [torch.zeros(2)]
    assert trimtab.shard(loader) is loader
    with raises(UsageError, code="value.invalid", field="rank"):
        trimtab.shard([], 2, 2)


class Stream(IterableDataset):
    """Rows without indices."""

    def __iter__(self):
        return iter(range(11))


def test_of_a_stream_whole_batches_are_drawn_and_the_rest_is_dropped():
    dealt = [list(trimtab.shard(DataLoader(Stream(), batch_size=4), rank, 2)) for rank in range(2)]
    assert [[part.tolist() for part in rank] for rank in dealt] == [[[0, 1], [4, 5], [8, 9]], [[2, 3], [6, 7], [10]]]


def test_a_loader_that_deals_rows_out_itself_is_refused():
    data = TensorDataset(torch.arange(12))
    loader = DataLoader(data, batch_size=3, sampler=DistributedSampler(data, num_replicas=2, rank=0))
    with raises(UsageError, code="loader.already_sharded", field="loader"):
        trimtab.shard(loader, 0, 2)
    assert trimtab.shard(loader, 0, 1) is loader
    batches = BatchSampler(DistributedSampler(data, num_replicas=2, rank=0), 3, drop_last=False)
    with raises(UsageError, code="loader.already_sharded", field="loader"):
        trimtab.shard(DataLoader(data, batch_sampler=batches), 0, 2)


class Doubled(DataLoader):
    """A loader of its own kind."""

    def __iter__(self):
        return (2 * batch for batch in super().__iter__())


def test_a_loader_of_a_derived_class_does_what_it_does():
    loader = Doubled(torch.arange(8), batch_size=4)
    dealt = [[part.tolist() for part in trimtab.shard(loader, rank, 2)] for rank in range(2)]
    assert dealt == [[[0, 2], [8, 10]], [[4, 6], [12, 14]]]
    assert not hasattr(trimtab.shard(loader, 0, 2), "state_dict")


class Seen(Dataset):
    """Rows that say that they were loaded."""

    def __init__(self) -> None:
        self.loaded: list[int] = []

    def __len__(self):
        return 16

    def __getitem__(self, index):
        self.loaded.append(index)
        return index


@pytest.mark.parametrize("times", [1, 2])
def test_a_stateful_loader_keeps_its_place(times):
    def dealt(data):
        loader = StatefulDataLoader(data, batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(5))
        for _ in range(times):
            loader = trimtab.shard(loader, 1, 2)
        return loader

    first = dealt(Seen())
    batches = iter(first)
    next(batches), next(batches)
    saved = first.state_dict()
    rest = [batch.tolist() for batch in batches]
    data = Seen()
    again = dealt(data)
    again.load_state_dict(saved)
    assert [batch.tolist() for batch in again] == rest
    assert len(rest) == 2
    assert len(data.loaded) == 8  # and none of what was trained on


class Drawn(Dataset):
    """Rows of numbers that a worker draws."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return torch.tensor([torch.rand(()).item(), random.random(), np.random.rand()], dtype=torch.float64)


def first_draws(rank, **options):
    generator = torch.Generator().manual_seed(3)
    loader = DataLoader(Drawn(), batch_size=4, num_workers=2, generator=generator, **options)
    return torch.cat(list(trimtab.shard(loader, rank, 2)))


def fixed_seed(worker):
    torch.manual_seed(worker)
    assert get_worker_info().id == worker


def test_workers_of_each_rank_draw_numbers_of_their_own():
    one, other = first_draws(0), first_draws(1)
    for drawn in range(3):  # by torch, by Python and by NumPy
        assert len({*one[:, drawn].tolist(), *other[:, drawn].tolist()}) == 8
    assert torch.equal(first_draws(1), other)
    alone = DataLoader(Drawn(), batch_size=2, num_workers=2, generator=torch.Generator().manual_seed(3))
    assert torch.equal(torch.cat(list(alone)[:2]), one)


def test_seeds_and_init_functions_of_workers_reach_spawned_workers_too():
    one, other = (first_draws(rank, worker_init_fn=fixed_seed) for rank in range(2))
    assert torch.equal(one[:, 0], other[:, 0])
    assert not torch.equal(one[:, 1], other[:, 1])
    spawned = first_draws(1, worker_init_fn=fixed_seed, multiprocessing_context="spawn")
    assert torch.equal(spawned, first_draws(1, worker_init_fn=fixed_seed))


class Own(DataLoader):
    """One that only collates in its own way, into what cannot be cut."""

    def __init__(self, data, **options):
        super().__init__(data, collate_fn=frozenset, **options)


def test_of_a_loader_that_is_only_made_otherwise_each_rank_loads_its_own_rows():
    parts = [list(trimtab.shard(Own(list(range(8)), batch_size=4), rank, 2)) for rank in range(2)]
    assert parts == [[{0, 1}, {4, 5}], [{2, 3}, {6, 7}]]
