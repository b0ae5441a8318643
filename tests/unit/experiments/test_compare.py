"""`compare` from a user's task file to the report, cut off and resumed; plans and arms as they are measured."""

from __future__ import annotations

import copy
import json
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from raising import raises
from tiny_task import BATCH_SIZE, BUDGET_SAMPLES, load_data
from tiny_task import task as tiny

import trimtab
from benchmarks.paper.recipes.paper import PaperLoop
from trimtab.core.batch_rule import BatchRule
from trimtab.core.choice import MeasuredCost
from trimtab.core.errors import FormatError, InfeasibleError, LoopError, ValueGivenError
from trimtab.core.objective import Budget, Objective, Reference
from trimtab.core.record import read_record
from trimtab.core.serialization import read_json, to_json, to_jsonable
from trimtab.core.step_phases import TimedGain
from trimtab.experiments import gain_timing as gain_module
from trimtab.experiments import output_folder as claim_module
from trimtab.experiments import task_plans as planning_module
from trimtab.experiments.baselines.reference import ReferenceLoop
from trimtab.experiments.comparison import compare as compare_module
from trimtab.experiments.comparison.arm_metrics import ArmMetrics
from trimtab.experiments.comparison.compare import ArmSelection, CompareOptions, compare
from trimtab.experiments.comparison.comparison_result import Comparison
from trimtab.experiments.comparison.comparison_rows import benchmark_object
from trimtab.experiments.output_folder import build_of, code_of
from trimtab.experiments.paired_runs import inspect_arm
from trimtab.experiments.paired_runs import paired_run as lengths_module
from trimtab.experiments.paired_runs import paired_run as race_module
from trimtab.experiments.paired_runs import results_folder as race_folder
from trimtab.experiments.paired_runs.inspect_arm import measure_arm
from trimtab.experiments.paired_runs.plan_loops import PlanLoop
from trimtab.experiments.report import terminal_report, write_report
from trimtab.experiments.task_plans import PLANNING_SEED, Plans, make_plans
from trimtab.plans.plan import Plan
from trimtab.profiling import trials
from trimtab.tasks import TaskData, load_task
from trimtab.tasks.models.gpt import GPTShape

CPU = torch.device("cpu")
TASK_FILE = f"{Path(__file__).with_name('tiny_task.py')}:task"
PAIRS = CompareOptions(num_pairs=2, peers=False)


def test_a_folder_of_other_or_damaged_settings_is_refused(folder):
    path = folder / "settings.json"
    settings = json.loads(path.read_text())
    older = {name: value for name, value in settings.items() if name != "code"}
    cases = [("folder.settings_differ", json.dumps(each)) for each in (older, settings | {"budget": "x"})]
    for code, text in (*cases, *(("settings.damaged", text) for text in ("", "{", "[1]", "3"))):
        path.write_text(text)
        with raises(FormatError, code=code):
            run(folder)


@pytest.fixture(autouse=True)
def short(monkeypatch):
    shorten(monkeypatch)


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> tuple[Path, Comparison, list[str]]:
    """A comparison of two pairs, run once."""
    folder, lines = tmp_path_factory.mktemp("compare") / "tiny", []
    with pytest.MonkeyPatch.context() as monkeypatch:
        shorten(monkeypatch)
        return folder, run(folder, progress=lambda text, share=None: lines.append(text)), lines


