"""Figures of a comparison: verdicts, quality, effects of changes, flat rows, text and page."""

from __future__ import annotations

import struct
from dataclasses import replace
from pathlib import Path

import pytest

from trimtab.core.choice import Proof
from trimtab.core.energy_reading import NO_METER, MeterFacts, Provenance
from trimtab.core.errors import FormatError
from trimtab.core.hardware import DeviceSpec
from trimtab.core.objective import Reference
from trimtab.core.serialization import from_json, to_json
from trimtab.experiments.benchmark_rows import benchmark_object
from trimtab.experiments.comparison import Comparison, headline_of, html_of, screen_of
from trimtab.experiments.result_table import CONTROL, ENERGY, FLOPS, LOSS, PEAK, SAMPLES, SECONDS, ResultTable, Row
from trimtab.experiments.time_to_target import QualityMetric
from trimtab.plans.plan import Plan

JITTER = (1.0, 1.002, 0.999, 1.001, 0.998)


def comparison(speeds, *, evaluated=None, pairs=5, losses=True, title="digits", **changes):
    """Return a comparison of arms with these speeds; `evaluated` are the last accuracies by arm."""
    rows = []
    arms = {"baseline": 1.0, CONTROL: 1.0, **speeds}
    for seed in range(pairs):
        for index, (arm, speed) in enumerate(arms.items()):
            for number in range(8):
                seconds = JITTER[(seed + index) % 5] / speed
                rows.append(Row(arm, seed, number, SECONDS, seconds, "s"))
                rows.append(Row(arm, seed, number, SAMPLES, 10.0, "samples"))
                rows.append(Row(arm, seed, number, ENERGY, 40 * seconds, "J"))
                if losses:
                    rows.append(Row(arm, seed, number, LOSS, 2.0 - 0.1 * number, ""))
                if evaluated is not None:
                    value = evaluated.get(arm, 0.9) * (number + 1) / 8 + 0.0001 * seed
                    rows.append(Row(arm, seed, number, "evaluation:accuracy", value, ""))
    for index, arm in enumerate(arms):
        rows += [Row(arm, -1, -1, PEAK, 2.0**30 / (1 + index), "B"), Row(arm, -1, -1, FLOPS, 1e9, "FLOP")]
    found = {
        "plans": {"plan": Plan.fixed(10, 5, fused_optimizer=True)},
        "reference": Reference("fp32"),
        "task": "digits",
        "meter": MeterFacts(Provenance.MEASURED, ("rapl",)),
        "device": DeviceSpec("cpu", "cpu", peak_flops={"fp32": 1e12}),
        "precisions": dict.fromkeys(arms, "fp32"),
    }
    return Comparison(title, ("baseline", *speeds), 80, ResultTable.of(rows), **found | changes)


@pytest.mark.parametrize(("ours", "verdict"), [(0.9, "equal"), (0.93, "better"), (0.87, "worse")])
def test_quality_is_judged_by_half_a_point(ours, verdict):
    metric = QualityMetric("accuracy", targets=(0.5,))
    found = comparison({"plan": 1.5}, evaluated={"plan": ours}, metric=metric)
    assert found.quality_verdict() == verdict
    assert found.metric_difference().mean == pytest.approx(100 * (ours - 0.9), abs=0.01)
    assert replace(found, failures={"plan": "diverged"}).quality_verdict() == "no verdict"
    assert comparison({"plan": 1.5}, evaluated={"plan": ours}, metric=metric, pairs=4).quality_verdict() == "no verdict"
    assert comparison({"plan": 1.5}).metric_difference() is None


def test_energy_memory_and_utilisation():
    found = comparison({"plan": 2.0})
    assert found.energy().mean == pytest.approx(0.5, rel=1e-2)
    assert found.energy().low < found.energy().mean < found.energy().high
    assert found.memory() == pytest.approx(1 / 3)
    assert found.utilisation("baseline") == pytest.approx(0.01, rel=1e-2)
    assert found.utilisation("plan") == pytest.approx(0.02, rel=1e-2)
    assert replace(found, device=None).utilisation("plan") is None
    assert found.terms_per_s("plan")[0] == pytest.approx(20, rel=1e-2)


