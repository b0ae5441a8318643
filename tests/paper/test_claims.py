"""Several runs on one page: what each shows of the paper's claims, and what may not be held against what."""

from __future__ import annotations

import itertools
import json
import math
import re
from dataclasses import replace

import pytest
import race_records
from benchmarks.paper.finding import Finding
from benchmarks.paper.findings import of_ablation, of_comparison, of_scaling
from benchmarks.paper.machines import letters, sameness
from benchmarks.paper.report import main, write_evaluation
from benchmarks.paper.results import of_record, read_runs
from benchmarks.paper.rows import evaluation_object
from benchmarks.paper.tables import claim_table, gain_table
from measured_runs import CPU, GAIN, GPU, NOISE, ablation, around, comparison, counted, gain, on, recorded, scaled
from raising import raises
from trimtab.core.step_phases import ArmPhases, TimedGain, TimedRound
from trimtab.experiments.ablation.ablation_result import AblatedArm, ChangeEffect, ChangeTime
from trimtab.experiments.comparison.comparison_result import (
    Ratio,
    RatioRow,
    TargetRow,
    ThirdRow,
    Verdict,
    failure_of,
    limits_of,
)
from trimtab.experiments.comparison.time_to_target import target_row
from trimtab.experiments.comparison.verdicts import non_inferiority

from benchmarks.paper import arithmetic
from benchmarks.paper import judge as judging
from benchmarks.paper.claims import (
    ABOUT,
    CLAIMS,
    COMPONENTS,
    LEAST,
    MAIN_TABLES,
    MOST,
    RANKS,
    WITHIN,
)
from benchmarks.paper.judge import (
    FAIL,
    NO_VERDICT,
    NOT_COMPARABLE,
    NOT_MEASURED,
    PASS,
    judge,
    met,
    nearest,
    status_of,
)
from trimtab.core.energy_reading import OTHER_RANKS, MeterFacts, Provenance
from trimtab.core.errors import FormatError, ValueGivenError
from trimtab.core.hardware import DeviceSpec
from trimtab.core.record import End, Evaluation, Header, RunRecord, StepRecord, write_record
from trimtab.core.serialization import to_json, to_jsonable
from trimtab.experiments.phase_result import PhaseResult
from trimtab.experiments.results import KINDS
from trimtab.planner.statistics import Interval
from trimtab.plans.plan import Plan


def judged(found, source, measure, arm="paper"):
    """Return how the claim of a source on a measure stands by one arm."""
    (claim,) = [each for each in CLAIMS if (each.source, each.measure) == (source, measure) and each.target != 45.0]
    return [each for each in judge(found)[claim] if each.finding.arm == arm]


def shown(made, measure, arm=None):
    """Return a comparison's findings of a measure, of one arm or of all."""
    findings = of_comparison("x", made).findings
    return [each for each in findings if each.measure == measure and arm in (None, each.arm)]


def with_arm(made, name, **changes):
    """Return a comparison in which one arm has other values."""
    return replace(made, arms=tuple(replace(each, **changes) if each.name == name else each for each in made.arms))


def page_of(folder, *runs, goals=()):
    """Return the page of several runs, in Markdown."""
    return write_evaluation(list(runs), folder, "x", list(goals))["md"].read_text()


def clocked(seconds):
    """Return an arm's phases: rounds of these seconds, each a little longer or shorter than the others."""
    rounds = ({name: s * noise for name, s in seconds.items()} for noise in NOISE)
    return ArmPhases(tuple(TimedRound(each, {}, math.fsum(each.values())) for each in rounds))


def third_row(name="equivalent_plan", plan_kind="equivalent", saved=None):
    return ThirdRow("early", name, "reference", plan_kind, None, None, None, saved=saved)


def test_what_the_paper_prints_as_change_is_that_of_its_figures():
    for table in MAIN_TABLES:
        for line in table.lines:
            assert 100 * (line.optimised / line.baseline - 1) == pytest.approx(float(line.change[:-1]), abs=0.06)
    found = {each.says: each for each in arithmetic.checks()}
    assert not found["26% a cycle doubles in 14.8 months"].holds
    assert found["26% a cycle doubles in 14.8 months"].gives.startswith("15.0")
    assert found["20% a cycle doubles in about 19 months"].holds
    assert not found["perplexity within 0.5%"].holds
    assert found["efficiency on 4 GPUs: 85.7 and 94.6%"].holds


def test_every_claim_of_a_table_is_the_change_that_stands_there():
    lines = {(table.name.replace("T", "t"), line.measure): line for table in MAIN_TABLES for line in table.lines}
    found = 0
    for claim in CLAIMS:
        line = lines.get((claim.source, claim.measure))
        if line is not None and claim.sense != WITHIN and claim.measure != "mfu":
            assert claim.bar == pytest.approx(line.optimised / line.baseline, abs=1e-3)
            found += 1
    assert found == 6
    for before, after in itertools.pairwise(COMPONENTS):
        changes = {
            "component_time": after.minutes / before.minutes,
            "component_memory": after.memory_gb / before.memory_gb,
        }
        of = [each for each in CLAIMS if each.source == "table III" and set(each.part) <= set(after.choices)]
        assert of, after.says
        assert [each.bar for each in of] == pytest.approx([changes[each.measure] for each in of], abs=1e-3)
    assert {claim.bar for claim in CLAIMS if claim.ranks} == {each.optimised_efficiency for each in RANKS[1:]}


@pytest.mark.parametrize(
    ("sense", "bar", "figure", "expected"),
    [
        (MOST, 0.8, around(0.7), PASS),
        (MOST, 0.8, around(0.9), FAIL),
        (MOST, 0.8, around(0.8), NO_VERDICT),
        (LEAST, 1.3, around(1.4), PASS),
        (LEAST, 1.3, around(1.2), FAIL),
        (LEAST, 1.3, around(1.4, n=4), NO_VERDICT),
        (LEAST, 1.3, None, NO_VERDICT),
        (MOST, 0.8, counted(0.79), PASS),
        (MOST, 0.8, counted(0.81), FAIL),
        (WITHIN, 0.5, around(0.3), PASS),
        (WITHIN, 0.5, around(0.7), FAIL),
        (WITHIN, 0.5, Ratio(-0.3, -0.4, -0.2, 5, ()), PASS),
        (WITHIN, 0.5, around(0.5), NO_VERDICT),
        (LEAST, 1.3, replace(around(1.4), mean=math.nan), NO_VERDICT),
        (ABOUT, 0.35, Ratio(0.36, 0.28, 0.44, 5, ()), PASS),
        (ABOUT, 0.35, Ratio(0.9, 0.8, 1.0, 5, ()), FAIL),
        (ABOUT, 0.35, Ratio(0.1, 0.0, 0.2, 5, ()), FAIL),
        (ABOUT, 0.35, Ratio(0.4, -0.1, 0.9, 5, ()), NO_VERDICT),  # noise shows nothing
        (ABOUT, 0.35, Ratio(0.36, 0.3, 0.42, 4, ()), NO_VERDICT),
    ],
)
def test_a_bar_is_met_by_the_whole_interval(sense, bar, figure, expected):
    found = Finding("throughput", "equivalent_plan", plan_kind="equivalent", figure=figure)
    assert met(sense, bar, found) == expected
    assert met(sense, bar, replace(found, has_verdict=False)) == NO_VERDICT


@pytest.mark.parametrize(
    ("sense", "bar", "plan_kind", "figure", "expected"),
    [
        (ABOUT, 0.35, "tuned", Ratio(0.9, 0.8, 1.0, 5, ()), FAIL),
        (WITHIN, 0.5, "tuned", Ratio(5.0, 4.0, 6.0, 5, ()), PASS),
        (WITHIN, 0.5, "equivalent", Ratio(5.0, 4.0, 6.0, 5, ()), FAIL),
        (WITHIN, 0.5, "", Ratio(5.0, 4.0, 6.0, 5, ()), FAIL),
        (WITHIN, 0.5, "tuned", Ratio(-5.0, -6.0, -4.0, 5, ()), FAIL),
    ],
)
def test_what_is_better_by_another_training_is_no_miss(sense, bar, plan_kind, figure, expected):
    assert met(sense, bar, Finding("final_metric", "plan", plan_kind=plan_kind, figure=figure)) == expected
    if (plan_kind, sense) == ("tuned", WITHIN):  # the paper's recipe is another training too
        assert met(sense, bar, Finding("final_metric", "paper", figure=figure)) == expected


