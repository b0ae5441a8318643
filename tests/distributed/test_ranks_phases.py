"""Phases of a step on two ranks, clocked in step: communication of replicas is told, of shards that it is not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from trimtab.core.codec import read_json, to_json
from trimtab.core.plan import Plan
from trimtab.experiments.phases_command import PhasePage

TASKS = Path(__file__).parents[1] / "unit" / "experiments"
SOURCE = Path(__file__).parents[2] / "src"


@pytest.mark.parametrize("stage", [0, 3])
def test_two_ranks_clock_their_steps_together(tmp_path, stage):
    plan = tmp_path / "plan.json"
    plan.write_text(to_json(Plan.fixed(batch_rows=16, micro_batch=8, num_ranks=2, zero_stage=stage)))
    command = [sys.executable, "-c", "from trimtab.cli import main; main()", "phases", f"{TASKS / 'tiny_task.py'}:task"]
    done = subprocess.run(
        [*command, "--ranks", "2", "--plan", plan, "--rounds", "2", "--out", "found.json", "--json"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": str(SOURCE)},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n") == 1
    (gain,) = read_json(PhasePage, tmp_path / "found.json").gains
    assert gain.num_ranks == 2
    assert "communication" in gain.reference.has
    assert gain.reference.mean_s("communication") > 0
    assert gain.reference.roofs
    rows = json.loads(done.stdout)["rows"]
    waits = [row for row in rows if row["metric"] == "bound_share" and row["bound"] == "communication-bound"]
    assert {row["arm"] for row in waits} == {"reference", "plan"}
    if stage:
        assert gain.plan.roofs == {}
        assert any("shared out" in note for note in gain.plan.notes)
    else:
        assert gain.plan.mean_s("communication") > 0
        assert gain.plan.notes == ()
