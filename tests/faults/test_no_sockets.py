"""Nothing of ours opens a socket: importing, planning, training, comparing and reporting, with sockets blocked."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import brief
import pytest

TESTS = Path(__file__).parents[1]
# Told before anything else is imported: whatever asks for a socket is ended by it, and so says it.
BLOCKED = """
import sys

def block(event, given):
    if event.startswith("socket.") and event != "socket.gethostname":  # which asks the system for its own name
        raise RuntimeError(f"a socket was asked for: {event} {given}")

sys.addaudithook(block)
"""
COMMANDS = {
    "plan": ("plan", "tiny.py:task", "--json"),
    "plan for a device that is not here": ("plan", "digits_resnet", "--device", "H100 SXM", "--json"),
    "train": ("train", "digits_resnet", "--steps", "4", "--record", "run.jsonl", "--checkpoints", "kept"),
    "compare": ("compare", "tiny.py:task", "--quick", "--pairs", "1", "--out", "out"),
    "report": ("report", "run.jsonl", "--out", "pages"),
    "doctor": ("doctor",),
}


def run(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"PYTHONPATH": str(TESTS.parent / "src")}
    env.pop("TRIMTAB_OFFLINE", None)  # which refuses before a socket would be asked for
    return subprocess.run([sys.executable, "-c", BLOCKED + code], cwd=folder, env=env, capture_output=True, text=True)


def test_the_block_blocks(tmp_path):
    asked = run("import socket; socket.socket()", tmp_path)
    assert "a socket was asked for: socket.__new__" in asked.stderr
    assert run("import socket", tmp_path).returncode == 0


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return one with a task, in which commands leave what later ones read."""
    made = tmp_path_factory.mktemp("offline")
    task = (TESTS / "unit" / "experiments" / "tiny_task.py").read_text()
    (made / "tiny.py").write_text(task + brief.CODE)
    return made


@pytest.mark.parametrize("arguments", COMMANDS.values(), ids=COMMANDS)
def test_no_command_asks_for_a_socket(folder, arguments):
    code = f"sys.argv = ['trimtab', *{arguments!r}]\nfrom trimtab.cli import main\nmain()\n"
    done = run(code, folder)
    assert done.returncode == 0, done.stderr[-3000:]


def test_a_loop_of_ones_own_asks_for_none(tmp_path):
    code = f"""{brief.CODE}
import torch, trimtab
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters())
def loss_fn(model, batch): return (model(batch) - 1).square().mean()
batches = [torch.randn(8, 4) for _ in range(4)]
plan = trimtab.plan(model, optimizer, loss_fn, batches[0], num_blocks=3)
with trimtab.start(model, optimizer, plan, checkpoints=trimtab.Checkpoints("run", every_steps=2)) as run:
    for window in run.windows(batches):
        run.train_step(window, loss_fn)
"""
    done = run(code, tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
