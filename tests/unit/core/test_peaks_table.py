"""Published peaks: the right row for a device's own name, and nothing for a device that is not in the table."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimtab.core.hardware import PEAKS, DeviceSpec, lookup_peaks


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA A100-SXM4-80GB", "A100 80GB"),
        ("NVIDIA A100-SXM4-40GB", "A100"),
        ("NVIDIA A100-PCIE-40GB", "A100"),
        ("NVIDIA A100 80GB PCIe", "A100 80GB PCIe"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA GeForce RTX 3090", "RTX 3090"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("nvidia geforce rtx 3090", "RTX 3090"),
    ],
)
def test_a_device_is_found_by_its_own_name(name, row):
    peaks = lookup_peaks(name)
    assert peaks is not None
    assert peaks.match == row


@pytest.mark.parametrize(
    "name",
    [
        "Frobnicator 9000",
        "",
        "NVIDIA L40",
        "NVIDIA GH200 480GB",
        "NVIDIA H100 NVL",
        "NVIDIA GeForce RTX 3090 Ti",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
        "NVIDIA A10",
        "Tesla V100-SXM2-16GB",
        "AMD EPYC 9554 64-Core Processor",
    ],
)
def test_a_device_outside_the_table_is_unknown(name):
    assert lookup_peaks(name) is None


@pytest.mark.parametrize("row", PEAKS, ids=lambda row: row.match)
def test_no_row_hides_another_and_each_states_its_source(row):
    assert lookup_peaks(f"NVIDIA {row.match}") is row
    assert "dense" in row.source


@pytest.mark.parametrize("row", PEAKS, ids=lambda row: row.match)
def test_figures_are_dense_and_in_base_units(row):
    flops = row.flops
    assert set(flops) == {"fp32", "tf32", "bf16", "fp16"}
    assert flops["fp32"] <= flops["tf32"] < flops["bf16"] == flops["fp16"]
    # A half-precision peak is twice the tf32 one on every tensor core; a sparse figure would be four times it.
    assert flops["bf16"] == pytest.approx(2 * flops["tf32"], rel=0.02)
    assert 1e13 < flops["fp32"] < 1e14
    assert 1e11 < row.bandwidth_bytes_s < 1e13


def test_the_figures_of_the_paper_s_device():
    row = lookup_peaks("NVIDIA GeForce RTX 3090")
    assert row is not None
    assert (row.flops["bf16"], row.flops["fp32"], row.bandwidth_bytes_s) == (71e12, 35.6e12, 936e9)


@given(st.floats(1e-3, 1), st.sampled_from(["fp32", "bf16"]))
def test_utilisation_is_the_share_of_the_peak(share, precision):
    device = DeviceSpec("x", "cuda", peak_flops={"fp32": 1e13, "bf16": 1e14})
    assert device.utilisation(share * device.peak_flops[precision], precision) == pytest.approx(share)


def test_utilisation_without_a_peak_is_unknown():
    device = DeviceSpec("x", "cpu", peak_flops={"bf16": 0.0})
    assert device.utilisation(1e9, "fp32") is None
    assert device.utilisation(1e9, "bf16") is None
    assert device.peak("tf32") is None
