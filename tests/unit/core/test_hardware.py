"""Links and the ways to share: what is refused at the door, and what the table of published figures has."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from raising import raises

from trimtab.core.errors import ValueGivenError
from trimtab.core.hardware import LINKS, USUAL, Link, absent_link, over_nodes, ring_link
from trimtab.core.parallelism import Parallelism, StepShape
from trimtab.core.serialization import from_json, to_json

LINK = Link("made up", 1e-5, 1e9, "made up")
SHAPE = StepShape(1.0, 2.0, 0.5, (40, 80), (0.25, 0.75))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("name", ""),
        ("name", None),
        ("source", ""),
        ("latency_s", -1e-9),
        ("latency_s", math.nan),
        ("latency_s", "1"),
        ("bytes_per_s", 0),
        ("bytes_per_s", math.inf),
        ("bytes_per_s", True),
        ("calibrated", 1),
        ("scatters", None),
    ],
)
def test_a_link_that_is_none_is_refused_by_field(field, value):
    with raises(ValueGivenError, code="value.invalid"):
        replace(LINK, **{field: value})


def test_each_row_says_where_it_stands_and_is_found_by_its_name():
    for name, link in LINKS.items():
        assert link.name == name
        assert absent_link(name) is absent_link(name.upper()) is link
        assert not link.calibrated
        assert "latency" in link.source
        assert 1e-6 < link.latency_s < 1e-4
        assert 1e9 < link.bytes_per_s < 1e12


@pytest.mark.parametrize(
    ("device", "giga_bytes"),
    [
        ("NVIDIA A100-SXM4-80GB", 300),
        ("A100 80GB", 300),
        ("NVIDIA H100 80GB HBM3", 450),
        ("H100 SXM", 450),
        ("NVIDIA H200", 450),
        ("nvidia b200", 900),
    ],
)
def test_nvlink_is_the_device_s_own(device, giga_bytes):
    assert absent_link("nvlink", device).bytes_per_s == giga_bytes * 1e9


@pytest.mark.parametrize(("name", "giga_bits"), [("ib", 400), ("ib:HDR", 200), ("ethernet", 100), ("Ethernet:25", 25)])
def test_a_network_is_the_usual_one_or_the_one_named(name, giga_bits):
    assert absent_link(name, "NVIDIA L4").bytes_per_s == giga_bits * 1e9 / 8


def test_what_is_usual_is_in_the_table():
    assert set(USUAL.values()) <= set(LINKS)


@pytest.mark.parametrize(
    ("name", "device"),
    [
        ("nvlink", ""),
        ("nvlink", "NVIDIA L4"),
        ("nvlink", "NVIDIA H100 PCIe"),
        ("nvlink", "NVIDIA A100-PCIE-40GB"),
        ("nvlink", "NVIDIA H100 NVL"),
        ("nvlink", "NVIDIA GH200 480GB"),
        ("nvlink:V100", "H100"),
        ("ib:FDR", "H100"),
        ("", "H100"),
        ("string", ""),
        (None, ""),
    ],
)
def test_what_the_table_lacks_is_refused_and_the_names_are_listed(name, device):
    with pytest.raises(ValueGivenError) as caught:
        absent_link(name, device)
    for known in (*LINKS, *USUAL, "nvlink (only with the devices A100, H100, H200, B200)"):
        assert known in caught.value.expected
    assert device in caught.value.got


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("ranks", 0),
        ("ranks", 2.0),
        ("zero_stage", 4),
        ("zero_stage", -1),
        ("reduce_dtype", "fp8"),
        ("bucket_bytes", 0),
        ("bucket_bytes", 1e6),
        ("overlaps", 1),
        ("reduces_once", None),
    ],
)
def test_a_way_to_share_that_is_none_is_refused_by_field(field, value):
    with raises(ValueGivenError, code="value.invalid"):
        replace(Parallelism(2), **{field: value})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("forward_s", 0.0),
        ("backward_s", -1.0),
        ("backward_s", math.inf),
        ("optimizer_s", -1e-9),
        ("num_tensors", 0),
        ("block_bytes", (40, -1)),
        ("block_bytes", (40, 0.5)),
        ("block_shares", (1.0,)),
        ("block_shares", (0.0, 0.0)),
        ("block_shares", (-0.5, 1.5)),
        ("block_shares", (math.nan, 1.0)),
    ],
)
def test_a_step_that_is_none_is_refused_by_field(field, value):
    with raises(ValueGivenError, code="value.invalid"):
        replace(SHAPE, **{field: value})


def test_a_step_has_a_block():
    with raises(ValueGivenError, code="value.invalid", field="step.block_shares"):
        StepShape(1.0, 2.0, 0.0, (), ())


@given(st.lists(st.floats(0, 1e300), min_size=1, max_size=8).filter(any))
def test_shares_sum_to_one_and_are_read_back_as_written(shares):
    shape = StepShape(1.0, 2.0, 0.0, (1,) * len(shares), tuple(shares))
    assert math.fsum(shape.block_shares) == pytest.approx(1)
    assert from_json(StepShape, to_json(shape)) == shape


@pytest.mark.parametrize(
    "value", [LINK, replace(LINK, calibrated=True), Parallelism(8, 2, "bf16", 2**20, False), SHAPE]
)
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


def test_parameters_that_no_rank_gathers_have_no_type_to_be_gathered_in():
    assert Parallelism(2, 3, gather_dtype="bf16").gather_dtype == "bf16"
    with raises(ValueGivenError, code="value.invalid", field="parallelism.gather_dtype"):
        Parallelism(2, 3, gather_dtype="fp16")
    with raises(ValueGivenError, code="value.invalid", field="parallelism.gather_dtype"):
        Parallelism(2, 1, gather_dtype="bf16")
