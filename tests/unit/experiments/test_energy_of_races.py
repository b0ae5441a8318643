"""Energy in a comparison: joules of blocks, per row and to a target, told as measured, estimated or not at all."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from race_records import record
from tiny_task import BATCH_SIZE, load_data, task

from trimtab.core.energy_reading import Energy, MeterFacts, PowerLimit, Provenance, absent_energy
from trimtab.core.record import End, Evaluation, Event, RunRecord, read_record, write_record
from trimtab.core.serialization import to_jsonable
from trimtab.distributed.coordinator import ALONE
from trimtab.distributed.rank_energy import RankMeter
from trimtab.energy.energy_meter import GivenWatts
from trimtab.experiments.baselines.reference import ReferenceLoop
from trimtab.experiments.comparison import comparison_statistics
from trimtab.experiments.comparison.comparison_result import Arm
from trimtab.experiments.comparison.ratio_rows import (
    METER,
    energy_control,
    energy_row,
    energy_verdict,
    joules_to,
    meter_of,
    of_planning,
    short_blocks,
    throughput_row,
    watts,
)
from trimtab.experiments.comparison.time_to_target import PlanningCharge, target_row
from trimtab.experiments.comparison.verdicts import speed_verdict
from trimtab.experiments.doctor import energy_finding
from trimtab.experiments.paired_runs import paired_run as race_module
from trimtab.experiments.paired_runs.paired_run import PairedArm, PairedRunMeter, RunningArm, race
from trimtab.experiments.report.comparison_report import arm_energy_table, planning_sentence
from trimtab.experiments.report.formatting import measure
from trimtab.planner.statistics import Interval, ratio_interval

CPU = torch.device("cpu")
MEASURED = MeterFacts(Provenance.MEASURED, ("rapl package-0",), 20.0)


def metered(found: RunRecord, power_w: float, meter: MeterFacts = MEASURED, unknown: tuple[int, ...] = ()) -> RunRecord:
    """Return a record whose blocks drew so much, less those of which nothing is known."""

    def with_joules(at: int, event: Event) -> Event:
        known = None if at in unknown else power_w * event.detail["seconds"]
        return replace(event, detail=dict(event.detail) | {"energy_j": known})

    events = tuple(with_joules(at, event) for at, event in enumerate(found.events))
    header = replace(found.header, detail=dict(found.header.detail) | {METER: to_jsonable(meter)})
    return replace(found, header=header, events=events)


def arm(step_s: float, power_w: float, **given) -> RunRecord:
    return metered(record(blocks=[(10, step_s)] * 4, name="arm"), power_w, **given)


def races(power_w: float, step_s: float = 1.0, pairs: int = 5, meter: MeterFacts = MEASURED):
    """Return races of a reference of 100 W, itself and a plan."""
    jitter = [1.0, 1.01, 0.99, 1.005, 0.995]
    return {
        seed: {
            "reference": arm(1.0, 100.0, meter=meter),
            "self": arm(1.0, 100.0 * jitter[seed % 5], meter=meter),
            "equivalent_plan": arm(step_s, power_w * jitter[-1 - seed % 5], meter=meter),
        }
        for seed in range(pairs)
    }


def joules_row(found):
    """Return the row of the plan's joules, as a summary asks for it."""
    return energy_row(found, "equivalent_plan", "reference", "equivalent", meter_of(found), energy_control(found))


@pytest.mark.parametrize(
    ("power_w", "step_s", "kind", "ratio"),
    [(100.0, 0.5, "gain", 0.5), (300.0, 0.5, "harm", 1.5), (200.0, 0.5, "no gain", 1.0), (60.0, 1.0, "gain", 0.6)],
)
def test_joules_per_row_are_held_against_the_other_arms(power_w, step_s, kind, ratio):
    row = joules_row(races(power_w, step_s))
    assert (row.metric, row.verdict.kind) == ("energy", kind)
    assert row.ratio.mean == pytest.approx(ratio, rel=0.01)


