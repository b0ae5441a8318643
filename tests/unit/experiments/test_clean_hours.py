"""`trimtab train`: when it trains, as a command line says it."""

from __future__ import annotations

import datetime
import json
from dataclasses import replace
from pathlib import Path

import pytest
from train_here import trained_here

from trimtab.core.choice import MeasuredCost
from trimtab.core.serialization import to_json
from trimtab.plans.plan import Plan

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
    assert "work: 2.00 h: 4 steps of 30 min 0 s (from the given duration of the run)" in out
    assert "power: 500 W (given); power while waiting is unknown and not counted" in out
    assert "without a pause, end at " in out
    assert "forecast 100 g CO2e (average carbon intensity), 66.7% less than starting now (300 g)" in out
    assert "in the worst case within the range of the forecast: 300 g, 200 g more than starting now" in out
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != "__pycache__") == [
        "hours.csv",
        "plan.json",
        "tiny.py",
    ]
    found = json.loads(train(*dry, "--json")[1])
    assert found["saved_share"] == pytest.approx(2 / 3)
    assert found["power"].startswith("unknown: emissions assume 1000 W")
    assert found["forecast"] == "hours.csv"


def test_a_dry_run_takes_the_plans_seconds(train, tmp_path):
    forecast(tmp_path / "hours.csv", [300] * 4 + [100] * 8 + [300] * 12)
    (tmp_path / "plan.json").write_text(to_json(replace(Plan.fixed(32), measured=MeasuredCost(900.0))))
    out = train(*CLEAN, "--dry-run")[1]
    assert "work: 60 min 0 s: 4 steps of 15 min 0 s (measured by the plan, without evaluations)" in out


def test_where_no_hour_is_cleaner_it_trains_now_and_says_so(train, tmp_path):
    code, out, err = train(*CLEAN[:4], "--when-clean", 350, *CLEAN[6:], "--takes", "2h", "--json")
    assert code == 0
    assert err.startswith("start now: no other schedule saves 1%")
    found = json.loads(out)
    assert (found["steps"], found["waited_s"], found["pauses"]) == (4, 0, 0)
    assert found["when"] == err.strip()
    code, _, err = train(*CLEAN, "--takes", "2h")  # there is no such file
    assert code == 0
    assert err.startswith("start now: ")
    assert "hours.csv" in err


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("--by", "36h"), "option.required", ("--by", "--when-clean")),
        (("--dry-run",), "option.required", ("--dry-run", "--when-clean")),
        (("--when-clean", 350), "option.required", ("--when-clean", "--by")),
        (("--when-clean", 350, "--by", "36h"), "carbon.kind_missing", ("350", "average or marginal")),
        (("--when-clean", "germany", "--by", "36h"), "carbon.source_unknown", ("'germany'", "electricity-maps:ZONE")),
        (("--when-clean", "great-britain", "--by", "noon"), "value.invalid", ("--by", "'noon'")),
        (
            ("--when-clean", "great-britain", "--by", "36h", "--pauses", "60s"),
            "option.required",
            ("--pauses", "--checkpoints"),
        ),
        (
            ("--when-clean", "great-britain", "--by", "36h", "--checkpoints", "k", "--pauses", "1"),
            "value.invalid",
            ("--pauses", "'1'"),
        ),
        (
            ("--when-clean", "great-britain", "--by", "36h", "--takes", "long"),
            "value.invalid",
            ("--takes", "'long'"),
        ),
        (
            ("--when-clean", "great-britain", "--by", "36h", "--takes", "5h", "--idle-watts", 5),
            "carbon.power_unknown",
            ("--idle-watts", "--energy-watts"),
        ),
        (("--when-clean", "great-britain", "--by", "36h", "--ranks", 2), "option.conflict", ("2 ranks",)),
        (("--when-clean", "great-britain", "--by", "36h"), "carbon.duration_unknown", ("--when-clean", "--takes")),
        (("--carbon-kind", "average"), "option.required", ("--carbon-kind average", "--carbon")),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused_before_anything_is_measured(train, tmp_path, arguments, code, words):
    status, out, err = train("--plan", "plan.json", *arguments)
    assert (status, out) == (1, "")
    assert all(word in err for word in words)
    assert err.endswith(f" [{code}]\n")
    assert err.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != "__pycache__") == ["plan.json", "tiny.py"]
