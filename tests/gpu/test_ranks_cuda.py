"""What only ranks on CUDA devices can show, over NCCL: one rank on one device, several on more (`make gpu-check`)."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import torch
from device_rank import check
from ranks import run_program

TESTS = Path(__file__).parents[1]
DEVICES = torch.cuda.device_count()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
several = pytest.mark.skipif(DEVICES < 2, reason="needs two CUDA devices")


def read(folder: Path, name: str, ranks: int) -> list[dict]:
    return [json.loads((folder / f"{name}{rank}.json").read_text()) for rank in range(ranks)]


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=several)])
def test_ranks_ask_on_the_host_beside_nccl_and_share_a_model(tmp_path: Path, ranks: int) -> None:
    """Also in a group of NCCL alone, as a loop's own script often makes it; backends at one rank too."""
    run_program(TESTS / "device_rank.py", tmp_path, "cuda", ranks=ranks)
    check(read(tmp_path, "rank-", ranks), "nccl")


@several
def test_two_devices_train_as_one_does(tmp_path: Path) -> None:
    """Of torch's backends, as `tests/distributed/test_backends.py` has it of the host; double precision."""
    pattern = "^(ddp|zero-[123](-each)?)/(mean-k3|tokens|tokens-k3-clip|uneven-ends|rank-without-rows)$"
    run_program(TESTS / "backend_rank.py", tmp_path, pattern, "", "cuda", ranks=2)
    found = json.loads((tmp_path / "report.json").read_text())
    assert len(found) == 6 * 5
    for name, each in found.items():
        assert "error" not in each, (name, each["error"])
        assert each["difference"] <= 1e-10, name
        assert each["ours"]["steps"] == each["theirs"]["steps"]


@several
def test_ranks_that_plan_under_a_limit_get_shards(tmp_path: Path) -> None:
    run_program(TESTS / "stage_rank.py", tmp_path, "cuda")
    one, other = read(tmp_path, "rank-", 2)
    assert one["shards"]["plan"] == other["shards"]["plan"]
    assert one["shards"]["plan"]["zero_stage"]["value"] >= 2
    assert "over nccl of 2 ranks" in one["shards"]["plan"]["zero_stage"]["reason"]
    assert one["trained"]["difference"] <= 1e-10


@several
def test_the_peak_of_a_rank_is_told_within_five_percent(tmp_path: Path) -> None:
    """Beside what cuBLAS takes, which the model is large for."""
    from memory_rank import CASES, told_on

    run_program(TESTS / "memory_rank.py", tmp_path, "cuda", ranks=2)
    found = read(tmp_path, "peaks", 2)
    for name, (stage, k, once) in CASES.items():
        counted = max(itertools.chain(*(each[name] for each in found)))
        assert told_on("cuda", stage, k, once=once) == pytest.approx(counted, rel=0.05), name
