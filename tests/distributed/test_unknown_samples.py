"""Batches of an unknown number of samples on two ranks: each has the same weight; `shard` splits by the user's."""

from __future__ import annotations

import json

import pytest
import torch
from ranks import run_ranks

import trimtab
from trimtab.core.errors import BatchError, ValueGivenError

RANK = """
    import json, sys
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel
    import trimtab

    torch.set_num_threads(1)
    rank, folder, known_on, ends = int(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4])
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)

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
    with open(f"{folder}/rank-{rank}.json", "w") as file:
        json.dump({"apart": apart, "rows": rows}, file)
    dist.destroy_process_group()
"""


@pytest.mark.parametrize("ends", [0, 1])
@pytest.mark.parametrize("known_on", ["neither", "one", "both"])
def test_batches_of_an_unknown_size_weigh_as_a_full_batch_on_every_rank(tmp_path, known_on, ends):
    run_ranks(RANK, tmp_path, known_on, ends)
    for rank in range(2):
        found = json.loads((tmp_path / f"rank-{rank}.json").read_text())
        assert found["apart"] < 1e-12
        expected = [9, 9, 9] if known_on == "both" else [None] * 3
        assert found["rows"] == ([*expected[:2], 4 if known_on == "both" else None] if ends else expected)


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
