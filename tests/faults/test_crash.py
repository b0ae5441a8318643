"""Runs that are killed at moments that nobody chose, and go on: every loss is that of a run that never was."""

from __future__ import annotations

import itertools
import json
import random
import shutil
import time
from pathlib import Path
from typing import NamedTuple

import pytest
from ranks import SHARDED_CHECKPOINTS, started

from trimtab.checkpoint.atomic_directory import TEMPORARY

pytestmark = pytest.mark.slow

PROGRAM = Path(__file__).parents[1] / "crashing.py"
WINDOWS = {
    "k = 1": {},
    "k = 4": {"micro_batch": 2},
    "adaptive": {
        "rule": {"policy": "variance", "sigma2_target": 1e-12, "k_max": 8, "min_windows": 3},
        "micro_batch": 4,
    },
}
# Every value beside every other one of each pair of settings; all of them together are in tests/soak.
PAIRWISE = [
    ("fp32", "k = 1", False, 1),
    ("bf16", "k = 1", True, 2),
    ("fp32", "k = 4", True, 2),
    ("bf16", "k = 4", False, 1),
    ("fp32", "adaptive", False, 2),
    ("bf16", "adaptive", True, 1),
]


class Kills(NamedTuple):
    """Kills of a run that had said something since it was started: `counted`; those of them inside a save."""

    counted: int
    in_saves: int


def cell_of(precision: str, windows: str, recompute: bool, ranks: int) -> dict:
    """Return the options of a cell of the matrix."""
    return {"precision": precision, "recompute": recompute, "ranks": ranks} | WINDOWS[windows]


def started_once(folder: Path, losses: Path, options: dict, kill: tuple[int, float] | None = None) -> int:
    """Run the program; returns the status it ended with.

    Args:
        kill: it once it has said so many lines more, so many seconds later.
    """
    ranks = options.get("ranks", 1)
    meet = losses.with_name(f"meet-{time.monotonic_ns()}")
    each = [options | {"rank": rank, "meet": str(meet)} for rank in range(ranks)]
    arguments = [(folder, losses_of(losses, rank), json.dumps(each[rank])) for rank in range(ranks)]
    imports = SHARDED_CHECKPOINTS if options.get("stage") else ()
    with started(PROGRAM.read_text(), losses.parent, arguments, name=str(PROGRAM), imports=imports) as processes:
        process = processes[-1]
        if kill is not None:
            lines, later_s = kill
            until = time.monotonic() + 60
            while num_lines(losses) < lines and process.status() is None and time.monotonic() < until:
                time.sleep(0.004)
            time.sleep(later_s)
            for each_process in reversed(processes):
                each_process.kill()
        ended = [each_process.wait(120) for each_process in processes]
        assert set(ended) <= {0, 9, -9}, [each_process.said()[-3000:] for each_process in processes]
        return max(ended, key=abs)


def losses_of(losses: Path, rank: int) -> Path:
    """Return where a rank says its losses."""
    return losses.with_name(f"{losses.stem}-{rank}.txt") if rank else losses


def num_lines(losses: Path) -> int:
    """Return the lines that were said."""
    return losses.read_bytes().count(b"\n") if losses.exists() else 0


def said(losses: Path) -> dict[str, set[str]]:
    """Return what was said of each window, whole lines alone."""
    found: dict[str, set[str]] = {}
    for path in sorted(losses.parent.glob(f"{losses.stem}*.txt")):
        for line in path.read_text().split("\n")[:-1]:
            window, _, loss = line.partition(" ")
            found.setdefault(path.stem.removeprefix(losses.stem) + window, set()).add(loss)
    return found


def crashed(folder: Path, options: dict, kills: int, seed: int = 0) -> tuple[dict[str, set[str]], Kills]:
    """Kill a run as often, at random moments of its life, and let it come to its end; returns what it said."""
    chance, losses = random.Random(seed), folder / "crashed.txt"
    losses.touch()
    counted = in_saves = 0
    for _ in range(kills):
        before = num_lines(losses)
        kill = before + chance.randrange(14), chance.uniform(0, 0.02)
        if started_once(folder / "run", losses, options, kill) != 0 and num_lines(losses) > before:
            counted += 1
            in_saves += any(TEMPORARY in each.name for each in (folder / "run").iterdir())
    assert started_once(folder / "run", losses, options) == 0
    return said(losses), Kills(counted, in_saves)


