"""Two ranks whose blocks recompute: gradients and buffers are those of ranks that keep all, under DDP and FSDP2."""

from __future__ import annotations

import pytest
from ranks import run_ranks

RANK = """
    import sys
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel
    from trimtab.core.recompute_schedule import KeptBlock, RecomputedSegment
    from trimtab.planner.recompute_cost import every_block, keep_all, sqrt_segments
    from trimtab.settings.recompute import use_schedule

    rank, folder, how, name = int(sys.argv[1]), *sys.argv[2:5]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    L = 4
    SCHEDULES = {
        "every_block": every_block(L),
        "sqrt": sqrt_segments(L),
        "nested": (RecomputedSegment((RecomputedSegment((KeptBlock(0),)), KeptBlock(1))), KeptBlock(2), KeptBlock(3)),
        "in_part": tuple(KeptBlock(index, in_part=True) for index in range(L)),
    }

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.one, self.drop = nn.BatchNorm1d(8), nn.Linear(8, 8), nn.Dropout(0.1)

        def forward(self, x):
            return x + self.drop(torch.tanh(self.one(self.norm(x))))

    def trained(schedule):
        torch.manual_seed(0)
        model = nn.Sequential(*(Block() for _ in range(L)), nn.Linear(8, 2)).train()
        use_schedule(model, [str(index) for index in range(L)], schedule)
        if how == "ddp":
            model = DistributedDataParallel(model)
        else:
            for block in model[:L]:
                fully_shard(block)
            fully_shard(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        torch.manual_seed(1 + rank)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(6, 8)).square().mean().backward()
            optimizer.step()
        whole = [getattr(p, "full_tensor", lambda p=p: p)().detach().clone() for p in model.parameters()]
        return [*whole, *(b.clone() for b in model.buffers()), torch.rand(3)]

    for ours, theirs in zip(trained(SCHEDULES[name]), trained(keep_all(L)), strict=True):
        assert torch.equal(ours, theirs), (ours, theirs)
    dist.barrier()
    dist.destroy_process_group()
"""


@pytest.mark.parametrize(
    ("how", "name"),
    [("ddp", "every_block"), ("ddp", "sqrt"), ("ddp", "nested"), ("ddp", "in_part"), ("fsdp2", "every_block"),
     ("fsdp2", "in_part")],
)  # fmt: skip
def test_ranks_learn_the_same_whatever_is_recomputed(tmp_path, how, name):
    run_ranks(RANK, tmp_path, how, name)
