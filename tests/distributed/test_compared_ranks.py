"""`trimtab compare --ranks`: every rank runs the same comparison in step, one writes it down, and all end together."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from raising import raises
from ranks import Ended, run_command

import trimtab
from trimtab.core.errors import FormatError
from trimtab.core.serialization import to_json
from trimtab.experiments import result_table
from trimtab.experiments.comparison import Comparison
from trimtab.experiments.subject import RunOptions
from trimtab.plans.plan import Plan
from trimtab.tasks import load_task

pytestmark = pytest.mark.slow

TASKS = Path(__file__).parents[1] / "unit" / "experiments"
SOURCE = Path(__file__).parents[2] / "src"
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
        (folder / f"ranked_{name}.py").write_text(text)
    return folder


def run(folder: Path, task: str, *arguments: object) -> Ended:
    paths = os.pathsep.join([str(folder), str(SOURCE)])
    return run_command(folder, "compare", task, "--ranks", 2, *arguments, forked_ranks=2, PYTHONPATH=paths)


def written(folder: Path, name: str, **values) -> Path:
    path = folder / name
    path.write_text(to_json(Plan.fixed(**values)))
    return path


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("pair-*.json")}


def test_two_ranks_compare_and_go_on_where_they_were_cut_off(folder, monkeypatch):
    """The plan shards the model: training and evaluation are collectives. All arms end as one process does."""
    monkeypatch.syspath_prepend(folder)
    monkeypatch.chdir(folder)
    plan = written(folder, "sharded.json", batch_size=16, micro_batch=8, num_ranks=2, zero_stage=3)
    given = ("ranked_smooth_task:task", "--to-end", "--plan", plan, "--out", "out")
    done = run(folder, *given, "--pairs", 1, "--json")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n") == 1
    rows = json.loads(done.stdout)["rows"]
    assert {row["metric"] for row in rows} >= {"throughput_ratio", "peak_memory_ratio", "final_metric_difference"}

    out = folder / "out"
    found = Comparison.load(out / "result.json")
    assert (found.num_ranks, found.num_pairs, found.arms) == (2, 1, ("baseline", "plan"))
    assert not found.failures
    task = load_task("ranked_smooth_task:task")
    ends = {}
    for arm in ("baseline", result_table.CONTROL, "plan"):
        points = result_table.evaluations(found.table, arm, "entropy", 0)
        assert [point.samples for point in points] == [task.eval_every_samples * i for i in range(1, 6)]
        ends[arm] = points[-1].value
    assert ends["baseline"] == ends[result_table.CONTROL]
    assert ends["plan"] == pytest.approx(ends["baseline"], rel=1e-5)
    assert "DistributedDataParallel" in (out / "report.html").read_text()

    alone = trimtab.compare(task, plan=Plan.fixed(32), options=RunOptions(pairs=1, to_end=True))
    (end,) = result_table.final_values(alone.table, "baseline")["entropy"].values()
    assert end == pytest.approx(ends["baseline"], rel=1e-5)

    before = contents(out)
    again = run(folder, *given, "--pairs", 2)
    assert again.returncode == 0, again.stderr
    assert again.stdout.count("report: out/report.html") == 1
    found = Comparison.load(out / "result.json")
    assert found.num_pairs == 2
    assert any(note.startswith("1 of 2 pairs were read") for note in found.notes)
    after = contents(out)
    assert {name: after[name] for name in before} == before

    with raises(FormatError, code="folder.settings_differ"):
        trimtab.compare(task, plan=Plan.fixed(32), options=RunOptions(pairs=1, to_end=True, out=out))


@pytest.mark.parametrize(
    "where",
    ["True", 'any(frame.filename.endswith("training/run.py") for frame in inspect.stack())'],
    ids=["reference", "plan"],
)
def test_a_rank_that_fails_ends_the_comparison_with_one_reason(folder, where):
    (folder / "faulty.py").write_text(FAULTY.replace("WHERE", where))
    plan = written(folder, "replica.json", batch_size=16, num_ranks=2, zero_stage=0)
    done = run(folder, "faulty:task", "--pairs", 1, "--steps", 6, "--plan", plan, "--out", f"faulty-{where[0]}")
    assert done.returncode == 1
    assert done.stderr.count("a bad batch") == 1, done.stderr
    assert "Traceback" not in done.stderr
    assert not done.stdout


LOOP = """
import torch, trimtab
from torch import nn

BATCHES = [torch.randn(8, 4, generator=torch.Generator().manual_seed(index)) for index in range(4)]

def loss_fn(model, batch):
    return model(batch).square().mean()

def setup(seed, step=None):
    model = nn.Linear(4, 2)
    return trimtab.Loop(model, torch.optim.SGD(model.parameters(), lr=0.01), loss_fn, BATCHES, step=step)

def own(seed):
    return setup(seed, lambda model, optimizer, batch: None)

def uneven(seed):
    loop = setup(seed)
    return trimtab.Loop(loop.model, loop.optimizer, loss_fn, Parts())

class Parts:
    def __iter__(self):
        return iter(trimtab.shard([batch[:rows] for batch, rows in zip(BATCHES, (8, 8, 5, 8))]))
"""


def test_a_loop_that_ignores_the_ranks_is_refused_and_equal_batches_are_told(folder):
    (folder / "ranked_loop.py").write_text(LOOP)
    plan = written(folder, "loop.json", batch_size=8, num_ranks=2, zero_stage=0)
    done = run(folder, "ranked_loop.py:own", "--plan", plan, "--out", "own")
    assert done.returncode
    assert "DistributedDataParallel" in done.stderr
    done = run(folder, "ranked_loop.py:setup", "--plan", plan, "--steps", 6, "--pairs", 1, "--out", "equal")
    assert done.returncode == 0, done.stderr
    uneven = run(folder, "ranked_loop.py:uneven", "--plan", plan, "--steps", 60, "--pairs", 1, "--out", "uneven")
    assert uneven.returncode == 0, uneven.stderr
    assert any("trimtab.shard" in note for note in Comparison.load(folder / "equal" / "result.json").notes)
