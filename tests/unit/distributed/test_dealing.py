"""A loader's batches dealt out to ranks: every row once, in the loader's order."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, TensorDataset

import trimtab
from trimtab.core.errors import UsageError
from trimtab.distributed.dealing import rows_of_rank
from trimtab.runtime.joining import NoRows


@given(st.integers(0, 100), st.integers(1, 17))
def test_shares_are_the_rows_in_order_and_differ_by_one_at_most(rows, ranks):
    shares = [range(rows)[rows_of_rank(rows, rank, ranks)] for rank in range(ranks)]
    assert [row for share in shares for row in share] == list(range(rows))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(2, 5))
def test_each_batch_is_dealt_out_whole(sizes, ranks):
    batches = [torch.arange(100 * index, 100 * index + rows) for index, rows in enumerate(sizes)]
    dealt = [list(trimtab.shard(batches, rank, ranks)) for rank in range(ranks)]
    for parts, batch in zip(zip(*dealt, strict=True), batches, strict=True):
        kept = [part for part in parts if not isinstance(part, NoRows)]
        assert torch.equal(torch.cat(kept), batch)


@pytest.mark.parametrize("workers", [0, 1])
def test_of_a_dataset_only_this_ranks_rows_are_loaded(workers):
    rows = torch.arange(11)
    whole = DataLoader(TensorDataset(rows), batch_size=3, num_workers=workers, shuffle=False)
    dealt = [list(trimtab.shard(whole, rank, 4)) for rank in range(4)]
    assert len(trimtab.shard(whole, 0, 4)) == 4
    for index, batch in enumerate(whole):
        parts = [part[index] for part in dealt]
        assert isinstance(parts[3], NoRows)
        assert torch.equal(torch.cat([part[0] for part in parts if not isinstance(part, NoRows)]), batch[0])


def test_one_process_has_its_loader_back():
    loader = [torch.zeros(2)]
    assert trimtab.shard(loader) is loader


def test_a_rank_that_is_none_is_refused():
    with pytest.raises(UsageError, match="2 of 2"):
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
    with pytest.raises(UsageError, match=r"DistributedSampler deals rows out.*Take the sampler out"):
        trimtab.shard(loader, 0, 2)
    assert trimtab.shard(loader, 0, 1) is loader
    batches = BatchSampler(DistributedSampler(data, num_replicas=2, rank=0), 3, drop_last=False)
    with pytest.raises(UsageError, match="DistributedSampler deals rows out"):
        trimtab.shard(DataLoader(data, batch_sampler=batches), 0, 2)
