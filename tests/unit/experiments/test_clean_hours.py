"""`trimtab train`: when it trains, as a command line says it."""

from __future__ import annotations

import datetime
import json
from dataclasses import replace
from pathlib import Path

import pytest
from train_here import trained_here

from trimtab.core.choice import MeasuredCost
from trimtab.core.plan import Plan
from trimtab.core.serialization import to_json

HOUR = datetime.timedelta(hours=1)


@pytest.fixture
def train(monkeypatch, capsys, tmp_path):
    with trained_here(monkeypatch, capsys, tmp_path) as run:
        yield run


def forecast(path: Path, levels) -> None:
    """Write hours from the present one on."""
    now = datetime.datetime.now(datetime.UTC).replace(minute=0, second=0, microsecond=0)
    rows = [f"{(now + i * HOUR).isoformat()},{level}" for i, level in enumerate(levels)]
    path.write_text("\n".join(["time,g_per_kwh", *rows]))


CLEAN = ("--plan", "plan.json", "--steps", 4, "--when-clean", "hours.csv", "--carbon-kind", "average", "--by", "20h")


def test_a_dry_run_says_when_and_trains_nothing(train, tmp_path):
    forecast(tmp_path / "hours.csv", [300] * 4 + [100] * 8 + [300] * 12)
    dry = (*CLEAN, "--takes", "2h", "--dry-run", "--checkpoints", "kept", "--record", "run.jsonl")
    code, out, err = train(*dry, "--energy-watts", 500)
    assert (code, err) == (0, "")
    assert "work: 2.00 h: 4 steps of 30 min 0 s, as given for the whole run" in out
    assert "power: 500 W, as given; what it holds while it waits is not known, and not counted" in out
    assert "in one piece, to be done by " in out
    assert "100 g CO2e by average intensity, on the forecast, 66.7% less than 300 g of starting now" in out
    assert "at worst within the forecast's range: 300 g, 200 g more than starting now" in out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hours.csv", "plan.json", "tiny.py"]
    found = json.loads(train(*dry, "--json")[1])
    assert found["saved_share"] == pytest.approx(2 / 3)
    assert found["power"].startswith("not known: grams are of 1000 W, shares hold for any")
    assert found["forecast"] == "hours.csv"


def test_a_dry_run_takes_the_plans_seconds(train, tmp_path):
    forecast(tmp_path / "hours.csv", [300] * 4 + [100] * 8 + [300] * 12)
    (tmp_path / "plan.json").write_text(to_json(replace(Plan.fixed(32), measured=MeasuredCost(900.0))))
    out = train(*CLEAN, "--dry-run")[1]
    assert "work: 60 min 0 s: 4 steps of 15 min 0 s, as the plan measured them, without the evaluation" in out


def test_where_no_hour_is_cleaner_it_trains_now_and_says_so(train, tmp_path):
    code, out, err = train(*CLEAN[:4], "--when-clean", 350, *CLEAN[6:], "--takes", "2h", "--json")
    assert code == 0
    assert err.startswith("start now: no other time saves 1%")
    found = json.loads(out)
    assert (found["steps"], found["waited_s"], found["pauses"]) == (4, 0, 0)
    assert found["when"] == err.strip()
    code, _, err = train(*CLEAN, "--takes", "2h")  # there is no such file
    assert code == 0
    assert err.startswith("start now: no forecast from hours.csv: a file that cannot be read")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--by", "36h"), "--by: got it alone; expected --when-clean beside it"),
        (("--dry-run",), "--dry-run: got it alone"),
        (("--when-clean", 350), "--by: got nothing"),
        (("--when-clean", 350, "--by", "36h"), "which one it is: average or marginal"),
        (("--when-clean", "germany", "--by", "36h"), "electricity-maps:ZONE"),
        (("--when-clean", "great-britain", "--by", "noon"), "--by: got 'noon'"),
        (("--when-clean", "great-britain", "--by", "36h", "--pauses", "60s"), "--pauses: got no --checkpoints"),
        (
            ("--when-clean", "great-britain", "--by", "36h", "--checkpoints", "k", "--pauses", "1"),
            "--pauses: got '1'",
        ),
        (("--when-clean", "great-britain", "--by", "36h", "--takes", "long"), "--takes: got 'long'"),
        (
            ("--when-clean", "great-britain", "--by", "36h", "--takes", "5h", "--idle-watts", 5),
            "--idle-watts: got no --energy-watts, and no plan",
        ),
        (("--when-clean", "great-britain", "--by", "36h", "--ranks", 2), "--when-clean: got 2 ranks; expected one"),
        (("--when-clean", "great-britain", "--by", "36h"), "--when-clean: got a plan without seconds a step"),
        (("--carbon-kind", "average"), "--carbon beside it"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused_before_anything_is_measured(train, tmp_path, arguments, says):
    code, out, err = train("--plan", "plan.json", *arguments)
    assert (code, out) == (1, "")
    assert says in err
    assert err.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["plan.json", "tiny.py"]