def lengths(task, plans: Plans, *, brief: bool = False, **more) -> dict[str, int]:
    """Return the steps of each arm."""
    entries = ArmSelection(task, plans, CompareOptions(), brief=brief, **more).entries()
    return {e.name: e.budget_samples // BATCH_SIZE for e in entries}


LONG = replace(tiny, budget_samples=5000 * BATCH_SIZE)


with_paper = replace(tiny, baselines={"paper": PaperLoop})


def run(out: Path, settings: CompareOptions = PAIRS, task=None, **options) -> Comparison:
    return compare(task or load_task(TASK_FILE), out, settings, command="trimtab compare tiny", **options)


@pytest.fixture
def folder(finished, tmp_path) -> Path:
    """A copy of the finished comparison's folder."""
    return Path(shutil.copytree(finished[0], tmp_path / "copy"))


def first_look() -> CompareOptions:
    return CompareOptions(num_pairs=2, whole_pairs=0, quick=True, adapt=(), peers=False)


def files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_a_comparison_without_peers_races_the_loop_its_control_and_both_plans(finished, tmp_path):
    _, found, _ = finished
    assert [arm.name for arm in found.arms] == ["reference", "self", "equivalent_plan", "tuned_plan"]
    assert (found.task, found.num_pairs, found.command) == ("tiny", 2, "trimtab compare tiny")
    assert all(len(arm.step_s) == 2 and min(arm.step_s) > 0 for arm in found.arms)
    assert all(arm.peak_bytes > 0 for arm in found.arms)
    assert {row.metric for row in found.ratios} == {"throughput", "peak_memory", "final_metric_difference"}
    assert {(row.arm, row.charged) for row in found.target_rows} == {
        (arm, charged) for arm in ("equivalent_plan", "tuned_plan") for charged in (False, True)
    }
    assert found.headline.kind == "no verdict"
    assert found.data_source == {"name": "random points", "origin": "made here", "sha256": "0" * 64}
    reference, control = found.arm("reference"), found.arm("self")
    assert reference.final_metric == control.final_metric
    assert [(rows, metric) for curve in reference.curves for rows, _, metric in curve.points] == [
        (rows, metric) for curve in control.curves for rows, _, metric in curve.points
    ]
    assert reference.final_samples == BUDGET_SAMPLES
    found = finished[1]
    paths = write_report(found, tmp_path)
    assert read_json(Comparison, paths["json"]) == found
    assert "tiny" in paths["md"].read_text()
    assert paths["html"].read_text().lstrip().lower().startswith("<!doctype html>")
    assert terminal_report(found) is not None
    assert benchmark_object(read_json(Comparison, paths["json"])) == benchmark_object(found)


def test_some_pairs_may_be_only_timed(tmp_path, monkeypatch):
    """Throughput from both pairs, targets and final metrics from the whole one; a longer second try keeps the first."""
    monkeypatch.setattr(lengths_module, "_FEW_STEPS", 6)
    monkeypatch.setattr(lengths_module, "_FEW_S", 0.0)
    monkeypatch.setattr(lengths_module, "_CONTROL_S", 0.0)
    its = replace(load_task(TASK_FILE), adapted_samples=BUDGET_SAMPLES // 2)
    folder = tmp_path / "out"
    found = run(folder, CompareOptions(num_pairs=2, whole_pairs=1), its)
    assert {path.name for path in folder.iterdir() if path.is_dir()} == {"race-0", "brief-1"}
    by_arm = {
        name: found.arm(name)
        for name in ("reference", "self", "equivalent_plan", "tuned_plan", "strong", "strong_plan")
    }
    assert {name: len(arm.step_s) for name, arm in by_arm.items()} == dict.fromkeys(by_arm, 2)
    assert {name: len(arm.curves) for name, arm in by_arm.items()} == {
        "reference": 1, "self": 0, "equivalent_plan": 1, "tuned_plan": 1, "strong": 1, "strong_plan": 0
    }  # fmt: skip
    assert (by_arm["reference"].final_samples, by_arm["tuned_plan"].final_samples) == (
        BUDGET_SAMPLES,
        BUDGET_SAMPLES // 2,
    )
    few = read_record(folder / "brief-1" / "reference.jsonl")
    given = {"brief": True, "given_rows": 6 * BATCH_SIZE, "meter": to_jsonable(found.meter)}
    assert (few.end.detail["rows"], few.header.detail) == (6 * BATCH_SIZE, given)
    assert {(r.arm_samples, r.against_samples) for r in found.target_rows if r.arm == "tuned_plan"} >= {
        (BUDGET_SAMPLES // 2, BUDGET_SAMPLES)
    }
    assert any(f"trained on {BUDGET_SAMPLES // 2:,} samples" in note for note in found.notes)
    assert {(row.n, row.ratio.n if row.ratio else 1) for row in found.target_rows} == {(1, 1)}
    differences = {row.arm: row.ratio.n for row in found.ratios if row.metric == "final_metric_difference"}
    assert differences == {"equivalent_plan": 1, "tuned_plan": 1}
    again = run(folder, CompareOptions(num_pairs=2), its)
    assert {path.name for path in folder.iterdir() if path.is_dir()} == {"race-0", "brief-1", "race-1"}
    assert len(again.arm("reference").curves) == 2


@pytest.mark.parametrize("whole", [-1, 6, 2.5, "all"])
def test_whole_pairs_are_among_the_pairs(whole):
    with raises(ValueGivenError, code="value.invalid", field="whole"):
        CompareOptions(num_pairs=5, whole_pairs=whole)


def test_a_quick_comparison_times_a_few_steps_of_tier_s(tmp_path, monkeypatch):
    monkeypatch.setattr(lengths_module, "_QUICK_S", 0.0)
    found = run(tmp_path / "out", first_look())
    assert {path.name for path in (tmp_path / "out").iterdir() if path.is_dir()} == {"brief-0", "brief-1"}
    assert [arm.name for arm in found.arms] == ["reference", "self", "equivalent_plan"]
    assert all((len(arm.step_s), arm.curves) == (2, ()) for arm in found.arms)
    record = read_record(tmp_path / "out" / "brief-0" / "equivalent_plan.jsonl")
    assert (record.end.detail["rows"], record.end.reason, record.evaluations) == (4 * BATCH_SIZE, "budget", ())
    assert {row.metric for row in found.ratios} == {"throughput", "peak_memory"}
    assert found.target_rows == ()
    assert set(found.plans) == {"equivalent"}
    assert any("only timed" in note for note in found.notes)
    page = write_report(found, tmp_path / "report")["html"].read_text()
    assert "All arms were only timed" in page


@pytest.mark.parametrize("others", [{}, {"whole_pairs": 3}, {"adapt": ("learning_rate",)}, {"peers": True}])
def test_quick_is_throughput_of_tier_s_alone(others):
    settings = {"quick": True, "whole_pairs": 0, "adapt": (), "peers": False}
    with raises(ValueGivenError, code="option.conflict", field="quick"):
        CompareOptions(**(settings | others if others else {"quick": True}))


def test_a_quick_comparison_ends_when_its_time_does(tmp_path, monkeypatch):
    monkeypatch.setattr(lengths_module, "_QUICK_S", 0.0)
    monkeypatch.setattr(lengths_module, "_QUICK_END_S", 0.0)
    found = run(tmp_path / "out", first_look())
    assert found.num_pairs == 1
    assert found.headline.kind == "no verdict"
    monkeypatch.setattr(lengths_module, "_QUICK_END_S", 1e9)
    assert run(tmp_path / "out", first_look()).num_pairs == 2


def test_facts_of_an_arm_that_lack_what_is_known_today_are_measured_again(folder):
    path = folder / "arm-reference.json"
    kept = json.loads(path.read_text())
    path.write_text(json.dumps({"peak_bytes": 1, "phases_s": {}}))
    run(folder)
    assert json.loads(path.read_text()).keys() == kept.keys()
    assert json.loads(path.read_text())["precision"] == "fp32"


def test_a_loop_that_cannot_be_counted_is_still_raced(monkeypatch):
    monkeypatch.setattr(inspect_arm, "count_flops", _raise)
    facts = measure_arm(ReferenceLoop, tiny, load_data(), CPU)
    assert facts.flops_per_sample is None
    assert facts.peak_bytes > 0


def _raise(*arguments, **options):
    raise RuntimeError("this device cannot")


@pytest.mark.parametrize("where", ["build", "step"])
def test_a_peer_that_fails_is_named_and_the_comparison_stands(tmp_path, monkeypatch, where):
    broken = SimpleNamespace(step=_raise, close=lambda: None, model=None)
    monkeypatch.setattr(compare_module, "PlanLoop", _raise if where == "build" else lambda *_, **__: broken)
    if where == "step":  # the memory pass succeeds, the race does not
        monkeypatch.setattr(race_folder, "measure_arm", lambda *_, **__: ArmMetrics(100))
    found = run(tmp_path / "out")
    for name in ("equivalent_plan", "tuned_plan"):
        arm = found.arm(name)
        assert arm.error.startswith("RuntimeError: this device cannot")
        assert arm.step_s == ()
    assert not [row for row in found.ratios if row.arm == "equivalent_plan" and row.metric == "throughput"]
    assert len(found.arm("reference").step_s) == 2
    page = write_report(found, tmp_path / "report")["html"].read_text()
    assert "this device cannot" in page


def test_a_reference_that_fails_ends_the_comparison(tmp_path, monkeypatch):
    monkeypatch.setattr(compare_module, "ReferenceLoop", _raise)
    with raises(LoopError, code="baseline.failed", field="baseline loop") as caught:
        run(tmp_path / "out")
    assert isinstance(caught.value.__cause__, RuntimeError)


def made_plans(step_s: float) -> Plans:
    same = replace(Plan.fixed(BATCH_SIZE), baseline=MeasuredCost(step_s))
    return Plans({"equivalent": same, "tuned": same, "strong": same})


@pytest.mark.parametrize(("schedule", "steps"), [("user", 5000), ("warmup_cosine", 1000)])
def test_only_a_plan_with_a_schedule_of_its_own_ends_at_the_tasks_horizon(schedule, steps):
    plans = made_plans(0.01)
    freed = replace(plans.plans["tuned"], schedule=replace(plans.plans["tuned"].schedule, value=schedule))
    plans = replace(plans, plans=plans.plans | {"tuned": freed})
    assert lengths(replace(LONG, adapted_samples=1000 * BATCH_SIZE), plans)["tuned_plan"] == steps


def fused(plans: Plans, **values) -> Plans:
    """Return plans of which the equivalent one fuses the optimizer's step."""
    same = plans.plans["equivalent"]
    same = replace(same, fused_optimizer=replace(same.fused_optimizer, value=True, changed=True), **values)
    return replace(plans, plans=plans.plans | {"equivalent": same})


@pytest.mark.parametrize(
    ("step_s", "steps", "steps_on_gpu", "own_on_gpu"),
    # Slow steps; about six seconds of fast ones, and fewer on a GPU, each by its own step; at most the whole.
    [(1.0, 60, 24, 50), (0.01, 600, 500, 5000), (0.001, 5000, 5000, 5000)],
)
def test_short_arms_last_sixty_steps_and_about_six_seconds(step_s, steps, steps_on_gpu, own_on_gpu):
    found = lengths(LONG, made_plans(step_s), brief=True)
    assert [found[name] for name in ("reference", "self", "equivalent_plan")] == [steps] * 3
    found = lengths(LONG, fused(made_plans(step_s), measured=MeasuredCost(step_s / 10)), brief=True, dear=True)
    assert (found["reference"], found["self"], found["equivalent_plan"]) == (steps_on_gpu, steps_on_gpu, own_on_gpu)


def test_the_controls_of_a_whole_race_run_for_a_minute():
    rows = 5000 * BATCH_SIZE
    its = replace(with_paper, budget_samples=rows, strong=replace(tiny.strong, budget_samples=rows))
    entries = ArmSelection(its, made_plans(0.1), CompareOptions(), brief=False).entries()
    assert {e.name: e.budget_samples // BATCH_SIZE for e in entries if e.is_timed_only} == {
        "self": 600, "equivalent_plan": 600, "strong_plan": 600, "paper": 60
    }  # fmt: skip
    detail = {e.name: e.detail for e in entries}
    assert detail["paper"] == {"brief": True, "why_timed": "the reference trains longer than 120 s"}
    assert detail["reference"] == {}
    assert "the plan changes nothing" in str(detail["equivalent_plan"])
    changing = ArmSelection(its, fused(made_plans(0.1)), CompareOptions(), brief=False).entries()
    assert "equivalent_plan" not in {e.name for e in changing if e.is_timed_only}
    quick = ArmSelection(its, made_plans(0.001), CompareOptions(), brief=False).entries()
    assert not any(e.is_timed_only or e.detail for e in quick)
    # A cap says how long an arm may train.
    (paper,) = [
        e
        for e in ArmSelection(its, made_plans(0.1), CompareOptions(cap_s=90.0), brief=False).entries()
        if e.name == "paper"
    ]
    assert (paper.budget_samples, paper.is_timed_only) == (rows, False)


def test_every_stage_leaves_its_result(finished):
    folder, found, lines = finished
    arms = ["reference", "self", "equivalent_plan", "tuned_plan"]
    races = {f"race-{seed}/{arm}.jsonl" for seed in (0, 1) for arm in arms}
    others = {
        "run.lock",
        "settings.json",
        "plans.json",
        "gain.json",
        "memory-reference.json",
        "memory-equivalent_plan.json",
    }
    assert set(files(folder)) == others | {f"arm-{arm}.json" for arm in arms} | races
    assert lines[0] == "loading the data of tiny"
    assert any(line.startswith("paired run 2 of 2: reference") for line in lines)
    plans = read_json(Plans, folder / "plans.json")
    assert plans.plans == found.plans
    assert json.loads(to_json(plans)) == json.loads((folder / "plans.json").read_text())
    record = read_record(folder / "race-1" / "tuned_plan.jsonl")
    assert (record.header.name, record.header.seed) == ("tuned_plan", 1)
    assert found.arm("tuned_plan").final_metric[1] == record.evaluations[-1].metrics["accuracy"]
    assert read_json(TimedGain, folder / "gain.json") == found.gain
    assert [(row.arm, row.third, row.speed.n) for row in found.thirds] == [
        (arm, third, 2) for arm in ("equivalent_plan", "tuned_plan") for third in ("early", "middle", "late")
    ]


def test_a_finished_comparison_is_read_back_without_running(finished, folder, monkeypatch):
    monkeypatch.setattr(race_folder, "race", None)
    monkeypatch.setattr(compare_module, "make_plans", None)
    monkeypatch.setattr(race_folder, "measure_arm", None)
    again = run(folder)
    *before, said = again.notes
    assert tuple(before) == finished[1].notes
    assert "2 of 2" in said
    assert str(folder) in said
    assert replace(again, created="", notes=()) == replace(finished[1], created="", notes=())


def test_the_environment_is_that_of_the_races(folder, finished, monkeypatch):
    today = finished[1].environment | {"python": "another"}
    monkeypatch.setattr(race_folder, "environment", lambda: today)
    assert run(folder).environment == finished[1].environment != today


def test_only_the_race_that_is_missing_is_run_again(finished, folder):
    lines: list[str] = []
    shutil.rmtree(folder / "race-1")
    run(folder, progress=lambda text, share=None: lines.append(text))
    assert f"resuming with 1 completed runs in {folder}" in lines
    assert not any(line.startswith("resuming") for line in finished[2])
    shutil.rmtree(folder / "race-1")
    (folder / "race-1.partial").mkdir()  # where it was cut off
    (folder / "race-1.partial" / "reference.jsonl").write_text("torn")
    before, lines = files(folder), []
    found = run(folder, progress=lambda text, share=None: lines.append(text))
    after = files(folder)
    assert not any(line.startswith(("race 1 of 2", "memory and phases")) for line in lines)
    assert any(line.startswith("paired run 2 of 2") for line in lines)
    kept = {name: content for name, content in before.items() if not name.startswith("race-1.partial")}
    assert {name: after[name] for name in kept} == kept
    assert set(after) - set(kept) == {f"race-1/{arm.name}.jsonl" for arm in found.arms}


def test_a_race_that_is_cut_off_leaves_nothing_that_counts_and_more_pairs_may_be_added(folder):
    shutil.rmtree(folder / "race-1")

    def interrupt(text: str, share: float | None = None) -> None:
        if text.startswith("paired run 2 of 2"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(folder, progress=interrupt)
    assert not (folder / "race-1").exists()
    assert run(folder).num_pairs == 2
    before = files(folder)
    found = run(folder, replace(PAIRS, num_pairs=3))
    assert found.num_pairs == 3
    after = files(folder)
    assert {name: after[name] for name in before} == before
    assert run(folder, replace(PAIRS, num_pairs=1)).num_pairs == 1


def test_data_is_placed_once_for_all_races(folder, monkeypatch):
    placed, given = race_folder.place_data, []
    monkeypatch.setattr(race_folder, "place_data", lambda *args: given.append(args) or placed(*args))
    for race in folder.glob("race-*"):
        shutil.rmtree(race)
    assert run(folder).num_pairs == 2
    assert len(given) == 1


@pytest.mark.parametrize(
    ("changes", "options", "named"),
    [
        ({"quick": True, "whole_pairs": 0, "adapt": ()}, {}, "adapt, quick"),
        ({"adapt": ()}, {}, "adapt"),
        ({"cap_s": 9.0}, {}, "cap_s"),
        ({}, {"budget": Budget(memory="1GiB")}, "budget, objective"),
        ({}, {"objective": Objective(time=1, memory=1)}, "budget, objective"),
    ],
)
def test_a_folder_holds_one_comparison(folder, changes, options, named):
    before = files(folder)
    with raises(FormatError, code="folder.settings_differ") as caught:
        run(folder, replace(PAIRS, **changes), **options)
    assert files(folder) == before
    assert named in caught.value.problem


def retuned(model, lr):
    return torch.optim.SGD(model.parameters(), lr=lr)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"batch_size": 16}, "batch_size"),
        ({"budget_samples": BUDGET_SAMPLES - BATCH_SIZE}, "budget_samples"),
        ({"eval_every_samples": BATCH_SIZE}, "eval_every_samples"),
        ({"adapted_samples": BATCH_SIZE}, "adapted_samples"),
        ({"strong": replace(tiny.strong, budget_samples=BATCH_SIZE)}, "strong_budget_samples"),
        ({"strong": None}, "code, strong_budget_samples"),
        ({"reference": Reference("bf16")}, "reference_precision"),
        ({"load_data": lambda: other_data()}, "code, data_sha256"),
        ({"make_model": lambda: torch.nn.Linear(3, 3)}, "code, model or optimizer"),
        ({"make_optimizer": partial(retuned, lr=0.5)}, "code, model or optimizer"),
        ({"terms_per_sample": 2}, "terms_per_sample"),
        ({"reference": Reference(clip_norm=1.0)}, "clip_norm"),
    ],
)
def test_a_folder_of_a_task_that_has_changed_is_refused(folder, changes, named):
    with raises(FormatError, code="folder.settings_differ") as caught:
        run(folder, task=replace(tiny, **changes))
    assert named in caught.value.problem


