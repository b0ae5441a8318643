"""Batches of an unknown number of samples on two ranks: each has the same weight; `shard` splits by the user's."""

from __future__ import annotations

import itertools

import pytest
import torch
from ranks import run_cases

import trimtab
from trimtab.core.errors import BatchError, ValueGivenError

RANK = """
    from torch.nn.parallel import DistributedDataParallel

    known_on, ends = case

    def built():
        torch.manual_seed(0)
        model = nn.Linear(3, 2).double()
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    def batch(rank, step):
        generator = torch.Generator().manual_seed(10 * step + rank)
        x = torch.randn(4 + rank, 3, generator=generator, dtype=torch.float64)
        is_known = known_on == "both" or (known_on == "one" and rank == 1)
        return {"x": x, "other": torch.zeros(len(x) if is_known else 9)}

    def loss(model, batch):
        return model(batch["x"]).square().mean()

    STEPS = (3, 3 - ends)
    model, optimizer = built()
    writer = trimtab.RecordWriter(f"{folder}/{rank}.jsonl", trimtab.Header("run"))
    with trimtab.start(DistributedDataParallel(model), optimizer, trimtab.Plan.fixed(5), record=writer) as run:
        for window in run.windows([batch(rank, step) for step in range(STEPS[rank])]):
            run.train_step(window, loss)
    writer.close()

    plain, optimizer = built()  # batches weighted alike, or by their samples if all are known
    for step in range(max(STEPS)):
        each = [(batch(r, step), 4 + r if known_on == "both" else 5) for r in range(2) if step < STEPS[r]]
        optimizer.zero_grad()
        for part, size in each:
            (loss(plain, part) * size / sum(size for _, size in each)).backward()
        optimizer.step()
    rows = [step.samples for step in trimtab.read_record(f"{folder}/{rank}.jsonl").steps]
    apart = float((model.weight - plain.weight).detach().norm() / plain.weight.detach().norm())
    found = {"apart": apart, "rows": rows}
"""


def test_batches_of_an_unknown_size_weigh_as_a_full_batch_on_every_rank(tmp_path):
    cases = [*itertools.product(("neither", "one", "both"), (0, 1))]
    for (known_on, ends), ranks in zip(cases, run_cases(RANK, tmp_path, *cases), strict=True):
        for found in ranks:
            assert found["apart"] < 1e-12, (known_on, ends)
            expected = [9, 9, 9] if known_on == "both" else [None] * 3
            expected = [*expected[:2], 4 if known_on == "both" else None] if ends else expected
            assert found["rows"] == expected, (known_on, ends)


def test_a_sharded_loader_splits_by_the_users_functions():
    batches = [(torch.arange(12.0).reshape(3, 4), torch.arange(4))]
    with pytest.raises(BatchError) as caught:
        list(trimtab.shard(batches, 0, 2))
    assert caught.value.code == "batch.samples_unknown"
    how = {
        "count": lambda batch: len(batch[1]),
        "split": lambda batch, start, stop: (batch[0][:, start:stop], batch[1][start:stop]),
    }
    parts = [next(iter(trimtab.shard(batches, rank, 2, **how))) for rank in range(2)]
    assert torch.equal(torch.cat([x for x, _ in parts], 1), batches[0][0])
    assert [labels.tolist() for _, labels in parts] == [[0, 1], [2, 3]]
    with pytest.raises(ValueGivenError):
        trimtab.shard(batches, 0, 2, count=3)
