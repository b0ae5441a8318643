"""A signal to a launcher, which sends it on to every rank: all save one window, and the next job goes on from it."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
from ranks import reports, run_torchrun

from trimtab.checkpoint.atomic_directory import committed_folders

pytestmark = pytest.mark.slow

WINDOWS = 40
LOOP = f"""
    import json, sys, time, torch, trimtab

    with trimtab.process_group() as here:
        torch.manual_seed(here.rank)
        model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Dropout(0.2), torch.nn.Linear(64, 2))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        rows = torch.sin(torch.arange(48.0)[:, None] * 6 + torch.arange(8))
        order = torch.Generator().manual_seed(2)
        loader = trimtab.shard(torch.utils.data.DataLoader(rows, batch_size=8, shuffle=True, generator=order))
        plan = trimtab.Plan.fixed(4, num_ranks=2, zero_stage=2)
        keep, losses = trimtab.Checkpoints("run", every_s=None), {{}}
        try:
            with trimtab.start(model, optimizer, plan, checkpoints=keep) as run:
                while run.num_windows < {WINDOWS}:
                    for window in run.windows(loader):
                        run.train_step(window, lambda model, batch: model(batch).square().mean())
                        losses[run.num_windows] = float(run.loss).hex()
                        time.sleep(float(sys.argv[1]))
                        if here.rank == 0:
                            print(run.num_windows, flush=True)
                        if run.num_windows == {WINDOWS}:
                            break
        finally:
            with open(f"rank-{{here.rank}}.json", "w") as file:
                json.dump(losses, file)
"""


def write_loop(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "loop.py").write_text(textwrap.dedent(LOOP))


@contextlib.contextmanager
def job(folder: Path, slow_s: float) -> Iterator[subprocess.Popen]:
    """Run a job of two ranks, whose windows take so long at least; what is left of it when this is left is ended."""
    write_loop(folder)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", "loop.py"]
    with (folder / "errors.txt").open("w") as errors:
        streams = {"stdout": subprocess.PIPE, "stderr": errors, "text": True}
        started = subprocess.Popen([*command, str(slow_s)], cwd=folder, **streams)
    try:
        yield started
    finally:
        if started.poll() is None:
            started.terminate()  # sent on to the ranks, which SIGKILL is not
            started.communicate()


def losses(folder: Path) -> list[dict[str, str]]:
    """Return each rank's losses of a job that nothing cuts off."""
    write_loop(folder)
    done = run_torchrun(folder, "loop.py", 0.0)
    assert done.returncode == 0, done.stderr
    return reports(folder)


def test_a_signal_to_the_launcher_saves_the_job(tmp_path):
    whole, folder = losses(tmp_path / "whole"), tmp_path / "cut"
    with job(folder, slow_s=0.3) as cut:
        while (line := cut.stdout.readline().strip()) != "3":
            assert line, (folder / "errors.txt").read_text()
        cut.send_signal(signal.SIGTERM)
        cut.communicate()
    assert cut.returncode == 1
    (saved,) = committed_folders(folder / "run")
    windows = int(saved.name.removeprefix("step-"))
    assert 3 <= windows < WINDOWS
    assert [max(map(int, each)) for each in reports(folder)] == [windows] * 2
    for rest, expected in zip(losses(folder), whole, strict=True):
        assert rest == {window: loss for window, loss in expected.items() if int(window) > windows}
        assert len(rest) == WINDOWS - windows