def ks_of(folder: Path) -> set[int]:
    """Return the k that windows were decided to have."""
    lines = (folder / "run" / "decisions.jsonl").read_text().splitlines()[1:]
    return {json.loads(line)["k"] for line in lines}


def whole(folder: Path, options: dict) -> dict[str, set[str]]:
    """Return what a run says that nobody kills; it repeats the other's decisions."""
    keep = {"every_steps": None} | ({"follows": str(folder / "run")} if "rule" in options else {})
    assert started_once(folder / "whole", folder / "whole.txt", options | {"keep": keep}) == 0
    return said(folder / "whole.txt")


def test_a_few_cells_have_every_pair_of_settings():
    whole_matrix = itertools.product(("fp32", "bf16"), WINDOWS, (False, True), (1, 2))

    def pairs(cells):
        return {((i, cell[i]), (j, cell[j])) for cell in cells for i, j in itertools.combinations(range(4), 2)}

    assert pairs(PAIRWISE) == pairs(whole_matrix)


@pytest.mark.parametrize(("precision", "windows", "recompute", "ranks"), PAIRWISE)
def test_no_loss_differs_after_kills(tmp_path, precision, windows, recompute, ranks):
    options = cell_of(precision, windows, recompute, ranks)
    found, kills = crashed(tmp_path, options, kills=2, seed=len(windows) + ranks)
    assert kills.counted >= 1, "too few of the kills came between its start and its end"
    assert found == whole(tmp_path, options)
    assert windows != "adaptive" or len(ks_of(tmp_path)) > 1
    shutil.rmtree(tmp_path / "run")


@pytest.mark.parametrize(
    "options",
    [{"micro_batch": 2}, {"micro_batch": 2, "ranks": 2}, {"micro_batch": 4, "precision": "fp16", "factor": 64.0}],
)
def test_no_loss_that_counts_its_terms_differs_after_kills(tmp_path, options):
    """By tokens of masks: no two windows or micro-batches have as many, and the schedule goes by them."""
    options = options | {"tokens": True, "micro_batch": 2}
    found, kills = crashed(tmp_path, options, kills=2, seed=11)
    assert kills.counted >= 1, "too few of the kills came between its start and its end"
    assert found == whole(tmp_path, options)
    shutil.rmtree(tmp_path / "run")


def test_no_loss_differs_after_kills_while_it_is_saved_in_the_background(tmp_path):
    options = {"keep": {"background": True, "every_steps": 1}}
    found, kills = crashed(tmp_path, options, kills=3, seed=17)
    assert kills.counted >= 2, "too few of the kills came between its start and its end"
    assert found == whole(tmp_path, options)


FAULTS = {"no_number": [5, 21, 22, 40], "out_of_memory_from": 13}


@pytest.mark.parametrize("verb", ["split", "restore_skipped"])
def test_no_loss_differs_where_a_run_is_killed_while_it_recovers(tmp_path, verb):
    """Losses that are no numbers, and memory that runs out: killed in the middle of one of them, and at random."""
    options = {"faults": FAULTS | {"killed_in": [verb]}}
    found, _ = crashed(tmp_path, options, kills=2)
    assert (tmp_path / f"killed-in-{verb}").exists()
    assert found == whole(tmp_path, {"faults": FAULTS})
    assert {"nan"} == found["21"]
    shutil.rmtree(tmp_path / "run")


def test_no_loss_of_ranks_in_shards_differs_after_kills(tmp_path):
    options = {"ranks": 2, "stage": 2}
    found, kills = crashed(tmp_path, options, kills=3, seed=3)
    assert kills.counted >= 2, "too few of the kills came between its start and its end"
    assert found == whole(tmp_path, options)
