"""From plans and records to a comparison and its benchmark rows: on races made by hand."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
from race_records import climbing
from raising import raises
from tiny_task import load_data, task

from benchmarks.paper.recipes.paper import PaperLoop
from trimtab.core.choice import Choice, Effect, MeasuredCost, SplitCheck
from trimtab.core.energy_reading import NO_METER
from trimtab.core.errors import FormatError
from trimtab.core.hardware import DeviceSpec
from trimtab.core.record import BRIEF, End, RunRecord
from trimtab.core.serialization import from_json, to_json
from trimtab.experiments.comparison import comparison_summary
from trimtab.experiments.comparison.arm_metrics import ArmMetrics
from trimtab.experiments.comparison.caveats import WHY_TIMED, notes
from trimtab.experiments.comparison.comparison_result import Comparison
from trimtab.experiments.comparison.comparison_rows import benchmark_object
from trimtab.experiments.comparison.comparison_statistics import GIVEN_ROWS
from trimtab.experiments.comparison.comparison_summary import _planning_s, summarise
from trimtab.experiments.task_plans import Plans
from trimtab.plans.plan import Plan
from trimtab.plans.profile import Candidate, LoopFacts, Profile, Trial

DEVICE = DeviceSpec("a processor", "cpu", 2**34, {"fp32": 1e9}, None, "made up", 1)
LOOP = LoopFacts(
    num_parameters=10,
    trainable_parameters=10,
    parameter_bytes=40,
    optimizer="AdamW",
    batch_size=100,
    terms_per_step=100,
    terms="rows",
    flops_per_step=1e8,
    has_convolutions=False,
    supports_fused=True,
    is_fused=False,
    layout="contiguous",
)
TASK = replace(task, batch_size=100, targets=(0.5, 0.7), baselines={"paper": PaperLoop})
RISE = (0.2, 0.4, 0.6, 0.8, 0.9)
# The plan's step recomputes half of the model's FLOP.
FACTS = {
    "reference": ArmMetrics(1000, {"forward": 0.4}, 1e6, "fp32"),
    "equivalent_plan": ArmMetrics(600, {}, 1.5e6, "fp32"),
}
WOBBLE = (1.0, 1.01, 0.99, 1.005, 0.995)


def plans(*, changed: bool = True) -> Plans:
    trial = Trial("modes", Candidate(100), (1.0,) * 5, 1000)
    profile = Profile(DEVICE, LOOP, SplitCheck(True, "proved"), trials=(trial,))
    same = Plan.fixed(100, 50 if changed else None)
    same = replace(same, baseline=MeasuredCost(1.0, 1000), predicted=MeasuredCost(0.5, 600), planning_s=2.0)
    rate = Choice(4.0, "a third of 12x", Effect.TRAINING, changed=True)
    freed = replace(same, learning_rate_scale=rate, planning_s=5.0, search_s=3.0)
    return Plans({"equivalent": same, "tuned": freed}, {"equivalent": profile})


def arm(step_s: float, values: tuple[float, ...] = RISE) -> RunRecord:
    """Return an arm of one step of 100 rows an evaluation."""
    return climbing([step_s * (i + 1) for i in range(len(values))], values)


def races(n: int = 5, *, ours: float = 0.5, freed: float = 0.5) -> dict[int, dict[str, RunRecord]]:
    """Return races: an equivalent step takes `ours` of the reference's, and the tuned plan climbs twice as steeply."""
    steep = (0.4, 0.8, 0.9)
    return {
        seed: {
            "reference": arm(10.0),
            "self": arm(10.0 * wobble),
            "equivalent_plan": arm(10.0 * ours * wobble),
            "tuned_plan": arm(10.0 * freed * wobble, steep),
        }
        for seed, wobble in zip(range(n), WOBBLE * 2, strict=False)
    }


def comparison(found=None, *, changed: bool = True, facts: dict[str, ArmMetrics] | None = None, its=TASK) -> Comparison:
    facts = FACTS if facts is None else facts
    found = races() if found is None else found
    environment = {"torch": "2"}
    return summarise(
        its,
        load_data(),
        plans(changed=changed),
        found,
        facts,
        command="trimtab compare x",
        environment=environment,
    )