def cut(found, name, last):
    """Return a comparison in which an arm was stopped after a number of evaluations."""
    arm = found.arm(name)
    curves = tuple(replace(each, points=each.points[:last]) for each in arm.curves)
    ends = tuple(curve.points[-1][2] for curve in curves)
    return with_arm(found, name, curves=curves, final_metric=ends, final_samples=curves[0].points[-1][0])


@pytest.mark.parametrize(("plan_kind", "has_verdict"), [("equivalent", False), ("tuned", True)])
def test_a_plan_that_a_cap_stopped_is_told_of_the_rows_it_came_to(plan_kind, has_verdict):
    """After a fifth of the rows "final accuracy within 0.5%" was told, beside the reference's own end."""
    made = cut(comparison(), "equivalent_plan", 2)
    made = replace(made, ratios=tuple(replace(row, plan_kind=row.plan_kind and plan_kind) for row in made.ratios))
    (found,) = shown(made, "final_metric", "equivalent_plan")
    # The tuned plan, which may train on fewer rows, is judged at both ends.
    reference = 0.2 if plan_kind == "equivalent" else 0.95
    assert (found.value, found.baseline) == pytest.approx((0.2, reference))
    assert found.said == "after 20% of the reference's rows"
    assert found.has_verdict == has_verdict
    assert met(WITHIN, 0.5, found) == (PASS if has_verdict else NO_VERDICT)


def test_where_all_arms_were_stopped_early_quality_is_of_the_rows_that_there_were_to_be():
    made = cut(cut(comparison(), "equivalent_plan", 2), "reference", 2)
    made = replace(made, target_rows=tuple(replace(row, against_samples=1000) for row in made.target_rows))
    arms = tuple(replace(a, curves=(replace(a.curves[0], points=()), *a.curves[1:])) for a in comparison().arms)
    cases = (
        (made, "after 20% of the reference's rows", False),
        (cut(made, "equivalent_plan", 1), "after 10% of the reference's rows", False),  # the last that both have
        (comparison(), "", True),
        (replace(comparison(), arms=arms), "some pair has no evaluation of both", False),
    )
    for of, said, has_verdict in cases:
        (found,) = shown(of, "final_metric", "equivalent_plan")
        assert (found.said, found.has_verdict) == (said, has_verdict)
    assert found.value is None


@pytest.mark.parametrize("last", [6, 10])
def test_what_ended_whole_is_not_held_against_a_reference_that_was_stopped(last):
    """P1 had all of its rows under a cap that ended the reference: "better" than what was never trained."""
    made = cut(comparison(), "reference", last)
    made = replace(
        made,
        ratios=tuple(replace(row, plan_kind=row.plan_kind and "tuned") for row in made.ratios),
        target_rows=tuple(replace(row, against_samples=1000) for row in made.target_rows),
    )
    found = shown(made, "final_metric")
    assert {each.arm for each in found} == {"paper", "equivalent_plan"}
    assert {each.has_verdict for each in found} == {last == 10}
    came_to = "after 100% of the reference's rows, which itself came to 60%"
    assert {each.said for each in found} == {came_to if last == 6 else ""}


