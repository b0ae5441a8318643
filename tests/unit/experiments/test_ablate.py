"""`ablate` from a plan to the report: what is run and gone on with, what cannot be tried, and nothing to do."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from raising import raises
from tiny_task import BATCH_SIZE, BUDGET_SAMPLES
from tiny_task import task as tiny

from trimtab.core.choice import MeasuredCost
from trimtab.core.errors import FormatError, LoopError, ValueGivenError
from trimtab.core.objective import Budget
from trimtab.core.record import read_record
from trimtab.experiments.ablation import ablate as ablate_module
from trimtab.experiments.ablation.ablate import AblateSettings, ablate
from trimtab.experiments.ablation.ablation_design import PLAN, REFERENCE, UNCHANGED, AblationDesign
from trimtab.experiments.ablation.ablation_result import (
    ALONE,
    INTERACTION,
    MEMORY,
    QUALITY,
    THROUGHPUT,
    WITHIN,
    Ablation,
)
from trimtab.experiments.ablation.ablation_rows import ablation_object
from trimtab.experiments.paired_runs import paired_run
from trimtab.experiments.paired_runs import paired_run as race_module
from trimtab.experiments.paired_runs import results_folder as race_folder
from trimtab.experiments.report import terminal_report, write_report
from trimtab.experiments.results import read_result
from trimtab.experiments.task_plans import Plans
from trimtab.plans.plan import Plan

pytestmark = pytest.mark.slow

TWO = Plan.fixed(BATCH_SIZE, micro_batch=8, fused_optimizer=True)
SEEDS = AblateSettings(num_seeds=2)
ARMS = ["reference", "unchanged", "with_micro_batch", "with_fused_optimizer", "plan", "unchanged_again", "plan_again"]


@pytest.fixture(autouse=True)
def short(monkeypatch):
    """Blocks of a few steps."""
    monkeypatch.setattr(race_module, "_BLOCK_S", 0.01)
    monkeypatch.setattr(race_module, "_BLOCK_STEPS", 1)


def run(out: Path, settings: AblateSettings = SEEDS, *, plan: Plan | None = TWO, task=tiny, **options) -> Ablation:
    return ablate(task, out, settings, command="trimtab ablate tiny", plan=plan, **options)


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> tuple[Path, Ablation, list[str]]:
    """An ablation of two changes and two seeds, run once."""
    folder, lines = tmp_path_factory.mktemp("ablate") / "tiny", []
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(race_module, "_BLOCK_S", 0.01)
        monkeypatch.setattr(race_module, "_BLOCK_STEPS", 1)
        return folder, run(folder, progress=lambda text, share=None: lines.append(text)), lines


@pytest.fixture
def folder(finished, tmp_path) -> Path:
    """A copy of the finished ablation's folder."""
    return Path(shutil.copytree(finished[0], tmp_path / "copy"))


def files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_each_change_is_told_alone_in_the_plan_and_by_the_difference(finished):
    _, found, _ = finished
    assert sorted(arm.name for arm in found.arms) == sorted(ARMS)
    assert all(len(arm.sample_s) == 2 and min(arm.sample_s) > 0 for arm in found.arms)
    assert [(change.name, change.says, change.plan_kind) for change in found.changes] == [
        ("micro_batch", "micro batch 8", "equivalent"),
        ("fused_optimizer", "fused optimizer", "equivalent"),
    ]
    expected = {(s, m) for s in (ALONE, WITHIN, INTERACTION) for m in (THROUGHPUT, MEMORY, QUALITY)}
    for change in found.changes:
        assert {(e.setting, e.metric) for e in found.effects if e.change == change.name} == expected
    within = found.effect("micro_batch", WITHIN)
    assert (within.arm, within.against, within.ratio.n) == ("plan", "with_fused_optimizer", 2)
    assert {(row.arm, row.against) for row in found.whole} == {("plan", "reference"), ("unchanged", "reference")}
    assert [row.arm for row in found.controls] == ["unchanged_again", "plan_again"]
    assert found.interaction_control.n == 2
    assert found.headline.kind == "no verdict"
    # Quality is of the same rows in every arm; the loop that nothing is changed of is the reference's to the bit.
    arms = {arm.name: arm for arm in finished[1].arms}
    assert arms["unchanged"].final_metric == arms["reference"].final_metric
    assert {arm.final_samples for arm in finished[1].arms} == {BUDGET_SAMPLES}
    folder, _, lines = finished
    told = [name for name in ARMS if not name.endswith("_again")]
    races = {f"race-{seed}/{arm}.jsonl" for seed in (0, 1) for arm in ARMS}
    assert set(files(folder)) == {"run.lock", "settings.json", *(f"arm-{arm}.json" for arm in told)} | races
    assert "memory and phases of reference" in lines
    assert "memory of with_micro_batch" in lines


