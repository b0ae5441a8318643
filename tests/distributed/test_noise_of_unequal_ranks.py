"""FSDP2 on two ranks with unlike numbers of terms: the noise of each window is that of all ranks' micro-batches."""

from __future__ import annotations

import pytest
from ranks import run_codes

RANK = """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from trimtab.adaptive_batch.noise_probes import OverheadBudget
    from trimtab.adaptive_batch.gradient_noise_scale import NoiseAverage, from_partial_sums
    from trimtab.training import noise_monitor

    OverheadBudget.is_due = lambda self, sparse=0: True
    seen, add = [], NoiseAverage.add
    def noting(self, window, age=1):
        seen.append((window.trace, window.norm2, window.num, window.rows))
        add(self, window, age)
    NoiseAverage.add = noting
    losses, shown = case
    WINDOWS, K, ROWS, LENGTH = 12, 3, 4, 5
    SIZES = [[4, 2, 3], [3, 4, 1]]  # rows of a window's micro-batches, of each rank

    def build():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)).double()

    def batches(rank):
        generator = torch.Generator().manual_seed(10 + rank)
        found = []
        for index in range(WINDOWS * K):
            rows = SIZES[rank][index % K] if losses == "means" else ROWS
            inputs = torch.randn(rows, LENGTH, 6, generator=generator, dtype=torch.float64)
            kept = torch.rand(rows, LENGTH, generator=generator) < (0.9, 0.2)[(index + rank) % 2]
            if index % (2 * K) == 1:
                kept[:] = rank == 0  # a rank without terms
            if index % (4 * K) == 2 * K + 1:
                kept[:] = False  # nor has any other
            found.append((inputs, kept))
        return found

    def each_term(model, batch):
        inputs, kept = batch
        each = model(inputs).square().mean(-1)
        return each.mean(1) if losses == "means" else each[kept]

    def loss(model, batch):
        each = each_term(model, batch)
        return each.mean() if losses == "means" else trimtab.Summed(each.sum(), int(batch[1].sum()))

    # by hand: each micro-batch of both ranks as one, on a model that is whole
    whole, parts, expected = build(), [batches(0), batches(1)], []
    for window in range(WINDOWS):
        gradients, terms, rows = [], [], []
        for j in range(window * K, window * K + K):
            each = torch.cat([each_term(whole, part[j]) for part in parts])
            if not len(each):
                continue
            found = torch.autograd.grad(each.mean(), whole.parameters())
            gradients.append(torch.cat([g.flatten() for g in found]))
            terms.append(len(each))
            rows.append(sum(len(part[j][0]) for part in parts))
        g, n, m = torch.stack(gradients), torch.tensor(terms).double(), torch.tensor(rows).double()
        if shown == "partial-sums":
            sums = torch.cumsum(n[:, None] * g, 0).square().sum(1)
            one = from_partial_sums(sums.tolist(), rows)
            expected.append((one.trace, one.norm2, one.num, one.rows))
            continue
        w = n / n.sum()
        mean = (w[:, None] * g).sum(0)
        trace = float((w * (g - mean).square().sum(1)).sum() / (w * (1 - w) / m).sum())
        squares = float((w**2 / m).sum())
        expected.append((trace, float(mean.square().sum()) - trace * squares, len(terms), 1 / squares))

    model, own = build(), {}
    if shown == "by-plan":
        own = {"num_ranks": 2, "zero_stage": 3, "reduces_once": False}
    else:
        mesh = init_device_mesh("cpu", (2,))
        fully_shard(model[0], mesh=mesh)
        fully_shard(model, mesh=mesh)
    if shown == "partial-sums":
        noise_monitor.shows_reductions = lambda model: False
    rule = trimtab.BatchRule("fixed", k=K, learning_rate="none")
    plan = trimtab.Plan.fixed(ROWS, batch_rule=rule, **own)
    with trimtab.start(model, torch.optim.SGD(model.parameters(), lr=0.0), plan) as run:
        for window in run.windows(batches(rank)):
            assert window.num_micro_batches == K
            run.train_step(window, loss)
    found = {"seen": seen, "expected": expected}
"""
PADDED = """
    from torch.distributed.fsdp import fully_shard
    from trimtab.adaptive_batch.noise_probes import OverheadBudget
    from trimtab.training.noise_monitor import NoiseMonitor

    OverheadBudget.is_due = lambda self, sparse=0: True
    said, noise_of = [], NoiseMonitor.noise_of
    def noting(self, ranks):
        found = noise_of(self, ranks)
        said.append((len(ranks[0]), found is not None))
        return found
    NoiseMonitor.noise_of = noting
    model = nn.Linear(6, 2)
    fully_shard(model)
    rule = trimtab.BatchRule("fixed", k=2, learning_rate="none")
    plan = trimtab.Plan.fixed(4, 2, batch_rule=rule)
    rows = [4, 2 if rank else 4, 6]  # of every third window rank 1 has one micro-batch less
    with trimtab.start(model, torch.optim.SGD(model.parameters(), lr=0.1), plan) as run:
        for window in run.windows([torch.randn(rows[i % 3], 6) for i in range(9)]):
            run.train_step(window, lambda model, rows: model(rows).square().mean())
    found = said
"""
# The last one changes how noise is measured from then on.
CASES = [("tokens", "by-loop"), ("means", "by-loop"), ("tokens", "by-plan"), ("means", "partial-sums")]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What ranks found in windows that one of them joins, and in windows of unlike micro-batches, by case."""
    return run_codes(tmp_path_factory.mktemp("noise"), [(PADDED, None), *((RANK, case) for case in CASES)])


@pytest.mark.parametrize("case", range(len(CASES)), ids=map("-".join, CASES))
def test_a_window_says_what_one_process_would_of_the_same_micro_batches(found, case):
    one, other = found[1 + case]
    assert one == other
    assert len(one["seen"]) >= 9  # the last ones are not read any more
    for (trace, norm2, num, rows), (true_trace, true_norm2, true_num, true_rows) in zip(
        one["seen"], one["expected"], strict=False
    ):
        assert trace == pytest.approx(true_trace, rel=1e-12)
        assert norm2 == pytest.approx(true_norm2, abs=1e-12 * (abs(true_norm2) + true_trace / true_rows))
        assert num == true_num
        assert rows == pytest.approx(true_rows, rel=1e-12)


def test_ranks_send_as_many_figures_where_one_joins_with_a_micro_batch_that_weighs_nothing(found):
    """Of windows of 2, 2 and 3 micro-batches; the second of them says nothing."""
    one, other = found[0]
    assert one == other
    short, padded, long = [11, True], [11, False], [14, True]
    assert one == [short, padded, long, short, padded, long, short]
