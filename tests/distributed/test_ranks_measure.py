"""Two ranks: what a run measures is the noise of both, under DDP and FSDP2, by reductions and by partial sums."""

from __future__ import annotations

import pytest
from ranks import run_codes

pytestmark = pytest.mark.slow

COMMON = """
    from torch.nn.parallel import DistributedDataParallel
    from trimtab.adaptive_batch.noise_probes import OverheadBudget
    from trimtab.adaptive_batch.gradient_noise_scale import NoiseAverage

    OverheadBudget.is_due = lambda self, sparse=0: True
    seen, add = [], NoiseAverage.add
    def noting(self, window, age=1):
        seen.append((window.trace, window.norm2))
        add(self, window, age)
    NoiseAverage.add = noting
    K, WINDOWS, ROWS = case, 40, 4

    def build():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)).double()

    def batches(rank):
        generator = torch.Generator().manual_seed(10 + rank)
        return [torch.randn(ROWS, 6, generator=generator, dtype=torch.float64) for _ in range(WINDOWS * K)]

    def loss(model, rows):
        return model(rows).square().mean()

    def gradient_of(rows):
        whole = build()
        found = torch.autograd.grad(loss(whole, rows), list(whole.parameters()))
        return torch.cat([g.flatten() for g in found])

    def truth(gradients, rows):
        mean = torch.stack(gradients).mean(0)
        spread = sum(float((g - mean).square().sum()) for g in gradients) / (len(gradients) - 1)
        return rows * spread, float(mean.square().sum()) - spread / len(gradients)

    def run(model, optimizer, rule):
        plan = trimtab.Plan.fixed(ROWS, batch_rule=rule)
        with trimtab.start(model, optimizer, plan) as run:
            for window in run.windows(batches(rank)):
                assert window.num_micro_batches == K
                run.train_step(window, loss)

    rule = trimtab.BatchRule("fixed", k=K, learning_rate="none")
    parts = [batches(0), batches(1)]
"""

OF_EACH = """
    run(model, torch.optim.SGD(model.parameters(), lr=0.0), rule)
    expected = []
    for window in range(WINDOWS):
        each = [gradient_of(part[window * K + j]) for part in parts for j in range(K)]
        expected.append(truth(each, ROWS))
"""
DDP = (
    COMMON
    + """
    model = DistributedDataParallel(build())
"""
    + OF_EACH
)

UNUSED = (
    COMMON.replace("nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)).double()", "Late().double()").replace(
        "torch.autograd.grad(loss(whole, rows), list(whole.parameters()))", "found_in(whole, rows)"
    )
    + """
    class Late(nn.Module):
        def __init__(self):
            super().__init__()
            self.always, self.late = nn.Linear(6, 2), nn.Linear(6, 2)

        def forward(self, rows):
            return self.always(rows) + (self.late(rows) if rows[0, 0] > 50 else 0)

    def found_in(model, rows):
        each = list(model.parameters())
        found = torch.autograd.grad(loss(model, rows), each, allow_unused=True)
        return [torch.zeros_like(p) if g is None else g for p, g in zip(each, found)]

    def marked(batches):
        for index in range(K - 1, len(batches), K):  # the last of each window
            batches[index][0, 0] = 100.0
        return batches

    plain, batches = batches, lambda rank: marked(plain(rank))
    parts = [batches(0), batches(1)]
    model = DistributedDataParallel(build(), find_unused_parameters=True)
"""
    + OF_EACH
)

SHARDED = (
    COMMON
    + """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model, mesh = build(), init_device_mesh("cpu", (2,))
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    expected = []

    def of_both(window):
        return [torch.cat([part[window * K + j] for part in parts]) for j in range(K)]
"""
)

FSDP = (
    SHARDED
    + """
    run(model, torch.optim.SGD(model.parameters(), lr=0.0), rule)
    for window in range(WINDOWS):
        expected.append(truth([gradient_of(rows) for rows in of_both(window)], 2 * ROWS))
"""
)

