"""A count of loss terms: what can be one, where it lies, and what it is divided by."""

from __future__ import annotations

import pytest
import torch

from trimtab.core.errors import LossError
from trimtab.runtime.accumulation import WindowWeights, as_loss


def loss(device="cpu"):
    return torch.ones((), device=device, requires_grad=True)


def test_a_count_is_brought_to_the_device_of_its_loss():
    _, count = as_loss((loss("meta"), torch.tensor(3)))
    assert count.device.type == "meta"
    _, there = as_loss((loss(), held := torch.tensor(3)))
    assert there.data_ptr() == held.data_ptr()


@pytest.mark.parametrize("dtype", [torch.bool, torch.complex64])
def test_a_tensor_that_is_no_number_of_terms_is_refused_by_its_type(dtype):
    with pytest.raises(LossError, match=str(dtype)):
        as_loss((loss(), torch.ones((), dtype=dtype)))


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
