"""A command that is killed while it pauses, and started again, decides anew, and is the run that nobody stopped."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
from ranks import Ended, run_command

from trimtab.checkpoint.atomic_directory import committed_folders
from trimtab.core.record import read_record
from trimtab.core.serialization import to_json
from trimtab.plans.plan import Plan

ROOT = Path(__file__).parents[2]
NOW = 1772323200.0  # 2026-03-01T00:00Z
HOUR = 3600.0

# A process whose clock goes only while it sleeps and trains: ten minutes a window.
PROGRAM = """
    import os, signal, sys
    from types import SimpleNamespace
    from trimtab import cli
    from trimtab.experiments import train, train_command
    from trimtab.experiments.train_command import Clock
    import tiny

    now, dies_at = [float(sys.argv[1])], float(sys.argv[2])
    sys.argv[:3] = ["trimtab"]

    def sleep(seconds):
        now[0] += seconds
        if now[0] > dies_at:
            os.kill(os.getpid(), signal.SIGKILL)

    def loss_fn(model, batch, plain=tiny.loss_fn):
        loss = plain(model, batch)
        now[0] += 600
        with open("losses", "a") as file:
            file.write(float(loss.detach()).hex() + "\\n")
        return loss

    def evaluate(model, batches, plain=tiny.accuracy):
        with open("weights", "w") as file:
            file.write("\\n".join(float(p.double().sum()).hex() for p in model.state_dict().values()))
        return plain(model, batches)

    tiny.noted = tiny.replace(tiny.task, loss_fn=loss_fn, metric=tiny.replace(tiny.task.metric, evaluate=evaluate))
    train.time = SimpleNamespace(perf_counter=lambda: now[0])
    train_command.Clock = lambda: Clock(lambda: now[0], sleep)
    cli.main()
"""


def command(folder: Path, *arguments: object, now_s: float = NOW, dies_at: float = 1e12) -> Ended:
    """Run `trimtab train` in a folder of its own."""
    folder.mkdir(exist_ok=True)
    tiny = (ROOT / "tests" / "unit" / "experiments" / "tiny_task.py").read_text()
    (folder / "tiny.py").write_text(
        tiny.replace("import torch\n", "from dataclasses import replace\nimport torch\n", 1)
    )
    (folder / "plan.json").write_text(to_json(Plan.fixed(32)))
    rows = [f"2026-03-01T{i:02}:00Z,{level}" for i, level in enumerate((100, 300, 300, 100, 300, 100, 300, 300))]
    (folder / "hours.csv").write_text("\n".join(["time,g_per_kwh", *rows]))
    options = ("train", "tiny:noted", "--plan", "plan.json", "--steps", 12, "--json", *arguments)
    return run_command(folder, now_s, dies_at, *options, code=PROGRAM)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plain")
    done = command(folder)
    assert done.returncode == 0, done.stderr
    return folder


def test_killed_while_it_pauses_it_goes_on_from_its_checkpoint(plain, tmp_path):
    folder = tmp_path / "paused"
    clean = ("--when-clean", "hours.csv", "--carbon-kind", "average", "--by", "2026-03-01T08:00Z", "--takes", "2h")
    clean += ("--pauses", "10min", "--energy-watts", 1000, "--checkpoints", "kept", "--record", "run.jsonl")
    killed = command(folder, *clean, dies_at=NOW + 2 * HOUR)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert killed.stderr.startswith("start now, in 2 periods, end at 2026-03-01T04:00+00:00; forecast 250 g")
    assert [each.name for each in committed_folders(folder / "kept")] == ["step-6"]
    again = command(folder, *clean, now_s=NOW + 2.5 * HOUR)
    assert again.returncode == 0, again.stderr
    found = json.loads(again.stdout)
    assert found["resumed_at_rows"] == 6 * 32
    for name in ("losses", "weights"):
        assert (folder / name).read_text() == (plain / name).read_text()
    record = read_record(folder / "run.jsonl")
    assert [step.index for step in record.steps] == list(range(12))
    decisions = [event for event in record.events if event.name == "when_to_train"]
    assert [decision.step for decision in decisions] == [0, 6]
    assert decisions[1].detail["now_s"] == NOW + 2.5 * HOUR
    assert decisions[1].detail["work"] == "60 min 0 s: 6 steps of 10 min 0 s (from the given duration of the run)"
    (begin_s, end_s), *_ = decisions[1].detail["stretches"]
    assert NOW + 2.5 * HOUR <= begin_s < end_s <= NOW + 8 * HOUR
