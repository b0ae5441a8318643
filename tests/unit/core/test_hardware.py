"""Links and devices: invalid values are refused, and the tables of published figures are found by name."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from raising import raises

from trimtab.core.errors import ValueGivenError
from trimtab.core.hardware import (
    LINKS,
    PEAKS,
    USUAL,
    DeviceSpec,
    Link,
    absent_link,
    lookup_peaks,
    over_nodes,
    ring_link,
)
from trimtab.core.parallelism import Parallelism, StepShape
from trimtab.core.serialization import from_json, to_json

LINK = Link("made up", 1e-5, 1e9, "made up")
SHAPE = StepShape(1.0, 2.0, 0.5, (40, 80), (0.25, 0.75))


REFUSED = (
    (LINK, {"name": ["", None], "source": [""], "latency_s": [-1e-9, math.nan, "1"]}),
    (LINK, {"bytes_per_s": [0, math.inf, True], "calibrated": [1], "scatters": [None]}),
    (Parallelism(2), {"ranks": [0, 2.0], "zero_stage": [4, -1], "reduce_dtype": ["fp8"], "bucket_bytes": [0, 1e6]}),
    (Parallelism(2), {"overlaps": [1], "reduces_once": [None], "gather_dtype": ["fp16", "bf16"]}),
    (SHAPE, {"forward_s": [0.0], "backward_s": [-1.0, math.inf], "optimizer_s": [-1e-9], "num_tensors": [0]}),
    (SHAPE, {"block_bytes": [(40, -1), (40, 0.5)], "block_shares": [(1.0,), (0.0, 0.0), (-0.5, 1.5), (math.nan, 1.0)]}),
)
CASES = [(valid, field, value) for valid, fields in REFUSED for field, values in fields.items() for value in values]


@pytest.mark.parametrize(("valid", "field", "value"), CASES)
def test_an_invalid_value_is_refused(valid, field, value):
    with raises(ValueGivenError, code="value.invalid"):
        replace(valid, **{field: value})


def test_each_row_says_where_it_stands_and_is_found_by_its_name():
    for name, link in LINKS.items():
        assert link.name == name
        assert absent_link(name) is absent_link(name.upper()) is link
        assert not link.calibrated
        assert "latency" in link.source
        assert 1e-6 < link.latency_s < 1e-4
        assert 1e9 < link.bytes_per_s < 1e12


GIGA_BYTES = {"NVIDIA A100-SXM4-80GB": 300, "NVIDIA H100 80GB HBM3": 450, "H100 SXM": 450, "nvidia b200": 900}


@pytest.mark.parametrize("device", GIGA_BYTES)
def test_nvlink_is_the_device_s_own(device):
    assert absent_link("nvlink", device).bytes_per_s == GIGA_BYTES[device] * 1e9


@pytest.mark.parametrize(("name", "giga_bits"), [("ib", 400), ("ib:HDR", 200), ("ethernet", 100), ("Ethernet:25", 25)])
def test_a_network_is_the_usual_one_or_the_one_named(name, giga_bits):
    assert absent_link(name, "NVIDIA L4").bytes_per_s == giga_bits * 1e9 / 8


WITHOUT_NVLINK = ("", "NVIDIA L4", "NVIDIA H100 PCIe", "NVIDIA A100-PCIE-40GB", "NVIDIA H100 NVL", "NVIDIA GH200 480GB")
UNKNOWN = [*(("nvlink", device) for device in WITHOUT_NVLINK), ("nvlink:V100", "H100"), ("ib:FDR", "H100"), (None, "")]


@pytest.mark.parametrize(("name", "device"), UNKNOWN)
def test_what_the_table_lacks_is_refused_and_the_names_are_listed(name, device):
    with pytest.raises(ValueGivenError) as caught:
        absent_link(name, device)
    for known in (*LINKS, *USUAL, "nvlink (only with the devices A100, H100, H200, B200)"):
        assert known in caught.value.expected
    assert device in caught.value.got


def test_a_step_has_a_block():
    with raises(ValueGivenError, code="value.invalid", field="step.block_shares"):
        StepShape(1.0, 2.0, 0.0, (), ())


@given(st.lists(st.floats(0, 1e300), min_size=1, max_size=8).filter(any))
def test_shares_sum_to_one_and_are_read_back_as_written(shares):
    shape = StepShape(1.0, 2.0, 0.0, (1,) * len(shares), tuple(shares))
    assert math.fsum(shape.block_shares) == pytest.approx(1)
    assert from_json(StepShape, to_json(shape)) == shape


@pytest.mark.parametrize("value", [LINK, replace(LINK, calibrated=True), Parallelism(8, 3, gather_dtype="bf16"), SHAPE])
def test_values_are_read_back_as_written(value):
    assert from_json(type(value), to_json(value)) == value


def test_a_ring_over_nodes_is_as_wide_as_their_ports_together():
    inside, port = Link("inside", 2e-6, 400e9, "a"), Link("port", 14e-6, 25e9, "b")
    ring = over_nodes(inside, port, 8)
    assert ring.bytes_per_s == 200e9
    assert ring.latency_s == pytest.approx((7 * 2e-6 + 14e-6) / 8)
    assert ring.source == "a; b"
    assert over_nodes(inside, replace(port, bytes_per_s=100e9), 8).bytes_per_s == 400e9
    assert over_nodes(inside, port, 1).latency_s == port.latency_s
    with raises(ValueGivenError, code="value.invalid", field="ranks_of_node"):
        over_nodes(inside, port, 0)


@pytest.mark.parametrize("name", ["8 x nvlink + ib:NDR", "8xnvlink+IB", " 8 X NVLink:H100 + ib "])
def test_nodes_are_named_by_what_joins_their_ranks_and_them(name):
    inside, between = LINKS["nvlink:H100"], LINKS["ib:NDR"]
    assert ring_link(name, "H100 SXM", 8) is inside
    assert ring_link(name, "H100 SXM", 64) == over_nodes(inside, between, 8)
    assert ring_link(over_nodes(inside, between, 8).name, "", 64) == over_nodes(inside, between, 8)


def test_a_link_that_names_no_nodes_is_that_of_the_table():
    assert ring_link("ib:HDR", "H100", 64) is LINKS["ib:HDR"]
    for name in ("8 x nvlink", "x nvlink + ib", "8 x ib:FDR + ib", "8 x nvlink + token ring", None):
        with raises(ValueGivenError, code="value.invalid", field="link"):
            ring_link(name, "H100", 64)
    with raises(ValueGivenError, code="value.invalid", field="link.ranks_of_node"):
        ring_link("0 x nvlink + ib", "H100", 64)


# Published peaks of devices.

ROWS = {"NVIDIA H100 80GB HBM3": "H100", "NVIDIA H100 PCIe": "H100 PCIe", "NVIDIA H200": "H200", "NVIDIA L4": "L4"}
ROWS |= {"NVIDIA A100-SXM4-80GB": "A100 80GB", "NVIDIA A100-PCIE-40GB": "A100", "NVIDIA L40S": "L40S"}
ROWS |= {"NVIDIA A100 80GB PCIe": "A100 80GB PCIe", "nvidia geforce rtx 3090": "RTX 3090", "RTX 4090": "RTX 4090"}
ROWS |= {"Tesla V100-SXM2-16GB": "V100 SXM2", "Tesla V100-SXM2-32GB": "V100 SXM2 32GB", "Tesla T4": "T4"}
ROWS |= {"NVIDIA A10": "A10", "NVIDIA GeForce RTX 5090": "RTX 5090", "NVIDIA B200": "B200"}
OTHERS = ["", "Frobnicator 9000", "NVIDIA L40", "NVIDIA GH200 480GB", "NVIDIA H100 NVL", "NVIDIA GeForce RTX 3090 Ti"]
OTHERS += ["NVIDIA GeForce RTX 4090 D", "NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA A100-SXM4-40GB MIG 1g.5gb"]
OTHERS += ["NVIDIA A10G", "Tesla V100-PCIE-16GB", "AMD EPYC 9554 64-Core Processor", "NVIDIA T400"]


@pytest.mark.parametrize("name", ROWS)
def test_a_device_is_found_by_its_own_name(name):
    assert lookup_peaks(name).match == ROWS[name]


@pytest.mark.parametrize("name", OTHERS)
def test_a_device_outside_the_table_is_unknown(name):
    assert lookup_peaks(name) is None


@pytest.mark.parametrize("row", PEAKS, ids=lambda row: row.match)
def test_figures_are_dense_and_in_base_units(row):
    assert lookup_peaks(f"NVIDIA {row.match}") is row
    flops = row.flops
    if "tf32" not in flops:  # before Ampere, which introduced tf32, bf16 and sparsity
        assert set(flops) == {"fp32", "fp16"}
        assert flops["fp16"] == pytest.approx(8 * flops["fp32"], rel=0.02)
        return
    assert "dense" in row.source
    assert set(flops) == {"fp32", "tf32", "bf16", "fp16"}
    assert flops["fp32"] <= flops["tf32"] < flops["bf16"] == flops["fp16"]
    # A half-precision peak is twice the tf32 one on every tensor core; a sparse figure would be four times it.
    assert flops["bf16"] == pytest.approx(2 * flops["tf32"], rel=0.02)
    assert 1e13 < flops["fp32"] < 1.1e14
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
