"""`trimtab compare --ranks`: every rank runs the same comparison in step, one writes it down, and all end together."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from raising import raises
from ranks import Ended, run_command

from trimtab.core.errors import FormatError
from trimtab.core.record import read_record
from trimtab.core.serialization import read_json, to_json
from trimtab.experiments import gain_timing
from trimtab.experiments.comparison.compare import CompareOptions, compare
from trimtab.experiments.comparison.comparison_result import Comparison
from trimtab.plans.plan import Plan
from trimtab.tasks import load_task

pytestmark = pytest.mark.slow

TASKS = Path(__file__).parents[1] / "unit" / "experiments"
SOURCE = Path(__file__).parents[2] / "src"
SHORT = """
from trimtab.experiments import gain_timing

gain_timing._LAP_S = 0.01
"""
FAULTY = """
import inspect, os
from dataclasses import replace
from ranked_smooth_task import task as smooth

def loss_fn(model, batch):
    if os.environ["RANK"] == "1" and WHERE:
        raise ValueError("a bad batch")
    return smooth.loss_fn(model, batch)

task = replace(smooth, loss_fn=loss_fn)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the tasks, under names that no other test imports."""
    folder = tmp_path_factory.mktemp("compared")
    for name in ("tiny_task", "smooth_task"):
        text = (TASKS / f"{name}.py").read_text().replace("tiny_task", "ranked_tiny_task")
        (folder / f"ranked_{name}.py").write_text(text + SHORT)
    return folder


def run(folder: Path, task: str, *arguments: object) -> Ended:
    paths = os.pathsep.join([str(folder), str(SOURCE)])
    return run_command(folder, "compare", task, "--ranks", 2, *arguments, forked_ranks=2, PYTHONPATH=paths)


def written(folder: Path, name: str, **values) -> Path:
    path = folder / name
    path.write_text(to_json(Plan.fixed(**values)))
    return path


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.glob("race-*/*")}


def test_two_ranks_compare_and_go_on_where_they_were_cut_off(folder, monkeypatch):
    """The plan shards the model: training and evaluation are collectives. All arms end as one process does."""
    monkeypatch.setattr(gain_timing, "_LAP_S", gain_timing._LAP_S)  # which the task changes in this process too
    monkeypatch.syspath_prepend(folder)
    monkeypatch.chdir(folder)
    plan = written(folder, "sharded.json", batch_size=16, micro_batch=8, num_ranks=2, zero_stage=3)
    done = run(folder, "ranked_smooth_task:task", "--pairs", 1, "--plan", plan, "--out", "out", "--json")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n") == 1
    rows = json.loads(done.stdout)
    assert rows["environment"]["ranks"] == "2"

    out = folder / "out"
    found = read_json(Comparison, out / "report.json")
    assert (found.num_ranks, found.num_pairs) == (2, 1)
    assert [arm.name for arm in found.arms] == ["reference", "self", "equivalent_plan"]
    assert not any(arm.error for arm in found.arms)
    assert found.arm("reference").source == "experiments/baselines/replica.py"
    reference, control, planned = (found.arm(name).final_metric for name in ("reference", "self", "equivalent_plan"))
    assert reference == control
    assert planned == pytest.approx(reference, rel=1e-5)
    metrics = {(row.arm, row.metric) for row in found.ratios}
    assert metrics >= {
        ("equivalent_plan", "throughput"),
        ("equivalent_plan", "peak_memory"),
        ("equivalent_plan", "final_metric_difference"),
    }
    assert "on 2 ranks; the reference is the loop in DistributedDataParallel" in found.headline.sentence
    page = (out / "report.md").read_text()
    assert "on 2 ranks" in page
    assert "DistributedDataParallel" in page
    record = read_record(out / "race-0" / "equivalent_plan.jsonl")
    task = load_task("ranked_smooth_task:task")
    assert record.end.detail["rows"] == task.budget_samples
    assert [each.samples for each in record.evaluations] == [task.eval_every_samples * i for i in range(1, 6)]

    settings = CompareOptions(num_pairs=1, adapt=(), peers=False)
    alone = compare(task, folder / "alone", settings, command="", plan=Plan.fixed(32))
    assert alone.num_ranks == 1
    assert alone.arm("reference").final_metric[0] == pytest.approx(reference[0], rel=1e-5)

    before = contents(out)
    again = run(folder, "ranked_smooth_task:task", "--pairs", 2, "--plan", plan, "--out", "out")
    assert again.returncode == 0, again.stderr
    assert again.stdout.count("report: out/report.html") == 1
    found = read_json(Comparison, out / "report.json")
    assert found.num_pairs == 2
    assert any(note.startswith("1 of 2 paired runs were completed by an earlier call") for note in found.notes)
    after = contents(out)
    assert {name: after[name] for name in before} == before

    with raises(FormatError, code="folder.settings_differ"):
        compare(task, out, settings, command="", plan=Plan.fixed(32))


@pytest.mark.parametrize(
    "where",
    ["True", 'any(frame.filename.endswith("training/run.py") for frame in inspect.stack())'],
    ids=["reference", "plan"],
)
def test_a_rank_that_fails_ends_the_comparison_with_one_reason(folder, where):
    (folder / "faulty.py").write_text(FAULTY.replace("WHERE", where))
    plan = written(folder, "replica.json", batch_size=16, num_ranks=2, zero_stage=0)
    done = run(folder, "faulty:task", "--pairs", 1, "--plan", plan, "--out", f"faulty-{where[0]}")
    assert done.returncode == 1
    assert done.stderr.count("a bad batch") == 1, done.stderr
    assert "Traceback" not in done.stderr
    assert not done.stdout
