"""The loss of a plain head in chunks, on two ranks: weights as those of one process with whole batches."""

from __future__ import annotations

import pytest
from ranks import reports, run_ranks

pytestmark = pytest.mark.slow

STAGES = (0, 1, 2, 3)
CODE = """
import copy, json, os, sys
from pathlib import Path
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
import trimtab
from trimtab.settings.loss_chunk import plain_head

rank, folder = int(sys.argv[1]), Path(sys.argv[2])
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
WORDS, ROWS, STEPS = 512, 3, 3


class Plain(nn.Module):
    def __init__(self, tied):
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 16)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(2))
        self.head = nn.Linear(16, WORDS, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens, targets=None):
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        logits = self.head(hidden)
        return logits if targets is None else (logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten()))


def outside(model, batch):
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


def inside(model, batch):
    return model(*batch)[1]


told = {}
for stage in (0, 1, 2, 3):
    for loss_fn, tied in ((outside, False), (inside, True)):
        torch.manual_seed(0)
        own = Plain(tied)
        trained = copy.deepcopy(own)
        batches = [torch.randint(WORDS, (2, 2 * ROWS, 8)) for _ in range(STEPS)]
        optimizer = torch.optim.SGD(own.parameters(), lr=0.5)
        for batch in batches:
            optimizer.zero_grad()
            loss_fn(own, batch).backward()
            optimizer.step()
        optimizer = torch.optim.SGD(trained.parameters(), lr=0.5)
        plan = trimtab.Plan.fixed(ROWS, loss_chunk=5, num_ranks=2, zero_stage=stage)
        with trimtab.start(trained, optimizer, plan) as run:
            for window in run.windows(list(each[:, rank * ROWS : (rank + 1) * ROWS] for each in batches)):
                run.train_step(window, loss_fn)
            (hook,) = [each for each in plain_head(trained)._forward_pre_hooks.values() if hasattr(each, "use")]
            whole = {
                name: each.full_tensor() if hasattr(each, "full_tensor") else each
                for name, each in trained.named_parameters()
            }
        differences = [(whole[name] - each).abs().max().item() for name, each in own.named_parameters()]
        told[f"{stage}/{loss_fn.__name__}"] = {
            "difference": max(differences),
            "tokens": hook.use.tokens,
            "computed_by": list(hook.use.computed_by),
        }
from torch.distributed.fsdp import fully_shard

own = Plain(False)
fully_shard(own)
try:
    trimtab.start(own, torch.optim.SGD(own.parameters(), lr=0.5), trimtab.Plan.fixed(ROWS, loss_chunk=5))
except trimtab.errors.TrimtabError as error:
    told["own shards"] = error.code
(folder / f"rank-{rank}.json").write_text(json.dumps(told))
dist.barrier()
os._exit(0)
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plain_head")
    run_ranks(CODE, folder)
    return reports(folder)


@pytest.mark.parametrize("loss", ["outside", "inside"])
@pytest.mark.parametrize("stage", STAGES)
def test_chunks_on_ranks_train_as_one_process(trained, stage, loss):
    for each in trained:
        told = each[f"{stage}/{loss}"]
        assert told["difference"] < 1e-6, told
        assert (told["tokens"], told["computed_by"]) == (3 * 3 * 8, []), told


def test_a_model_that_the_user_shards_is_refused(trained):
    assert [each["own shards"] for each in trained] == ["loss_chunk.sharded"] * 2
