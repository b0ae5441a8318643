"""A rank that ends while plans are rehearsed ends all, by one reason."""

from __future__ import annotations

import json
from pathlib import Path

from ranks import run_program

PROGRAM = Path(__file__).parents[1] / "rehearsal_rank.py"


def test_a_rank_that_raises_while_others_wait_for_it_ends_all_by_its_reason(tmp_path):
    run_program(PROGRAM, tmp_path, "one_raises")
    one, other = (json.loads((tmp_path / f"rank-{rank}.json").read_text())["one_raises"] for rank in range(2))
    assert other["error"] == "ValueError: no loss here"
    assert one["error"].startswith("RankError")
    assert "rank 1 with ValueError: no loss here" in one["error"]


def test_a_rank_that_is_gone_is_named(tmp_path):
    run_program(PROGRAM, tmp_path, "one_dies")
    said = json.loads((tmp_path / "rank-0.json").read_text())["one_dies"]["error"]
    assert said.startswith("RankError")
    assert "no answer from rank 1, of 2" in said