def test_times_to_targets_count_planning():
    plan = replace(Plan.fixed(10, 5), planning_s=2.0)
    metric = QualityMetric("accuracy", targets=(0.3, 0.6))
    found = comparison({"plan": 2.0}, evaluated={}, metric=metric, plans={"plan": plan})
    charged, plain = (found.times_to_target("plan", charged=each)[1] for each in (True, False))
    assert plain.speed.mean == pytest.approx(2.0, rel=1e-2)
    assert charged.arm_s[0] == pytest.approx(plain.arm_s[0] + 2.0)
    assert found.planning_s("plan") == 2.0
    assert found.planning_s("baseline") == 0.0


CHANGES = {
    "plan": ("precision", "fused_optimizer", "micro_batch"),
    "precision alone": ("precision",),
    "fused optimizer alone": ("fused_optimizer",),
    "micro batch alone": ("micro_batch",),
    "plan without micro batch": ("precision", "fused_optimizer"),
}


def test_effects_of_changes_are_alone_in_the_plan_and_together():
    speeds = dict(zip(CHANGES, (3.0, 1.5, 1.2, 1.1, 2.0), strict=True))
    found = comparison(speeds, changes=CHANGES, kind="ablation")
    effects = {(each.change, each.setting): each for each in found.effects()}
    assert effects["precision", "alone"].speed.mean == pytest.approx(1.5, rel=1e-2)
    assert effects["micro_batch", "in the plan"].speed.mean == pytest.approx(1.5, rel=1e-2)
    assert effects["precision and fused_optimizer", "together"].speed.mean == pytest.approx(2.0 / 1.8, rel=1e-2)
    assert ("precision", "in the plan") not in effects  # The plan without it was not run.
    failed = replace(found, failures={"precision alone": "out of memory"})
    assert ("precision", "alone") not in {(each.change, each.setting) for each in failed.effects()}


def test_rows_have_the_names_of_benchmarks():
    metric = QualityMetric("accuracy", targets=(0.3,))
    speeds = {"plan": 2.0, "tuned plan": 1.0, "strong": 3.0, "plan for strong": 3.3}
    rivals = {"plan for strong": "strong"}
    plans = dict.fromkeys(("plan", "tuned plan", "plan for strong"), Plan.fixed(10, 5))
    found = comparison(speeds, evaluated={}, metric=metric, rivals=rivals, plans=plans)
    made = benchmark_object(found)
    assert (made["name"], made["environment"]["verdict"]) == ("compare", "gain")
    rows = {(row["metric"], row.get("arm"), row.get("against")): row for row in made["rows"]}
    assert rows["throughput_ratio", "equivalent_plan", "reference"]["mean"] == pytest.approx(2.0, rel=1e-2)
    assert rows["throughput_ratio", "equivalent_plan", "strong"]["mean"] == pytest.approx(2 / 3, rel=1e-2)
    assert rows["throughput_ratio", "self", "self"]["n"] == 5
    assert rows["do_no_harm_ratio", "strong_plan", "strong"]["verdict"] == "no harm"
    assert rows["peak_memory_ratio", "equivalent_plan", "reference"]["mean"] == pytest.approx(1 / 3)
    assert rows["energy_ratio", "equivalent_plan", "reference"]["mean"] == pytest.approx(0.5, rel=1e-2)
    assert rows["final_metric_difference", "tuned_plan", "reference"]["plan_kind"] == "tuned"
    target = rows["time_to_target_ratio", "equivalent_plan", "reference"]
    assert (target["target"], target["charged"], target["reached"]) == (0.3, False, 5)
    assert target["mean"] == pytest.approx(0.5, rel=1e-2)
    assert rows["mfu", "reference", None]["value"] > 0
    assert rows["planning_s", "equivalent_plan", None]["changes"]
    ablated = benchmark_object(comparison(dict.fromkeys(CHANGES, 1.5), changes=CHANGES, kind="ablation"))["rows"]
    assert {row["setting"] for row in ablated if "change" in row} == {"alone", "in the plan", "together"}


