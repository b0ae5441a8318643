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
    assert (one["code"], one["ranks"]) == ("ranks.ended", [1])
    assert "ValueError: no loss here" in one["error"]


def test_a_rank_that_is_gone_is_named(tmp_path):
    run_program(PROGRAM, tmp_path, "one_dies")
    said = json.loads((tmp_path / "rank-0.json").read_text())["one_dies"]
    assert said["error"].startswith("RankError")
    assert (said["code"], said["ranks"]) == ("ranks.silent", [1])
    assert "2 ranks" in said["error"]


def test_memory_that_runs_out_on_all_ranks_at_unlike_places_ends_all_by_one_reason(tmp_path):
    """What one sent more than the other is left over, and would meet whatever is sent next."""
    run_program(PROGRAM, tmp_path, "all_run_out")
    said = [json.loads((tmp_path / f"rank-{rank}.json").read_text())["all_run_out"] for rank in range(2)]
    assert said[0]["error"] == said[1]["error"]
    assert said[0]["error"].startswith("RankError: ")
    assert (said[0]["code"], said[0]["ranks"]) == ("ranks.dry_run_failed", [0])
    assert said[0]["got"] == "out of memory"
    assert max(each["seconds"] for each in said) < 12.0  # that collectives wait at the longest


def test_memory_that_runs_out_on_all_ranks_at_one_place_refuses_the_plan(tmp_path):
    run_program(PROGRAM, tmp_path, "all_run_out_alike", "slow_usual")
    for rank in range(2):
        found = json.loads((tmp_path / f"rank-{rank}.json").read_text())
        assert found["all_run_out_alike"]["unchanged"]
        reduce_dtype = found["all_run_out_alike"]["plan"]["reduce_dtype"]
        assert reduce_dtype["code"] == "dry_run.not_run"
        assert "out of memory" in reduce_dtype["reason"]
        assert found["slow_usual"]["plan"]["reduce_dtype"]["value"] == "bf16"  # what is sent after it arrives
