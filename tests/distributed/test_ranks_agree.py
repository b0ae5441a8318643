"""Two ranks over gloo: the same k on each, from the noise of both, and one reduction a window."""

from __future__ import annotations

import pytest
from ranks import run_cases, run_codes

pytestmark = pytest.mark.slow

RANK = """
    import itertools
    from torch.nn.parallel import DistributedDataParallel
    from trimtab.adaptive_batch.noise_probes import OverheadBudget

    slow, measured, policy = case
    if measured == "always":  # so short a step would be measured once in a hundred
        OverheadBudget.is_due = lambda self, sparse=0: not self.is_paused
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 1)))
    reductions = []

    def slow_reduce(state, bucket):
        reductions.append(1)
        if slow:
            time.sleep(slow)
        future = dist.all_reduce(bucket.buffer().div_(2), async_op=True).get_future()
        return future.then(lambda f: f.value()[0])

    model.register_comm_hook(None, slow_reduce)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(1 + rank)

    def batches():
        while True:
            x = torch.randn(4, 6, generator=generator)
            yield x, x.sum(1, keepdim=True) + torch.randn(4, 1, generator=generator)

    def loss(model, batch):
        if rank == 1:
            time.sleep(0.002)  # a slower rank: times differ, decisions must not
        return (model(batch[0]) - batch[1]).square().mean()

    rule = trimtab.BatchRule(policy, k_max=16, min_windows=5)
    plan = trimtab.Plan.fixed(4, batch_rule=rule)
    ks, windows = [], 0
    with trimtab.start(model, optimizer, plan) as run:
        for window in itertools.islice(run.windows(batches()), 110):
            ks.append(window.num_micro_batches)
            run.train_step(window, loss)
        noise = run.noise
    weights = [float(p.detach().double().sum()) for p in model.parameters()]
    found = {"ks": ks, "reductions": len(reductions), "weights": weights, "scale": noise.scale, "n": noise.num_windows}
"""
# Changes of the program, as what stands in it and what is to.
NOT_EQUALLY_LONG = {
    "itertools.islice(run.windows(batches()), 110)": """itertools.chain(
            run.windows(itertools.islice(batches(), 12 - rank)), run.windows(itertools.islice(batches(), 40))
        )""",
    "window.num_micro_batches": "window.num_batches",
    "nn.Tanh()": "nn.BatchNorm1d(32)",
}
FEWER_ROWS = {
    "itertools.islice(run.windows(batches()), 110)": """itertools.chain.from_iterable(
            run.windows(epoch()) for _ in range(12)
        )""",
    "    rule = ": """    def epoch():
        *full, last = itertools.islice(batches(), 10 - rank)
        return [*full, tuple(part[:4 - rank] for part in last)]

    rule = """,
    "k_max=16, min_windows=5": 'k=4, k_max=4, theta=1e-3, learning_rate="linear"',
    "trimtab.start(model, optimizer, plan)": "trimtab.start(model, optimizer, plan, total_samples=12 * 40)",
    "window.num_micro_batches": "window.num_batches",
    "lr=1e-3": "lr=1e-2",
}
WARMED_UP = {"Plan.fixed(4, batch_rule=rule)": 'Plan.fixed(4, schedule="warmup_cosine", batch_rule=rule)'}
GIVEN_UP = {
    "        if rank == 1:\n": """        if rank == 1 and next(calls) % 7 == 5 and not reductions[len(ks):]:
            raise ValueError("a bad batch")
        if rank == 1:
""",
    "    ks, windows = [], 0\n": "    ks, calls, given_up = [], itertools.count(), []\n",
    "itertools.islice(run.windows(batches()), 110)": "run.windows(batches())",
    """            ks.append(window.num_micro_batches)
            run.train_step(window, loss)
""": """            try:
                run.train_step(window, loss)
            except ValueError:
                given_up.append(len(ks))
                continue
            ks.append(window.num_micro_batches)
            if len(ks) == 110:
                break
""",
    '"n": noise.num_windows}': '"n": noise.num_windows, "given_up": given_up}',
}
SHARDED = {
    "model = DistributedDataParallel(nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 1)))": """
    from torch.distributed.fsdp import fully_shard
    model = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 1))
    fully_shard(model)""",
    "    model.register_comm_hook(None, slow_reduce)\n": "",
    "float(p.detach().double().sum()) for p": "float(p.detach().full_tensor().double().sum()) for p",
    "ks.append(window.num_micro_batches)": "ks.append((window.num_batches, window.num_micro_batches))",
}
# Of each case: changes, seconds of a reduction, when windows are measured, and by what policy.
CASES = {
    "by the account": ({}, 0.0, "by the account", "norm_test"),
    "not equally long": (NOT_EQUALLY_LONG, 0.0, "by the account", "goodput"),
    "fewer rows": (FEWER_ROWS, 0.0, "by the account", "norm_test"),
    "fewer rows, warmed up": (FEWER_ROWS | WARMED_UP, 0.0, "by the account", "norm_test"),
    "given up": (GIVEN_UP, 0.0, "by the account", "norm_test"),
    "sharded, goodput": (SHARDED, 0.0, "always", "goodput"),
    "sharded, norm_test": (SHARDED, 0.0, "always", "norm_test"),
    "fast": ({}, 0.0, "always", "goodput"),
    "slow": ({}, 0.05, "always", "goodput"),
}


