"""Whose seconds shrank: planted phases come back, and phases and remainder add up to the whole."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from raising import raises

from trimtab.core.errors import FormatError
from trimtab.core.hardware import DeviceSpec
from trimtab.core.serialization import from_json, to_json
from trimtab.core.step_phases import PHASES, ArmPhases, RooflineBound, TimedGain, TimedRound
from trimtab.experiments.phase_attribution import attribute, bound_seconds, of_the_roof, shares, speedup
from trimtab.planner.cost_model import roof_of

DEVICE = DeviceSpec("made up", "cpu", None, {"fp32": 100.0, "bf16": 400.0}, 10.0, "made up", 1)
PLAIN = {"data": 0.1, "forward": 1.0, "backward": 2.0, "optimizer": 0.4, "rest": 0.1}
PLANNED = {"data": 0.1, "forward": 0.5, "recompute": 0.4, "backward": 1.2, "optimizer": 0.1, "rest": 0.1}


def lap(seconds: dict[str, float], clock: float = 1.0, factor: float = 1.0) -> TimedRound:
    """Return a lap in which the clock makes a step so much longer."""
    seconds = {name: each * factor for name, each in seconds.items()}
    parts = {"forward Linear": 0.75 * seconds["forward"], "forward": 0.25 * seconds["forward"]}
    return TimedRound(seconds, parts, math.fsum(seconds.values()) / clock)


def gain(
    clocks: tuple[float, float] = (1.0, 1.0), wobble: tuple[float, ...] = (1.0, 1.01, 0.99, 1.005, 0.995)
) -> TimedGain:
    theirs, ours = (
        ArmPhases(tuple(lap(seconds, clock, each) for each in wobble))
        for seconds, clock in zip((PLAIN, PLANNED), clocks, strict=True)
    )
    return TimedGain("made_up", theirs, ours, "precision bf16", DEVICE)


def test_what_was_planted_is_found():
    found = attribute(gain())
    saved = {row.phase: row.saved.mean for row in found.phases}
    assert list(saved) == [phase for phase in PHASES if phase != "communication"]
    assert saved == pytest.approx(
        {"data": 0.0, "forward": 0.5, "recompute": -0.4, "backward": 0.8, "optimizer": 0.3, "rest": 0.0}
    )
    assert found.whole.saved.mean == pytest.approx(1.2)
    assert found.unattributed.saved.mean == pytest.approx(0.0)
    shares = {row.phase: row.share for row in found.phases}
    assert shares["backward"] == pytest.approx(0.8 / 1.2)
    assert math.fsum(shares.values()) == pytest.approx(1.0)
    assert {row.phase: row.saved.mean for row in found.parts} == pytest.approx(
        {"forward Linear": 0.375, "forward": 0.125}
    )
    assert speedup(gain()).mean == pytest.approx(3.6 / 2.4)
    # It makes the plan's step 10% longer, and the reference's not: what phases save is too little by that.
    found = attribute(gain(clocks=(1.0, 1.1)))
    assert found.plan_clock.mean == pytest.approx(1.1)
    assert found.reference_clock.mean == pytest.approx(1.0)
    assert found.unattributed.saved.mean == pytest.approx(2.4 - 2.4 / 1.1)
    phases = math.fsum(row.saved.mean for row in found.phases)
    assert phases + found.unattributed.saved.mean == pytest.approx(found.whole.saved.mean)
    assert found.whole.saved.mean == pytest.approx(3.6 - 2.4 / 1.1)


times = st.floats(1e-6, 1e3)


@given(
    st.lists(
        st.tuples(*[st.tuples(st.dictionaries(st.sampled_from(PHASES), times, min_size=1), times)] * 2),
        min_size=1,
        max_size=4,
    )
)
def test_phases_and_remainder_always_add_up_to_the_whole(laps):
    arms = [ArmPhases(tuple(TimedRound(*pair[i][:1], {}, pair[i][1]) for pair in laps)) for i in (0, 1)]
    found = attribute(TimedGain("any", *arms, "", DEVICE))
    for name in ("reference_s", "plan_s"):
        total = math.fsum(getattr(row, name) for row in (*found.phases, found.unattributed))
        assert total == pytest.approx(getattr(found.whole, name), rel=1e-9, abs=1e-9)
    total = math.fsum(row.saved.mean for row in (*found.phases, found.unattributed))
    assert total == pytest.approx(found.whole.saved.mean, rel=1e-9, abs=1e-9)
    for arm in arms:
        bounds = bound_seconds(arm)
        assert math.fsum(bounds.values()) == pytest.approx(math.fsum(map(arm.mean_s, arm.has)))


def test_without_a_clear_saving_nothing_has_a_share():
    same = gain()
    noisy = replace(same, plan=ArmPhases(tuple(lap(PLAIN, factor=each) for each in (0.9, 1.0, 1.1, 0.95, 1.05))))
    assert all(row.share is None for row in (*attribute(noisy).phases, attribute(noisy).whole))
    noisy = ArmPhases(tuple(lap(PLAIN, factor=each) for each in (0.9, 1.0, 1.1, 0.95, 1.05)))
    assert shares(replace(gain(), plan=noisy)) == ()
    assert shares(gain(wobble=(1.0,))) == ()
    made = gain()
    assert shares(replace(made, reference=made.plan, plan=made.reference)) == (), "a plan that is slower saves nothing"
    few = gain(wobble=(1.0, 1.01, 0.99, 1.005))
    assert {row.share for row in attribute(few).phases} == {None}
    assert shares(few) == ()
    found = attribute(gain(wobble=(1.0,)))
    assert found.whole.saved.low == -math.inf
    assert found.whole.share is None


def test_shares_of_phases_are_what_was_planted_and_have_intervals():
    found = {each.of: each for each in shares(gain())}
    assert found["backward"].share.mean == pytest.approx(0.8 / 1.2)
    assert found["recompute"].share.mean == pytest.approx(-0.4 / 1.2)
    for each in found.values():
        assert math.fsum(each.each) / len(each.each) == pytest.approx(each.share.mean)
        assert each.share.low - 1e-12 <= each.share.mean <= each.share.high + 1e-12
    assert math.fsum(each.share.mean for name, each in found.items() if name in PHASES) == pytest.approx(1.0)
    planned = attribute(gain(clocks=(1.0, 1.1)))
    assert {each.of: each.share.mean for each in shares(gain(clocks=(1.0, 1.1))) if each.of in PHASES} == pytest.approx(
        {row.phase: row.share for row in planned.phases}
    )


def test_shares_of_bounds_follow_the_roofs():
    roofs = {
        "forward": RooflineBound(0.3, 0.1, 0, 0),
        "backward": RooflineBound(0.1, 0.1, 0, 0),
        "optimizer": RooflineBound(0.0, 0.05, 0, 0),
    }
    made = gain()
    made = replace(made, reference=replace(made.reference, roofs=roofs), plan=replace(made.plan, roofs=roofs))
    found = {each.of: each.share.mean for each in shares(made)}
    assert found["memory-bound"] == pytest.approx((0.25 * 0.5 + 0.5 * (2.0 - 1.6) + 0.3) / 1.2)
    assert found["compute-bound"] == pytest.approx((0.75 * 0.5 + 0.5 * (2.0 - 1.6)) / 1.2)
    assert found["waiting for data"] == pytest.approx(0.0)
    # As of a plan that compiles: its seconds are not those of no bound.
    made = gain()
    found = shares(replace(made, reference=replace(made.reference, roofs=roofs)))
    assert {each.of for each in found} == {phase for phase in PHASES if phase != "communication"}


def test_what_one_arm_does_not_tell_apart_is_told_of_neither():
    # As of a plan that is compiled: of the classes of its modules nothing was measured, which is no 0 s.
    made = gain()
    laps = tuple(replace(each, parts={"forward": each.seconds["forward"]}) for each in made.plan.laps)
    assert attribute(replace(made, plan=replace(made.plan, laps=laps))).parts == ()
    both = replace(made, reference=replace(made.plan, laps=laps), plan=replace(made.plan, laps=laps))
    assert [row.phase for row in attribute(both).parts] == ["forward"]
    told = ("data", "optimizer")
    hidden = tuple(
        replace(each, parts={}, seconds={name: each.seconds[name] for name in told} | {"rest": _rest(each, told)})
        for each in made.reference.laps
    )
    found = replace(made, reference=replace(made.reference, laps=hidden))
    rows = {row.phase: row.saved.mean for row in attribute(found).phases}
    assert rows == pytest.approx({"data": 0.0, "optimizer": 0.3, "rest": 0.9})
    assert {each.of for each in shares(found)} == {"data", "optimizer", "rest"}
    compiled = tuple(replace(each, parts={"forward": each.seconds["forward"]}) for each in made.plan.laps)
    assert attribute(replace(found, plan=replace(found.plan, laps=compiled))).parts == ()
    assert math.fsum(each.share.mean for each in shares(found)) == pytest.approx(1.0)
    assert "the loop itself" not in bound_seconds(found.reference)
    assert bound_seconds(found.reference)["not known"] == pytest.approx(3.5)


def _rest(one: TimedRound, told: tuple[str, ...]) -> float:
    return math.fsum(seconds for name, seconds in one.seconds.items() if name not in told)


def test_an_operator_is_bound_by_what_takes_longer():
    # By hand, at 100 FLOP/s and 10 bytes/s: 50 FLOP take 0.5 s, 20 bytes 2 s; in bf16 800 FLOP take 2 s.
    found = roof_of([("fp32", 50.0, 20.0), ("bf16", 800.0, 10.0), ("fp32", 0.0, 5.0)], DEVICE, "fp32")
    assert found == RooflineBound(compute_s=2.0, memory_s=2.5, flops=850.0, moved_bytes=35.0)
    assert found.times(2.0).seconds == 9.0
    device = replace(DEVICE, peak_flops={"fp32": 100.0, "tf32": 800.0})
    products = [("fp32", 1600.0, 1.0)]
    assert roof_of(products, device, "tf32").compute_s == 2.0
    assert roof_of(products, device, "fp32").compute_s == 16.0
    assert roof_of([("fp32", 0.0, 20.0)], replace(DEVICE, peak_flops={}), "fp32").memory_s == 2.0


@pytest.mark.parametrize("unknown", [{"peak_flops": {}}, {"bandwidth_bytes_s": None}])
def test_without_a_peak_there_is_no_roof(unknown):
    assert roof_of([("fp32", 50.0, 20.0)], replace(DEVICE, **unknown), "fp32") is None


def test_seconds_are_split_as_their_roof_and_what_waits_is_apart():
    roofs = {
        "forward": RooflineBound(0.3, 0.1, 0, 0),
        "backward": RooflineBound(0.1, 0.1, 0, 0),
        "optimizer": RooflineBound(0.0, 0.05, 0, 0),
    }
    seconds = PLANNED | {"communication": 0.2}
    arm = ArmPhases((lap(seconds),), roofs)
    assert bound_seconds(arm) == pytest.approx(
        {
            "compute-bound": 0.5 * 0.75 + 1.6 / 2,
            "memory-bound": 0.5 * 0.25 + 1.6 / 2 + 0.1,
            "communication-bound": 0.2,
            "waiting for data": 0.1,
            "the loop itself": 0.1,
        }
    )
    assert of_the_roof(arm) == pytest.approx({"forward": 0.8, "backward": 0.2 / 1.6, "optimizer": 0.5})
    found = bound_seconds(ArmPhases((lap(PLAIN),)))
    assert found == pytest.approx({"waiting for data": 0.1, "the loop itself": 0.1, "not known": 3.4})


def test_a_gain_has_laps_in_pairs_and_comes_back_from_its_file():
    found = gain()
    with raises(FormatError, code="format.invalid", field="gain"):
        replace(found, plan=ArmPhases(found.plan.laps[:2]))
    with raises(FormatError, code="format.invalid", field="gain"):
        replace(found, reference=ArmPhases(()), plan=ArmPhases(()))
    with raises(FormatError, code="format.invalid", field="gain.schema"):
        replace(found, schema=0)
    assert from_json(TimedGain, to_json(found)) == found


@pytest.mark.parametrize(("clocks", "distorted"), [((1.0, 1.2), False), ((1.0, 1.3), True), ((1.3, 1.0), True)])
def test_of_a_step_that_the_clock_makes_another_nothing_has_a_share(clocks, distorted):
    found = attribute(gain(clocks=clocks))
    assert found.is_distorted is distorted
    assert all((row.share is None) is distorted for row in (*found.phases, found.whole, *found.parts))
    assert bool(shares(gain(clocks=clocks))) is not distorted