def test_joules_of_races_that_allow_no_verdict():
    assert joules_row(races(50.0, pairs=4)).verdict.kind == "no verdict"
    estimated = MeterFacts(Provenance.ESTIMATED, ("100 W, as given",))
    row = joules_row(races(50.0, meter=estimated))
    assert (row.verdict.kind, "estimated" in row.verdict.sentence) == ("no verdict", True)
    ratio = comparison_statistics.as_ratio(ratio_interval([0.5] * 5), [0.5] * 5)
    assert energy_verdict(ratio, None, "a", "b").kind == "no verdict"
    found = races(50.0, pairs=6)
    found[3]["equivalent_plan"] = replace(found[3]["equivalent_plan"], end=End("error", {"error": "no memory"}))
    row = joules_row(found)
    assert (row.ratio.n, row.verdict.kind, row.failed) == (5, "no verdict", "equivalent_plan failed in 1 of 6 runs")
    found = {0: {"reference": record(), "equivalent_plan": record()}}
    assert joules_row(found) is None
    assert meter_of(found).is_absent
    assert watts(record()) is None
    assert joules_to(record(), 2.0) is None
    assert math.isnan(comparison_statistics.step_joules(record(), 10))


@pytest.mark.parametrize("saved", [1.0, -1.0])
@pytest.mark.parametrize(
    ("control", "kinds"),
    [
        (
            ratio_interval([0.97, 1.03, 0.98, 1.02, 1.0]),
            ("gain", "harm"),
        ),  # it holds 1, which is then what to be clear of
        (ratio_interval([1.05, 1.06, 1.05, 1.06, 1.055]), ("no gain", "no gain")),
    ],
)
def test_joules_are_judged_by_the_rule_of_seconds(saved, control, kinds):
    """Between 2 and 8% of them saved or lost, where the reference against itself is within 3.2%, or off by 5.5%."""
    pairs = [math.exp(-saved * share) for share in (0.02, 0.08, 0.05, 0.06, 0.04)]
    found, speeds = (
        comparison_statistics.as_ratio(ratio_interval(each), each) for each in (pairs, [1 / pair for pair in pairs])
    )
    turned = Interval(1 / control.mean, 1 / control.high, 1 / control.low, control.n)
    kind = energy_verdict(found, control, "a", "b").kind
    assert kind == speed_verdict(speeds, turned, "a", "b").kind == kinds[saved < 0]


def test_joules_are_paired_by_lap():
    uneven = record(blocks=[(10, 1.0), (10, 1.0), (10, 3.0), (10, 1.0)])  # one lap takes three times the others' joules
    ours, theirs = metered(uneven, 50.0, unknown=(2,)), metered(uneven, 100.0, unknown=(3,))
    assert comparison_statistics.energy_ratios({0: {"a": ours, "b": theirs}}, "a", "b") == pytest.approx([0.5])
    none = metered(uneven, 100.0, unknown=(1, 3))
    assert comparison_statistics.energy_ratios({0: {"a": ours, "b": none}}, "a", "b") == []
    run = metered(record(blocks=[(10, 2.0)] * 3), 50.0)
    assert [joules_to(run, s) for s in (1.0, 2.0, 5.0)] == [50.0, 100.0, 250.0]
    assert joules_to(run, math.inf) is None
    known_in_part = metered(record(blocks=[(10, 2.0)] * 3), 50.0, unknown=(1,))
    assert joules_to(known_in_part, 5.0) == 250.0  # by the arm's mean power
    assert joules_to(metered(record(blocks=[(10, 2.0)] * 3), 50.0, unknown=(0, 1)), 5.0) is None
    found = races(300.0, 0.5)  # twice as fast, and half as much again in joules
    speed = throughput_row(
        found, "equivalent_plan", "reference", "equivalent", ratio_interval([1.0, 1.001, 0.999, 1.0, 1.0])
    )
    assert (speed.verdict.kind, speed.ratio.mean) == ("gain", pytest.approx(2.0))
    assert joules_row(found).verdict.kind == "harm"


def test_meters_are_not_mixed():
    found = races(50.0)
    found[3] = races(50.0, meter=MeterFacts(Provenance.ESTIMATED, ("100 W, as given",)))[3]
    assert "different meters" in meter_of(found).describe()
    assert joules_row(found) is None
    ladder = {"target": 0.5, "metric": "accuracy", "higher_is_better": True, "charge": None}
    seen = tuple(Evaluation(10 * i, float(i), {"accuracy": 0.2 * i}) for i in (1, 2, 3, 4))
    for pairs, told in ((races(50.0), 5), (found, 0)):
        reached = {
            seed: {name: replace(run, evaluations=seen) for name, run in race.items()} for seed, race in pairs.items()
        }
        row = target_row(reached, "equivalent_plan", "reference", "equivalent", meter=meter_of(reached), **ladder)
        assert (len(row.arm_j), row.energy is None) == (told, not told)
    limit = PowerLimit("package-0", 125.0)
    first = replace(MEASURED, limits=(limit,))
    found = races(50.0, meter=first)
    assert meter_of(found) == first
    found[3] = races(50.0, meter=replace(MEASURED, idle_w=30.0, uncounted=("gpu 0",)))[3]
    assert meter_of(found) == replace(MEASURED, uncounted=("gpu 0",))  # 20 W of most