@pytest.mark.parametrize("width", [60, 80])
def test_the_screen_has_few_short_lines_with_headline_figures_changes_and_report(width):
    found = comparison({"plan": 2.0}, failures={"other": "out of memory"}, changes={"plan": ("micro_batch",)})
    lines = screen_of(found, width, "runs/a/report.html").splitlines()
    assert len(lines) <= 25
    assert max(map(len, lines)) <= width
    assert lines[0].startswith("gain: trimtab's plan has 2.00x")
    assert "67% less peak memory" in " ".join(lines[:3])
    assert "  micro-batch  10 samples -> 5 samples" in lines
    assert "- other failed: out of memory" in lines
    assert lines[-1] == "report: runs/a/report.html"
    assert not any("baseline" in line for line in lines)
    assert headline_of(replace(found, failures={"plan": "diverged"})) == "trimtab's plan failed: diverged"


def test_the_screen_shows_measured_quantities_only_and_details_show_the_rest():
    found = comparison({"plan": 2.0})
    assert "energy/sample" in screen_of(found)
    assert "rapl" in found.details()
    bare = comparison({"plan": 2.0}, losses=False, plans={})
    kept = [row for row in bare.table if row.metric not in (ENERGY, PEAK)]
    text = screen_of(replace(bare, table=ResultTable.of(kept), meter=NO_METER))
    for word in ("energy", "memory", "loss", "changes", "report"):
        assert word not in text


def test_a_long_screen_is_cut_and_the_report_stays():
    found = comparison({"plan": 2.0}, notes=tuple(f"caveat {number}: " + "words " * 40 for number in range(20)))
    lines = screen_of(found, 80, "report.html").splitlines()
    assert 23 <= len(lines) <= 25
    assert "--verbose" in lines[-2]
    assert lines[-1] == "report: report.html"
    assert len(found.details().splitlines()) > 25


def test_an_ablation_has_a_line_per_change():
    speeds = dict(zip(CHANGES, (3.0, 1.5, 1.2, 1.1, 2.0), strict=True))
    text = screen_of(comparison(speeds, changes=CHANGES, kind="ablation"), 60)
    assert max(map(len, text.splitlines())) <= 60
    assert any(line.startswith("precision") and "1.50x gain" in line for line in text.splitlines())
    assert any(line.startswith("micro-batch") and "1.50x gain" in line for line in text.splitlines())


@pytest.mark.parametrize("slower", [0.5, 2.0])
def test_a_higher_memory_is_in_the_headline(slower):
    found = comparison({"plan": slower})
    rows = [row._replace(value=3 * 2.0**30) if row[0::3] == ("plan", PEAK) else row for row in found.table]
    assert "200% more peak memory" in headline_of(replace(found, table=ResultTable.of(rows)))


def test_the_numerics_are_named_as_proved_or_changed():
    holds = Proof(True, "two optimizer steps agree", "proof.holds")
    plan = replace(Plan.fixed(10, 5), proof=holds)
    changes = {"plan": ("micro_batch",)}
    assert "Same numerics" in headline_of(comparison({"plan": 2.0}, plans={"plan": plan}, changes=changes))
    assert "not proved" in headline_of(comparison({"plan": 2.0}, changes=changes))
    differs = replace(plan, proof=Proof(False, "layer.weight differs", "proof.differs"))
    assert "layer.weight differs" in headline_of(comparison({"plan": 2.0}, plans={"plan": differs}, changes=changes))
    tuned = Plan.fixed(10, 5, schedule="warmup_cosine")
    found = comparison({"plan": 2.0}, plans={"plan": tuned}, changes={"plan": ("schedule",)})
    assert "Changes the training: schedule" in headline_of(found)


def test_a_plan_without_changes_is_named_so():
    found = comparison({"plan": 1.0}, plans={"plan": Plan.fixed(10)}, changes={"plan": ()})
    assert "changes nothing" in headline_of(found)
    assert "changes of" not in screen_of(found)


def test_the_headline_of_a_tuned_plan_is_its_time_to_a_target():
    metric = QualityMetric("accuracy", targets=(0.3, 0.6))
    plans = {"plan": Plan.fixed(10, 5), "tuned plan": Plan.fixed(10, 5, schedule="warmup_cosine")}
    found = comparison({"plan": 1.0, "tuned plan": 2.0}, evaluated={}, metric=metric, plans=plans)
    assert "accuracy 0.6" in headline_of(found)
    assert headline_of(found).startswith("gain: tuned plan")