def row(found: Comparison, metric: str, arm: str, against: str = "reference"):
    return next(r for r in found.ratios if (r.metric, r.arm, r.against) == (metric, arm, against))


def test_every_arm_is_there_with_what_was_measured_of_it():
    found = comparison()
    assert [arm.name for arm in found.arms] == ["reference", "self", "equivalent_plan", "tuned_plan"]
    reference, ours, freed = (found.arm(name) for name in ("reference", "equivalent_plan", "tuned_plan"))
    assert reference.step_s == pytest.approx((10.0,) * 5)
    assert ours.step_s == pytest.approx([5 * wobble for wobble in WOBBLE])
    assert ours.terms_per_s == pytest.approx([20 / wobble for wobble in WOBBLE])
    assert (reference.peak_bytes, ours.peak_bytes, freed.peak_bytes) == (1000, 600, None)
    assert reference.phases_s == {"forward": 0.4}
    assert (reference.plan_kind, ours.plan_kind, freed.plan_kind) == ("", "equivalent", "tuned")
    assert (reference.search_s, ours.search_s, freed.search_s) == (0.0, 2.0, 5.0)
    assert ours.final_metric == (0.9,) * 5
    assert (ours.final_samples, freed.final_samples) == (500, 300)
    assert [curve.seed for curve in ours.curves] == [0, 1, 2, 3, 4]
    assert ours.curves[0].points[0] == (100, pytest.approx(5.0), 0.2)
    assert (reference.mfu, reference.hfu) == pytest.approx((1e8 / 10 / 1e9,) * 2)
    assert (ours.mfu, ours.hfu) == pytest.approx((1e8 / 5 / 1e9, 1.5e8 / 5 / 1e9))
    assert (freed.mfu, freed.hfu) == (None, None)  # not looked at on its own
    uncounted = comparison(facts={"reference": replace(FACTS["reference"], flops_per_sample=None)})
    assert (uncounted.arm("reference").mfu, uncounted.arm("reference").hfu) == (None, None)
    unknown = comparison(facts={"reference": replace(FACTS["reference"], precision="bf16")})
    assert (unknown.arm("reference").mfu, unknown.arm("reference").hfu) == (None, None)  # no peak for it
    # One figure for all arms, the reference's: other batches make no arm faster or slower.
    its = replace(TASK, terms="tokens", terms_per_sample=8)
    counted = {
        name: replace(fact, terms_per_sample=n) for (name, fact), n in zip(FACTS.items(), (5.5, 5.4), strict=True)
    }
    for facts, terms in ((counted, 5.5), (FACTS, 8)):  # from facts that do not say: as the task does
        found = comparison(its=its, facts=facts)
        for name in ("reference", "equivalent_plan", "tuned_plan"):
            rates = [100 * terms / step_s for step_s in found.arm(name).step_s]
            assert found.arm(name).terms_per_s == pytest.approx(rates)


def test_ratios_and_targets_against_the_reference():
    found = comparison()
    assert row(found, "throughput", "equivalent_plan").ratio.mean == pytest.approx(2.0, rel=1e-4)
    assert row(found, "throughput", "equivalent_plan").verdict.kind == "gain"
    assert row(found, "peak_memory", "equivalent_plan").ratio.mean == pytest.approx(0.6)
    assert row(found, "final_metric_difference", "equivalent_plan").ratio.pairs == pytest.approx((0.0,) * 5)
    assert row(found, "throughput", "self").verdict.kind == "no gain"
    assert ("peak_memory", "tuned_plan") not in {(r.metric, r.arm) for r in found.ratios}  # not measured
    assert found.resolution is not None
    assert found.resolution.pairs == pytest.approx([1 / wobble for wobble in WOBBLE])
    shown = [(r.target, r.arm, r.charged) for r in found.target_rows]
    assert shown == [(t, a, c) for t in (0.5, 0.7) for a in ("equivalent_plan", "tuned_plan") for c in (False, True)]
    free, charged = (r for r in found.target_rows if (r.target, r.arm) == (0.7, "tuned_plan"))
    assert free.arm_s == pytest.approx([5 * wobble * 1.75 for wobble in WOBBLE])  # 0.4 at 1 step, 0.8 at 2
    assert charged.arm_s == pytest.approx([5.0 + s for s in free.arm_s])
    assert charged.against_s == pytest.approx((35.0,) * 5)
    charged = [r for r in found.target_rows if r.arm == "tuned_plan" and r.charged][-1]
    assert (found.headline.kind, found.headline.code) == ("gain", "speed.gain")
    assert found.headline.sentence.startswith("The equivalent plan has 2.00x (95% ")
    assert f"target 0.7 with a speed-up of {charged.ratio.mean:.2f}x, search included" in found.headline.sentence


