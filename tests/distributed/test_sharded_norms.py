"""FSDP2 on two ranks: a micro-batch's norm over all ranks, from reductions; and from partial sums."""

from __future__ import annotations

import pytest
from ranks import run_cases, run_codes

RANK = """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from trimtab.adaptive_batch.gradient_noise_scale import from_partial_sums
    from trimtab.adaptive_batch.gradient_noise_scale import JointMicroBatches
    from trimtab.measure.gradient_norms import PartialNorms, ShardedNorms, is_sharded

    WINDOWS, K, ROWS = 40, 3, 4

    def build():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)).double()

    def batches(rank):
        generator = torch.Generator().manual_seed(10 + rank)
        return [torch.randn(ROWS, 6, generator=generator, dtype=torch.float64) for _ in range(WINDOWS * K)]

    def loss(model, rows):
        return model(rows).square().mean()

    # the truth: each micro-batch of both ranks as one, on a model that is whole
    whole, truth = build(), []
    parts = [batches(0), batches(1)]
    for j in range(WINDOWS * K):
        gradients = torch.autograd.grad(loss(whole, torch.cat([parts[0][j], parts[1][j]])), whole.parameters())
        truth.append(torch.cat([g.flatten() for g in gradients]))

    model = build()
    assert not is_sharded(model)
    mesh = init_device_mesh("cpu", (2,))
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    assert is_sharded(model)
    norms, partial = ShardedNorms(model), PartialNorms(list(model.parameters()))
    own, found, sums = batches(rank), [], []
    for window in range(WINDOWS):
        model.zero_grad()
        norms.on()
        seen, so_far = [], []
        for j in range(K):
            (loss(model, own[window * K + j]) / K).backward()
            seen.append(float(norms.take()))
            so_far.append(float(partial.take()))
        norms.off()
        norm2 = float(partial.take())
        mine = [norm2, *(one * (K * ROWS) ** 2 for one in seen), *[ROWS] * K, *[ROWS] * K]
        every = [None, None]
        dist.all_gather_object(every, (mine, seen, so_far))
        found.append(vars(JointMicroBatches.of_ranks([e[0] for e in every]).noise()))
        for j in range(K):
            ours = sum(e[1][j] for e in every) * K**2
            theirs = float(truth[window * K + j].square().sum())
            assert abs(ours - theirs) < 1e-9 * theirs, (ours, theirs)
        both = [sum(e[2][j] for e in every) * (K * 2 * ROWS) ** 2 for j in range(K)]
        sums.append(vars(from_partial_sums(both, [2 * ROWS] * K)))
        mean = torch.stack(truth[window * K : window * K + K]).mean(0)
        spread = sum(float((g - mean).square().sum()) for g in truth[window * K : window * K + K])
        trace = 2 * ROWS * spread / (K - 1)
        assert abs(found[-1]["trace"] - trace) < 1e-9 * trace
    found = {"exact": found, "partial": sums}
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return run_cases(RANK, tmp_path_factory.mktemp("sharded"), "all")[0][0]


def test_what_reductions_show_is_each_micro_batch_of_all_ranks(found):
    """The ranks themselves hold every norm and every window's estimate against the truth."""
    assert len(found["exact"]) == 40


def test_partial_sums_agree_on_average(found):
    exact, partial = (sum(each["trace"] for each in found[name]) / 40 for name in ("exact", "partial"))
    assert partial == pytest.approx(exact, rel=0.5)


UNREDUCED = """
    from torch.distributed.fsdp import fully_shard
    from trimtab.adaptive_batch.noise_probes import OverheadBudget

    OverheadBudget.is_due = lambda self, sparse=0: True
    model = nn.Linear(6, 2)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rule = trimtab.BatchRule("goodput", k=4, k_max=8, learning_rate="linear", min_windows=2)
    with trimtab.start(model, optimizer, trimtab.Plan.fixed(4, batch_rule=rule)) as run:
        loader = [torch.randn(4, 6) for _ in range(60)]
        for window in run.windows(loader):
            for index, micro in enumerate(window):
                model.set_requires_gradient_sync(index == window.num_micro_batches - 1)
                run.backward(run.model(micro).square().mean())
            run.step()
            assert run._control.k <= 4, run._control.k  # though some windows are of many batches, to find out
        assert run.noise is None, run.noise
"""
REPLICATED = """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from trimtab.core.errors import UsageError

    model = nn.Linear(6, 2)
    fully_shard(model, mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicas", "shards")))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        trimtab.start(model, optimizer, trimtab.Plan.fixed(4, batch_rule=trimtab.BatchRule()))
    except UsageError as error:
        assert error.code == "batch_rule.mesh", error
        with trimtab.start(model, optimizer, trimtab.Plan.fixed(4)) as run:  # nothing was taken
            run.train_step(run.window(torch.ones(4, 6)), lambda model, rows: model(rows).mean())
    else:
        raise SystemExit("a mesh of replicas was taken")
"""


def test_micro_batches_that_are_not_reduced_and_meshes_with_replicas_say_nothing(tmp_path):
    """Taken for gradients of nothing, the former would make all of the last one's noise, and k rise without end; of the
    latter, each replica would count as shards of its own."""
    run_codes(tmp_path, [(REPLICATED, None), (UNREDUCED, None)])
