"""How gradients are sent, by what a link was timed to do."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from raising import raises

from trimtab.core.errors import ValueGivenError
from trimtab.core.hardware import Link, LinkCalibration
from trimtab.core.parallelism import StepShape
from trimtab.planner.multi_rank_plan import WORTH, for_replicas, ways_to_send, with_fastest_communication
from trimtab.plans.plan import Plan

SHAPE = StepShape(0.01, 0.02, 0.001, (2**20,) * 8, (1.0,) * 8)


def calibration(
    latency_s: float, bytes_per_s: float, cast_s_per_byte: float = 0.0, overlap: float = 0.0, hook_s: float = 0.0
):
    link = Link("planted", latency_s, bytes_per_s, "planted", calibrated=True)
    return LinkCalibration(link, overlap_share=overlap, cast_s_per_byte=cast_s_per_byte, hook_s=hook_s)


def plan(ranks: int = 2) -> Plan:
    return for_replicas(Plan.fixed(16, 8), ranks)


def test_one_process_shares_nothing_and_a_plan_that_says_how_stays_so():
    assert for_replicas(Plan.fixed(8), 1) == Plan.fixed(8)
    shared = Plan.fixed(8, num_ranks=2, zero_stage=3)
    assert for_replicas(shared, 2) == shared


def test_on_a_fast_link_nothing_is_changed():
    found = with_fastest_communication(plan(), calibration(1e-6, 1e11), SHAPE)
    assert found.changes == ("micro_batch",)
    assert found.reduce_dtype.code == "predicted.no_gain"


def test_on_a_slow_link_half_of_the_bytes_are_sent():
    found = with_fastest_communication(plan(), calibration(1e-6, 1e8), SHAPE)
    assert (found.reduce_dtype.value, found.reduce_dtype.changed) == ("bf16", True)
    assert found.plan_kind == "equivalent"
    assert found.reduce_dtype.code == "predicted.best"
    assert "8 MiB of gradients over planted" in found.reduce_dtype.reason


def test_where_casting_takes_as_long_as_sending_it_is_not_done():
    assert (
        with_fastest_communication(plan(), calibration(1e-6, 1e8, cast_s_per_byte=1e-7), SHAPE).reduce_dtype.value
        == "fp32"
    )


def test_where_gradients_are_few_a_hook_takes_longer_than_what_it_saves():
    few = StepShape(0.001, 0.003, 0.0005, (2**13,) * 10, (1.0,) * 10)  # 80 KiB: 1.6 ms at 5e7 bytes/s, of 10
    assert with_fastest_communication(plan(), calibration(1e-6, 5e7), few).reduce_dtype.value == "bf16"
    assert with_fastest_communication(plan(), calibration(1e-6, 5e7, hook_s=0.0005), few).reduce_dtype.value == "fp32"


def test_a_hook_is_called_for_each_bucket_and_shards_have_none():
    known = calibration(1e-6, 1e8, hook_s=0.001)
    cast_s = {bucket: ways_to_send(plan(), known, SHAPE)["bf16", bucket].cast_s for bucket in (None, 2**20, 2**22)}
    assert cast_s == pytest.approx({None: 0.002, 2**20: 0.008, 2**22: 0.002})  # 8 MiB, torch's first of 1 MiB
    assert ways_to_send(plan(), known, SHAPE)["fp32", None].cast_s == 0
    shards = Plan.fixed(16, num_ranks=2, zero_stage=3)
    assert ways_to_send(shards, known, SHAPE)["bf16", None].cast_s == 0


def test_a_hook_takes_no_less_than_nothing():
    with raises(ValueGivenError, code="value.invalid", field="calibration.hook_s"):
        calibration(1e-6, 1e8, hook_s=-1e-6)


def test_where_a_hop_takes_long_gradients_are_sent_together():
    found = with_fastest_communication(plan(), calibration(0.05, 1e10), SHAPE)
    assert found.bucket_bytes.value == 2**27
    assert {loser.value for loser in found.bucket_bytes.rejected} == {None, 2**20, 2**22}


@given(st.floats(1e-6, 0.1), st.floats(1e6, 1e11), st.floats(0.0, 1e-8), st.floats(0.0, 1.0), st.integers(2, 64))
def test_a_change_is_predicted_to_be_worth_it_and_nothing_considered_is_faster(latency, speed, cast, overlap, ranks):
    known = calibration(latency, speed, cast, overlap)
    found, ways = with_fastest_communication(plan(ranks), known, SHAPE), ways_to_send(plan(ranks), known, SHAPE)
    chosen = ways[found.reduce_dtype.value, found.bucket_bytes.value]
    usual, fastest = ways["fp32", None], min(way.total_s for way in ways.values())
    if chosen is usual:
        assert fastest >= (1 - WORTH) * usual.total_s
    else:
        assert chosen.total_s == pytest.approx(fastest)
        assert chosen.total_s < (1 - WORTH) * usual.total_s


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize(("micro_batch", "once", "casts"), [(16, True, 1), (8, True, 1), (8, False, 2)])
def test_shards_are_sent_in_two_types_each_cast_as_often_as_it_is_reduced(stage, micro_batch, once, casts):
    plan = Plan.fixed(16, micro_batch, num_ranks=2, zero_stage=stage, reduces_once=once)
    ways = ways_to_send(plan, calibration(1e-6, 1e8, cast_s_per_byte=1e-9), SHAPE)
    assert set(ways) == {("fp32", None), ("bf16", None)}
    assert ways["bf16", None].cast_s == pytest.approx(casts * 1e-9 * 8 * 2**20)
    assert ways["bf16", None].cost.communication_s < ways["fp32", None].cost.communication_s
    found = with_fastest_communication(plan, calibration(1e-6, 1e8), SHAPE)
    assert (found.reduce_dtype.value, found.bucket_bytes) == ("bf16", plan.bucket_bytes)


def test_what_deepspeed_shares_is_sent_as_it_is():
    theirs = Plan.fixed(16, num_ranks=2, zero_stage=1, engine="deepspeed")
    assert set(ways_to_send(theirs, calibration(1e-6, 1e8), SHAPE)) == {("fp32", None)}
