"""Mean losses: however a batch is split, each step's gradient and the weights are those of the whole batch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from plain_loop import TOLERANCE, Trained, assert_same_training, train_ours, train_plain
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from training_cases import ROWS, Words, class_batches, class_case, class_mean, mlp, token_batches

import trimtab
from trimtab.core.choice import SplitCheck
from trimtab.plans.plan import Plan

DTYPES = [torch.float64, torch.float32]
# k = 1, 2, 3, 4, 6, 12 equal slices; 12 = 5 + 5 + 2 = 7 + 5 = 11 + 1 = 8 + 4 unequal ones; 40 is more than there is.
MICRO_BATCHES = [12, 6, 4, 3, 2, 1, 5, 7, 8, 11]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("micro_batch", MICRO_BATCHES)
def test_a_split_batch_trains_as_the_whole_batch(micro_batch, optimizer, dtype):
    case = class_case(dtype, optimizer)
    ours = train_ours(case, Plan.fixed(ROWS, micro_batch))
    assert_same_training(ours, train_plain(case), TOLERANCE[dtype])


@pytest.mark.parametrize("k", range(1, 9))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_k_equal_micro_batches_train_as_the_whole_batch(k, dtype):
    case = class_case(dtype, batches=class_batches((3 * k,) * 4, dtype))
    plan = Plan.fixed(3 * k, 3)
    assert plan.num_micro_batches == k
    assert_same_training(train_ours(case, plan), train_plain(case), TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("micro_batch", [4, 3, 5, 1])
def test_a_short_last_batch_of_a_loader_is_weighted_by_its_own_rows(micro_batch, dtype):
    inputs, labels = class_batches((29,), dtype)[0]
    loader = DataLoader(TensorDataset(inputs, labels), batch_size=ROWS)  # 12, 12, 5
    case = class_case(dtype, batches=loader)
    assert_same_training(train_ours(case, Plan.fixed(ROWS, micro_batch)), train_plain(case), TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("micro_batch", [4, 5])
def test_batches_of_other_sizes_than_planned_train_as_they_are(micro_batch, dtype):
    case = class_case(dtype, batches=class_batches((1, 20, 12, 3, 13), dtype))
    assert_same_training(train_ours(case, Plan.fixed(ROWS, micro_batch)), train_plain(case), TOLERANCE[dtype])


def normalised() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 4))


REFUSED = SplitCheck(False, "BatchNorm1d computes over the batch")


@pytest.mark.parametrize("check", [None, REFUSED], ids=["no check", "a check that refused"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_plan_that_does_not_split_takes_a_larger_batch_whole(check, dtype):
    """Under batch statistics a batch cut at the planned rows would have other statistics, and update them twice."""
    case = class_case(dtype, model=normalised, batches=class_batches((12, 20, 13, 5), dtype))
    plan = replace(Plan.fixed(ROWS), check=check)
    assert_same_training(train_ours(case, plan), train_plain(case), 0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_larger_batch_is_cut_at_the_planned_rows_where_splitting_was_proved(dtype):
    case = class_case(dtype, batches=class_batches((12, 20, 13, 5), dtype))
    seen = []

    def noting(model, batch):
        seen.append(len(batch[0]))
        return class_mean(model, batch)

    plan = replace(Plan.fixed(ROWS), check=SplitCheck(True, "an unequal split agrees"))
    ours = train_ours(case.having(loss_fn=noting), plan)
    assert seen == [12, 12, 8, 12, 1, 5]
    assert_same_training(ours, train_plain(case), TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tied_weights_get_both_their_gradients(dtype):
    def mean_loss(model, batch):
        return nn.functional.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())

    case = class_case(dtype, "adamw", model=Words, loss_fn=mean_loss, batches=token_batches((9,) * 7))
    assert_same_training(train_ours(case, Plan.fixed(7, 3)), train_plain(case), TOLERANCE[dtype])


def freeze_first(model: nn.Module) -> None:
    model[0].requires_grad_(False)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("clip_norm", [None, 0.1])
def test_frozen_parameters_stay_and_get_no_gradient(clip_norm, dtype):
    case = class_case(dtype, prepare=freeze_first)
    ours = train_ours(case, Plan.fixed(ROWS, 5), clip_norm=clip_norm)
    assert_same_training(ours, train_plain(case, clip_norm), TOLERANCE[dtype])
    assert set(ours.gradients[0]) == {"2.weight", "2.bias"}
    torch.manual_seed(0)
    assert torch.equal(ours.model[0].weight, mlp().to(dtype)[0].weight)


def test_a_parameter_outside_the_optimizer_is_left_alone():
    case = class_case(optimizer="sgd")
    case = case.having(optimizer=lambda parameters: torch.optim.SGD(parameters[2:], lr=0.2))
    ours, plain = train_ours(case, Plan.fixed(ROWS, 12)), train_plain(case)
    assert_same_training(ours, plain, 0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("micro_batch", [12, 5, 1])
@pytest.mark.parametrize("clip_norm", [1e-3, 0.3, 1e3])
def test_clipping_is_on_the_whole_window_gradient(clip_norm, micro_batch, dtype):
    case = class_case(dtype)
    ours = train_ours(case, Plan.fixed(ROWS, micro_batch), clip_norm=clip_norm)
    assert_same_training(ours, train_plain(case, clip_norm), TOLERANCE[dtype])


def test_a_clip_norm_in_the_plan_is_the_same_as_one_given_to_start():
    case = class_case()
    planned = train_ours(case, Plan.fixed(ROWS, 5, clip_norm=0.3))
    assert_same_training(planned, train_ours(case, Plan.fixed(ROWS, 5), clip_norm=0.3), 0)


@pytest.mark.parametrize("micro_batch", [12, 5, 1])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_open_form_is_train_step_bit_for_bit(micro_batch, precision):
    case = class_case(torch.float32)
    plan = Plan.fixed(ROWS, micro_batch, precision=precision)
    model, optimizer = case.build()
    opened = Trained(model, optimizer)
    with trimtab.start(model, optimizer, plan) as run:
        for window in run.windows(case.batches):
            assert len(window) == window.num_micro_batches == -(-ROWS // micro_batch)
            for micro in window:
                with run.autocast():
                    loss = class_mean(run.model, micro)
                run.backward(loss)
            assert run.step() is True
            opened.losses.append(run.loss)
    assert_same_training(opened, train_ours(case, plan), 0)


def test_the_loss_returned_is_the_mean_over_the_window():
    case = class_case()
    model, optimizer = case.build()
    with trimtab.start(model, optimizer, Plan.fixed(ROWS, 5)) as run:
        expected = class_mean(model, case.batches[0]).detach()
        loss = run.train_step(run.window(case.batches[0]), case.loss_fn)
    assert torch.allclose(loss, expected, rtol=1e-12, atol=0)
    assert not loss.requires_grad
    assert run.loss is loss