def test_targets_are_charged_and_bounded_by_what_can_be_resolved():
    found = comparison(with_peers(races(), strong=arm(10.0)))
    rows = [r for r in found.target_rows if (r.arm, r.against, r.target) == ("tuned_plan", "strong", 0.7)]
    assert [each.charged for each in rows] == [False, True]
    free, charged = rows
    assert charged.arm_s == pytest.approx([5.0 + seconds for seconds in free.arm_s])
    assert charged.against_s == free.against_s
    # The control strays by 8%; a plan 3% faster is no gain to any target.
    found = races(ours=0.97)
    for race, wobble in zip(found.values(), (1.0, 1.08, 0.93, 1.0, 1.0), strict=True):
        race["self"], race["equivalent_plan"] = arm(10.0 * wobble), arm(9.7)
    rows = [r for r in comparison(found).target_rows if r.arm == "equivalent_plan" and not r.charged]
    assert [r.verdict.kind for r in rows] == ["no gain", "no gain"]
    assert all(r.ratio.low > 1 for r in rows)
    result = comparison(with_peers(races(), tuned_plan=stopped(arm(5.0, (0.4, *(0.6,) * 11)))))
    (harder,) = [r for r in result.target_rows if (r.arm, r.target, r.charged) == ("tuned_plan", 0.7, True)]
    assert (harder.reached_arm, harder.verdict.kind) == (0, "harm")
    assert "reaches target 0.5" in result.headline.sentence
    assert "but target 0.7 was reached in 0 of 5 pairs (reference: 5 of 5)" in result.headline.sentence
    assert "reaches target 0.7" not in result.headline.sentence
    result = comparison(with_peers(races(), paper=stopped(arm(60.0, (0.1, 0.2, 0.3)))))
    (row,) = [r for r in result.target_rows if (r.arm, r.target) == ("paper", 0.5)]
    assert (row.reached_arm, row.verdict.kind) == (0, "harm")
    assert row.bound.startswith("<= 0.")
    assert row.bound == f"<= {row.at_most:.2f}x"
    # The tuned plan goes on from the equivalent plan; the plan for P2 is made apart.
    assert comparison().planning_s == 5.0
    whole = plans()
    apart = replace(whole, plans=whole.plans | {"strong": replace(whole.plans["equivalent"], planning_s=7.0)})
    assert _planning_s(apart) == 12.0
    assert _planning_s(replace(whole, plans={"equivalent": whole.plans["equivalent"]})) == 2.0


@pytest.mark.parametrize(
    ("lasts", "reason", "said"),
    [
        ((0.9,) * 5, "budget", ""),
        (
            (0.9, 0.92, 0.88, 0.91, 0.88),
            "budget",
            "there is no verdict on its final quality: equal quality is not shown",
        ),
        ((0.9,) * 5, "cut off", "its final quality was not measured"),
    ],
)
def test_a_tuned_plan_whose_quality_is_not_known_is_no_gain(lasts, reason, said):
    found = races(ours=1.0)
    for race, last in zip(found.values(), lasts, strict=True):
        race["tuned_plan"] = arm(1.0, (0.3, 0.6, 0.8, last))
    first = found[0]["tuned_plan"]
    found[0]["tuned_plan"] = replace(first, end=replace(first.end, reason=reason))
    headline = comparison(found, changed=False).headline
    assert headline.kind == ("no gain" if said else "gain")
    assert (f"but {said}" if said else "") in headline.sentence