PARTIAL = (
    SHARDED
    + """
    from torch.distributed.fsdp import MixedPrecisionPolicy
    from trimtab.adaptive_batch.gradient_noise_scale import from_partial_sums
    from trimtab.measure.gradient_norms import shows_reductions
    from trimtab.training import noise_monitor

    assert shows_reductions(model)
    half = fully_shard(build(), mesh=mesh, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float16))
    assert not shows_reductions(half)
    noise_monitor.shows_reductions = lambda model: False
    run(model, torch.optim.SGD(model.parameters(), lr=0.0), rule)
    for window in range(WINDOWS):
        sums = torch.cumsum(torch.stack([2 * ROWS * gradient_of(rows) for rows in of_both(window)]), 0)
        one = from_partial_sums([float(each.square().sum()) for each in sums], [2 * ROWS] * K)
        expected.append((one.trace, one.norm2))
"""
)

NORMS = (
    SHARDED
    + """
    from trimtab.adaptive_batch.gradient_noise_scale import JointMicroBatches, from_partial_sums
    from trimtab.measure.gradient_norms import PartialNorms, ShardedNorms, is_sharded

    # the truth: each micro-batch of both ranks as one, on a model that is whole
    whole, of_batches = build(), []
    for j in range(WINDOWS * K):
        gradients = torch.autograd.grad(loss(whole, torch.cat([parts[0][j], parts[1][j]])), whole.parameters())
        of_batches.append(torch.cat([g.flatten() for g in gradients]))

    assert is_sharded(model) and not is_sharded(build())
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
            theirs = float(of_batches[window * K + j].square().sum())
            assert abs(ours - theirs) < 1e-9 * theirs, (ours, theirs)
        both = [sum(e[2][j] for e in every) * (K * 2 * ROWS) ** 2 for j in range(K)]
        sums.append(vars(from_partial_sums(both, [2 * ROWS] * K)))
        mean = torch.stack(of_batches[window * K : window * K + K]).mean(0)
        spread = sum(float((g - mean).square().sum()) for g in of_batches[window * K : window * K + K])
        trace = 2 * ROWS * spread / (K - 1)
        assert abs(found[-1]["trace"] - trace) < 1e-9 * trace
    found = {"exact": found, "partial": sums}
"""
)
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
REPORT = """
    found = {"seen": seen, "expected": expected}
"""
CASES = {
    "ddp-1": (DDP, 1),
    "ddp-3": (DDP, 3),
    "ddp-unused-3": (UNUSED, 3),
    "fsdp2-3": (FSDP, 3),
    "fsdp2-partial-sums": (PARTIAL, 3),  # the last, as it changes how noise is measured from then on
}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What rank 0 found, by case."""
    codes = [(code + REPORT, k) for code, k in CASES.values()]
    ranks = run_codes(tmp_path_factory.mktemp("measure"), [(NORMS, 3), *codes])
    return {name: first for name, (first, _) in zip(("norms", *CASES), ranks, strict=True)}


@pytest.mark.parametrize("name", CASES)
def test_each_window_says_what_the_gradients_of_both_ranks_do(found, name):
    """Under DDP also where the micro-batch that is reduced, in place, is a window's only one, or a gradient's first."""
    seen, expected = found[name]["seen"], found[name]["expected"]
    assert len(seen) >= 37
    for (trace, norm2), (true_trace, true_norm2) in zip(seen, expected, strict=False):
        assert trace == pytest.approx(true_trace, rel=1e-9)
        assert norm2 == pytest.approx(true_norm2, rel=1e-9)


def test_what_reductions_show_is_each_micro_batch_of_all_ranks(found):
    """The ranks themselves hold every norm and every window's estimate against the truth."""
    assert len(found["norms"]["exact"]) == 40


def test_partial_sums_agree_on_average(found):
    exact, partial = (sum(each["trace"] for each in found["norms"][name]) / 40 for name in ("exact", "partial"))
    assert partial == pytest.approx(exact, rel=0.5)


def test_micro_batches_that_are_not_reduced_and_meshes_with_replicas_say_nothing(tmp_path):
    """Taken for gradients of nothing, the former would make all of the last one's noise, and k rise without end; of the
    latter, each replica would count as shards of its own."""
    run_codes(tmp_path, [(REPLICATED, None), (UNREDUCED, None)])
