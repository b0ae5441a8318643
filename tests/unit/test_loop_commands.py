"""The commands for functions that build a loop: what they write, what they refuse, and how they end."""

from __future__ import annotations

import json
import shlex
import sys

import brief
import pytest

from trimtab import cli
from trimtab.plans.plan import Plan

TRAIN = """
import dataclasses
import torch, trimtab
from torch import nn

BATCHES = [torch.randn(8, 4, generator=torch.Generator().manual_seed(index)) for index in range(4)]

def loss_fn(model, batch):
    return model(batch).square().mean()

def setup(seed):
    model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 2))
    return trimtab.Loop(model, torch.optim.AdamW(model.parameters()), loss_fn, BATCHES)

def step(model, optimizer, batch):
    optimizer.zero_grad()
    loss = loss_fn(model, batch)
    loss.backward()
    optimizer.step()
    return loss

def stepped(seed):
    return dataclasses.replace(setup(seed), step=step)

other = setup
number = 3
"""


@pytest.fixture
def command(monkeypatch, capsys, tmp_path):
    (tmp_path / "train.py").write_text(TRAIN)
    Plan.fixed(8, 4).save(tmp_path / "plan.json")
    monkeypatch.chdir(tmp_path)
    brief.shorten(monkeypatch.setattr)

    def run(line):
        monkeypatch.setattr(sys, "argv", ["trimtab", *shlex.split(line)])
        capsys.readouterr()
        code = 0
        try:
            cli.main()
        except SystemExit as end:
            code = end.code or 0
        return (code, *capsys.readouterr())

    yield run
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None)).startswith(str(tmp_path)):
            del sys.modules[name]


def test_a_loop_is_compared_and_its_report_written(command, tmp_path):
    code, out, err = command("compare train.py:setup --steps 10 --pairs 1 --plan plan.json --out result")
    assert (code, err) == (0, "")
    assert "samples/s" in out
    assert {path.name for path in (tmp_path / "result").iterdir()} >= {"report.html", "result.json"}
    code, out, _ = command("compare train.py:setup --steps 10 --pairs 1 --plan plan.json --json")
    assert (code, json.loads(out)["name"]) == (0, "compare")


def test_a_loop_is_planned_and_its_plan_written(command, tmp_path):
    code, out, err = command("plan train.py:setup -o made.json")
    assert (code, err) == (0, "")
    assert str(Plan.load(tmp_path / "made.json")) in out


def test_a_plan_for_a_loop_with_a_step_names_the_part_of_the_step(command):
    code, _, err = command("plan train.py:stepped")
    assert code == 0
    assert "stepped" in err
    assert "trimtab compare" in err


def test_a_race_of_one_loop_counts_it(command):
    _, _, err = command("race train.py:setup")
    assert "one loop" in err


def test_a_finished_run_names_its_checkpoints_and_its_record(command):
    line = "train train.py:setup --steps 4 --plan plan.json --checkpoints kept --record run.jsonl"
    assert "run.jsonl" not in command(line)[2]
    code, out, err = command(line)
    assert code == 0
    assert "kept" in err
    assert "run.jsonl" in err
    assert "resumed_at_samples: 32" in out


def test_a_task_is_compared_for_a_number_of_steps(command):
    Plan.fixed(128, fused_optimizer=True).save("digits.json")
    code, out, _ = command("compare digits_resnet --steps 4 --pairs 1 --plan digits.json")
    assert code == 0
    assert "accuracy" in out


def test_loops_are_raced_and_a_plan_ablated(command):
    code, out, _ = command("race train.py:setup train.py:other --steps 10 --pairs 1")
    assert code == 0
    assert "train.py:other" in out
    code, out, _ = command("ablate train.py:setup --steps 10 --pairs 1 --plan plan.json --json")
    assert (code, json.loads(out)["name"]) == (0, "ablate")
    code, out, _ = command("phases train.py:setup --rounds 2 --plan plan.json")
    assert code == 0
    assert "forward" in out


@pytest.mark.parametrize(("limit", "code"), [("0.01", 0), ("100", 1)])
def test_a_speed_below_the_limit_ends_with_status_1(command, limit, code):
    line = f"race train.py:setup train.py:other --steps 10 --pairs 1 --fail-below {limit}"
    assert command(line)[0] == code


REFUSED = {
    "compare train.py:setup --to-end": "to_end.not_task",
    "compare train.py:setup --against strict": "against.not_task",
    "scale train.py:setup --scaling strong": "scaling.not_task",
    "compare digits_resnet --steps 10 --quick": "option.conflict",
    "race train.py:setup": "race.names",
    "profile train.py:setup": "task.is_setup",
    "compare train.py:number": "format.invalid",
}


@pytest.mark.parametrize(("line", "code"), REFUSED.items(), ids=list(REFUSED))
def test_what_does_not_fit_is_refused_in_one_line(command, line, code):
    status, out, err = command(line)
    assert (status, out) == (1, "")
    assert err.endswith(f" [{code}]\n")
    assert err.count("\n") == 1


def test_a_loop_is_trained_with_a_plan(command, tmp_path):
    code, out, _ = command("train train.py:setup --steps 6 --plan plan.json --record run.jsonl --json")
    found = json.loads(out)
    assert (code, found["steps"], found["samples"]) == (0, 6, 48)
    assert len((tmp_path / "run.jsonl").read_text().splitlines()) >= 6
    code, out, _ = command("train train.py:setup --steps 6")
    assert code == 0


@pytest.mark.parametrize(
    "options", ["--batch-size 4", "--judged 2", "--ranks 2", "--when-clean a.csv --by 1h", "--dry-run"]
)
def test_options_of_tasks_are_refused_for_a_loop(command, options):
    code, _, err = command(f"train train.py:setup --plan plan.json {options}")
    assert code
    assert options.split()[0] in err
