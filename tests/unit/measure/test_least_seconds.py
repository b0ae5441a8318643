"""The least time of a call on a machine that also runs other processes."""

from __future__ import annotations

import itertools

import pytest
import torch

from trimtab.core.hardware import DeviceSpec
from trimtab.measure import timing
from trimtab.measure.timing import least_seconds
from trimtab.settings.precision import precision_refusal

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("times", "calls", "least"),
    [
        ([1.0, 1.05, 1.02], 3, 1.0),  # an idle machine
        ([9.0, 400.0, 1.0, 7.0, 1.09], 5, 1.0),  # disturbed until two calls agree
        ([1000.0, 1000.0, 1000.0, 1.0], 3, 1000.0),  # cannot be known without an undisturbed call
    ],
)
def test_a_disturbed_call_is_repeated_until_two_agree(monkeypatch, times, calls, least):
    drawn = iter(times)
    monkeypatch.setattr(timing, "time_call", lambda function, device: next(drawn))
    assert least_seconds(lambda: None, CPU) == least
    assert len(list(drawn)) == len(times) - calls


def test_calls_that_never_agree_end_after_a_second(monkeypatch):
    falling = (1.0 / 2**call for call in itertools.count())
    clock = itertools.count(step=0.3)
    monkeypatch.setattr(timing, "time_call", lambda function, device: next(falling))
    monkeypatch.setattr(timing.time, "perf_counter", lambda: next(clock))
    assert least_seconds(lambda: None, CPU) == 1.0 / 2**5


@pytest.mark.parametrize(("native", "is_refused"), [((), True), (("bf16",), False), (("fp16",), True)])
def test_a_precision_with_its_own_instructions_is_never_refused(native, is_refused):
    device = DeviceSpec("a CPU", "cpu", peak_flops={"fp32": 1e11, "bf16": 1e8}, native=native)
    assert (precision_refusal(device, "bf16") is not None) is is_refused