@pytest.mark.parametrize(
    ("freed", "targets", "kind", "said", "unsaid"),
    [
        ((0.3, 0.6, 0.8, 0.9), (0.5, 0.7), "gain", ("reaches target 0.7 ",), ("but", "final quality is lower")),
        # The last evaluation alone does not count.
        (
            (0.3, 0.6, 0.65, 0.69, 0.9),
            (0.5, 0.7),
            "no gain",
            ("reaches target 0.5 ", ", but target 0.7 was reached in 0 of 5 pairs (reference: 5 of 5)."),
            (),
        ),
        ((0.3, 0.6, 0.8, 0.9), (0.5, 0.99), "gain", (), ("target 0.99",)),
        (
            (0.2, 0.3, 0.4, 0.45),
            (0.5, 0.7),
            "no gain",
            (
                "For the tuned plan, target 0.5 was reached in 0 of 5 pairs (reference: 5 of 5)",
                "target 0.7 was reached in 0 of 5",
                "its final quality is lower: ",
            ),
            (),
        ),
        ((0.3, 0.6, 0.8, 0.87), (0.5, 0.7), "no gain", ("reaches target 0.7 ", "its final quality is lower: "), ()),
        # 35 s over 1 s and 5 s of planning.
        ((0.8, 0.85, 0.9), (0.5, 0.7), "gain", ("target 0.7 with a speed-up of at least 5.",), ()),
    ],
    ids=["gain", "missed target", "target of neither", "no target", "worse end", "past it when first evaluated"],
)
def test_the_headline_of_a_tuned_plan_whose_equivalent_plan_brings_nothing(freed, targets, kind, said, unsaid):
    found = races(ours=1.0)
    for race, wobble in zip(found.values(), WOBBLE, strict=True):
        race["tuned_plan"] = arm(1.0 * wobble, freed)
    headline = comparison(found, its=replace(TASK, targets=targets), changed=False).headline
    assert headline.kind == kind
    assert headline.sentence.count("tuned plan") == 1
    assert all(each in headline.sentence for each in said)
    assert not any(each in headline.sentence for each in unsaid)


def fails(found: dict[int, dict[str, RunRecord]], name: str, *seeds: int) -> dict[int, dict[str, RunRecord]]:
    """Return the races with an arm that left some of them with an error."""
    for seed in seeds:
        last = found[seed][name]
        found[seed][name] = replace(last, end=End("error", {**last.end.detail, "error": "RuntimeError: no"}))
    return found


def test_an_arm_that_failed_in_a_race_is_no_gain_of_its_tier():
    result = comparison(fails(races(8, freed=20.0), "equivalent_plan", 2, 5))
    assert row(result, "throughput", "equivalent_plan").ratio.n == 6
    for metric in ("throughput", "peak_memory", "final_metric_difference"):
        assert row(result, metric, "equivalent_plan").verdict.kind == "no verdict", metric
    assert (result.headline.kind, result.headline.code) == ("no verdict", "arm.failed")
    assert result.headline.sentence.startswith("The equivalent plan failed in 2 of 8 runs")
    assert "2.00x" not in result.headline.sentence
    assert result.arm("equivalent_plan").error == "RuntimeError: no (in 2 of 8 runs)"
    result = comparison(fails(races(8), "self", 0))
    assert result.resolution is None
    assert row(result, "throughput", "equivalent_plan").verdict.kind == "no verdict"
    assert result.headline.kind != "gain" or "target" in result.headline.sentence
    for name in ("strong", "strong_plan"):
        found = fails(with_peers(races(6), strong=arm(4.0), strong_plan=arm(4.0)), name, 0)
        harm = row(comparison(found), "do_no_harm", "strong_plan", "strong")
        assert (harm.ratio.n, harm.verdict.kind, harm.verdict.code) == (5, "no verdict", "arm.failed")
        assert harm.failed == f"{name} failed in 1 of 6 runs"


