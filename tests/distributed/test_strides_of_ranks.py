"""What ranks send each other arrives as it was, however it lies in memory on each of them."""

from __future__ import annotations

import json

import pytest
from ranks import run_ranks

BEGIN = """
    import json, sys
    import torch
    import torch.distributed as dist
    from torch import nn
    import trimtab

    rank, folder = int(sys.argv[1]), sys.argv[2]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
"""
TRAINED = """
    def trained(layout):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(64, 2)).double()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        plan = trimtab.Plan.fixed(4, num_ranks=2, zero_stage=1, memory_layout=layout)
        generator = torch.Generator().manual_seed(3)
        batches = [torch.randn(8, 3, 6, 6, generator=generator, dtype=torch.float64) for _ in range(3)]
        with trimtab.start(model, optimizer, plan) as run:
            for window in run.windows(trimtab.shard(batches)):
                run.train_step(window, lambda model, batch: model(batch).square().mean())
        return [optimizer.state[each] for each in model.parameters()]

    for kept, laid_out in zip(trained("keep"), trained("channels_last"), strict=True):
        for name in ("exp_avg", "exp_avg_sq"):
            theirs = [torch.empty(kept[name].shape, dtype=torch.float64) for _ in range(2)]
            dist.all_gather(theirs, laid_out[name].contiguous())
            assert torch.equal(*theirs), name
            torch.testing.assert_close(laid_out[name], kept[name])
            assert laid_out[name].stride() == kept[name].stride()
    dist.destroy_process_group()
"""
BUFFERS = """
    stage, engine = int(sys.argv[3]), sys.argv[4]

    class Model(nn.Linear):
        def __init__(self):
            super().__init__(8, 2)
            self.register_buffer("expanded", torch.full((1,), 1.0 + rank).expand(4096))
            self.register_buffer("transposed", (torch.arange(6.0).reshape(2, 3) + 10 * rank).t())
            self.register_buffer("behind", torch.full((64,), 5.0 + rank))

    model = Model()
    lies = [each.stride() for each in model.buffers()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = trimtab.Plan.fixed(4, num_ranks=2, zero_stage=stage, engine=engine)
    with trimtab.start(model, optimizer, plan) as run:
        for window in run.windows([torch.ones(4, 8)]):
            run.train_step(window, lambda model, batch: model(batch).square().mean())
            assert model.expanded.tolist() == [1.0] * 4096
            assert torch.equal(model.transposed, torch.arange(6.0).reshape(2, 3).t())
            assert model.behind.tolist() == [5.0] * 64
    assert [each.stride() for each in model.buffers()] == lies
    dist.destroy_process_group()
"""
REFUSED = """
    from trimtab.core.errors import ValueGivenError

    how = {"zero_stage": int(sys.argv[3]), "engine": sys.argv[4]}
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(64, 2)).to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = [(type(each), each.stride()) for each in model.parameters()]
    try:
        trimtab.start(model, optimizer, trimtab.Plan.fixed(4, num_ranks=2, **how))
    except ValueGivenError as error:
        said = {"code": error.code, "got": error.got, "text": str(error)}
    else:
        raise AssertionError("it was not refused")
    try:
        laid_out = trimtab.Plan.fixed(4, num_ranks=2, memory_layout="channels_last", **how)
        trimtab.start(model, optimizer, laid_out)
    except ValueGivenError as error:
        assert (error.code, error.field) == ("plan.layout_with_shards", "plan.memory_layout")
    else:
        raise AssertionError("it was not refused")
    assert [(type(each), each.stride()) for each in model.parameters()] == before
    assert not hasattr(model, "reshard")
    open(f"{folder}/said-by-{rank}.json", "w").write(json.dumps(said))
    model.to(memory_format=torch.contiguous_format)
    with trimtab.start(model, optimizer, trimtab.Plan.fixed(4, num_ranks=2, **how)):
        pass
    dist.destroy_process_group()
"""


def test_moments_of_weights_that_lie_channels_last_are_their_owners_on_every_rank(tmp_path):
    run_ranks(BEGIN + TRAINED, tmp_path)


@pytest.mark.parametrize(("stage", "engine"), [(0, "torch"), (2, "torch"), (1, "deepspeed")])
def test_buffers_of_any_strides_become_those_of_rank_0(tmp_path, stage, engine):
    run_ranks(BEGIN + BUFFERS, tmp_path, stage, engine)


@pytest.mark.parametrize(("stage", "engine"), [(2, "torch"), (3, "torch"), (1, "deepspeed")])
def test_weights_that_cannot_be_sharded_are_refused_before_anything_is_changed(tmp_path, stage, engine):
    run_ranks(BEGIN + REFUSED, tmp_path, stage, engine)
    for rank in range(2):
        said = json.loads((tmp_path / f"said-by-{rank}.json").read_text())
        assert said["code"] == "model.not_contiguous"
        assert said["got"] == "0.weight with strides (27, 1, 9, 3)"
        assert f"zero_stage={stage}" in said["text"]
        assert "zero_stage 0 or 1" in said["text"]