def test_a_folder_of_a_task_whose_file_was_edited_is_refused(tmp_path):
    path, folder = tmp_path / "edited.py", tmp_path / "out"
    text = Path(__file__).with_name("tiny_task.py").read_text()
    path.write_text(text)
    run(folder, task=load_task(f"{path}:task"))
    path.write_text(text + "\n# another loss, say\n")
    with raises(FormatError, code="folder.settings_differ"):
        run(folder, task=load_task(f"{path}:task"))


def test_a_folder_of_another_machine_version_or_task_is_refused(folder, monkeypatch):
    here = claim_module.environment()
    for key, value in (("cpu", "another processor"), ("threads", "99")):
        with monkeypatch.context() as patched:
            patched.setattr(claim_module, "environment", lambda: here | {key: value})  # noqa: B023
            with raises(FormatError, code="folder.settings_differ"):
                run(folder)
    with raises(FormatError, code="folder.settings_differ"):
        run(folder, task=replace(tiny, name="other"))
    monkeypatch.setattr(trimtab, "__version__", "0.0.0")
    with raises(FormatError, code="folder.settings_differ"):
        run(folder)


def test_code_is_told_by_what_it_says_not_by_where_it_lies(tmp_path):
    text, codes = Path(__file__).with_name("tiny_task.py").read_text(), []
    for index, (one, other) in enumerate(("az", "za", "zz")):
        tasks = []
        for folder, added in ((one, "# one\n"), (other + "b", "# other\n" if index < 2 else "# a third\n")):
            path = tmp_path / str(index) / folder / "its.py"
            path.parent.mkdir(parents=True)
            path.write_text(text + added)
            tasks.append(load_task(f"{path}:task"))
        codes.append(code_of(replace(tasks[0], loss_fn=tasks[1].loss_fn)))
    assert codes[0] == codes[1] != codes[2]
    # As `functools.partial(load_cifar10, 2000)` does from one of 3,000.
    shape, other = GPTShape(20, 8, width=8), GPTShape(20, 8, width=16)
    bound = [2000, 3000, "2000", [2000], {"rows": 2000}, shape, other, partial(retuned, lr=1), partial(retuned, lr=2)]
    assert len({code_of(tiny), *map(held_at, bound)}) == len(bound) + 1
    assert [held_at(each) for each in bound] == [held_at(each) for each in copy.deepcopy(bound)]
    assert held_at(object()) == held_at(object())  # where something lies in memory is not what it is
    recipes = [replace(tiny.strong, make_optimizer=partial(retuned, lr=lr)) for lr in (1, 2)]
    assert len({code_of(replace(tiny, strong=recipe)) for recipe in recipes}) == 2
    before = torch.get_rng_state()
    assert build_of(tiny) == build_of(tiny)
    assert torch.equal(torch.get_rng_state(), before)


