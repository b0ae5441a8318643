"""A model under FSDP2 on two ranks: clipping, and what looks at the gradient's norm, as on one device."""

from __future__ import annotations

import json

import pytest
from ranks import run_ranks

RANK = """
    import json, sys
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    import trimtab

    torch.set_num_threads(1)
    rank, folder, options = int(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)

    def build():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)).double()

    def loss(model, rows):
        return model(rows).square().mean()

    def train(model, first, rows):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        norms, steps = [], 0
        keywords = options | ({"stop": trimtab.Stop(grad_norm=options["stop"])} if "stop" in options else {})
        with trimtab.start(model, optimizer, trimtab.Plan.fixed(rows), **keywords) as run:
            for window in run.windows([batch[first : first + rows] for batch in data]):
                run.train_step(window, loss)
                norms.append(float(run.grad_norm))
        return norms, run.stop_reason

    generator = torch.Generator().manual_seed(1)
    data = [torch.randn(8, 6, generator=generator, dtype=torch.float64) for _ in range(12)]
    sharded, mesh = build(), init_device_mesh("cpu", (2,))
    fully_shard(sharded[0], mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    ours = *train(sharded, 4 * rank, 4), [p.full_tensor().tolist() for p in sharded.parameters()]
    if rank == 0:
        whole = build()
        dist.barrier()
        dist.destroy_process_group()  # from here on it is alone
        theirs = *train(whole, 0, 8), [p.tolist() for p in whole.parameters()]
        with open(f"{folder}/found.json", "w") as file:
            json.dump([ours, theirs], file)
    else:
        dist.barrier()
        dist.destroy_process_group()
"""


@pytest.mark.parametrize("options", [{"clip_norm": 0.05}, {"nonfinite": "skip"}, {"stop": 0.45}])
def test_the_gradients_norm_is_that_of_one_device(tmp_path, options):
    run_ranks(RANK, tmp_path, json.dumps(options))
    (norms, reason, weights), (whole_norms, whole_reason, whole_weights) = json.loads(
        (tmp_path / "found.json").read_text()
    )
    assert norms == pytest.approx(whole_norms)
    assert reason == whole_reason
    assert (reason is not None) == ("stop" in options)
    for ours, theirs in zip(weights, whole_weights, strict=True):
        for row, whole_row in zip(ours, theirs, strict=True):
            assert row == pytest.approx(whole_row)
