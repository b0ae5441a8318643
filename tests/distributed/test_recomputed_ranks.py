"""Two ranks whose blocks recompute: gradients and buffers are those of ranks that keep all, under DDP and FSDP2."""

from __future__ import annotations

from ranks import run_cases

RANK = """
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel
    from trimtab.core.recompute_schedule import KeptBlock, RecomputedSegment
    from trimtab.planner.recompute_cost import every_block, keep_all, sqrt_segments
    from trimtab.techniques.activation_checkpointing import use_schedule

    how, name = case
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
"""


def test_ranks_learn_the_same_whatever_is_recomputed(tmp_path):
    """Each case, which an error names, compares its ranks with those that keep all."""
    of_ddp, of_fsdp2 = ("every_block", "sqrt", "nested", "in_part"), ("every_block", "in_part")
    run_cases(RANK, tmp_path, *(("ddp", name) for name in of_ddp), *(("fsdp2", name) for name in of_fsdp2))
