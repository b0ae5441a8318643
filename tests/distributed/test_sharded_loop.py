"""A model under FSDP2 on two ranks: clipping, and what looks at the gradient's norm, as on one device."""

from __future__ import annotations

import pytest
from ranks import run_cases

RANK = """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    def build():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)).double()

    def loss(model, rows):
        return model(rows).square().mean()

    def train(model, first, rows):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        norms, steps = [], 0
        keywords = case | ({"stop": trimtab.Stop(grad_norm=case["stop"])} if "stop" in case else {})
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
        found = [ours, theirs]
    else:
        dist.barrier()
        dist.destroy_process_group()
"""


CASES = [{"clip_norm": 0.05}, {"nonfinite": "skip"}, {"stop": 0.45}]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return run_cases(RANK, tmp_path_factory.mktemp("loop"), *CASES)


@pytest.mark.parametrize(("number", "case"), list(enumerate(CASES)))
def test_the_gradients_norm_is_that_of_one_device(found, number, case):
    (norms, reason, weights), (whole_norms, whole_reason, whole_weights) = found[number][0]
    assert norms == pytest.approx(whole_norms)
    assert reason == whole_reason
    assert (reason is not None) == ("stop" in case)
    for ours, theirs in zip(weights, whole_weights, strict=True):
        for row, whole_row in zip(ours, theirs, strict=True):
            assert row == pytest.approx(whole_row)
