"""Files that `trimtab init` writes: each kind is planned, compared and run as it is."""

from __future__ import annotations

import shlex
import sys

import brief
import pytest
import torch

import trimtab
from trimtab import cli
from trimtab.experiments.loop_setup import build
from trimtab.tasks import load_task_or_setup

LOOPS = {"plain": 128, "images": 64, "text": 16, "transformers": 16}  # Samples per batch.
MOST_LINES = 60


@pytest.fixture
def command(monkeypatch, capsys, tmp_path):
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


@pytest.fixture(params=LOOPS)
def kind(request):
    if request.param == "transformers":
        pytest.importorskip("transformers")
    return request.param


def test_a_loop_is_written_with_the_next_two_commands_and_builds(command, tmp_path, kind):
    code, out, err = command(f"init {kind}_loop.py --kind {kind}")
    assert (code, err) == (0, "")
    assert out.splitlines()[1:] == [
        f"  trimtab plan {kind}_loop.py:setup",
        f"  trimtab compare {kind}_loop.py:setup --quick",
    ]
    text = (tmp_path / f"{kind}_loop.py").read_text()
    assert len(text.splitlines()) <= MOST_LINES
    assert f"trimtab plan {kind}_loop.py:setup " in text
    setup = load_task_or_setup(f"{kind}_loop.py:setup")
    loop, again = build(setup, 1), build(setup, 1)
    assert loop.model is not again.model
    assert all(map(torch.equal, loop.model.state_dict().values(), again.model.state_dict().values()))


def test_a_written_loop_is_compared(command, tmp_path, kind):
    command(f"init {kind}_loop.py --kind {kind}")
    trimtab.Plan.fixed(LOOPS[kind], fused_optimizer=True).save(tmp_path / "plan.json")
    code, out, _ = command(f"compare {kind}_loop.py:setup --steps 4 --pairs 1 --plan plan.json")
    assert code == 0  # Transformers logs to standard error.
    assert "samples/s" in out


@pytest.mark.slow
def test_a_written_loop_is_planned(command, kind):
    command(f"init {kind}_loop.py --kind {kind}")
    code, out, _ = command(f"plan {kind}_loop.py:setup --memory 4GiB")
    assert code == 0
    assert "your loop: " in out


def test_the_default_is_a_plain_loop_and_no_file_is_overwritten(command, tmp_path):
    code, out, _ = command("init")
    assert code == 0
    assert "trimtab plan my_loop.py:setup" in out
    before = (tmp_path / "my_loop.py").read_text()
    for line in ("init", "init my_loop.py --kind text"):
        code, _, err = command(line)
        assert code == 1
        assert err.endswith("[file.exists]\n")
    assert (tmp_path / "my_loop.py").read_text() == before
    assert command("init other.py --kind unknown")[0] == 2


def test_the_plain_loop_runs_as_a_program(command, capsys):
    command("init")
    load_task_or_setup("my_loop.py:setup").__globals__["main"]()
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("epoch ")]
    losses = [float(line.rpartition(" ")[2]) for line in lines]
    assert len(losses) == 3
    assert losses[-1] < losses[0]
