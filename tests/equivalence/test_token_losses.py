"""Token losses `Summed(loss_sum, count)`: a split window has the gradient of the mean over all tokens that count."""

from __future__ import annotations

import pytest
import torch
from plain_loop import TOLERANCE, assert_same_training, train_ours, train_plain
from training_cases import UNEQUAL_COUNTS, token_case, token_sum, token_sum_int

import trimtab
from trimtab.losses import Summed
from trimtab.plans.plan import Plan

ROWS = len(UNEQUAL_COUNTS)
LOSSES = [token_sum, token_sum_int]
every_dtype = pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)


def float_count(model, batch):
    found = token_sum(model, batch)
    return Summed(found.loss_sum, float(found.count))


def int32_count(model, batch):
    found = token_sum(model, batch)
    return Summed(found.loss_sum, found.count.to(torch.int32).reshape(1))


@every_dtype
@pytest.mark.parametrize("loss_fn", [*LOSSES, float_count, int32_count])
@pytest.mark.parametrize("micro_batch", [12, 6, 5, 3, 2, 1])
def test_very_unequal_counts_are_weighted_by_token(micro_batch, loss_fn, dtype):
    case = token_case(dtype, loss_fn=loss_fn)
    assert_same_training(train_ours(case, Plan.fixed(ROWS, micro_batch)), train_plain(case), TOLERANCE[dtype])


@every_dtype
@pytest.mark.parametrize("loss_fn", LOSSES)
@pytest.mark.parametrize("clip_norm", [1e-3, 0.5])
def test_clipping_sees_the_mean_over_tokens(clip_norm, loss_fn, dtype):
    case = token_case(dtype, loss_fn=loss_fn)
    ours = train_ours(case, Plan.fixed(ROWS, 5), clip_norm=clip_norm)
    assert_same_training(ours, train_plain(case, clip_norm), TOLERANCE[dtype])


# Loss weights per target, each half of the one before: a window's weights sum to less than one.
WEIGHTS = 0.25 * 0.5 ** torch.arange(11.0, dtype=torch.float64)


def weighted_sum(model, batch):
    """Return the weighted loss sum, and the sum of the weights as a tensor: a fraction."""
    tokens, targets = batch
    logits, labels = model(tokens).flatten(0, 1), targets.flatten()
    losses = torch.nn.functional.cross_entropy(logits, labels, reduction="none", ignore_index=-100)
    weights = torch.where(labels == -100, 0.0, WEIGHTS[labels.clamp(min=0)]).to(losses.dtype)
    return Summed((losses * weights).sum(), weights.sum())


def weighted_sum_float(model, batch):
    found = weighted_sum(model, batch)
    return Summed(found.loss_sum, float(found.count))


@every_dtype
@pytest.mark.parametrize("loss_fn", [weighted_sum, weighted_sum_float])
@pytest.mark.parametrize("micro_batch", [4, 3, 2, 1])
@pytest.mark.parametrize("kept", [(1, 0, 2, 1), (0, 0, 1, 0)], ids=str)
def test_counts_below_one_are_divided_by_as_they_are(kept, micro_batch, loss_fn, dtype):
    case = token_case(dtype, kept=kept, loss_fn=loss_fn)
    total = [float(weighted_sum(case.build()[0], batch).count) for batch in case.batches]
    assert all(0 < count < 1 for count in total), total
    ours = train_ours(case, Plan.fixed(len(kept), micro_batch))
    assert_same_training(ours, train_plain(case), TOLERANCE[dtype])


IGNORED = {"first": (0, 0, 5, 9), "middle": (4, 9, 0, 0, 1, 1), "last": (3, 9, 0, 0)}


@every_dtype
@pytest.mark.parametrize("loss_fn", LOSSES)
@pytest.mark.parametrize("kept", IGNORED.values(), ids=IGNORED)
def test_an_all_ignored_micro_batch_adds_nothing(kept, loss_fn, dtype):
    case = token_case(dtype, kept=kept, loss_fn=loss_fn)
    assert_same_training(train_ours(case, Plan.fixed(len(kept), 2)), train_plain(case), TOLERANCE[dtype])


@every_dtype
@pytest.mark.parametrize("loss_fn", LOSSES)
@pytest.mark.parametrize("micro_batch", [4, 2, 1])
def test_an_all_ignored_window_has_zero_gradient_and_no_nan(micro_batch, loss_fn, dtype):
    case = token_case(dtype, kept=(0, 0, 0, 0), loss_fn=loss_fn)
    ours = train_ours(case, Plan.fixed(4, micro_batch))
    assert_same_training(ours, train_plain(case), TOLERANCE[dtype])
    assert all(not gradient.any() for step in ours.gradients for gradient in step.values())


@every_dtype
@pytest.mark.parametrize("loss_fn", LOSSES)
def test_an_all_ignored_window_between_others_changes_neither(loss_fn, dtype):
    full, empty = token_case(dtype, loss_fn=loss_fn), token_case(dtype, kept=(0,) * ROWS, loss_fn=loss_fn)
    case = full.having(batches=[empty.batches[0], full.batches[0], empty.batches[1], *full.batches[1:]])
    assert_same_training(train_ours(case, Plan.fixed(ROWS, 5)), train_plain(case), TOLERANCE[dtype])


@pytest.mark.parametrize("loss_fn", LOSSES)
def test_windows_of_very_different_counts_share_one_reference_count(loss_fn):
    dense, sparse = token_case(kept=(9,) * 8, loss_fn=loss_fn), token_case(kept=(1, 0, 0, 0, 0, 0, 0, 0))
    case = dense.having(batches=[sparse.batches[0], *dense.batches, *sparse.batches[1:]])
    assert_same_training(train_ours(case, Plan.fixed(8, 3)), train_plain(case), 1e-12)


def test_the_open_form_takes_a_sum():
    case = token_case()
    model, optimizer = case.build()
    with trimtab.start(model, optimizer, Plan.fixed(ROWS, 5)) as run:
        for window in run.windows(case.batches):
            for micro in window:
                with run.autocast():
                    result = token_sum(run.model, micro)
                run.backward(result)
            run.step()
    ours = train_ours(case, Plan.fixed(ROWS, 5))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), ours.model.parameters(), strict=True))


def test_the_loss_returned_is_the_mean_over_tokens():
    case = token_case(loss_fn=token_sum_int)
    model, optimizer = case.build()
    with trimtab.start(model, optimizer, Plan.fixed(ROWS, 5)) as run:
        found = token_sum_int(model, case.batches[0])
        loss = run.train_step(run.window(case.batches[0]), case.loss_fn)
    assert torch.allclose(loss, found.loss_sum.detach() / found.count, rtol=1e-12, atol=0)