def test_a_whole_ablation_is_reported_with_its_times_to_targets(finished, tmp_path):
    # From the same records: of each change alone and in the plan, of the plan against the reference.
    found = finished[1]
    told = {(each.change, each.setting, each.row.target) for each in found.times}
    settings = {("", "whole"), *((change.name, setting) for change in found.changes for setting in (ALONE, WITHIN))}
    assert told == {(*each, target) for each in settings for target in tiny.targets}
    assert all(each.row.n == 2 and not each.row.charged for each in found.times)  # a plan that was given took nothing
    rows = [row for row in ablation_object(found)["rows"] if row["metric"] == "time_to_target_ratio"]
    assert {(row.get("change", ""), row["setting"], row["target"]) for row in rows} == told
    assert len(rows) == len(found.times)
    text = write_report(found, tmp_path)["md"].read_text()
    assert text.count("### Time to target") + text.count("**Time to target**") == 2
    paths = write_report(found, tmp_path)
    assert read_result(paths["json"]) == found
    page = paths["html"].read_text()
    assert page.lstrip().lower().startswith("<!doctype html>")
    assert "<svg" in page
    assert "trimtab ablation" in page
    rows = ablation_object(read_result(paths["json"]))["rows"]
    assert rows == ablation_object(found)["rows"]
    effects = [row for row in rows if row.get("setting") in (ALONE, WITHIN, INTERACTION) and "target" not in row]
    assert len(effects) == len(found.effects)
    timed = [row for row in effects if row["metric"] == "throughput_ratio"]
    assert all(row.keys() >= {"change", "mean", "low", "high", "n", "pairs", "resolution", "verdict"} for row in timed)


def test_a_finished_ablation_is_read_back_without_running(finished, folder, monkeypatch):
    monkeypatch.setattr(race_folder, "race", None)
    monkeypatch.setattr(race_folder, "measure_arm", None)
    again = run(folder)
    *before, said = again.notes
    assert tuple(before) == finished[1].notes
    assert "2 of 2" in said
    assert str(folder) in said
    assert replace(again, created="", notes=()) == replace(finished[1], created="", notes=())


def test_only_the_race_that_is_missing_is_run_again(folder):
    shutil.rmtree(folder / "race-1")
    before, lines = files(folder), []
    found = run(
        folder, replace(SEEDS, num_seeds=3, whole_seeds=1), progress=lambda text, share=None: lines.append(text)
    )
    after = files(folder)
    assert {name: after[name] for name in before} == before
    assert found.num_seeds == 3
    assert f"resuming with 1 completed runs in {folder}" in lines
    assert not any(line.startswith(("race 1 of", "memory")) for line in lines)
    assert {path.name for path in folder.iterdir() if path.is_dir()} == {"race-0", "brief-1", "brief-2"}


@pytest.mark.parametrize(
    ("settings", "options"),
    [
        (replace(SEEDS, pairwise=True), {}),
        (replace(SEEDS, quick=True, whole_seeds=0), {}),
        (SEEDS, {"plan": Plan.fixed(BATCH_SIZE, micro_batch=16)}),
        (SEEDS, {"budget": Budget("1GiB")}),
        (SEEDS, {"task": replace(tiny, budget_samples=BATCH_SIZE)}),
    ],
)
def test_a_folder_holds_one_ablation(folder, settings, options):
    before = files(folder)
    with raises(FormatError, code="folder.settings_differ"):
        run(folder, settings, **options)
    assert files(folder) == before


def test_quality_may_be_left_out(tmp_path, monkeypatch):
    monkeypatch.setattr(paired_run, "_FEW_STEPS", 6)
    monkeypatch.setattr(paired_run, "_FEW_S", 0.0)
    found = run(
        tmp_path / "out", AblateSettings(num_seeds=1, whole_seeds=0), plan=Plan.fixed(BATCH_SIZE, micro_batch=8)
    )
    assert {effect.metric for effect in found.effects} == {THROUGHPUT, MEMORY}
    assert any("not measured" in note for note in found.notes)
    assert found.times == ()
    assert any("single change" in note for note in found.notes)
    assert [arm.name for arm in found.arms] == ["reference", "unchanged", "plan", "unchanged_again"]
    record = read_record(tmp_path / "out" / "brief-0" / "plan.jsonl")
    assert (record.end.detail["rows"], record.evaluations) == (6 * BATCH_SIZE, ())


