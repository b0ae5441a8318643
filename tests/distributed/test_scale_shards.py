"""`trimtab scale` with shards: ranks that choose their stage within a limit, and a plan that was made before."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from ranks import Ended, run_torchrun
from wide_task import WIDE, least_of

from trimtab.core.serialization import to_json
from trimtab.experiments.scale import PlanOfJob
from trimtab.plans.plan import Plan

pytestmark = pytest.mark.slow

TINY_TASK = Path(__file__).parents[1] / "unit" / "experiments" / "tiny_task.py"
SHORT = ["--quick", "--scaling=weak", "--out=table", "--json"]
# An interpreter that ends as usual leaves a file.
MARKED = (
    WIDE
    + """
import atexit, os

atexit.register(lambda: open(f"ended-{os.environ.get('RANK', 'launcher')}", "w").close())
"""
)


@pytest.fixture
def folder(tmp_path):
    shutil.copy(TINY_TASK, tmp_path / "tiny.py")
    (tmp_path / "wide.py").write_text(MARKED)
    return tmp_path


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command as a Python of its own, which ends as it usually does."""
    paths = filter(None, [str(folder), os.environ.get("PYTHONPATH")])
    given = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-m", "trimtab.cli", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, env=given)


def printed(done: subprocess.CompletedProcess[str] | Ended) -> dict[tuple[str, int], dict]:
    """Return the rows that a command printed, by recipe and ranks."""
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n") == 1
    return {(row["recipe"], row["ranks"]): row for row in json.loads(done.stdout)["rows"]}


def test_each_number_of_ranks_chooses_its_stage_within_the_limit_or_says_that_there_is_none(folder):
    (folder / "table").mkdir()
    (folder / "table" / "plan-weak-1.json").write_text(
        to_json(PlanOfJob(None, "4 MiB over it"))
    )  # as an earlier round has it
    limit = (least_of(0) + min(least_of(stage) for stage in (1, 2, 3))) // 2
    of = printed(run(folder, "scale", "wide:task", *SHORT, "--ranks=2", "--rounds=1", f"--memory={limit}B"))
    (plan,) = of["plan", 2]["plans"]
    assert plan["zero_stage"] >= 1
    assert plan["predicted_bytes"] <= limit
    assert of["plan", 2]["peak_bytes"] == pytest.approx(plan["predicted_bytes"], rel=0.3)
    assert of["plan", 2]["peak_bytes"] < of["baseline", 2]["peak_bytes"]
    assert of["plan", 2]["samples_per_s"] > 0
    assert (of["plan", 1]["refused"], of["plan", 1]["n"], of["plan", 2]["mean"]) == (
        "no plan meets the limit: 4 MiB over it",
        0,
        None,
    )
    assert of["baseline", 2]["mean"] > 0
    assert {each.name for each in folder.glob("ended-*")} == {"ended-launcher", "ended-0"}  # 0: of the job of one rank


def test_the_ranks_of_another_launcher_time_a_plan_of_stage_2_and_leave_at_once(folder):
    (folder / "plan.json").write_text(to_json(Plan.fixed(32, 16, num_ranks=2, zero_stage=2)))
    asked = ("-m", "trimtab.cli", "scale", "wide:task", *SHORT, "--plan=plan.json")
    of = printed(run_torchrun(folder, *asked, forked_ranks=0))  # new Pythons, which leave a file if they end as usual
    (plan,) = of["plan", 2]["plans"]
    assert (plan["zero_stage"], plan["micro_batch"], plan["num_micro_batches"]) == (2, 16, 2)
    assert plan["predicted_bytes"] is None
    assert 0 < of["plan", 2]["peak_bytes"] < of["baseline", 2]["peak_bytes"]
    assert not list(folder.glob("ended-*"))