def test_a_tuned_plan_that_failed_is_no_gain():
    found = fails(races(8, ours=1.0), "tuned_plan", 1)
    result = comparison(found, changed=False)
    assert result.headline.kind == "no gain"
    assert "The tuned plan failed in 1 of 8 runs" in result.headline.sentence
    charged = [r for r in result.target_rows if r.arm == "tuned_plan" and r.charged]
    assert [(r.reached_arm, r.reached_against, r.n, r.verdict.kind) for r in charged] == [(7, 8, 8, "no verdict")] * 2
    # Every pair of a rung is whole: none of the rungs would show it.
    found = fails(races(8, ours=1.0), "tuned_plan", 7)
    for name, record in found[7].items():
        found[7][name] = replace(record, header=replace(record.header, detail={BRIEF: True}))
    result = comparison(found, changed=False)
    rungs = [r for r in result.target_rows if r.arm == "tuned_plan"]
    assert {(r.n, r.reached_arm, r.verdict.kind) for r in rungs} == {(7, 7, "no verdict")}
    assert result.headline.kind == "no gain"
    assert "failed in 1 of 8 runs" in result.headline.sentence
    result = comparison(fails(races(8), "equivalent_plan", 0))
    assert result.headline.kind == "gain"
    assert "The equivalent plan failed in 1 of 8 runs" in result.headline.sentence
    assert "reaches target 0.7" in result.headline.sentence


@pytest.mark.parametrize(
    ("races_of", "kind", "code"),
    [
        (races(ours=1.0, freed=2.0), "no gain", "speed.not_significant"),
        (races(ours=1.3), "harm", "speed.harm"),  # whatever the learning rate bought
        (races(3), "no verdict", "pairs.too_few"),
        (
            {s: {n: r for n, r in race.items() if n != "self"} for s, race in races().items()},
            "no verdict",
            "control.missing",
        ),
    ],
    ids=["nothing changed", "slower", "three pairs", "no control"],
)
def test_the_headline_without_a_gain(races_of, kind, code):
    found = comparison(races_of, changed=kind != "no gain")
    assert (found.headline.kind, found.headline.code) == (kind, code)
    if kind == "no gain":
        assert "recommends no change" in found.headline.sentence
    if kind == "harm":
        assert "slower: 0.77x" in found.headline.sentence
    if code == "pairs.too_few":
        timed = [r for r in found.ratios if r.metric != "peak_memory"]
        assert {r.verdict.kind for r in (*timed, *found.target_rows)} == {"no verdict"}
    if code == "control.missing":
        assert {r.verdict.kind for r in found.target_rows} == {"no verdict"}


def stopped(made: RunRecord) -> RunRecord:
    """Return an arm as a cap stopped it."""
    return replace(made, end=replace(made.end, reason="cap"))


def test_a_plan_that_failed_on_its_own_is_told():
    """Before the first race, and beside the races that it ran."""
    found = races()
    for race in found.values():
        del race["equivalent_plan"], race["tuned_plan"]
    failed = {name: ArmMetrics(None, error="out of memory") for name in ("equivalent_plan", "tuned_plan")}
    result = comparison(found, facts=FACTS | failed)
    assert result.headline.kind == "no verdict"
    for plan in ("equivalent", "tuned"):
        assert f"The {plan} plan failed before the first paired run" in result.headline.sentence
    beside = comparison(facts=FACTS | {"equivalent_plan": failed["equivalent_plan"]})
    assert [arm.name for arm in beside.arms] == ["reference", "self", "equivalent_plan", "tuned_plan"]
    assert beside.arm("equivalent_plan").error == "out of memory"
    assert "The equivalent plan failed" in beside.headline.sentence


def noted(found: Comparison, *words: str) -> list[str]:
    """Return the notes that hold all of these words."""
    return [note for note in found.notes if all(word in note for word in words)]


def test_a_report_is_read_back_from_its_file():
    """Also one that was written before it had some fields; one of another schema is refused by its number."""
    found = comparison()
    assert from_json(Comparison, to_json(found)) == found
    data = json.loads(to_json(found))
    for old in data["ratios"]:
        del old["cpu"], old["failed"]
    for old in data["target_rows"]:
        del old["arm_samples"], old["against_samples"], old["at_least"], old["at_most"], old["failed"]
    assert len(from_json(Comparison, json.dumps(data)).ratios) == len(data["ratios"])
    with raises(FormatError, code="json.schema", field="comparison.schema"):
        from_json(Comparison, json.dumps(data | {"schema": 1, "quick": False}))


