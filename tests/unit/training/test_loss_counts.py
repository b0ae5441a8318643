"""Counts of loss terms, and the mean loss of a window, which is summed in float32 whatever the losses' precision."""

from __future__ import annotations

import json

import pytest
import torch
from raising import raises
from small_loops import sgd

import trimtab
from trimtab.core.errors import LossError, UsageError
from trimtab.losses import Summed, as_loss
from trimtab.plans.plan import Plan
from trimtab.training.accumulation import WindowWeights


def loss(device="cpu"):
    return torch.ones((), device=device, requires_grad=True)


def test_a_count_is_brought_to_the_device_of_its_loss():
    count = as_loss(Summed(loss("meta"), torch.tensor(3))).count
    assert count.device.type == "meta"
    there = as_loss(Summed(loss(), held := torch.tensor(3))).count
    assert there.data_ptr() == held.data_ptr()


@pytest.mark.parametrize("dtype", [torch.bool, torch.complex64])
def test_a_tensor_that_is_no_number_of_terms_is_refused_by_its_type(dtype):
    with raises(LossError, code="loss.count_invalid", field="loss count") as caught:
        as_loss(Summed(loss(), torch.ones((), dtype=dtype)))
    assert str(dtype).removeprefix("torch.") in caught.value.got


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int32, torch.int64])
@pytest.mark.parametrize("count", [0, 0.25, 1, 3])
@pytest.mark.parametrize("as_tensor", [False, True])
def test_only_a_count_of_zero_is_divided_by_as_one(count, as_tensor, dtype):
    if not dtype.is_floating_point:
        count = int(count)
    weights = WindowWeights()
    weights.open(rows=2, num_micro_batches=1)
    weighted = weights.weigh(loss(), torch.tensor(count, dtype=dtype) if as_tensor else count, 2)
    assert float(weighted.detach()) == float(weights.mean_loss) == pytest.approx(1 / (count or 1))


def scale_of(weights, counts, rows=8, seen=None):
    """Return the factor on each micro-batch's loss sum in one window, given up after the first `seen` of them."""
    weights.open(rows=rows, num_micro_batches=len(counts))
    found = [float(weights.weigh(loss(), count, rows // len(counts)).detach()) for count in counts[:seen]]
    if seen is None:
        weights.close()
    return found


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("make", [int, torch.tensor])
def test_a_first_micro_batch_that_is_all_but_empty_sets_the_scale_of_one_window_only(first, make):
    weights = WindowWeights()
    odd = scale_of(weights, [make(count) for count in (first, 4096, 4096, 4096)])
    assert set(odd) == {1 / 8}  # never larger than a loss of one term a row
    assert weights.correction == pytest.approx(8 / (first + 3 * 4096))
    usual = scale_of(weights, [make(4096)] * 4)
    assert set(usual) == {1 / 16384}
    assert set(scale_of(weights, [make(1)] * 4)) == {1 / 16384}  # constant from there on


def test_a_window_without_counts_or_given_up_leaves_the_scale_open():
    weights = WindowWeights()
    assert scale_of(weights, [0, 0]) == [1 / 8, 1 / 8]
    assert scale_of(weights, [512, 512]) == [1 / 1024, 1 / 1024]
    assert scale_of(weights, [0, 512]) == [1 / 1024, 1 / 1024]
    weights = WindowWeights()
    scale_of(weights, [0, 0])
    weights.load_state_dict(weights.state_dict())
    assert scale_of(weights, [512, 512]) == [1 / 1024, 1 / 1024]
    weights = WindowWeights()
    assert scale_of(weights, [1, 4096, 4096, 4096], seen=1) == [1 / 8]
    assert set(scale_of(weights, [4096] * 4)) == {1 / 16384}


@pytest.mark.parametrize("make", [int, torch.tensor])
@pytest.mark.parametrize("windows", [1, 2])
def test_the_scale_of_a_run_that_goes_on_is_that_of_one_that_was_not_cut_off(make, windows):
    weights, other = WindowWeights(), WindowWeights()
    for _ in range(windows):
        scale_of(weights, [make(4096)] * 4)
    other.load_state_dict(json.loads(json.dumps(weights.state_dict())))
    assert set(scale_of(weights, [make(1)] * 4)) == set(scale_of(other, [make(1)] * 4)) == {1 / 16384}
    assert other.state_dict() == weights.state_dict()


@pytest.mark.parametrize(
    "state", [{}, {"terms_per_sample": 0.0, "first": None}, {"terms_per_sample": 2.0, "first": "8"}]
)
def test_a_state_that_is_no_scale_is_refused(state):
    weights = WindowWeights()
    with pytest.raises(UsageError) as caught:
        weights.load_state_dict(state)
    assert caught.value.field.startswith("state.weights")


def test_a_run_tells_its_weights_which_windows_were_whole():
    model = torch.nn.Linear(2, 1)
    batches = [(torch.ones(4, 2), torch.tensor([count] * 4)) for count in (1, 64, 64)]

    def loss_fn(model, batch):
        if not fails:
            return Summed(model(batch[0]).sum(), batch[1].sum())
        fails.pop()
        return Summed(model(batch[0]).sum(), batch[1].sum() if fails else "no count")

    fails = [1, 1]
    with trimtab.start(model, sgd(model), Plan.fixed(4, 2)) as run:
        with pytest.raises(LossError):
            run.train_step(run.window(batches[0]), loss_fn)
        run.train_step(run.window(batches[1]), loss_fn)
        run.train_step(run.window(batches[2]), loss_fn)
        assert run._weights._divisor == 256


def loss_of(value, dtype):
    return torch.full((), value, dtype=dtype, requires_grad=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_mean_of_many_small_parts_is_that_of_float32(dtype):
    """In bf16 a part of 3/512 would be lost once the sum is 2."""
    weights = WindowWeights()
    weights.open(rows=512, num_micro_batches=512)
    for _ in range(512):
        assert weights.weigh(loss_of(3.0, dtype), None, 1).dtype is dtype
    assert weights.mean_loss.dtype is torch.float32
    assert float(weights.mean_loss) == 3.0


@pytest.mark.parametrize("make_count", [int, torch.tensor])
def test_sums_beyond_fp16_are_numbers(make_count):
    weights = WindowWeights()
    weights.open(rows=4, num_micro_batches=4)
    for _ in range(4):
        weights.weigh(loss_of(60000.0, torch.float16), make_count(100), 1)
    assert float(weights.mean_loss) == 600.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_other_losses_keep_their_own_precision(dtype):
    weights = WindowWeights()
    weights.open(rows=2, num_micro_batches=2)
    for value in (1.0, 3.0):
        weights.weigh(loss_of(value, dtype), None, 1)
    assert weights.mean_loss.dtype is dtype
    assert float(weights.mean_loss) == 2.0
