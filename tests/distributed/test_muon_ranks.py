"""Muon on replicas: every rank takes the same step, and it is that of one process; shards are refused by the run."""

from __future__ import annotations

import pytest
import torch
from rank_cases import Tokens
from ranks import run_cases

import trimtab

RANK = """
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel
    from rank_cases import Tokens
    from trimtab.core.errors import ModelError

    torch.manual_seed(0)
    model = Tokens(torch.float32)

    def loss_fn(model, batch):
        return torch.nn.functional.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())

    def batches(rows):
        for step in range(6):
            tokens = torch.randint(11, (4, 7), generator=torch.Generator().manual_seed(step))[rows]
            yield tokens[:, :-1], tokens[:, 1:]

    if case == "sharded":
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
    called = DistributedDataParallel(model) if case == "loop" else model
    optimizer = torch.optim.AdamW(called.parameters(), lr=1e-2)
    stage = {"num_ranks": 2, "zero_stage": 0} if case == "plan" else {}
    plan = trimtab.Plan.fixed(2, 1, optimizer="muon", **stage)
    try:
        with trimtab.start(called, optimizer, plan) as run:
            for window in run.windows(batches(slice(2 * rank, 2 * rank + 2))):
                run.train_step(window, loss_fn)
            momentum = [float(each.double().sum()) for each in run.state_dict()["muon"]["momentum_buffer"]]
        weights = torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()
        found = {"weights": weights, "momentum": momentum}
    except ModelError as error:
        found = {"refused": str(error)}
"""
CASES = ("plan", "loop", "sharded")


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return dict(zip(CASES, run_cases(RANK, tmp_path_factory.mktemp("muon"), *CASES), strict=True))


def alone():
    """Return the weights that one process comes to on the whole batches."""
    torch.manual_seed(0)
    model = Tokens(torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with trimtab.start(model, optimizer, trimtab.Plan.fixed(4, optimizer="muon")) as run:
        for step in range(6):
            tokens = torch.randint(11, (4, 7), generator=torch.Generator().manual_seed(step))
            window = run.window((tokens[:, :-1], tokens[:, 1:]))
            run.train_step(
                window,
                lambda m, batch: torch.nn.functional.cross_entropy(m(batch[0]).flatten(0, 1), batch[1].flatten()),
            )
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize("who", ["plan", "loop"])
def test_replicas_take_one_step_which_is_that_of_one_process(found, who):
    first, second = found[who]
    assert first == second
    ours, whole = torch.tensor(first["weights"]), alone()
    # Gradients differ by rounding, which Muon's products in bf16 (8 bits) can turn into one unit of theirs.
    assert float((ours - whole).norm() / whole.norm()) < 2**-8


def test_shards_of_the_loops_own_are_refused(found):
    assert all("got sharded parameters" in each["refused"] for each in found["sharded"])