def test_notes_tell_what_a_reader_must_know():
    found = races(2)
    early = found[0]["tuned_plan"]
    found[0]["tuned_plan"] = replace(early, end=replace(early.end, reason="cap"))
    found[1]["equivalent_plan"] = replace(arm(5.0, (0.55, 0.8, 0.9)), end=None)
    found[1]["reference"] = replace(arm(5.0, (0.1, math.nan)), end=replace(early.end, reason="diverged"))
    result = comparison(found)
    assert "tuned_plan: stopped at the time cap in 1 of 2 runs" in result.notes
    assert "reference: diverged in 1 of 2 runs" in result.notes
    assert noted(result, "left-censored")
    assert noted(result, "a learning-rate range test (3 s)")
    # A paper recipe that was only timed, several states of the sources, and what intervals do not hold.
    plain = comparison()
    detail = {BRIEF: True, WHY_TIMED: "the reference trains longer than 120 s"}
    found = {seed: race | {"paper": arm(20.0)} for seed, race in races().items()}
    (told,) = noted(comparison(with_header(found, "paper", detail=detail)), "paper ")
    assert told.endswith("the reference trains longer than 120 s")
    assert not noted(plain, "paper")
    found = races(3)
    for name in found[0]:
        for seed, race in found.items():
            with_header({seed: race}, name, environment={"sources": "ab" if seed else "cd"})
    (told,) = noted(comparison(found), "source code")
    assert "ab in 2, cd in 1 of 3" in told
    assert not noted(plain, "source code")
    (told,) = noted(plain, "variance", "5 seeds")
    assert "planning and tuning" in told
    assert not noted(comparison(races(1)), "variance")


def with_header(found: dict[int, dict[str, RunRecord]], name: str, **header) -> dict[int, dict[str, RunRecord]]:
    """Return races in which the header of one arm's records has other values."""
    for race in found.values():
        race[name] = replace(race[name], header=replace(race[name].header, **header))
    return found


def test_plans_that_trained_on_other_samples_are_told():
    found = races()
    for name, rows in (("tuned_plan", 1200), ("reference", 4800)):
        with_header(found, name, detail={GIVEN_ROWS: rows})
    result = comparison(found)
    assert noted(result, "trained on 1,200 samples, the reference on 4,800")
    assert {(r.arm_samples, r.against_samples) for r in result.target_rows if r.arm == "tuned_plan"} == {(1200, 4800)}
    flat = benchmark_row(result, metric="time_to_target_ratio", arm="tuned_plan")
    assert (flat["arm_samples"], flat["against_samples"]) == (1200, 4800)
    same = {seed: race | {"tuned_plan": race["reference"]} for seed, race in races().items()}
    assert not noted(comparison(same), "trained on")
    longer = replace(TASK, planned_samples=100 * TASK.budget_samples)
    (told,) = noted(comparison(its=longer), "Plans were made for a run")
    assert f"100 times the {TASK.budget_samples:,} samples" in told
    for its in (TASK, replace(TASK, planned_samples=TASK.budget_samples)):
        assert not noted(comparison(its=its), "Plans were made for a run")


@pytest.mark.parametrize(
    ("planning_s", "charged", "said"),
    [(0.0, {False}, "no planning time"), (2.0, {False, True}, "planning time of 2 s")],
)
def test_a_plan_that_was_given_is_charged_with_what_its_file_tells(planning_s, charged, said):
    given = Plans({"equivalent": replace(plans().plans["equivalent"], planning_s=planning_s)})
    raced = {seed: {name: race[name] for name in race if name != "tuned_plan"} for seed, race in races().items()}
    found = summarise(TASK, load_data(), given, raced, FACTS, command="", environment={})
    assert {each.charged for each in found.target_rows if each.arm == "equivalent_plan"} == charged
    (told,) = noted(found, "from a file")
    assert said in told
    assert not noted(comparison(), "from a file")


def with_peers(found: dict[int, dict[str, RunRecord]], **peers: RunRecord) -> dict[int, dict[str, RunRecord]]:
    return {seed: race | peers for seed, race in found.items()}


def test_the_meter_of_the_races_is_looked_for_once(monkeypatch):
    looked = []
    monkeypatch.setattr(comparison_summary, "meter_of", lambda found: looked.append(found) or NO_METER)
    assert comparison().meter == NO_METER
    assert len(looked) == 1