def test_energy_to_target_is_of_the_pairs_in_which_both_reached_it():
    def run(seconds: float, power_w: float) -> RunRecord:
        points = [(10 * i, seconds * i, 0.3 * i) for i in (1, 2, 3)]
        return metered(record(blocks=[(10, seconds)] * 3, evaluations=points), power_w)

    found = {seed: {"equivalent_plan": run(1.0, 150.0), "reference": run(2.0, 100.0)} for seed in range(5)}
    row = target_row(found, "equivalent_plan", "reference", "equivalent", 0.6, "accuracy", True, None, meter=MEASURED)
    assert row.energy.mean == pytest.approx(0.75)
    assert row.arm_j == pytest.approx([300.0] * 5)
    charged = target_row(
        found,
        "equivalent_plan",
        "reference",
        "equivalent",
        0.6,
        "accuracy",
        True,
        PlanningCharge(60.0, 900.0),
        meter=MEASURED,
    )
    assert charged.arm_j == pytest.approx([1200.0] * 5)
    assert charged.energy.mean == pytest.approx(3.0)
    unknown = target_row(
        found, "equivalent_plan", "reference", "equivalent", 0.6, "accuracy", True, PlanningCharge(60.0), meter=MEASURED
    )
    assert (unknown.energy, unknown.arm_j) == (None, ())  # what planning took is not known, so neither is the sum
    never = target_row(found, "equivalent_plan", "reference", "equivalent", 5.0, "accuracy", True, None, meter=MEASURED)
    assert never.energy is None
    flat = metered(record(blocks=[(10, 2.0)] * 3, evaluations=[(10 * i, 2.0 * i, 0.1) for i in (1, 2, 3)]), 100.0)
    left = found | {4: found[4] | {"reference": flat}}
    survivors = target_row(
        left, "equivalent_plan", "reference", "equivalent", 0.6, "accuracy", True, None, meter=MEASURED
    )
    assert (survivors.energy, len(survivors.arm_j)) == (None, 4)  # those that are left were chosen by their outcome


@pytest.mark.parametrize(
    ("spent", "is_told"),
    [
        (Energy(60.0, 900.0, Provenance.MEASURED, MEASURED.sources), True),
        (Energy(60.0, 900.0, Provenance.ESTIMATED, ("15 W, as given",)), False),
        (Energy(60.0, 900.0, Provenance.MEASURED, ("nvml gpu 0",)), False),
        (absent_energy("its meter was lost"), False),
    ],
)
def test_joules_of_planning_are_those_of_the_meter_of_the_races(spent, is_told):
    assert of_planning({"equivalent": spent}, MEASURED) == ({"equivalent": spent} if is_told else {})


def test_a_report_says_what_planning_took_and_what_is_estimated():
    spent = {
        key: Energy(1.0, j, Provenance.MEASURED, ("a",)) for key, j in {"equivalent": 900.0, "tuned": 2000.0}.items()
    }
    said = planning_sentence(SimpleNamespace(planning_energy=spent | {"strong": spent["equivalent"]}))
    assert said.startswith(
        "Planning took 900 J for the equivalent plan, 2 kJ for the tuned plan, 900 J for P2 (equivalent plan); "
    )
    assert planning_sentence(SimpleNamespace(planning_energy={})) == ""
    for kind, said in ((Provenance.MEASURED, "energy"), (Provenance.ESTIMATED, "energy, estimated")):
        found = SimpleNamespace(meter=MeterFacts(kind, ("a",)), metric="accuracy")
        assert (measure("energy", found), measure("throughput", found)) == (said, "throughput")


def race_meter_of(meter, kind: Provenance = Provenance.ESTIMATED) -> PairedRunMeter:
    facts = MeterFacts(kind, ("a meter",))
    return PairedRunMeter(RankMeter(meter, facts, facts), ALONE)