def test_a_plan_that_changes_nothing_is_said_to(tmp_path, monkeypatch):
    monkeypatch.setattr(race_folder, "race", None)
    monkeypatch.setattr(race_folder, "measure_arm", None)
    found = run(tmp_path / "out", plan=Plan.fixed(BATCH_SIZE))
    assert (found.headline.kind, found.arms, found.effects, found.num_seeds) == ("no gain", (), (), 0)
    assert found.headline.code == "plan.no_changes"
    paths = write_report(found, tmp_path / "report")
    for kind in ("html", "md"):
        assert found.headline.sentence in paths[kind].read_text()
    assert read_result(paths["json"]) == found
    assert terminal_report(found) is not None


def test_what_cannot_stand_alone_or_be_taken_out_says_why(tmp_path):
    """A loss head that is built on the optimizer being fused, as a layer's own rule might have it."""

    class Needs(ablate_module.PlanLoop):
        def __init__(self, task, device, plan, total_samples=None):
            if plan.micro_batch.value < BATCH_SIZE and not plan.fused_optimizer.value:
                raise ValueGivenError("micro_batch", got="8 <script> without a fused optimizer", expected="one")
            super().__init__(task, device, plan, total_samples)

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(ablate_module, "PlanLoop", Needs)
        found = run(tmp_path / "out", AblateSettings(num_seeds=1))
    split, fused = found.changes
    assert split.refusals.keys() == {ALONE}
    assert split.refusals[ALONE].startswith("failed alone: ValueGivenError: micro_batch: got 8 <script> without")
    assert fused.refusals.keys() == {WITHIN}
    assert fused.refusals[WITHIN].startswith("cannot be removed from the plan: ")
    assert found.effect("micro_batch", WITHIN) is not None
    assert found.effect("fused_optimizer", ALONE) is not None
    assert not any(effect.setting == INTERACTION for effect in found.effects)
    pages = write_report(found, tmp_path / "report")
    assert "micro batch 8 failed alone: " in pages["md"].read_text()
    assert "<script>" not in pages["html"].read_text() + pages["md"].read_text()
    refused = [row for row in ablation_object(found)["rows"] if "refused" in row]
    assert {(row["change"], row["setting"]) for row in refused} == {("micro_batch", ALONE), ("fused_optimizer", WITHIN)}


def test_a_plan_that_fails_leaves_what_its_changes_are_alone(tmp_path):
    found = run(tmp_path / "out", AblateSettings(num_seeds=1), plan=Plan.fixed(BATCH_SIZE, loss_chunk=8, micro_batch=8))
    assert (found.headline.kind, found.headline.code) == ("no verdict", "speed.not_measured")
    assert "plan failed: ModelError" in found.headline.sentence
    split, chunk = found.changes
    assert "the plan failed: ModelError" in split.refusals[WITHIN]
    assert chunk.refusals[ALONE].startswith("failed alone: ModelError")
    assert found.effect("micro_batch", ALONE) is not None
    assert found.effect("micro_batch", WITHIN) is None


def test_a_limit_that_a_change_alone_meets_is_said(tmp_path, finished):
    peaks = {arm.name: arm.peak_bytes for arm in finished[1].arms}
    wide = replace(tiny, batch_size=512, budget_samples=2048, eval_every_samples=1024)
    settings = AblateSettings(num_seeds=1)
    plan = Plan.fixed(512, micro_batch=32)
    assert peaks["plan"] > 0
    loose = run(tmp_path / "loose", settings, plan=plan, task=wide, budget=Budget("1GiB"))
    assert not any("over the limit" in note for note in loose.notes)
    held = {arm.name: arm.peak_bytes for arm in loose.arms}
    limit = (held["plan"] + held["unchanged"]) // 2
    tight = run(tmp_path / "tight", settings, plan=plan, task=wide, budget=Budget(limit))
    assert any("micro batch 32 cannot be removed" in note and "over the limit" in note for note in tight.notes)


def test_a_reference_that_fails_ends_it(tmp_path, monkeypatch):
    def broken(task, device):
        raise RuntimeError("no kernel")

    monkeypatch.setattr(ablate_module, "ReferenceLoop", broken)
    with raises(LoopError, code="baseline.failed", field="baseline loop"):
        run(tmp_path / "out")


