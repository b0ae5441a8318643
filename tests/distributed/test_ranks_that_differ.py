"""Ranks whose plans, loops, weights or data differ are refused at the start, by the rank and the value."""

from __future__ import annotations

import pytest
from ranks import TESTS, reports, run_command, run_program

from trimtab.core.serialization import to_json
from trimtab.plans.plan import Plan

pytestmark = pytest.mark.slow

PROGRAM = TESTS / "alike_rank.py"
TINY_TASK = TESTS / "unit" / "experiments" / "tiny_task.py"


NAMED = {
    "ddp/lr": "lr of group 0",
    "own/tensor lr": "",
    "own/lr": "lr of group 0",
    "zero-2/betas": "betas of group 0",
    "zero-1/weight decay": "weight_decay of group 0",
    "ddp/class": "the optimizer's class",
    "own/groups": "parameters of group 0",
    "ddp/shapes": "parameters",
    "ddp/frozen": "parameters",
    "own/weights": "checksums of the parameters",
    "ddp/state": "checksums of the optimizer state",
    "own/plan": "micro_batch",
    "zero-2/clip": "clip_norm",
    "ddp/samples": "number of samples",
    "own/values": "checksums of the values",
    "zero-2/subset": "indices",
    "ddp/nothing": "",
    "zero-2/weights": "",  # which are rank 0's once the run has started
}
UNSHARDED = ("ddp/unsharded", "own/unsharded")


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("alike")
    run_program(PROGRAM, folder, *NAMED, *UNSHARDED)
    return reports(folder)


@pytest.mark.parametrize("name", NAMED)
def test_the_rank_and_the_value_are_named(found, name):
    for rank in found:
        each = rank[name]
        if not NAMED[name]:
            assert not each["error"], each
            continue
        assert each["code"] == "ranks.differ", each
        assert NAMED[name] in each["said"]
        assert "on rank 1" in each["said"]


def test_of_three_ranks_the_one_that_differs_is_named(tmp_path):
    run_program(PROGRAM, tmp_path, "ddp/lr", ranks=3)
    for each in reports(tmp_path, 3):
        assert each["ddp/lr"]["code"] == "ranks.differ", each
        assert "0.02 on rank 2" in each["ddp/lr"]["said"]


@pytest.mark.parametrize("name", UNSHARDED)
def test_ranks_that_train_on_the_same_samples_are_warned(found, name):
    assert not any(rank[name]["error"] for rank in found), found
    assert all(any("trimtab.shard" in text for text in rank[name]["warned"]) for rank in found)


OTHER = """
import os
from dataclasses import replace
import torch
import tiny

is_other = os.environ.get("RANK") == "1"

def load_data():
    data = tiny.task.load_data()
    return replace(data, columns=tuple(DATA)) if is_other else data

def make_optimizer(model):
    return torch.optim.AdamW(model.parameters(), lr=0.02 if is_other and RATE else 0.01)

task = replace(tiny.task, load_data=load_data, make_optimizer=make_optimizer)
"""
ROLLED = "column.roll(1, 0) for column in data.columns"
FEWER = "column[:-64] for column in data.columns"


@pytest.mark.parametrize(
    ("command", "data", "rate", "named"),
    [
        ("train", ROLLED, False, "values"),
        ("train", "data.columns", True, "lr of group 0"),
        ("compare", FEWER, False, "samples"),
    ],
)
def test_tasks_that_differ_on_ranks_are_refused(tmp_path, command, data, rate, named):
    (tmp_path / "tiny.py").write_text(TINY_TASK.read_text())
    (tmp_path / "other.py").write_text(OTHER.replace("DATA", data).replace("RATE", str(rate)))
    rows = 16
    (tmp_path / "plan.json").write_text(to_json(Plan.fixed(rows, num_ranks=2, zero_stage=0)))
    more = ("--steps", 2) if command == "train" else ("--quick", "--out", tmp_path / "out")
    given = ("other:task", "--ranks", 2, "--plan", tmp_path / "plan.json", *more)
    done = run_command(tmp_path, command, *given, forked_ranks=2)
    assert done.returncode == 1
    assert named in done.stderr
    assert "on rank 1" in done.stderr
    assert "Traceback" not in done.stderr