def test_the_page_escapes_what_comes_from_outside_and_refers_to_nothing():
    found = comparison({"plan": 2.0}, title="<script>alert(1)</script>", notes=("<b>note</b>",))
    page = html_of(found, is_page=True)
    assert "<script" not in page
    assert "<b>note" not in page
    assert "http" not in page
    assert page.count("<polyline") == 2
    assert html_of(found, is_page=False) in page
    assert "<!DOCTYPE" not in html_of(found, is_page=False)


def test_the_page_has_the_changes_with_reasons_and_marks_in_the_colours_of_the_legend():
    found = comparison({"plan": 2.0, "strong": 0.5}, changes={"plan": ("micro_batch", "fused_optimizer")})
    page = html_of(found, is_page=True)
    assert page.count("<dt>") == 2
    assert page.count("set by hand") >= 2
    for index, name in enumerate(("your loop", "trimtab's plan", "hand-tuned recipe")):
        label = name.replace("'", "&#39;")
        for mark in (f'<polyline class="c{index}"', f'class="c{index}"/></svg> {label}', f'<i class="c{index}"'):
            assert mark in page
    assert page.count("<details>") >= 3
    for internal in ("plan_S", "P0", "P2", "equivalent_plan"):
        assert internal not in page


def test_a_comparison_is_a_value_and_another_schema_is_refused():
    found = comparison({"plan": 2.0}, evaluated={}, metric=QualityMetric("accuracy"))
    assert from_json(Comparison, to_json(found)) == found
    with pytest.raises(FormatError):
        replace(found, schema=99)


def of_lengths(plan_blocks, baseline_blocks):
    """Return a comparison of arms with equal curves of loss and accuracy, which trained for numbers of blocks."""
    rows = []
    for seed in range(5):
        for arm, blocks in (("baseline", baseline_blocks), (CONTROL, baseline_blocks), ("plan", plan_blocks)):
            for number in range(blocks):
                values = {SECONDS: 1.0, SAMPLES: 10.0, LOSS: 4.0 - 0.1 * number, "evaluation:accuracy": 0.02 * number}
                rows += [Row(arm, seed, number, metric, value, "") for metric, value in values.items()]
    metric = QualityMetric("accuracy")
    return Comparison("digits", ("baseline", "plan"), 80, ResultTable.of(rows), metric=metric)


@pytest.mark.parametrize("lengths", [(30, 10), (10, 30), (30, 29)])
def test_losses_and_quality_are_compared_after_equal_samples(lengths):
    found = of_lengths(*lengths)
    assert found.loss_difference().mean == pytest.approx(0.0, abs=0.5)
    assert found.metric_difference().mean == pytest.approx(0.0, abs=1e-6)
    assert found.quality_verdict() == "equal"


def test_without_an_evaluation_after_equal_samples_quality_has_no_verdict():
    ended = comparison({"plan": 1.5}, metric=QualityMetric("accuracy"))
    rows = [Row(arm, seed, -1, "evaluation:accuracy", 0.9, "") for seed in range(5) for arm in ("baseline", "plan")]
    whole = replace(ended, table=ended.table.joined([ResultTable.of(rows)]))
    assert whole.metric_difference().mean == pytest.approx(0.0)
    more = [Row("plan", seed, 9, SAMPLES, 80.0, "") for seed in range(5)]
    assert replace(whole, table=whole.table.joined([ResultTable.of(more)])).metric_difference() is None


def test_a_limit_judges_plans_against_their_rivals_and_all_loops_of_a_race():
    arms = {"plan": 1.5, "strict": 0.3, "plan for strong": 0.8, "strong": 0.7}
    plans = dict.fromkeys(("plan", "plan for strong"), Plan.fixed(10, 5))
    found = comparison(arms, plans=plans, rivals={"plan for strong": "strong"})
    assert not found.is_below(1.05)
    assert found.is_below(1.3)
    assert not replace(found, failures={"strict": "diverged"}).is_below(1.05)
    assert replace(found, failures={"plan": "diverged"}).is_below(1.05)
    assert replace(found, kind="race", plans={}).is_below(1.05)


def test_the_picture_of_a_report_is_small_and_fits_a_page():
    picture = (Path(__file__).parents[3] / "docs" / "figures" / "report.png").read_bytes()
    assert picture[:8] == b"\x89PNG\r\n\x1a\n"
    assert len(picture) <= 150 * 1024
    width, height = struct.unpack(">II", picture[16:24])
    assert 600 <= width <= 1600
    assert height <= 2 * width