def test_a_plan_for_something_else_is_refused(tmp_path):
    with raises(ValueGivenError, code="plan.batch_differs", field="plan"):
        run(tmp_path / "out", plan=Plan.fixed(64))
    with raises(ValueGivenError, code="plan.ranks_differ", field="plan"):
        run(tmp_path / "out", plan=Plan.fixed(BATCH_SIZE, num_ranks=2, zero_stage=0))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "wrong", [{"num_seeds": 0}, {"whole_seeds": 6}, {"cap_s": 0.0}, {"quick": True}, {"quick": True, "whole_seeds": 2}]
)
def test_settings_are_checked_at_the_door(wrong):
    with pytest.raises(ValueGivenError):
        AblateSettings(**wrong)


def test_a_change_of_the_training_shares_no_table_with_what_keeps_the_maths(tmp_path):
    plan = Plan.fixed(BATCH_SIZE, fused_optimizer=True, learning_rate_scale=3.0)
    found = run(tmp_path / "out", AblateSettings(num_seeds=1), plan=plan)
    assert {change.name: change.plan_kind for change in found.changes} == {
        "fused_optimizer": "equivalent",
        "learning_rate_scale": "tuned",
    }
    assert {effect.plan_kind for effect in found.effects if effect.change == "learning_rate_scale"} == {"tuned"}
    assert {row.plan_kind for row in found.whole if row.arm == "plan"} == {"tuned"}
    text = write_report(found, tmp_path / "report")["md"].read_text()
    effects = text.index("## Effect of each change")
    same, freed = (text.index(f"### {title}", effects) for title in ("Equivalent plan", "Tuned plan"))
    assert same < text.index("fused optimizer | alone") < freed < text.index("learning rate scale 3 | alone")


def test_the_plan_that_is_made_is_the_one_that_is_ablated(tmp_path, monkeypatch):
    asked = []

    def make(task, data, device, **how):
        asked.append(how)
        return Plans({"equivalent": Plan.fixed(BATCH_SIZE), "tuned": TWO})

    monkeypatch.setattr(ablate_module, "make_plans", make)
    found = run(tmp_path / "out", AblateSettings(num_seeds=1, adapt=True), plan=None, budget=Budget("1GiB"))
    assert found.plan == TWO
    assert (asked[0]["adapt"], asked[0]["budget"]) == (("learning_rate",), Budget("1GiB"))
    assert json.loads((tmp_path / "out" / "plans.json").read_text())["plans"].keys() == {"equivalent", "tuned"}
    run(tmp_path / "out", AblateSettings(num_seeds=1, adapt=True), plan=None, budget=Budget("1GiB"))
    assert len(asked) == 1


def test_of_three_changes_each_two_are_told_together(tmp_path, monkeypatch):
    monkeypatch.setattr(paired_run, "_FEW_STEPS", 2)
    monkeypatch.setattr(paired_run, "_FEW_S", 0.0)
    plan = Plan.fixed(BATCH_SIZE, micro_batch=8, fused_optimizer=True, clip_norm=1.0)
    found = run(tmp_path / "out", AblateSettings(num_seeds=1, whole_seeds=0), plan=plan)
    assert {(e.change, e.other) for e in found.effects if e.other} == {
        ("micro_batch", "fused_optimizer"),
        ("micro_batch", "clip_norm"),
        ("fused_optimizer", "clip_norm"),
    }
    assert "## Pairs of changes" in write_report(found, tmp_path / "report")["md"].read_text()


def test_on_a_gpu_short_arms_of_the_plan_are_as_long_as_its_own_steps_ask():
    design = AblationDesign(("precision", "fused_optimizer", "loss_chunk"))
    rows = ablate_module._brief_rows(design, dict.fromkeys([REFERENCE, *design.arms]), 24, 200)
    alone, without = ([f"{how}_{name}" for name in design.changes] for how in ("with", "without"))
    assert {name for name, each in rows.items() if each == 24} == {REFERENCE, UNCHANGED, *alone}
    assert {name for name, each in rows.items() if each == 200} == {PLAN, *without}
    plan = replace(Plan.fixed(32, precision="bf16"), measured=MeasuredCost(0.1))
    made, given = Plans({"equivalent": plan}, {"equivalent": None}), Plans({"equivalent": plan})
    assert ablate_module._step_within(made, 1.0, dear=True) == 0.1
    assert ablate_module._step_within(made, 0.05, dear=True) == 0.05
    assert ablate_module._step_within(made, 1.0, dear=False) == 1.0
    assert ablate_module._step_within(given, 1.0, dear=True) == 1.0  # it may have been measured elsewhere