def test_peers_and_do_no_harm():
    result = comparison(with_peers(races(), paper=arm(20.0), strong=arm(4.0), strong_plan=arm(4.0)))
    assert row(result, "throughput", "paper").ratio.mean == pytest.approx(0.5)
    assert row(result, "throughput", "equivalent_plan", "strong").ratio.mean == pytest.approx(0.8, rel=1e-4)
    harm = row(result, "do_no_harm", "strong_plan", "strong")
    assert (harm.ratio.mean, harm.verdict.kind) == (pytest.approx(1.0), "no harm")
    flat = benchmark_row(result, metric="do_no_harm_ratio")
    assert (flat["arm"], flat["against"], flat["mean"]) == ("strong_plan", "strong", pytest.approx(1.0))
    assert {(r.arm, r.plan_kind) for r in result.thirds} >= {("equivalent_plan", "equivalent"), ("paper", "")}
    assert {(r.arm, r.against) for r in result.target_rows} == {
        ("equivalent_plan", "reference"),
        ("tuned_plan", "reference"),
        ("equivalent_plan", "paper"),
        ("tuned_plan", "paper"),
        ("paper", "reference"),
        ("strong", "reference"),
        ("tuned_plan", "strong"),
    }
    peers = [r for r in result.target_rows if r.arm in ("paper", "strong")]
    assert {(r.plan_kind, r.charged) for r in peers} == {("", False)}  # a recipe is planned by nobody


def test_rows_are_flat_and_named():
    found = benchmark_object(comparison())
    assert list(found) == ["schema", "name", "environment", "rows"]
    assert (found["schema"], found["name"]) == (1, "compare")
    assert (
        found["environment"].items() >= {"torch": "2", "command": "trimtab compare x", "data_sha256": "0" * 64}.items()
    )
    assert found["environment"]["verdict"] == comparison().headline.kind
    json.dumps(found, allow_nan=False)
    rows = benchmark_object(comparison())["rows"]
    lists = {"pairs", "arm_s", "against_s"}
    flat = [value for row in rows for name, value in row.items() if name not in lists]
    assert {type(value) for value in flat} <= {str, int, float, bool, type(None)}
    assert {row["metric"] for row in rows} == {
        "throughput_ratio",
        "peak_memory_ratio",
        "final_metric_difference",
        "time_to_target_ratio",
        "planning_s",
        *(f"third_{name}" for name in ("speed_ratio", "progress_ratio", "progress_per_s_ratio", "saved_share")),
    }
    assert {row["task"] for row in rows} == {"tiny"}
    for row in rows:
        if row["metric"] != "planning_s":
            assert row.keys() >= {"mean", "low", "high", "n", "plan_kind", "against"}, row
        if row["metric"] in ("throughput_ratio", "time_to_target_ratio") and "mean" in row:
            assert len(row["pairs"]) == row["n"]
            logs = [math.log(pair) for pair in row["pairs"]]
            assert math.exp(sum(logs) / len(logs)) == pytest.approx(row["mean"])
    changes = {"equivalent": "micro batch 50", "tuned": "micro batch 50, learning rate scale 4.0"}
    seconds = {"equivalent": (2.0, 0.0), "tuned": (5.0, 3.0)}
    assert [row for row in rows if row["metric"] == "planning_s"] == [
        {"metric": "planning_s", "task": "tiny", "plan_kind": kind, "arm": f"{kind}_plan"}
        | dict(zip(("planning_s", "search_s"), seconds[kind], strict=True))
        | {"changes": changes[kind]}
        for kind in changes
    ]


def benchmark_row(found: Comparison, **wanted):
    return next(r for r in benchmark_object(found)["rows"] if wanted.items() <= r.items())