def changed(changes: dict[str, str]) -> str:
    code = RANK
    for before, after in changes.items():
        assert before in code
        code = code.replace(before, after)
    return code


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What each rank found, by case."""
    codes = [(changed(changes), how) for changes, *how in CASES.values()]
    return dict(zip(CASES, run_codes(tmp_path_factory.mktemp("agree"), codes), strict=True))


@pytest.mark.parametrize("case", ["fast", "slow"])
def test_every_rank_takes_the_same_windows(found, case):
    one, other = found[case]
    assert one["ks"] == other["ks"]
    assert one["weights"] == other["weights"]
    assert (one["scale"], one["n"]) == (other["scale"], other["n"])


def test_they_agree_on_when_to_measure_too(found):
    """By what measuring takes, which is another time on each: all go by the dearest."""
    one, other = found["by the account"]
    assert one == other
    assert 5 <= one["n"] < len(one["ks"]) - 20


@pytest.mark.parametrize("case", ["fast", "slow"])
def test_gradients_are_reduced_once_a_window(found, case):
    for rank in found[case]:
        assert rank["reductions"] == len(rank["ks"])
        assert max(rank["ks"]) > 1


def test_a_slow_link_asks_for_more_accumulation(found):
    """50 ms a reduction against 2 ms a micro-batch."""
    fast, slow = (found[each][0]["ks"] for each in ("fast", "slow"))
    assert slow[-1] >= 4
    assert slow[-1] > fast[-1]


def test_ranks_whose_loaders_are_not_equally_long_do_not_wait_for_each_other(found):
    """The eleventh window is to be of two batches, for their time, and one rank has but one left, that is not split."""
    one, other = (each["ks"] for each in found["not equally long"])
    assert (one[10], other[10]) == (2, 1)
    assert one[:10] + one[11:] == other[:10] + other[11:]


@pytest.mark.parametrize("case", ["fewer rows", "fewer rows, warmed up"])
def test_a_rank_with_less_data_has_the_rate_of_the_others(found, case):
    """Or the weights of the two would be others after one step, and for good. Its loader ends in a window of one batch
    where the other's has two, and in fewer rows. Both make as many windows while k is 4: theta asks for no less."""
    one, other = found[case]
    assert (one["ks"][:3], other["ks"][:3]) == ([4, 4, 2], [4, 4, 1])
    assert one["weights"] == other["weights"]


def test_a_window_that_one_rank_gives_up_leaves_them_agreed(found):
    """Its batch is bad: the loss raises, and the rank takes its next one in the same reduction. It may be a probe."""
    one, other = map(dict, found["given up"])
    assert not one.pop("given_up")
    assert len(other.pop("given_up")) >= 10
    assert one == other


@pytest.mark.parametrize(("policy", "shown_by"), [("goodput", (3, 3)), ("norm_test", (1, 2))])
def test_shards_of_a_model_follow_the_same_windows_too(found, policy, shown_by):
    """Under FSDP2 a window of one micro-batch says nothing, of ranks as of one: some are split, or of more batches."""
    one, other = found[f"sharded, {policy}"]
    assert one == other
    assert shown_by in {tuple(each) for each in one["ks"]}
    assert policy == "goodput" or (one["n"] >= 90 and one["ks"][-1][0] > 1)


OTHER_PLANS = """
    from torch.nn.parallel import DistributedDataParallel
    from trimtab.core.errors import UsageError

    what, said = case
    model = DistributedDataParallel(nn.Linear(6, 2))
    kind = torch.optim.AdamW if what == "optimizer" and rank == 1 else torch.optim.SGD
    optimizer = kind(model.parameters(), lr=0.1)
    micro = 4 - rank if what == "cut" else 4
    k_max = 16 + rank if what == "rule" else 16
    plan = trimtab.Plan.fixed(4, micro, batch_rule=trimtab.BatchRule(k_max=k_max, learning_rate="sqrt"))
    try:
        trimtab.start(model, optimizer, plan)
    except UsageError as error:
        assert error.code == "ranks.differ", error
        assert error.got.startswith(f"differences in {said};"), error
    else:
        raise SystemExit("ranks that differ were taken")
"""


def test_ranks_that_would_decide_otherwise_are_refused(tmp_path):
    differences = {"cut": "micro_batch", "rule": "batch_rule", "optimizer": "the optimizer's class"}
    run_cases(OTHER_PLANS, tmp_path, *differences.items())
