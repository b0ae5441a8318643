"""How much of a device an arm's step is: of the peak of what its products run in."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from trimtab.core.hardware import DeviceSpec
from trimtab.experiments.comparison.arm_metrics import ArmMetrics, utilisation
from trimtab.experiments.paired_runs.inspect_arm import _peak

GPU = DeviceSpec("made up", "cuda", None, {"fp32": 100.0, "tf32": 400.0}, 10.0, "made up")


class Loop:
    def __init__(self, model: nn.Module, precision: str) -> None:
        self.model, self.precision = model, precision


@pytest.mark.parametrize(("peak", "expected"), [("", 0.5), ("tf32", 0.125)])
def test_utilisation_is_of_the_peak_that_convolutions_run_at(peak, expected):
    fact = ArmMetrics(1, {}, 5.0, "fp32", peak=peak)
    assert utilisation(GPU, fact, fact, [10.0]) == (expected, expected)


@pytest.mark.parametrize(
    ("model", "precision", "mode", "kind", "expected"),
    [
        (nn.Conv2d(1, 1, 1), "fp32", "tf32", "cuda", "tf32"),
        (nn.Conv2d(1, 1, 1), "fp32", "ieee", "cuda", ""),
        (nn.Conv2d(1, 1, 1), "bf16", "tf32", "cuda", ""),
        (nn.Linear(1, 1), "fp32", "tf32", "cuda", ""),
        (nn.Conv2d(1, 1, 1), "fp32", "tf32", "cpu", ""),
    ],
)
def test_a_loop_in_fp32_convolves_in_tf32_on_a_gpu_where_torch_may(model, precision, mode, kind, expected):
    before = torch.backends.cudnn.conv.fp32_precision
    torch.backends.cudnn.conv.fp32_precision = mode
    try:
        assert _peak(Loop(model, precision), torch.device(kind)) == expected
    finally:
        torch.backends.cudnn.conv.fp32_precision = before
