"""A window of several loader batches: the gradient of all of them as one batch, at the rate of the rule."""

from __future__ import annotations

import math

import pytest
import torch
from plain_loop import TOLERANCE, Case, assert_same_training, train_ours, train_plain
from torch import nn
from training_cases import OPTIMIZERS, ROWS, mlp

from trimtab.core.batch_rule import BatchRule
from trimtab.losses import Summed
from trimtab.plans.plan import Plan
from trimtab.training import run as run_module

NUM_BATCHES = 7  # of them three windows of two, and one of what is left


def batches(dtype, sizes=(ROWS,) * NUM_BATCHES):
    generator = torch.Generator().manual_seed(5)
    return [
        (torch.randn(rows, 6, dtype=dtype, generator=generator), torch.randint(0, 4, (rows,), generator=generator))
        for rows in sizes
    ]


def joined(each, k):
    """Return the batches, every k of them as one."""
    groups = [each[i : i + k] for i in range(0, len(each), k)]
    return [tuple(torch.cat(columns) for columns in zip(*group, strict=True)) for group in groups]


def mean_loss(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def summed(model, batch):
    loss_sum = nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="sum")
    return Summed(loss_sum, (batch[1] != -100).sum())


def masked(each):
    """Return the batches with every third label ignored."""
    return [(rows, torch.where(torch.arange(len(labels)) % 3 == 0, -100, labels)) for rows, labels in each]


def fixed(k, micro_batch, **rule):
    return Plan.fixed(ROWS, micro_batch, batch_rule=BatchRule("fixed", k=k, learning_rate="none", **rule))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("loss_fn", [mean_loss, summed])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(("k", "micro_batch"), [(2, 12), (3, 12), (4, 6), (6, 5), (1, 12)])
def test_batches_together_are_one_batch(k, micro_batch, optimizer, loss_fn, dtype):
    each = batches(dtype)
    together = -(-k // -(-ROWS // micro_batch))
    each = masked(each) if loss_fn is summed else each
    case = Case(mlp, OPTIMIZERS[optimizer], loss_fn, each, dtype)
    ours = train_ours(case, fixed(k, micro_batch))
    if loss_fn is summed:
        plain = train_plain(case.having(batches=joined_sums(each, together), loss_fn=sum_of_parts))
    else:
        plain = train_plain(case.having(batches=joined(each, together)))
    assert_same_training(ours, plain, TOLERANCE[dtype])


def joined_sums(each, k):
    return [each[i : i + k] for i in range(0, len(each), k)]


def sum_of_parts(model, parts):
    found = [summed(model, part) for part in parts]
    return Summed(sum(each.loss_sum for each in found), sum(each.count for each in found))


def test_batches_of_other_sizes_weigh_by_their_rows():
    each = batches(torch.float64, sizes=(12, 5, 9, 12, 1))
    case = Case(mlp, OPTIMIZERS["adamw"], mean_loss, each)
    ours = train_ours(case, fixed(2, 12))
    assert_same_training(ours, train_plain(case.having(batches=joined(each, 2))), TOLERANCE[torch.float64])


def test_weighting_batches_alike_would_be_seen(monkeypatch):
    """The mutation: every micro-batch of a window by the same weight, whatever its rows."""
    from trimtab.training.accumulation import WindowWeights

    def alike(self, loss, rows):
        weighted = loss / self._num_micro_batches
        self._add(weighted.detach())
        return weighted

    monkeypatch.setattr(WindowWeights, "_weigh_mean", alike)
    each = batches(torch.float64, sizes=(12, 5, 9, 12, 1))
    case = Case(mlp, OPTIMIZERS["adamw"], mean_loss, each)
    with pytest.raises(AssertionError):
        assert_same_training(train_ours(case, fixed(2, 12)), train_plain(case.having(batches=joined(each, 2))), 1e-3)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_measuring_changes_no_gradient(optimizer, each_measured):
    """The same windows with and without the monitor, bit for bit."""
    each = batches(torch.float32, sizes=(ROWS,) * 6)
    case = Case(mlp, OPTIMIZERS[optimizer], mean_loss, each, torch.float32)
    watched, unwatched = (
        train_ours(case, fixed(2, 12)),
        train_ours(case.having(batches=joined(each, 2)), Plan.fixed(24, 12)),
    )
    assert_same_training(watched, unwatched, 0.0)
    assert each_measured.closed == 3


@pytest.mark.parametrize(("rule", "power"), [("linear", 1.0), ("sqrt", 0.5), ("none", 0.0), ("auto", 1.0)])
def test_the_rate_follows_the_batch_over_some_windows_and_falls_at_once(rule, power):
    """Of the ratio of the batches, ten windows a doubling; the user's own rate stands again after each step."""
    each = batches(torch.float64, sizes=(ROWS,) * 81)
    model, optimizer = Case(mlp, lambda p: torch.optim.SGD(p, lr=0.1), mean_loss, each).build()
    plan, seen = Plan.fixed(ROWS, 12, batch_rule=BatchRule("fixed", k=4, learning_rate=rule)), []
    optimizer.register_step_pre_hook(lambda *_: seen.append(optimizer.param_groups[0]["lr"]))
    with run_module.Run(model, optimizer, plan) as run:
        for window in run.windows(each):
            run.train_step(window, mean_loss)
            assert optimizer.param_groups[0]["lr"] == 0.1
    wanted = [0.1 * min(4**power, 2 ** ((i + 1) / 10)) for i in range(20)] + [0.1]  # the last window: one batch
    assert seen == pytest.approx(wanted)


def test_the_schedule_goes_by_tokens_where_they_are_given():
    each = masked(batches(torch.float64))
    model, optimizer = Case(mlp, lambda p: torch.optim.SGD(p, lr=0.1), summed, each).build()
    plan, seen = Plan.fixed(ROWS, 6, schedule="warmup_cosine"), []
    optimizer.register_step_pre_hook(lambda *_: seen.append(optimizer.param_groups[0]["lr"]))
    total = 2 * NUM_BATCHES * 8  # 8 of 12 labels count
    with run_module.Run(model, optimizer, plan, total_tokens=total) as run:
        for window in run.windows(each):
            run.train_step(window, summed)
    progress = [8 * (i + 1) / total for i in range(NUM_BATCHES)]
    wanted = [0.1 * (0.1 + 0.45 * (1 + math.cos(math.pi * (p - 0.05) / 0.95))) for p in progress]
    assert seen == pytest.approx(wanted)
