"""Shards on CUDA devices are kept: killed, a job goes on to the bit; on one device and on more (`make gpu-check`)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from kept_job import job, trained

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
several = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
STEPS = {"every_steps": 5}


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"own": "fsdp", "ranks": 1}, id="fully_shard, one device"),
        pytest.param({"own": "fsdp", "ranks": 2}, id="fully_shard, two devices", marks=several),
        pytest.param({"stage": 1, "ranks": 2}, id="stage 1, two devices", marks=several),
        pytest.param({"stage": 3, "ranks": 2, "mixed": True}, id="stage 3, two devices", marks=several),
    ],
)
def test_shards_go_on_as_those_that_were_not_killed(tmp_path: Path, options: dict) -> None:
    given = options | {"device": "cuda"}
    (tmp_path / "whole").mkdir()
    whole = job(tmp_path / "whole", "whole", keep={}, **given)
    trained(tmp_path, "dead", keep=STEPS, dies_after=13, **given)
    for ours, theirs in zip(job(tmp_path, "again", keep=STEPS, **given), whole, strict=True):
        assert min(int(window) for window in ours["said"] if window != "end") == 11
        assert ours["said"] == {window: loss for window, loss in theirs["said"].items() if window in ours["said"]}
        assert ours["state"]["20"] == theirs["state"]["20"]
        assert ours["consumed"] == theirs["consumed"][10:]