def test_ratios_are_ours_over_theirs():
    # Twice as fast: above 1 for throughput, below 1 for time; memory below 1 is less.
    found = comparison()
    throughput = benchmark_row(found, metric="throughput_ratio", arm="equivalent_plan")
    assert throughput["mean"] == pytest.approx(2.0, rel=1e-4)
    assert (throughput["plan_kind"], throughput["against"], throughput["n"]) == ("equivalent", "reference", 5)
    assert throughput["low"] < throughput["mean"] < throughput["high"]
    time = benchmark_row(found, metric="time_to_target_ratio", arm="equivalent_plan", target=0.7, charged=False)
    assert time["mean"] == pytest.approx(0.5, rel=1e-4)
    assert time["low"] < time["mean"] < time["high"]
    assert (time["censored"], time["reached"], time["reached_against"]) == (False, 5, 5)
    memory = benchmark_row(found, metric="peak_memory_ratio", arm="equivalent_plan")
    assert (memory["mean"], memory["low"], memory["high"], memory["n"]) == (0.6, None, None, 1)
    bare = benchmark_row(comparison(), metric="throughput_ratio", arm="equivalent_plan")
    assert (bare["cpu_mean"], bare["cpu_low"], bare["cpu_high"]) == (None, None, None)
    found = races()
    for race in found.values():
        for name, share in (("reference", 1.0), ("equivalent_plan", 2.0)):
            events = [replace(e, detail={**e.detail, "cpu_s": share * e.detail["seconds"]}) for e in race[name].events]
            race[name] = replace(race[name], events=tuple(events))
    flat = benchmark_row(comparison(found), metric="throughput_ratio", arm="equivalent_plan")
    assert flat["cpu_mean"] == pytest.approx(flat["mean"] / 2)
    assert flat["cpu_low"] < flat["cpu_mean"] < flat["cpu_high"]
    assert "cpu_mean" not in benchmark_row(comparison(found), metric="peak_memory_ratio", arm="equivalent_plan")


def test_the_control_is_against_self_and_gives_the_resolution_of_speeds():
    found = comparison()
    control = benchmark_row(found, metric="throughput_ratio", arm="self")
    assert control["against"] == "self"
    expected = max(control["high"], 1 / control["low"]) - 1
    speeds = [r for r in benchmark_object(found)["rows"] if r["metric"] in ("throughput_ratio", "time_to_target_ratio")]
    assert [r["resolution"] for r in speeds] == pytest.approx([expected] * len(speeds))
    assert "resolution" not in benchmark_row(found, metric="peak_memory_ratio", arm="equivalent_plan")
    for pairs in (1, 4):  # fewer than a verdict needs
        few = benchmark_row(comparison(races(pairs)), metric="throughput_ratio", arm="equivalent_plan")
        assert few["resolution"] is None
    alone = comparison(races(1))
    assert alone.resolution is None
    assert row(alone, "throughput", "equivalent_plan").ratio.low is None


def test_a_censored_target_has_its_bound_and_no_ratio():
    wanted = {"metric": "time_to_target_ratio", "target": 0.7, "charged": False}
    late = comparison(with_peers(races(), reference=arm(10.0, (0.2, 0.4, 0.45, 0.6, 0.65))))
    censored = benchmark_row(late, arm="equivalent_plan", **wanted)
    assert (censored["censored"], censored["reached"], censored["reached_against"], censored["n"]) == (True, 5, 0, 5)
    assert censored["bound"].startswith(">= 2.")
    assert (f">= {censored['at_least']:.2f}x", censored["at_most"]) == (censored["bound"], None)
    assert not {"mean", "low", "high"} & censored.keys()
    early = benchmark_row(comparison(with_peers(races(), tuned_plan=arm(5.0, (0.8, 0.9)))), arm="tuned_plan", **wanted)
    assert (early["left_censored"], early["bound"], early["verdict"]) == (5, ">= 7.00x", "gain")
    assert (early["at_least"], early["at_most"], early["censored"]) == (7.0, None, True)
    other = benchmark_row(comparison(), arm="tuned_plan", **wanted)
    assert (other["left_censored"], other["censored"]) == (0, False)


def test_races_that_show_another_speed_than_trials_told_say_so():
    def said(verified):
        made = plans()
        ours = replace(made.plans["equivalent"], verified=verified)
        found = notes(TASK, Plans(made.plans | {"equivalent": ours}), (), races())
        return [each for each in found if "planning trials" in each]

    assert said((1.9, 2.1)) == said(None) == []  # they are raced at 2.0
    (told,) = said((1.2, 1.4))
    assert "1.20 to 1.40x the speed, paired runs 1.9" in told