def held_at(number: object):
    """Return the code of a task whose loss is bound to something."""
    return code_of(replace(tiny, loss_fn=partial(tiny.loss_fn, number)))


def other_data() -> TaskData:
    data = load_data()
    return replace(data, source=replace(data.source, sha256="1" * 64))


def shorten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use blocks of a few steps, in trials and in races."""
    monkeypatch.setattr(trials, "BLOCK_S", 0.003)
    monkeypatch.setattr(race_module, "_BLOCK_S", 0.02)
    monkeypatch.setattr(race_module, "_BLOCK_STEPS", 1)
    monkeypatch.setattr(gain_module, "_LAP_S", 0.002)


@pytest.mark.parametrize(
    ("field", "value"),
    [("num_pairs", 0), ("cap_s", 0.0), ("cap_s", float("nan")), ("reference_cap_s", 5.0)],
)
def test_settings_are_checked_at_the_door(field, value):
    with pytest.raises(ValueGivenError):
        CompareOptions(**{field: value})


def test_a_whole_comparison_races_the_peers_too(tmp_path):
    found = run(tmp_path / "out", CompareOptions(num_pairs=1, adapt=()), task=with_paper)
    assert [arm.name for arm in found.arms] == [
        "reference",
        "self",
        "equivalent_plan",
        "paper",
        "strong",
        "strong_plan",
    ]
    assert set(found.plans) == {"equivalent", "strong"}
    assert found.plans["strong"].reference.clip_norm == 1.0
    assert found.arm("paper").final_samples >= BUDGET_SAMPLES
    assert {row.metric for row in found.ratios} >= {"do_no_harm"}
    assert ("equivalent_plan", "strong") in {(row.arm, row.against) for row in found.ratios}
    write_report(found, tmp_path)


OWN_STEP = """
from dataclasses import replace
from tiny_task import task as tiny
calls = []
def step(model, optimizer, batch):
    calls.append(len(batch[0]))
    loss = tiny.loss_fn(model, batch)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
