"""A job that plans as it starts: which stage its ranks get, what they are told, and that they train by it."""

from __future__ import annotations

from pathlib import Path

import pytest
from ranks import reports, run_program

pytestmark = pytest.mark.slow

PROGRAM = Path(__file__).parents[1] / "stage_rank.py"


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> list[dict]:
    folder = tmp_path_factory.mktemp("stages")
    run_program(PROGRAM, folder)
    return reports(folder)


def test_without_a_limit_every_rank_holds_the_model_and_nothing_is_traced(found):
    for rank in found:
        assert rank["none"]["plan"]["zero_stage"]["value"] == 0
        assert rank["none"]["traces"] == 0
    assert found[0]["none"]["plan"] == found[1]["none"]["plan"]


def test_under_a_limit_that_replicas_do_not_meet_the_ranks_get_shards(found):
    one, other = (rank["shards"] for rank in found)
    assert one["plan"] == other["plan"]
    stage = one["plan"]["zero_stage"]
    assert stage["value"] >= 2
    assert one["plan"]["num_ranks"] == 2
    assert one["plan"]["predicted"]["peak_bytes"] <= found[0]["limit"]
    assert stage["code"] == "dry_run.best"
    assert "waiting for communication" in stage["reason"]
    assert "over gloo of 2 ranks" in stage["reason"]  # as it was timed here
    assert "; measured in a dry run: predicted " in stage["reason"]
    assert one["plan"]["measured"]["step_s"] > 0
    assert one["plan"]["measured"]["peak_bytes"] <= found[0]["limit"]
    assert "this plan, measured" in one["text"]
    refused = {loser["value"]: loser["reason"] for loser in stage["rejected"]}
    assert "is over the budget" in refused[0]
    assert "is over the budget" in refused[1]
    assert "* zero stage" in one["text"]


def test_one_rank_traces_for_all(found):
    assert found[0]["shards"]["traces"] > 0
    assert found[1]["shards"]["traces"] == 0


def test_they_train_by_it_as_one_process_does(found):
    assert found[0]["shards"]["plan"]["reduce_dtype"]["value"] != "bf16"  # which would round
    trained = found[0]["trained"]
    assert trained["difference"] <= 1e-12
    assert trained["ours"]["steps"] == trained["theirs"]["steps"] > 0


def test_a_limit_that_no_stage_meets_is_refused_on_every_rank_for_one_reason(found):
    one, other = (rank["impossible"] for rank in found)
    assert (one["error"], other["error"]) == ("InfeasibleError", "RankError")
    assert one["code"] == "plan.infeasible"
    assert "on 2 ranks" in one["said"]
    assert one["said"] in other["said"]
