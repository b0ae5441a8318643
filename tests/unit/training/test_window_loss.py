"""The mean loss of a window: losses in half precision are summed in float32, however many or large they are."""

from __future__ import annotations

import pytest
import torch

from trimtab.training.accumulation import WindowWeights


def loss(value, dtype):
    return torch.full((), value, dtype=dtype, requires_grad=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_mean_of_many_small_parts_is_that_of_float32(dtype):
    """In bf16 a part of 3/512 would be lost once the sum is 2."""
    weights = WindowWeights()
    weights.open(rows=512, num_micro_batches=512)
    for _ in range(512):
        assert weights.weigh(loss(3.0, dtype), None, 1).dtype is dtype
    assert weights.mean_loss.dtype is torch.float32
    assert float(weights.mean_loss) == 3.0


@pytest.mark.parametrize("make_count", [int, torch.tensor])
def test_sums_beyond_fp16_are_numbers(make_count):
    weights = WindowWeights()
    weights.open(rows=4, num_micro_batches=4)
    for _ in range(4):
        weights.weigh(loss(60000.0, torch.float16), make_count(100), 1)
    assert float(weights.mean_loss) == 600.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_other_losses_keep_their_own_precision(dtype):
    weights = WindowWeights()
    weights.open(rows=2, num_micro_batches=2)
    for value in (1.0, 3.0):
        weights.weigh(loss(value, dtype), None, 1)
    assert weights.mean_loss.dtype is dtype
    assert float(weights.mean_loss) == 2.0