def test_a_race_counts_joules_of_each_block(tmp_path, monkeypatch):
    meter = race_meter_of(GivenWatts(80))
    monkeypatch.setattr(race_module, "_BLOCK_S", 1e-6)
    monkeypatch.setattr(race_module, "_BLOCK_STEPS", 1)
    entries = [PairedArm(name, ReferenceLoop, 4 * BATCH_SIZE) for name in ("reference", "self")]
    begin = time.perf_counter()
    raced = list(race(entries, task, load_data(), 0, CPU, meter=meter))
    whole_s = time.perf_counter() - begin
    for found in raced:
        assert len(found.events) > 2
        for event in found.events:
            assert event.detail["energy_j"] >= 80 * event.detail["seconds"]  # a block's clock starts after it
        assert math.fsum(event.detail["energy_j"] for event in found.events) < 80 * whole_s  # and each block's ends
        write_record(tmp_path / found.header.name, found)
        assert read_record(tmp_path / found.header.name).events == found.events


class Broken:
    """A meter whose file is gone."""

    provenance, sources, period_s = Provenance.MEASURED, ("a meter",), math.inf

    def joules(self) -> float:
        raise OSError("no such device")


class Failing(ReferenceLoop):
    """A loop whose second step raises."""

    steps = 0

    def step(self, batches) -> int:
        self.steps += 1
        if self.steps == 2:
            raise ZeroDivisionError("in a step")
        return super().step(batches)


def test_a_meter_that_fails_is_no_arms_error_and_a_step_that_does_is_no_meters(monkeypatch):
    monkeypatch.setattr(race_module, "_BLOCK_S", 1e-6)
    monkeypatch.setattr(race_module, "_BLOCK_STEPS", 1)
    entries = [
        PairedArm("reference", ReferenceLoop, 4 * BATCH_SIZE),
        PairedArm("equivalent_plan", Failing, 4 * BATCH_SIZE),
    ]
    for meter, counts in ((race_meter_of(Broken()), False), (race_meter_of(GivenWatts(80)), True)):
        own, rival = race(entries, task, load_data(), 0, CPU, meter=meter)
        assert own.end.reason == "budget"
        assert {event.detail["energy_j"] is not None for event in own.events} == {counts}
        assert "ZeroDivisionError" in comparison_statistics.error_of_run(rival)
        assert len(rival.events) == 1


@pytest.mark.parametrize(("kind", "block_s"), [(Provenance.MEASURED, 1.1), (Provenance.ESTIMATED, 1.0)])
def test_blocks_of_a_metered_race_are_a_tenth_above_the_shortest_window(kind, block_s):
    paces = []
    together = SimpleNamespace(pace=lambda steps, seconds: paces.append(seconds))
    entry = PairedArm("reference", ReferenceLoop, BATCH_SIZE)
    RunningArm(entry, task, load_data(), 0, CPU, together, race_meter_of(GivenWatts(80), kind))
    RunningArm(entry, task, load_data(), 0, CPU, together)
    assert paces == pytest.approx([block_s, 1.0])


def test_blocks_without_joules_are_told():
    run = metered(record(blocks=[(10, 0.9), (10, 1.1), (10, 0.5), (10, 1.2)]), 50.0, unknown=(0, 2, 3))
    assert short_blocks(run) == (1, 3)  # of the first it is not asked, the last lost its meter
    bare = Arm("equivalent_plan", "a plan", "equivalent", "", (), ())
    for joules in ((5.0,), ()):
        arms = (replace(bare, joules=joules, watts=joules, short_blocks=1, blocks=3), replace(bare, name="self"))
        table = arm_energy_table(SimpleNamespace(arms=arms))
        assert "too short for the meter, without energy: 1 of 3 of" in (table.note if joules else table.empty)
    assert "too short" not in arm_energy_table(SimpleNamespace(arms=(bare,))).note
    (found,) = race([PairedArm("reference", ReferenceLoop, 4 * BATCH_SIZE)], task, load_data(), 0, CPU)
    assert {event.detail["energy_j"] for event in found.events} == {None}
    found = energy_finding(MeterFacts(Provenance.ABSENT, reason="no driver"))
    assert (found.ok, found.detail) == (False, "not measured: no driver")


@pytest.mark.parametrize(
    ("limit", "said"),
    [
        (PowerLimit("gpu 0", 700.0, 200.0, 700.0), "gpu 0: 700 W (driver range 200 to 700 W)"),
        (PowerLimit("package-0", 125.0, None, 250.0), "package-0: 125 W (driver maximum 250 W)"),
        (PowerLimit("package-0", 125.0), "package-0: 125 W ("),
    ],
)
def test_doctor_says_which_meter_there_is_and_what_its_limit_is(limit, said):
    found = energy_finding(MeterFacts(Provenance.MEASURED, ("nvml gpu 0",), 61.5, limits=(limit,)))
    assert found.ok
    assert "measured (nvml gpu 0); includes 61.5 W" in found.detail
    assert said in found.detail
    assert "read only" in found.detail