def longer(made, percent, seeds=5):
    """Return a comparison in which the paper's recipe ends at a percentage of its rows, in the first races."""
    curves = tuple(
        replace(each, points=(*each.points[:-1], (each.points[-1][0] * percent // 100, *each.points[-1][1:])))
        if each.seed < seeds
        else each
        for each in made.arm("paper").curves
    )
    return with_arm(made, "paper", curves=curves)


def test_a_claim_passes_at_its_size_on_a_gpu_and_nowhere_else():
    fast = {"paper": 1.5}
    here = of_comparison("gpu", comparison(**fast))
    assert [each.status for each in judged([here], "table I", "throughput")] == [PASS]
    on_cpu = of_comparison("cpu", comparison(environment=CPU, **fast))
    smaller = of_comparison("small", comparison("cifar10_resnet", **fast))
    for run, why in ((on_cpu, "on a CPU"), (smaller, "a smaller task")):
        (found,) = judged([run], "table I", "throughput")
        assert (found.status, found.here) == (NOT_COMPARABLE, PASS)
        assert why in found.why
    assert judged([of_comparison("own", comparison("mine", **fast))], "table I", "throughput") == []


def test_times_of_recipes_and_plans_are_those_of_their_races():
    easier = of_comparison("gpu", comparison(paper=1.5, target=0.7))
    (found,) = judged([easier], "table I", "time_to_target")
    assert (found.status, found.finding.target) == (NOT_COMPARABLE, 0.7)
    assert "to 0.7, not to 0.85" in found.why
    made = comparison(paper=1.5)
    (found,) = judged([of_comparison("gpu", made)], "table I", "time_to_target")
    assert found.finding.figure.mean == pytest.approx(1 / 1.5, rel=1e-3)
    assert found.finding.baseline == pytest.approx(85.0)
    assert found.status == PASS
    none = {"ratio": None, "bound": "never reached by either arm", "arm_s": (math.inf,) * 5, "reached_arm": 0}
    rows = tuple(replace(row, target=0.99, verdict=Verdict(NO_VERDICT, ""), **none) for row in made.target_rows)
    (never,) = judged([of_comparison("gpu", replace(made, target_rows=rows))], "table I", "time_to_target")
    assert (never.status, never.here) == (NOT_COMPARABLE, NO_VERDICT)
    assert never.finding.said == "never reached by either arm"
    found = judged([of_comparison("gpu", comparison(plan=2.0))], "table I", "time_to_target", "equivalent_plan")
    assert [each.finding.charged for each in found] == [False, True]


def test_a_recipe_that_ends_elsewhere_is_compared_in_all_pairs_and_it_says_where():
    """One whose windows go beyond the budget, in two of five races; and one that was stopped early."""
    made = with_arm(longer(comparison(), 101, seeds=2), "paper", precision="fp32")
    (end,) = shown(made, "final_metric", "paper")
    assert (end.figure.n, end.said, end.has_verdict) == (5, "after 100 to 101% of the reference's rows", True)
    run = of_comparison("gpu", made)
    assert run.labels["paper"].endswith(", computed in fp32")
    assert run.precisions == {"paper": "fp32"}
    stands = judge([of_comparison("gpu", longer(comparison(), 40))])
    every = [each for found in stands.values() for each in found if each.finding.measure == "final_metric"]
    (found,) = [each for each in every if each.finding.arm == "paper"]
    assert (found.status, found.why) == (NO_VERDICT, "after 40% of the reference's rows")


def test_why_there_is_no_figure_is_said(tmp_path):
    run = of_comparison("gpu", comparison())
    said = {(claim.measure, claim.workload.says): judging.unmeasured(claim, [run]) for claim in CLAIMS}
    assert judging.unmeasured(claim_of(part=("early",)), [run]) == "P1 saved nothing that could be shared out"
    text = of_comparison("gpu", replace(comparison(), task="wikitext2_gpt2"))
    backward = judging.unmeasured(claim_of(part=("backward",)), [text])
    assert backward.startswith("P1's steps are clocked by phase once, not")
    assert said["gain_share", "WikiText-2, GPT-2 Small"] == "no run of it was given"
    assert said["component_time", "CIFAR-10, ResNet-50"].startswith("P1 is raced whole")
    assert said["scaling_efficiency", "CIFAR-10, ResNet-50"].startswith("P1 is run on one device")
    said = judging.headline(judge([of_comparison("cpu", comparison(environment=CPU))]))
    assert said.kind == "nothing to compare"
    assert said.sentence.startswith("No run is at the paper's size on a GPU")
    made = comparison(environment=CPU)
    cpu = of_comparison("cpu", replace(made, arms=tuple(replace(arm, precision="fp32") for arm in made.arms)))
    absent = "**not measured**: there is no fast half precision on this processor"
    assert page_of(tmp_path, cpu).count(absent) == 3  # and none of text
    on_gpu = judging.unmeasured(claim_of(says=FASTER), [of_comparison("gpu", comparison())])
    assert on_gpu.startswith("P1 is raced whole")
    assert "batch statistics" in judging.unmeasured(claim_of(says="accumulation: 13.6% less memory"), [cpu])


def test_what_cannot_be_compared_says_how_it_came_out_here(tmp_path):
    """And of nothing else: what a smaller task shows on a processor foretells nothing of the paper's size."""
    fast, slow = (
        of_comparison("cpu", comparison("cifar10_resnet", environment=CPU, paper=speed)) for speed in (1.5, 0.9)
    )
    page = page_of(tmp_path, fast, goals=[("F 4x", "not measured", "")])
    rows = [line for line in page.splitlines() if line.startswith("| 27.4% more images per second")]
    why = "**not comparable**: a smaller task; on a CPU; what was measured"
    assert f"{why} meets it" in rows[0]
    assert "| F 4x | **not measured** |" in page
    assert f"{why} does not meet it" in page_of(tmp_path, slow)


def test_our_plans_do_not_answer_for_the_papers_recipe_and_a_claim_that_fails_once_fails():
    found = judge([of_comparison("gpu", comparison(paper=1.1, plan=2.0))])
    (claim,) = [each for each in found if (each.source, each.measure) == ("table I", "throughput")]
    assert {(each.finding.arm, each.status) for each in found[claim]} == {("paper", FAIL), ("equivalent_plan", PASS)}
    said = judging.headline(found)
    assert said.kind == "1 of 24 shown"  # quality alone
    assert "3 missed" in said.sentence
    assert "By trimtab's plans: 4 reached, 0 missed" in said.sentence
    slow, fast = (of_comparison(name, comparison(paper=speed)) for name, speed in (("a", 1.1), ("b", 1.5)))
    found = judge([slow, fast])
    (claim,) = [each for each in found if (each.source, each.measure) == ("table I", "throughput")]
    literal = [each for each in found[claim] if each.is_literal]
    assert [each.status for each in literal] == [FAIL, PASS]
    assert status_of(literal) == FAIL
    assert status_of([]) == NOT_MEASURED


def test_a_pass_on_one_stem_does_not_speak_for_the_other():
    """The paper does not say which its ResNet-50 has. Two runs of one stem, as with longer races, are one."""
    fast, open_one = comparison(paper=1.5), comparison("cifar10_resnet50_7x7", paper=1.5, n=3)
    again = comparison("cifar10_resnet50_timed", paper=1.5, n=3)
    small = comparison("cifar10_resnet", paper=1.5, n=3)

    def status(*found):
        judged = judge([of_comparison(str(i), each) for i, each in enumerate(found)])
        (claim,) = [each for each in judged if (each.source, each.measure) == ("table I", "throughput")]
        return status_of([each for each in judged[claim] if each.is_literal])

    assert status(fast, open_one) == NO_VERDICT
    assert status(fast, again, small) == PASS
    assert status(comparison("cifar10_resnet50_7x7", paper=1.1), fast) == FAIL


def test_a_bound_on_a_harder_rung_comes_before_a_figure_on_an_easier_one():
    """What is nearest where no rung of the target is there: of rungs from easy to hard."""
    easy, hard, never = (
        Finding("time_to_target", "a", figure=around(0.5), target=0.3),
        Finding("time_to_target", "a", said=">= 31.00x", target=0.6, at_least=31.0),
        Finding("time_to_target", "a", said="never reached by either arm", target=0.7),
    )
    assert nearest([easy, hard, never], None) is nearest([easy, hard, never], 0.85) is hard
    assert nearest([easy, hard, never], 0.7) is never
    assert nearest([easy, never], None) is easy
    assert nearest([never], None) is never


def rung(target, reached, said="", figure=None, **limits):
    """Return a finding of seconds to a target, of five pairs."""
    how = {"figure": figure, "said": said, "values": (1.0,) * 5, "reached": reached} | limits
    return Finding("time_to_target", "tuned_plan", "reference", "tuned", target=target, **how)


def test_a_gain_on_an_easier_rung_does_not_speak_for_an_arm_that_was_left_behind():
    easy = rung(0.3, (5, 5), figure=around(0.2))
    some = rung(0.4, (3, 5), "reached in some pairs only")
    never = rung(0.5, (0, 5), "never reached")
    ahead = rung(0.5, (4, 3), "reached in some pairs only")
    assert met("at most", 1 / 3, nearest([easy], None)) == PASS
    assert nearest([easy, ahead], None) is easy
    for harder in ((some,), (never,), (some, never)):
        found = nearest([easy, *harder], None)
        assert (found.target, found.behind_at) == (0.3, harder[-1].target)
        assert met("at most", 1 / 3, found) == NO_VERDICT
        assert met("at most", 0.1, found) == FAIL  # what it misses on the easier one it misses
    assert nearest([easy, some], 0.3) is easy  # which was asked for


@pytest.mark.parametrize(
    ("limit", "speed", "status"),
    [
        ("at_least", 3.0, PASS),
        ("at_least", 2.99, NO_VERDICT),
        ("at_least", 0.0, NO_VERDICT),
        ("at_most", 2.99, FAIL),
        ("at_most", 3.01, NO_VERDICT),
    ],
)
def test_a_bound_is_held_against_the_bar(limit, speed, status):
    bounded = rung(0.5, (0, 5), **{limit: speed})
    assert met("at most", 1 / 3, bounded) == status
    noise = replace(bounded, has_verdict=False)  # no control, say: that is no pass, and may be a miss
    assert met("at most", 1 / 3, noise) == (FAIL if status == FAIL else NO_VERDICT)
    assert met("at most", 1 / 3, replace(bounded, values=(1.0,) * 4)) == NO_VERDICT


@pytest.mark.parametrize(
    ("bound", "limits", "told"),
    [
        (">= 3.10x", {"at_least": 3.1}, "at least 3.10x the speed"),
        (">= 0.00x", {"at_least": 0.0}, "at least 0.00x the speed"),
        ("<= 0.80x", {"at_most": 0.8}, "at most 0.80x the speed"),
        ("reached in some pairs only", {}, "reached in some pairs only"),
    ],
)
def test_a_row_that_was_written_without_fields_for_its_bound_shows_the_same(bound, limits, told):
    made = comparison()
    old = replace(made.target_rows[0], ratio=None, bound=bound)
    assert limits_of(old) == (limits.get("at_least"), limits.get("at_most"))
    before, now = (shown(replace(made, target_rows=(row,)), "time_to_target") for row in (old, replace(old, **limits)))
    assert before == now
    (found,) = before
    assert (found.said, found.told, found.is_bounded) == (bound, told, bool(limits))


def test_a_row_that_was_written_without_a_field_for_what_failed_shows_the_same():
    made, failed = comparison(), "paper failed in 1 of 5 races and reference failed in 2 of 5 races"
    verdict = Verdict(NO_VERDICT, f"{failed}: the figure is of what ran")
    for rows in ("ratios", "target_rows"):
        old = replace(getattr(made, rows)[0], verdict=verdict)
        assert failure_of(old) == failed
        assert failure_of(getattr(made, rows)[0]) == ""
        before, now = (
            of_comparison("x", replace(made, **{rows: (row,)})).findings for row in (old, replace(old, failed=failed))
        )
        assert before == now
        assert [each.said for each in before if each.failed == failed] == [verdict.sentence]


def test_a_bound_of_an_arm_that_failed_is_held_against_no_bar():
    """A miss needs no verdict of its run: that bound would be one."""
    made, failed = comparison(), "paper failed in 1 of 5 runs"
    bounded = {"ratio": None, "bound": "<= 0.50x", "at_most": 0.5}
    row = replace(made.target_rows[0], **bounded, verdict=Verdict(NO_VERDICT, "<= 0.50x: it had crossed"))
    said = Verdict(NO_VERDICT, f"{failed}: {row.verdict.sentence}")
    broken, lost = replace(row, verdict=said), "it failed: no memory"
    cases = (
        (made, row, ("", "at most 0.50x the speed", True), FAIL),
        (made, broken, (failed, said.sentence, False), NO_VERDICT),
        (made, replace(broken, failed=failed), (failed, said.sentence, False), NO_VERDICT),
        (with_arm(made, "paper", error="no memory"), row, (lost, lost, False), NO_VERDICT),
    )
    for of, each, told, status in cases:
        (found,) = shown(replace(of, target_rows=(each,)), "time_to_target")
        assert (found.failed, found.told, found.is_bounded) == told
        assert met("at most", 0.9, found) == status


def test_a_recipe_that_failed_in_some_race_shows_nothing_and_says_so():
    made = with_arm(comparison(), "paper", error="no memory", mfu=0.9)
    for measure in ("time_to_target", "final_metric", "mfu"):
        (each,) = shown(made, measure, "paper")
        assert (each.said, each.failed) == ("it failed: no memory",) * 2
        assert met("at least", 0.0, each) == NO_VERDICT
    made, said = comparison(), "strong_plan failed in 1 of 6 races: do no harm"
    arms = (*made.arms, *(replace(made.arms[2], name=name, peak_bytes=100) for name in ("strong", "strong_plan")))
    row = RatioRow("do_no_harm", "strong_plan", "strong", "equivalent", around(1.0), Verdict("no verdict", said))
    (peak,) = shown(replace(made, arms=arms, ratios=(row,)), "peak_memory")
    assert (peak.said, met("at most", 2.0, peak)) == (said, NO_VERDICT)
    assert peak.failed == "strong_plan failed in 1 of 6 races"


def test_figures_stand_on_the_page_as_the_paper_has_them(tmp_path):
    # Twice as fast, in a precision whose peak is eight times as high: a quarter of the share.
    made = with_arm(comparison("cifar10_resnet", environment=CPU), "reference", mfu=0.4)
    page = page_of(tmp_path, of_comparison("a", with_arm(made, "equivalent_plan", mfu=0.1)))
    (line,) = [line for line in page.splitlines() if line.startswith("| FLOPs utilization | +38.8% | 40.0% | 10.0%")]
    assert re.search(r"\| -75\.0\d% \| -7\d\.\d+% to -7\d\.\d+% \| 5 \|", line)
    made = comparison("cifar10_resnet", environment=CPU)
    (row,) = [each for each in made.target_rows if each.arm == "equivalent_plan" and not each.charged]
    row = replace(row, target=0.6)
    never = {"arm_s": (math.inf,) * 5, "reached_arm": 0, "ratio": None, "bound": "never reached"}
    run = of_comparison("a", replace(made, target_rows=(row, replace(row, target=0.9, **never))))
    page = page_of(tmp_path, run)
    assert "| Time to accuracy 0.6, behind at 0.9 |" in page
    rates = [each for each in run.findings if (each.measure, each.arm) == ("throughput", "equivalent_plan")]
    more = f"{100 * (rates[0].figure.mean - 1):+.2f}% | {100 * (rates[0].figure.low - 1):+.2f}% to"
    assert any(more in line for line in page.splitlines() if line.startswith("| FLOPs utilization"))
    # As the paper's own column has it: the figure that is judged is positive where it is better.
    made = replace(comparison("wikitext2_gpt2"), higher_is_better=False, unit="relative", metric="perplexity")
    worse = Ratio(-3.0, -4.0, -2.0, 5, (-3.0,) * 5)
    rows = tuple(replace(row, ratio=worse) if row.metric == "final_metric_difference" else row for row in made.ratios)
    page = page_of(tmp_path, of_comparison("a", replace(made, ratios=rows)))
    (line,) = [each for each in page.splitlines() if each.startswith("| Final perplexity | +0.7% |") and "+3" in each]
    assert "+2.00% to +4.00%" in line
    assert "Of perplexity the change as it is: below 0 is better." in page
    said = " ".join(page_of(tmp_path, of_comparison("a", comparison())).split())
    assert "no clipping (eq. 12), and so P1 has none" in said


def on_half(ours, theirs, ends=("budget",) * 5):
    """Return the finding on 0.5 of arms that were raced: (seconds, held-out metric) of each, and how they ended."""

    def record(name, curves, end):
        points = tuple(Evaluation(100 * at, s, {"accuracy": value}) for at, (s, value) in enumerate(curves, 1))
        detail = {"rows": 1000, "train_s": curves[-1][0] + 1.0} | ({"error": "no memory"} if end == "error" else {})
        return RunRecord(Header(name, 0, None, {}, {"given_rows": 1000}), (), points, (), End(end, detail))

    races = {
        seed: {"tuned_plan": record("tuned_plan", ours, end), "reference": record("reference", theirs, "budget")}
        for seed, end in enumerate(ends)
    }
    control = Interval(1.0, 0.99, 1.01, 5)
    row = target_row(races, "tuned_plan", "reference", "tuned", 0.5, "accuracy", True, None, control)
    (found,) = shown(replace(comparison(), target_rows=(row,)), "time_to_target", "tuned_plan")
    return found


def test_from_races_to_what_is_held_against_the_bar():
    arrives = [(100.0, 0.2), (200.0, 0.6), (300.0, 0.7)]
    short = [(60.0, 0.1), (120.0, 0.3)]
    capped = on_half(short, arrives, ends=("cap",) * 5)
    assert (capped.said, capped.reached) == ("<= 1.46x", (0, 5))  # 175 s against 120 s
    assert (capped.at_least, capped.at_most) == (None, 1.46)
    assert met("at most", 1 / 3, capped) == FAIL
    assert met("at most", 0.9, capped) == NO_VERDICT
    ended = on_half(short, arrives)
    assert (ended.said, met("at most", 1 / 3, ended)) == ("never reached", NO_VERDICT)
    broken = on_half(short, arrives, ends=("cap",) * 4 + ("error",))
    assert broken.said.startswith("tuned_plan failed in 1 of 5 runs")
    assert broken.failed == "tuned_plan failed in 1 of 5 runs"
    assert met("at most", 1 / 3, broken) == NO_VERDICT
    neither = on_half(short, short, ends=("cap",) * 5)
    assert (neither.said, met("at most", 1 / 3, neither)) == ("never reached by either arm", NO_VERDICT)


@pytest.mark.parametrize(("low", "high", "status"), [(0.93, 0.98, PASS), (0.965, 0.975, PASS), (0.70, 0.73, FAIL)])
def test_no_harm_is_held_against_the_bar_that_is_asked_for(low, high, status):
    """That 0.97, its own, lies in the interval says nothing of another bar."""
    ratio = Ratio((low + high) / 2, low, high, 5, tuple(low + (high - low) * each / 4 for each in range(5)))
    row = RatioRow("do_no_harm", "strong_plan", "strong", "equivalent", ratio, non_inferiority(ratio))
    broken = replace(row, verdict=Verdict("no verdict", "strong_plan failed in 1 of 5 runs"))
    for each, expected in ((row, status), (broken, NO_VERDICT)):
        (found,) = shown(replace(comparison(), ratios=(each,)), "do_no_harm")
        assert met("at least", 1 / 1.35, found) == expected


def test_what_keeps_a_figure_from_a_verdict_is_said():
    """That the control has too few pairs is not that the interval holds the bar."""
    of = comparison(paper=1.5, plan=2.0)
    few = Verdict("no verdict", "no A/A control of 5 pairs (3 ran), so 2.00x may be noise")
    run = of_comparison("gpu", replace(of, target_rows=tuple(replace(row, verdict=few) for row in of.target_rows)))
    for arm in ("paper", "equivalent_plan"):
        found = judged([run], "table I", "time_to_target", arm)
        assert {(each.status, each.why) for each in found} == {(NO_VERDICT, few.sentence)}
    failed = Verdict("no verdict", "paper failed in 1 of 5 runs")
    broken = replace(of, ratios=tuple(replace(row, verdict=failed) for row in of.ratios))
    for made, why in ((comparison(paper=1.274), "the interval holds it"), (broken, failed.sentence)):
        (holds,) = judged([of_comparison("gpu", made)], "table I", "throughput")
        assert (holds.status, holds.why) == (NO_VERDICT, why)


def test_efficiency_is_of_its_number_of_ranks_and_of_ranks_that_share_nothing():
    def by_plan(run, ranks):
        claim = next(claim for claim in CLAIMS if claim.ranks == ranks)
        return [each for each in judge([run])[claim] if each.finding.arm == "plan"]

    (found,) = by_plan(of_scaling("s", scaled(0.99)), 2)
    assert found.status == PASS
    assert by_plan(of_scaling("s", scaled(0.99)), 4) == []
    (crowded,) = by_plan(of_scaling("s", scaled(0.99, crowded="cores")), 2)
    assert crowded.status == NO_VERDICT
    assert "share cores" in crowded.why


def test_a_component_is_judged_alone_and_not_in_the_plan():
    claim = claim_of(says=FASTER)
    (alone,) = judge([of_ablation("a", ablation(1.3))])[claim]
    assert (alone.status, alone.finding.part) == (PASS, "precision")
    for setting in ("in the plan", "interaction"):
        assert judge([of_ablation("a", ablation(1.3, setting=setting))])[claim] == ()
    run = of_ablation("b", ablation())
    (where,) = {row[-2] for row in claim_table(judge([run]), "", [run], whole=False).rows}
    assert where == "1: cifar10_resnet50, precision alone"
    # One that failed in some race has no verdict on its speed; shares by third are of the races that it survived.
    thirds = third_row("paper", "", around(0.1)), third_row(saved=around(0.1))
    made = replace(comparison(), thirds=thirds)
    failed = Verdict(NO_VERDICT, "paper failed in 1 of 6 races")
    ratios = tuple(replace(row, verdict=failed) if row.arm == "paper" else row for row in made.ratios)
    run = of_comparison("a", replace(made, ratios=ratios))
    stands = {each.finding.arm: (each.status, each.why) for each in judge([run])[claim_of(part=("early",))]}
    assert stands["paper"] == (NO_VERDICT, "its races do not show that it is faster")
    assert stands["equivalent_plan"][0] == FAIL


def test_an_ablation_is_shown_with_its_interactions_the_whole_and_what_is_told_from_nothing(tmp_path):
    made = ablation(1.3)
    arms = {"plan": "the plan", "unchanged": "the loop, nothing changed", "unchanged_again": "the loop again"}
    made = replace(
        made,
        effects=(
            *made.effects,
            ChangeEffect("precision", "interaction", "throughput", "equivalent", around(0.9), GAIN),
        ),
        arms=tuple(AblatedArm(name, label, ("precision",) * (name == "plan")) for name, label in arms.items()),
        whole=(RatioRow("throughput", "plan", "reference", "equivalent", around(1.2), GAIN),),
        controls=(RatioRow("throughput", "unchanged_again", "unchanged", "", around(0.95), GAIN),),
        interaction_control=around(0.97),
    )
    page = page_of(tmp_path, of_ablation("a", made))
    for line in (
        "| precision bf16 | + mixed precision | throughput | interaction | -10.00% |",
        "| the plan |  | throughput | the reference | +20.00% |",
        "| the loop again |  | throughput | the loop, nothing changed | -5.00% |",
        "| nothing (control of interactions) |  | throughput | interaction | -3.00% |",
    ):
        assert line in page


def timed_row(ours_s, theirs_s, *, target=0.85, plan_kind="equivalent", ratio=None, bound=""):
    """Return the time to a target of five pairs; infinite where an arm never reached it."""
    reached = [5 if math.isfinite(seconds) else 0 for seconds in (ours_s, theirs_s)]
    return TargetRow(
        target,
        "plan",
        "unchanged",
        plan_kind,
        False,
        ratio,
        bound,
        *reached,
        5,
        0,
        arm_s=(ours_s,) * 5,
        against_s=(theirs_s,) * 5,
        verdict=GAIN,
    )


NEITHER = {"ours_s": math.inf, "theirs_s": math.inf, "bound": "never reached by either arm"}


@pytest.mark.parametrize(
    ("speed", "target", "status"), [(1.3, 0.85, PASS), (1.05, 0.85, FAIL), (1.3, 0.6, NOT_COMPARABLE)]
)
def test_less_time_is_judged_by_the_time_to_the_target_where_it_is_known(speed, target, status, tmp_path):
    """The throughput says something else here, as it may where a change is of the training."""
    row = timed_row(85.0 / speed, 85.0, target=target, ratio=around(speed))
    wanted = replace(ablation(2.0 if status is FAIL else 0.5), times=(ChangeTime("precision", "alone", row),))
    run = of_ablation("a", wanted)
    (found,) = judge([run])[claim_of(says=FASTER)]
    assert (found.status, found.finding.measure, found.finding.target) == (status, "component_time", target)
    assert found.finding.figure.mean == pytest.approx(1 / speed, rel=0.01)
    assert not found.why.startswith("by throughput")
    assert f"| time to {target:g} | alone |" in page_of(tmp_path, run)


def test_less_time_is_judged_by_throughput_only_where_that_is_said():
    claim = claim_of(says=FASTER)
    for times in ((), (ChangeTime("precision", "alone", timed_row(**NEITHER)),)):
        (found,) = judge([of_ablation("a", replace(ablation(1.3), times=times))])[claim]
        assert (found.status, found.finding.measure) == (PASS, "component_throughput")
        assert found.why.startswith("by throughput, as no time to a target is known: ")
        assert judge([of_ablation("a", replace(ablation(1.05), times=times))])[claim][0].status == FAIL
    lost = timed_row(math.inf, 85.0, bound="never reached")
    (found,) = judge([of_ablation("a", replace(ablation(1.3), times=(ChangeTime("precision", "alone", lost),)))])[claim]
    assert (found.status, found.finding.measure, found.why) == (NO_VERDICT, "component_time", "never reached")
    # A row may teach less of it: tuned no seconds a row stand for those to a target.
    claim = claim_of(says="schedule: 4.9% less time")
    never = timed_row(**NEITHER, plan_kind="tuned")
    made = replace(ablation(), effects=(ChangeEffect("schedule", "alone", "throughput", "tuned", around(1.3), GAIN),))
    assert judge([of_ablation("a", made)])[claim] == ()
    (found,) = judge([of_ablation("a", replace(made, times=(ChangeTime("schedule", "alone", never),)))])[claim]
    assert (found.status, found.finding.measure) == (NO_VERDICT, "component_time")
    assert found.why == "never reached by either arm"


ARMS = ("reference", "plan")
MADE_UP = DeviceSpec("made up", "cuda", None, {}, None, "made up", 1)


def test_a_share_of_the_gain_is_held_against_its_claim(tmp_path):
    """By phase and bound as the equivalent plan was clocked, by third as every arm's races ran."""
    thirds = third_row("paper", "", around(0.35)), third_row(saved=around(0.1))
    theirs = clocked({"data": 0.1, "forward": 1.0, "backward": 2.0})
    ours = clocked({"data": 0.1, "forward": 0.8, "backward": 1.2})
    gain = TimedGain("cifar10_resnet50", theirs, ours, "", MADE_UP)
    run = of_comparison("runs/a", replace(comparison(environment=GPU), thirds=thirds, gain=gain))
    found = {(each.arm, each.part): each for each in run.findings if each.measure == "gain_share"}
    assert found["equivalent_plan", "backward"].figure.mean == pytest.approx(0.8)
    assert found["equivalent_plan", "backward"].figure.n == len(NOISE)
    assert {part for arm, part in found if arm == "paper"} == {"early"}
    early = claim_of(part=("early",))
    by_arm = {each.finding.arm: each.status for each in judge([run])[early]}
    assert by_arm == {"paper": PASS, "equivalent_plan": FAIL}
    even = tuple(replace(each, saved=Ratio(0.34, 0.30, 0.38, 5, (0.34,) * 5)) for each in thirds)
    judged_even = judge([of_comparison("runs/a", replace(comparison(environment=GPU), thirds=even))])[early]
    assert {(each.status, each.why) for each in judged_even} == {(NO_VERDICT, "the interval holds a third")}
    assert judge([run])[claim_of(part=("communication",))] == (), "one process"
    page = page_of(tmp_path, run)
    assert "early" in next(line for line in page.splitlines() if line.startswith("| 35% of the gain early"))


@pytest.mark.parametrize(
    ("task", "part", "claimed", "says"),
    [
        ("cifar10_resnet50", "early", "35%", "35% of the gain early in training"),
        ("wikitext2_gpt2", "backward", "28%", "28% of the gain in the backward"),
    ],
)
def test_shares_stand_beside_what_the_paper_claims_of_such_a_model(task, part, claimed, says):
    thirds = (third_row(saved=around(0.4)),)
    run = of_comparison("a", replace(comparison(task), gain=gain(task), thirds=thirds))
    told = {row[0]: row[1] for row in gain_table(run, "equivalent").rows}
    assert {"early", "backward"} <= told.keys()
    assert {name: claim for name, claim in told.items() if claim} == {part: claimed}
    rows = claim_table(judge([run]), "", [run], whole=False).rows
    assert [row[-2] for row in rows if row[0] == says] == [f"1: {task}, {part}"]


def phase_page(num_ranks: int = 2, gains: int = 1) -> PhaseResult:
    """Return rounds in which communication takes 0.1 s less, of 1 s that a step takes less."""
    theirs, ours = (
        clocked({"forward": forward, "communication": communication})
        for forward, communication in ((1.0, 0.4), (0.1, 0.3))
    )
    gain = TimedGain("cifar10_resnet50", theirs, ours, "bf16", MADE_UP, num_ranks, GPU)
    return PhaseResult((gain,) * gains, ((),) * gains)


def read_phases(folder, result):
    """Return the run of a phase table that lies in a folder."""
    (folder / "phases.json").write_text(to_json(result))
    (run,) = read_runs([folder])
    return run


def test_a_phase_table_is_a_run(tmp_path):
    run = read_phases(tmp_path, phase_page())
    assert (run.kind, run.task, run.environment) == ("phases", "cifar10_resnet50", GPU)
    assert "on 2 ranks" in run.headline.sentence
    (judged,) = judge([run])[claim_of(part=("communication",))]
    assert judged.finding.figure.mean == pytest.approx(0.1)
    page = page_of(tmp_path / "page", run, of_comparison("b", comparison(environment=GPU)))
    assert "cifar10_resnet50 on 2 ranks: reference" in page
    assert "10.0%" in next(line for line in page.splitlines() if line.startswith("| communication | 15%"))
    assert "Not clocked by phase: 2: cifar10_resnet50." in page
    of_paper, of_ours = [line for line in page.splitlines() if line.startswith("| 15% of the gain in communication")]
    assert "not measured" in of_paper
    assert "on 2 ranks" in of_ours
    assert judged.status == NO_VERDICT, "rounds of one process have no control"
    assert "no races show that the plan gains" in judged.why
    raced = replace(comparison(environment=GPU), gain=replace(phase_page().gains[0], num_ranks=1))
    assert {each.has_verdict for each in shown(raced, "gain_share")} == {True}
    throughput = [replace(row, verdict=Verdict("no gain", "")) for row in raced.ratios]
    unproved = replace(raced, ratios=tuple(throughput))
    assert {each.has_verdict for each in shown(unproved, "gain_share")} == {False}


def test_shares_of_a_phase_table(tmp_path):
    page = phase_page()
    slower = replace(page.gains[0], reference=page.gains[0].plan, plan=page.gains[0].reference)
    run = read_phases(tmp_path, replace(page, gains=(slower,)))
    assert run.findings == ()
    text = page_of(tmp_path / "page", run)
    row = next(line for line in text.splitlines() if line.startswith("| communication |"))
    assert row.count("not reported") == 1
    run = read_phases(tmp_path, replace(phase_page(), thirds=((third_row(saved=around(0.4)),),)))
    assert "early" in {each.part for each in run.findings}


def rounds_of(lap):
    """Return a phase table whose plan has only rounds like this one."""
    page = phase_page()
    return replace(page, gains=(replace(page.gains[0], plan=ArmPhases((lap,) * len(NOISE))),))


@pytest.mark.parametrize(
    "result",
    [
        rounds_of(TimedRound({"forward": 1.0}, {}, 0.0)),
        rounds_of(TimedRound({}, {}, 1.0)),
        rounds_of(TimedRound({"forward": 0.0}, {}, 1.0)),
        phase_page(gains=0),
        phase_page(gains=2),
    ],
    ids=["a step of no time", "no phase", "a phase of no time", "no plan", "several plans"],
)
def test_a_phase_table_that_is_no_run_is_refused(tmp_path, result):
    with raises(FormatError, code="format.invalid"):
        read_phases(tmp_path, result)


def test_a_phase_table_keeps_its_own_machine_wherever_it_lies(tmp_path):
    run = comparison(environment=CPU)
    (tmp_path / "report.json").write_text(to_json(run))
    (tmp_path / "phases.json").write_text(to_json(phase_page()))
    with raises(FormatError, code="format.invalid"):
        read_runs([tmp_path])
    both = read_runs([tmp_path / "report.json", tmp_path / "phases.json"])
    assert [each.environment for each in both] == [CPU, GPU]


def test_machines_are_told_apart_and_never_meet_in_a_ratio():
    one, other = of_comparison("a", comparison()), of_comparison("b", on(comparison(), gpu="NVIDIA H100"))
    assert list(letters([one, other]).values()) == ["A", "B"]
    assert sameness([one, other])[0].startswith("The runs are of 2 kinds of machine. Every ratio is of one run")
    assert sameness([one, one]) == ("All runs are of one kind of machine and of the same versions.",)
    newer = of_comparison("c", on(comparison(), sources="def"))
    assert sameness([one, newer]) == ("All runs are of one kind of machine.", "Not all runs are of the same sources.")
    unknown = of_comparison("d", replace(comparison(), environment={}))
    assert letters([unknown]) == {(): "not recorded"}
    assert "the machine was not recorded" in sameness([unknown, one])[0]
    other_data = of_comparison("e", replace(comparison(), data_source={"sha256": "cd" * 32}))
    assert sameness([one, other_data])[-1] == "Runs of cifar10_resnet50 are of different data."

    def figures(runs):
        return [row for row in evaluation_object(runs, "")["rows"] if row["metric"] not in ("claim", "arithmetic")]

    alone = {json.dumps(row) for run in (one, other) for row in figures([run])}
    together = [row | {"machine": "A"} for row in figures([one, other])]
    assert {json.dumps(row) for row in together} == alone  # side by side, nothing is added


@pytest.fixture
def folder(tmp_path):
    """Return a folder with one run of each kind."""
    for name, file, value in (
        ("compared", "report.json", comparison()),
        ("ablated", "report.json", ablation()),
        ("scaled", "scaling.json", scaled()),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / file).write_text(to_json(value))
    write_record(tmp_path / "run.jsonl", recorded())
    return tmp_path


def test_runs_are_read_by_what_they_hold(folder):
    names = ("compared", "ablated", "scaled", "run.jsonl", "compared/report.json")
    runs = read_runs([folder / name for name in names[:4]])
    assert [run.kind for run in runs] == ["comparison", "ablation", "scaling", "record"]
    assert read_runs([folder / "compared" / "report.json"])[0].findings == runs[0].findings
    assert len({kind.key for kind in KINDS}) == len(KINDS)
    with raises(ValueGivenError, code="value.invalid", field="runs"):
        read_runs([folder / "compared", folder / "compared" / "report.json"])


def test_races_that_ran_at_several_states_of_the_sources_are_told_of_all(folder):
    """The result may have been written down as of one: what counts is what its races say."""
    for path, state in (
        ("compared/race-0", "abc"),
        ("compared/race-1", "def"),
        ("compared/brief-1", "abc"),
        ("scaled/other-0", "zzz"),  # no race's folder
    ):
        (folder / path).mkdir()
        write_record(folder / path / "self.jsonl", recorded(CPU | {"sources": state}))
    runs = read_runs([folder / "compared", folder / "scaled"])
    assert runs[0].environment["sources"] == "abc / def"
    assert runs[1].environment["sources"] == "abc"
    assert "sources" in sameness(runs)[-1]
    assert "sources abc / def" in page_of(folder / "out", *runs)
    (folder / "compared" / "race-1" / "self.jsonl").write_text("{")
    with raises(FormatError, code="record.no_header"):
        read_runs([folder / "compared"])


def test_a_plan_for_a_longer_run_is_said_where_planning_is_counted(folder):
    settings = folder / "compared" / "settings.json"
    settings.write_text(json.dumps({"planned_samples": "4096000", "budget_samples": "40960"}))
    (run,) = read_runs([folder / "compared"])
    page = page_of(folder / "out", run)
    said = "planning counted (planned as a run of 100 times the rows)"
    assert f"| Time to 85% accuracy, {said} | -26.2% |" in page
    assert f"1: cifar10_resnet50, {said}" in page
    settings.write_text(json.dumps({"planned_samples": "None", "budget_samples": "40960"}))
    assert read_runs([folder / "compared"])[0].planned == ""
    for damaged, code in (
        ("{", "settings.damaged"),
        ('{"planned_samples": "x", "budget_samples": "1"}', "format.invalid"),
        ('{"planned_samples": "1", "budget_samples": "0"}', "format.invalid"),
    ):
        settings.write_text(damaged)
        with raises(FormatError, code=code):
            read_runs([folder / "compared"])


DAMAGED = {
    "absent": (None, "No such file"),
    "torn.json": ('{"target_rows": [', "invalid JSON"),
    "binary.json": (b"\xff\xfe", "utf-8"),
    "other.json": ('{"a": 1}', "JSON of something else"),
    "list.json": ("[]", "JSON of something else"),
    "rows.json": ('{"schema": 1, "name": "compare", "rows": []}', "the rows that benchmark 'compare' printed"),
    "older.json": (to_json(replace(comparison(), schema=3)), "comparison.schema: got 3"),
    "short.json": ('{"target_rows": [], "task": "x"}', "is missing"),
    "torn.jsonl": ("{", "an incomplete first line"),
}


@pytest.mark.parametrize(("name", "text", "said"), [(name, *case) for name, case in DAMAGED.items()], ids=DAMAGED)
def test_what_is_no_run_is_refused_by_name(tmp_path, name, text, said):
    path = tmp_path / name
    if text is not None:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(FormatError) as raised:
        read_runs([path])
    assert name in str(raised.value)
    assert said in str(raised.value)


def test_folders_that_hold_no_result_say_what_to_do(tmp_path):
    with raises(FormatError, code="format.invalid"):
        read_runs([tmp_path])
    (tmp_path / "settings.json").write_text("{}")
    with raises(FormatError, code="format.invalid"):
        read_runs([tmp_path])


def test_the_page_has_the_papers_tables_beside_what_was_measured(folder):
    runs = read_runs([folder / name for name in ("compared", "ablated", "scaled", "run.jsonl")])
    paths = write_evaluation(runs, folder / "out", "trimtab report a b")
    markdown, page = (paths[kind].read_text() for kind in ("md", "html"))
    first = markdown.splitlines()[2]
    assert first.startswith("**1 of 24 shown**: Of the paper's 24 claims, by its own recipe (P1): 1 shown, 3 missed")
    for line in (
        "| Time to 85% accuracy | -26.2% | 85 s | 42.5 s | -50.00% |",
        "| Time to 85% accuracy, planning counted | -26.2% | 85 s | 42.5 s | -50.00% |",
        "| 27.4% more images per second | **fail**: the whole interval is short of it; on another GPU, ",
        "on another GPU, NVIDIA H200 | +10.00% | +8.92% to +11.08% |",
        "| perplexity 45 in 23.8% less time | **not measured**: no run of it was given |  |  |  |  | table II |",
        "| precision bf16 | + mixed precision | throughput | alone | +30.00% |",
        "| 4 | 4,250 img/s | 5,980 img/s | 85.7% | 94.6% |",
    ):
        assert line in markdown
    assert "<script" not in page
    assert '<span class="badge gain">pass</span>' in page
    assert '<span class="badge harm">fail</span>' in page
    rows = json.loads(paths["json"].read_text())["rows"]
    statuses = {row["claim"]: row["status"] for row in rows if row["metric"] == "claim" and row.get("arm") == "paper"}
    assert statuses["27.4% more images per second"] == FAIL
    assert statuses["accuracy within 0.5%"] == PASS


def test_tasks_that_were_clocked_stand_side_by_side_with_what_their_steps_project(tmp_path):
    images, text = (replace(comparison(task), gain=gain(task)) for task in ("cifar10_resnet50", "wikitext2_gpt2"))
    runs = [of_comparison(*each) for each in (("i", images), ("t", text), ("u", comparison("unclocked")))]
    page = page_of(tmp_path, *runs)
    table = page[page.index("### Side by side") :]
    line = next(line for line in table.splitlines() if line.startswith("| backward | "))
    assert line.split(" | ")[1] == line.split(" | ")[4] == "57.1%"  # of a step's 1.4 s
    assert "- Run 1: Net speed-up" in page
    assert re.search(r"Run 1: Net speed-up .* without recomputation", page)
    assert "Not clocked by phase: 3: unclocked." in page


def test_of_many_runs_one_of_images_stands_beside_one_of_text(tmp_path):
    """That with most laps of a plan that changes something, in one process."""
    few, text = gain("cifar10_resnet50"), gain("wikitext2_gpt2")
    idle, slower = replace(few, changes=""), replace(few, reference=few.plan, plan=few.reference)
    arms = few.reference, few.plan
    fewer = replace(few, **{name: replace(arm, laps=arm.laps[:2]) for name, arm in zip(ARMS, arms, strict=True)})
    ranks = replace(
        few, **{name: replace(vars(few)[name], laps=4 * vars(few)[name].laps) for name in ARMS}, num_ranks=2
    )
    all_of = [fewer, few, idle, slower, ranks, text]
    runs = [of_comparison(str(at), replace(comparison(each.task), gain=each)) for at, each in enumerate(all_of)]
    page = page_of(tmp_path, *runs)
    head = page[page.index("### Side by side") :].splitlines()[2]
    assert head.count("cifar10_resnet50: reference") == head.count("wikitext2_gpt2: reference") == 1
    assert "ranks" not in head
    assert "Beside one another stand run 4 and run 6" in page  # of equals the last, whichever gains
    assert page.count("Net speed-up") == 6


def test_what_one_arm_or_the_clock_does_not_tell_stands_in_no_cell(tmp_path):
    whole = gain("cifar10_resnet50")
    laps = tuple(replace(each, plain_s=each.plain_s / 1.5) for each in whole.reference.laps)
    distorted = replace(whole, reference=replace(whole.reference, laps=laps))
    compiled = replace(whole, plan=replace(whole.plan, roofs={}))
    for found, backward, bound in (
        (distorted, ["not reported"] * 3, []),
        (compiled, ["57.1%", "54.3%", "63.7%"], ["57.1%", "unknown"]),
    ):
        page = page_of(tmp_path, of_comparison("i", replace(comparison(found.task), gain=found)))
        lines = [line.split(" | ") for line in page[page.index("### Side by side") :].splitlines()]
        cells = {line[0].strip("| "): [each.strip(" |") for each in line[1:]] for line in lines}
        assert cells["backward"][:3] == backward
        assert cells.get("compute-bound", [])[:2] == bound
        assert ("without recomputation" in page) == (found is compiled)


@pytest.mark.parametrize(
    ("end", "steps", "joules"),
    [
        # Counted from the step that the run resumed at: over all rows it would be half.
        ({"energy_j": 40.0, "energy_s": 1.0, "energy_from_step": 2}, 4, 2.0),
        # Up to a second of training before each evaluation is not counted: over all rows it would be too little.
        ({"energy_j": 30.0, "energy_s": 1.5}, 4, 1.0),
    ],
    ids=["resumed", "between evaluations"],
)
def test_joules_per_row_are_of_the_rows_that_were_counted(end, steps, joules):
    rows = tuple(StepRecord(i, 10, 10.0, 1.0, 0.1, 0.5) for i in range(steps))
    found = of_record("r", replace(recorded(), steps=rows, end=End("closed", end | {"energy": "measured"})))
    assert [each.value for each in found.findings if each.measure == "energy"] == [joules]


def test_joules_are_shown_with_what_counted_them_or_why_nothing_did(tmp_path):
    absent = of_comparison("a", comparison())
    counted_by = "measured (rapl package-0); includes 20 W of idle power"
    found = Finding("energy", "equivalent_plan", "reference", "equivalent", value=2.0, figure=around(0.8))
    metered = replace(absent, findings=(found,), meter=counted_by)
    ends = {"energy_j": 40.0, "energy_s": 1.0, "energy": "estimated"}
    given = of_record("r", replace(recorded(), end=End("closed", ends)))
    missing = of_record("m", replace(recorded(), end=End("closed", ends | {"energy_j": None, "energy_reason": "gone"})))
    page = page_of(tmp_path, absent, metered, given, missing, of_record("u", recorded()))
    energy = page[page.index("## Energy") : page.index("## Single runs")].splitlines()
    rows = [line.split(" | ") for line in energy if line.startswith("| ") and line[2].isdigit()]
    assert [row[0].strip("| ")[0] for row in rows] == ["1", "2", "3", "4"]
    assert rows[0][2].startswith("not measured")
    assert rows[1][2:5] == [counted_by, "2 J", "-20.00%"]
    assert rows[2][1:4] == ["one run", "estimated", "2 J"]
    assert rows[3][2:4] == ["not measured: gone", "not measured"]
    every = [row for row in evaluation_object([metered, given], "")["rows"] if row["metric"] == "energy"]
    assert [row["meter"] for row in every] == [counted_by, "estimated"]


def test_joules_of_a_batch_are_told_as_those_of_a_row_and_against_whom(tmp_path):
    made = comparison()
    energy = [
        RatioRow("energy", "equivalent_plan", against, "equivalent", around(0.8), GAIN)
        for against in ("reference", "paper")
    ]
    made = replace(
        made,
        arms=tuple(replace(each, joules=(16.0,) * 5) for each in made.arms),
        ratios=tuple(energy),
        meter=MeterFacts(Provenance.MEASURED, ("nvml gpu 0",)),
    )
    one, two, uneven = (
        replace(made, plans={"equivalent": Plan.fixed(rows)}, num_ranks=ranks, batch_size=batch_size)
        for rows, ranks, batch_size in ((8, 1, None), (8, 2, None), (3, 3, 8))  # the last: of 3, 3 and 2 rows
    )
    for each, joules in ((one, 2.0), (two, 1.0)):
        assert [(found.value, found.baseline) for found in shown(each, "energy")] == [(joules, joules)] * 2
    assert {found.value for found in shown(uneven, "energy")} == {2.0}
    page = page_of(tmp_path, of_comparison("a", two))
    lines = [line.split(" | ")[1:5] for line in page.splitlines() if "nvml gpu 0" in line]
    label = "label of equivalent_plan"
    assert [line[0] for line in lines] == [label, f"{label}, against label of paper"]
    assert [line[2:] for line in lines] == [["1 J", "-20.00%"]] * 2
    page = page_of(tmp_path, of_comparison("a", made))  # nothing says how many rows a batch has
    assert page.count("| not measured | -20.00% |") == 2


@pytest.mark.parametrize(
    ("bound", "said"), [("<= 6.32x", "at most 6.32x the speed"), (">= 1.90x", "at least 1.90x the speed")]
)
def test_a_bound_amid_changes_in_time_says_that_it_is_of_speeds(tmp_path, bound, said):
    made = comparison()
    rows = tuple(replace(row, ratio=None, bound=bound) for row in made.target_rows)
    page = page_of(tmp_path, of_comparison("a", replace(made, target_rows=rows)))
    lines = [line for line in page.splitlines() if line.startswith(("| Time to 85%", "| 85% accuracy in"))]
    assert sum(said in line for line in lines) == 6
    assert not any(word in page for word in (bound, bound.replace("<", "&lt;").replace(">", "&gt;")))


@pytest.mark.parametrize(
    ("gpu", "mfu", "said"),
    [
        ("NVIDIA GeForce RTX 3090", FAIL, ""),
        ("NVIDIA H200", NOT_COMPARABLE, "; on another GPU, NVIDIA H200"),
        ("NVIDIA GeForce RTX 3090 Ti", NOT_COMPARABLE, "; on another GPU, NVIDIA GeForce RTX 3090 Ti"),
    ],
)
def test_of_another_gpu_ratios_are_compared_by_its_name_and_no_share_of_its_peak(gpu, mfu, said):
    run = of_comparison("a", on(comparison(paper=1.5), gpu=gpu))
    (speed,) = judged([run], "table I", "throughput")
    assert (speed.status, speed.why) == (PASS, f"the whole interval is as claimed or beyond{said}")
    (share,) = judged([run], "table I", "mfu")
    assert (share.status, share.here) == (mfu, FAIL)


def test_what_files_say_is_escaped(folder):
    hostile = "<script>alert(1)</script>|x"
    found = replace(comparison(), command=hostile, environment=GPU | {"gpu": hostile})
    paths = write_evaluation([of_comparison(hostile, found)], folder / "out", hostile)
    assert "<script>" not in paths["html"].read_text()
    assert "<script>" not in paths["md"].read_text().partition("## Reproduce")[0]


def test_a_record_is_no_ratio_and_has_the_speed_of_its_laps():
    run = of_record("r", recorded())
    assert [each.figure for each in run.findings] == [None, None]
    assert run.findings[0].value == pytest.approx(20.0)
    assert "cut off" in run.headline.sentence
    run = of_record("r", race_records.record(blocks=[(10, 1.0), (20, 2.0)], name="equivalent_plan"))
    assert [each.value for each in run.findings if each.measure == "throughput"] == pytest.approx([10.0])
    assert run.headline.sentence == "equivalent_plan, seed 0: 30 rows of a race, ended: budget"
    end = End("closed", {"energy_j": 40.0, "energy_s": 2.0, "energy": "measured"})
    for others, told in (((), 1), ((OTHER_RANKS,), 0)):
        meter = MeterFacts(Provenance.MEASURED, ("nvml gpu 0",), 60.0, uncounted=others)
        header = replace(recorded().header, detail={"meter": to_jsonable(meter)})
        found = of_record("r", replace(recorded(), header=header, end=end))
        assert len([each for each in found.findings if each.measure == "energy"]) == told
        assert found.meter == meter.describe()
    assert of_scaling("s", scaled()).environment["threads"] == "1 a rank"
    assert of_scaling("s", replace(scaled(), threads=())).environment["threads"] == "2"


def test_the_command_writes_the_page_of_several_runs(folder, capsys):
    out = folder / "page"
    main([str(folder / "compared"), str(folder / "scaled"), "--out", str(out), "--json"])
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert "claim" in {row["metric"] for row in rows}
    assert {path.name for path in out.iterdir()} == {"evaluation.html", "evaluation.md", "evaluation.json"}
    main([str(folder / "compared"), "--out", str(out)])
    assert capsys.readouterr().out.rstrip().endswith("evaluation.html")
    with pytest.raises(SystemExit, match="absent"):
        main([str(folder / "absent"), "--out", str(out)])


def claim_of(**fields):
    """Return the one claim with these fields."""
    (claim,) = [each for each in CLAIMS if all(getattr(each, name) == value for name, value in fields.items())]
    return claim


FASTER = "mixed precision: 9.4% less time"