task = replace(tiny, name="own_step", step=step)
"""


def test_a_users_own_step_is_what_is_compared_against(tmp_path, monkeypatch):
    monkeypatch.setattr(compare_module, "gain_in", lambda *arguments, **how: None)  # it steps for a time, not a number
    (tmp_path / "mine.py").write_text(OWN_STEP)
    task = load_task(f"{tmp_path / 'mine.py'}:task")
    calls = task.step.__globals__["calls"]
    found = run(tmp_path / "out", replace(PAIRS, num_pairs=1, adapt=()), task=task)
    assert [arm.name for arm in found.arms] == ["reference", "self", "equivalent_plan"]
    assert set(calls) == {BATCH_SIZE}
    measured = 2 + 1 + 4 + 1  # of memory, phases and FLOP, apart from the race
    checked = 2  # against the declared maths
    raced = 2 * (BUDGET_SAMPLES // BATCH_SIZE + measured)  # by the reference and its control, by no plan
    assert len(calls) == raced + checked
    run(tmp_path / "out", replace(PAIRS, num_pairs=1, adapt=()), task=task)  # read back: nothing is trained
    assert len(calls) == raced + checked


def test_a_step_of_other_maths_ends_the_comparison_before_it_is_planned(tmp_path, monkeypatch):
    monkeypatch.setattr(compare_module, "make_plans", None)

    def step(model, optimizer, batch):
        (2 * tiny.loss_fn(model, batch)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()

    with raises(ValueGivenError, code="step.gradient_differs", field="task.step"):
        run(tmp_path / "out", task=replace(tiny, step=step, make_optimizer=sgd))


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def test_plans_are_made_on_data_no_race_uses(monkeypatch):
    seeds = []
    data = load_data()

    class Watching(type(data)):
        def batches(self, seed, batch_size):
            seeds.append(seed)
            return super().batches(seed, batch_size)

    watching = Watching(data.columns, data.held_out, data.source)
    closed = []
    monkeypatch.setattr(planning_module.StrongLoop, "close", lambda loop: closed.append(True))
    plans = make_plans(tiny, watching, CPU, adapt=("learning_rate",), strong=True, progress=lambda text: None)
    assert set(seeds) == {PLANNING_SEED}
    assert set(plans.plans) == {"equivalent", "tuned", "strong"}
    assert set(plans.profiles) == {"equivalent", "strong"}
    assert closed == [True]
    assert (plans.plans["equivalent"].plan_kind, plans.plans["tuned"].plan_kind) == ("equivalent", "tuned")
    assert plans.plans["tuned"].planning_s == plans.plans["equivalent"].planning_s + plans.plans["tuned"].search_s
    assert plans.plans["equivalent"].reference == tiny.reference


def test_a_limit_is_of_every_plan_that_is_made(monkeypatch):
    """The strong recipe stays as it is; what is planned for it is held to the limit, in its profile and its choice."""
    profiled, decided, profile = [], [], planning_module.profile

    def watched_profile(*loop, **how):
        profiled.append((how.pop("budget"), how.pop("objective")))
        return profile(*loop, **how)

    def watched_choose(found, objective, budget):
        decided.append((objective, budget))
        return Plan.fixed(BATCH_SIZE)

    monkeypatch.setattr(planning_module, "profile", watched_profile)
    monkeypatch.setattr(planning_module, "choose", watched_choose)
    asked = {"budget": Budget("1GiB"), "objective": Objective(memory=1)}
    plans = make_plans(tiny, load_data(), CPU, adapt=(), strong=True, progress=lambda text: None, **asked)
    assert profiled == [(asked["budget"], asked["objective"])] * 2
    assert decided == [(plans.profiles[key].objective, asked["budget"]) for key in ("equivalent", "strong")]


def test_a_limit_that_the_strong_recipe_cannot_meet_says_whose_it_is(monkeypatch):
    choose = planning_module.choose

    def refused(found, objective, budget):
        if found.reference == tiny.reference:
            return choose(found, objective, budget)
        raise InfeasibleError("budget", got="a limit that no settings meet", expected="one", hint="The nearest.")

    monkeypatch.setattr(planning_module, "choose", refused)
    with raises(InfeasibleError, code="plan.infeasible", field="budget"):
        make_plans(tiny, load_data(), CPU, adapt=(), strong=True, progress=lambda text: None)


def test_a_freed_batch_is_raced_in_windows_of_several(tmp_path, monkeypatch):
    """The equivalent plan beside it is the plan of a loop whose batch is its own."""
    taken = []

    class Watched(PlanLoop):
        def step(self, batches):
            rows = super().step(batches)
            taken.append((self._run.plan.batch_policy.value, rows // BATCH_SIZE))
            return rows

    def by_three(plan):
        return BatchRule("fixed", k=3 * plan.num_micro_batches, k_max=3 * plan.num_micro_batches)

    monkeypatch.setattr(planning_module, "default_rule", by_three)  # goodput follows measured times
    monkeypatch.setattr(compare_module, "PlanLoop", Watched)
    found = run(tmp_path / "out", replace(PAIRS, num_pairs=1, adapt=("batch",)))
    assert [arm.name for arm in found.arms] == ["reference", "self", "equivalent_plan", "tuned_plan"]
    assert found.arm("tuned_plan").label == "trimtab, tuned plan (batch)"
    assert (found.plans["tuned"].batch_policy.value, found.plans["tuned"].plan_kind) == ("fixed", "tuned")
    assert found.plans["equivalent"].batch_rule is None
    record = read_record(tmp_path / "out" / "race-0" / "tuned_plan.jsonl")
    assert record.end.reason == "budget"
    assert record.end.detail["rows"] == -(-BUDGET_SAMPLES // (3 * BATCH_SIZE)) * 3 * BATCH_SIZE
    assert set(taken) == {("user", 1), ("fixed", 3)}


@pytest.mark.parametrize("changes", [{}, {"micro_batch": 8}, {"fused_optimizer": True}])
def test_an_arm_is_measured_apart(changes):
    def make(task, device):
        return PlanLoop(task, device, Plan.fixed(BATCH_SIZE, **changes)) if changes else ReferenceLoop(task, device)

    facts = measure_arm(make, tiny, load_data(), CPU)
    peak, phases = facts.peak_bytes, facts.phases_s
    parameters = sum(p.numel() * p.element_size() for p in tiny.make_model().parameters())
    assert 4 * parameters < peak < 40 * parameters  # weights, gradients, two moments, activations
    assert list(phases) == ["data", "forward", "backward", "optimizer", "rest"]
    assert min(phases.values()) > 0
    weights = sum(p.numel() for p in tiny.make_model().parameters() if p.dim() == 2)
    first = next(tiny.make_model().parameters()).numel()  # whose input needs no gradient
    assert facts.flops_per_sample == 2 * (3 * weights - first)
    assert facts.precision == "fp32"


def test_smaller_slices_are_seen_to_need_less_memory():
    def peak(micro_batch: int) -> int:
        wide = replace(tiny, batch_size=512)
        facts = measure_arm(lambda t, d: PlanLoop(t, d, Plan.fixed(512, micro_batch)), wide, load_data(), CPU)
        return facts.peak_bytes

    assert peak(64) < 0.7 * peak(512)
