"""A long run of a tiny model with all that keeps it: what the process holds as it goes on.

    python long_run.py FOLDER WINDOWS

Prints a line of JSON every hundredth of the way: bytes resident, threads, open files, bytes of the record and of the
decisions, files in the folder of the run.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import trimtab
from trimtab.core.record import Header, RecordWriter

PAGE = os.sysconf("SC_PAGE_SIZE")


def held(record: Path, run: Path) -> dict[str, int]:
    """Return what the process holds now, and what it left on disk."""
    gc.collect()
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * PAGE
    files = len(os.listdir("/proc/self/fd"))
    return {
        "resident": resident,
        "threads": len(os.listdir("/proc/self/task")),  # of torch and the interpreter, not Python's alone
        "files": files,
        "record": record.stat().st_size,
        "decisions": (run / "decisions.jsonl").stat().st_size,
        "on_disk": sum(each.is_file() for each in run.rglob("*")),
    }


def train(folder: Path, windows: int) -> None:
    """Train, and say what is held."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    x = torch.randn(256, 8)
    loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), 16, shuffle=True)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    rule = trimtab.BatchRule(k_max=4, min_windows=20)
    plan = trimtab.Plan.fixed(16, 8, batch_rule=rule)
    keep = trimtab.Checkpoints(folder / "run", every_steps=max(1, windows // 50), keep_last=2)
    path = folder / "record.jsonl"
    with (
        RecordWriter(path, Header("long", 0)) as record,
        trimtab.start(model, optimizer, plan, record=record, checkpoints=keep, nonfinite="skip") as run,
    ):
        while run.num_windows < windows:
            for window in run.windows(loader):
                run.train_step(window, lambda model, batch: (model(batch[0]) - batch[1]).square().mean())
                if run.num_windows % (windows // 100) == 0:
                    sys.stdout.write(json.dumps({"window": run.num_windows} | held(path, folder / "run")) + "\n")
                if run.num_windows >= windows:
                    break


if __name__ == "__main__":
    train(Path(sys.argv[1]), int(sys.argv[2]))
