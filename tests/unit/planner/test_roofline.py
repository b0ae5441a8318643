"""Seconds from a data sheet: what bounds an operator, and nothing where a peak is not known."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from raising import raises

from trimtab.core.errors import ValueGivenError
from trimtab.core.hardware import DeviceSpec, absent_device
from trimtab.core.memory_model import Operation, StepWork, operations
from trimtab.planner.cost_model import BANDWIDTH, COMPUTE, STARTING_S, step_seconds

DEVICE = DeviceSpec("made up", "cuda", 10**9, {"fp32": 1e12, "tf32": 4e12, "bf16": 8e12}, 1e11, "made up")
PRODUCT = Operation("fp32", (0.0, 1e9), (0.0, 1e3))  # of its FLOP
COPY = Operation("fp32", (0.0, 0.0), (1e6, 1e6))  # of its bytes
TINY = Operation("fp32", (0.0, 0.0), (8.0, 0.0), count=100)


def seconds(*micro_batch: Operation, precision: str = "fp32", rows: int = 4, count: int = 1, step=()) -> float | None:
    return step_seconds(StepWork(micro_batch, step), DEVICE, precision, rows, count)


def test_an_operator_takes_the_slower_of_computing_and_moving():
    assert seconds(PRODUCT) == pytest.approx(4e9 / (COMPUTE * 1e12))
    assert seconds(COPY) == pytest.approx(5e6 / (BANDWIDTH * 1e11))
    assert seconds(TINY) == pytest.approx(100 * STARTING_S["cuda"])


def test_tf32_is_a_mode_of_fp32_operators():
    assert seconds(PRODUCT, precision="tf32") == pytest.approx(4e9 / (COMPUTE * 4e12))
    half = replace(PRODUCT, precision="bf16")
    assert seconds(half, precision="tf32") == seconds(half, precision="bf16") == pytest.approx(4e9 / (COMPUTE * 8e12))


def test_convolutions_that_torch_runs_in_tf32_take_its_peak_where_there_is_one():
    convolution = replace(PRODUCT, precision="tf32")
    assert seconds(convolution) == seconds(PRODUCT, precision="tf32")
    older = replace(DEVICE, peak_flops={"fp32": 1e12, "fp16": 8e12})
    found = step_seconds(StepWork((convolution,), ()), older, "fp32", 4, 1)
    assert found == step_seconds(StepWork((PRODUCT,), ()), older, "fp32", 4, 1) == seconds(PRODUCT)


def test_micro_batches_are_paid_each_and_the_step_once():
    assert seconds(PRODUCT, count=3, step=(COPY,)) == pytest.approx(3 * seconds(PRODUCT) + seconds(COPY))


def test_without_a_peak_nothing_is_known():
    assert step_seconds(StepWork((PRODUCT,), ()), replace(DEVICE, bandwidth_bytes_s=None), "fp32", 4, 1) is None
    assert seconds(replace(PRODUCT, precision="fp16")) is None
    assert seconds(replace(COPY, precision="fp16")) is not None  # it computes nothing


@given(st.floats(0, 1e12), st.floats(0, 1e9), st.integers(1, 64), st.integers(1, 64))
def test_more_rows_never_take_less(flops, moved, one, other):
    few, many = sorted((one, other))
    operation = Operation("bf16", (1.0, flops), (1.0, moved))
    assert seconds(operation, rows=few) <= seconds(operation, rows=many)


def test_operators_of_two_sizes_are_lines_and_alike_ones_are_counted():
    few = [("fp32", 20.0, 10.0), ("bf16", 0.0, 7.0), ("fp32", 20.0, 10.0)]
    many = [("fp32", 40.0, 15.0), ("bf16", 0.0, 7.0), ("fp32", 40.0, 15.0)]
    assert operations(few, many, (2, 4)) == (
        Operation("fp32", (0.0, 10.0), (5.0, 2.5), 2),
        Operation("bf16", (0.0, 0.0), (7.0, 0.0), 1),
    )


@pytest.mark.parametrize("kind", ["bf16", "tf32"])
def test_what_is_done_more_often_at_another_size_is_summed_up(kind):
    begin, chunk, end = ("fp32", 4.0, 1.0), (kind, 10.0, 3.0), ("fp32", 0.0, 2.0)
    found = operations([begin, chunk, end], [begin, chunk, chunk, chunk, end], (2, 4))
    assert Operation(kind, (-20.0, 10.0), (-6.0, 3.0), 1) in found
    total = sum(operation.flops[0] + 4 * operation.flops[1] for operation in found)
    assert total == 4.0 + 30.0


def test_an_absent_device_is_found_by_name_or_refused():
    assert absent_device("H100 SXM").peak("bf16") == pytest.approx(989.4e12)
    assert absent_device("A100 80GB").memory_bytes == 80 * 10**9
    with raises(ValueGivenError, code="value.invalid", field="device"):
        absent_device("Frobnicator 9000")
