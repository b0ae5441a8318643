"""A signal to a launcher, which sends it on to every rank: all save one window, and the next job goes on from it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from trimtab.checkpoint.envelope import committed

WINDOWS = 40
LOOP = f"""
    import json, os, sys, time, torch, trimtab

    with trimtab.joined() as here:
        torch.manual_seed(here.rank)
        model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Dropout(0.2), torch.nn.Linear(64, 2))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        rows = torch.sin(torch.arange(48.0)[:, None] * 6 + torch.arange(8))
        order = torch.Generator().manual_seed(2)
        loader = trimtab.shard(torch.utils.data.DataLoader(rows, batch_size=8, shuffle=True, generator=order))
        plan = trimtab.Plan.fixed(4, num_ranks=2, zero_stage=int(sys.argv[1]))
        keep, losses = trimtab.Checkpoints("run", every_s=None), {{}}
        try:
            with trimtab.start(model, optimizer, plan, checkpoints=keep) as run:
                while run.num_windows < {WINDOWS}:
                    for window in run.windows(loader):
                        run.train_step(window, lambda model, batch: model(batch).square().mean())
                        losses[run.num_windows] = float(run.loss).hex()
                        time.sleep(0.05)
                        if here.rank == 0:
                            print(run.num_windows, flush=True)
                        if run.num_windows == {WINDOWS}:
                            break
        finally:
            with open(f"rank-{{here.rank}}.json", "w") as file:
                json.dump(losses, file)
"""


def job(folder: Path, stage: int) -> subprocess.Popen:
    folder.mkdir(exist_ok=True)
    (folder / "loop.py").write_text(textwrap.dedent(LOOP))
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", "loop.py"]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([*command, str(stage)], cwd=folder, **streams)


def losses(folder: Path) -> list[dict[str, str]]:
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("stage", [0, 2])
def test_a_signal_to_the_launcher_saves_the_job(tmp_path, stage):
    whole, cut = job(tmp_path / "whole", stage), job(tmp_path / "cut", stage)
    while (line := cut.stdout.readline().strip()) != "3":
        assert line, cut.communicate()[1]
    cut.send_signal(signal.SIGTERM)
    cut.communicate()
    assert cut.returncode != 0
    (saved,) = committed(tmp_path / "cut" / "run")
    windows = int(saved.name.removeprefix("step-"))
    assert 3 <= windows < WINDOWS
    assert [max(map(int, said)) for said in losses(tmp_path / "cut")] == [windows] * 2

    rest = job(tmp_path / "cut", stage)
    for each in (whole, rest):
        error = each.communicate()[1]
        assert each.returncode == 0, error
    for then, expected in zip(losses(tmp_path / "cut"), losses(tmp_path / "whole"), strict=True):
        assert then == {window: loss for window, loss in expected.items() if int(window) > windows}
        assert len(then) == WINDOWS - windows
