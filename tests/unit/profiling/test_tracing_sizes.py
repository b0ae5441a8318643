"""A trace allocates no more than it may: what is too large to be run at all rows is told from fewer."""

from __future__ import annotations

import pytest
import torch
from raising import raises
from small_loops import sgd
from torch import nn

from trimtab.core.errors import ModelError
from trimtab.measure import storage_tracker
from trimtab.measure.memory_trace import trace_peaks
from trimtab.profiling.candidate_traces import at_two_sizes

ROWS = 32


def test_sizes_are_halved_until_each_operator_can_be_run():
    seen = []

    def trace(sizes, batches):
        seen.append((sizes, tuple(len(each) for each in batches)))
        if sizes[1] > 8:
            raise storage_tracker.WorkspaceTooLarge("model", got="much", expected="less")
        return "told"

    assert at_two_sizes(torch.zeros(ROWS, 1), trace) == "told"
    assert seen == [((16, 32), (16, 32)), ((8, 16), (8, 16)), ((4, 8), (4, 8))]

    def trace(sizes, batches):
        raise storage_tracker.WorkspaceTooLarge("model", got="much", expected="less")

    with raises(ModelError, code="model.unsupported", field="model"):
        at_two_sizes(torch.zeros(ROWS, 1), trace)


def test_a_peak_told_from_fewer_rows_is_that_of_all(monkeypatch):
    """Convolutions in bf16, whose copies are found by running them."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(8, 16, 3), nn.ReLU(), nn.Conv2d(16, 8, 3), nn.Flatten(), nn.Linear(8 * 144, 4))
    optimizer = sgd(model)
    batch, tried = torch.randn(ROWS, 8, 16, 16), []

    def trace(sizes, batches):
        tried.append(sizes)
        how = {"autocasts": [lambda: torch.autocast("cpu", torch.bfloat16)], "counts_scratch": True}
        return trace_peaks(model, optimizer, lambda m, b: m(b).float().square().mean(), batches, sizes, **how)

    (all_rows,) = at_two_sizes(batch, trace)
    monkeypatch.setattr(storage_tracker, "MOST_BYTES", 2**18)
    (fewer,) = at_two_sizes(batch, trace)
    assert tried[1:] == [(16, 32), (8, 16)]
    off = 0.06 if torch.cpu._is_amx_tile_supported() else 0.02  # AMX's kernels take other scratch for other rows
    for rows in (8, ROWS):
        assert fewer.whole.peak_bytes(rows) == pytest.approx(all_rows.whole.peak_bytes(rows), rel=off)


def test_products_of_batches_in_half_precision_reorder_what_lies_otherwise():
    single = torch.randn(32, 8, 16).transpose(0, 1), torch.randn(32, 8, 16).permute(1, 2, 0)
    half = tuple(each.bfloat16() for each in single)
    assert storage_tracker.call_of(torch.ops.aten.bmm.default, single, {}) is None
    call = storage_tracker.call_of(torch.ops.aten.bmm.default, half, {})
    taken = storage_tracker.measure_calls([call])[call]
    assert taken.result_bytes == (2 * 8 * 32 * 32,)
    if "avx512" in torch.backends.cpu.get_cpu_capability().lower():
        assert taken.scratch_bytes > 0
