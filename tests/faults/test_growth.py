"""What a run holds as it goes on: no more memory, threads or files, and as much of a record for each window."""

from __future__ import annotations

import json
from pathlib import Path

from ranks import started

PROGRAM = Path(__file__).parents[1] / "long_run.py"


def held_over(folder: Path, windows: int) -> list[dict[str, int]]:
    """Return what a run of so many windows held, each hundredth of the way."""
    with started(PROGRAM.read_text(), folder, [(folder, windows)], name=str(PROGRAM)) as (process,):
        assert process.wait(3600) == 0, process.said()[-3000:]
        lines = [line for line in process.said().splitlines() if line.startswith("{")]
    found = [json.loads(line) for line in lines]
    assert len(found) >= 99
    return found


def test_a_thousand_windows_leave_nothing_behind(tmp_path):
    """The first half warms up what is made once; the matrix of ten thousand is in tests/soak."""
    held = held_over(tmp_path, 1_000)
    middle, last = held[len(held) // 2], held[-1]
    assert last["resident"] - middle["resident"] < 3 * 2**20
    assert last["threads"] == middle["threads"]
    assert last["files"] == middle["files"]
    assert last["record"] / last["window"] < 1_000
    assert (last["decisions"] - middle["decisions"]) / (last["window"] - middle["window"]) < 150
    assert last["on_disk"] == middle["on_disk"] < 20
    assert len(list((tmp_path / "run").glob("step-*"))) == 2
