"""Ranks that make something in turn wait for each other: as long as each lives, and not for one that failed."""

from __future__ import annotations

import pytest
from ranks import run_cases

RANK = """
    from trimtab.distributed.process_group import limited_to
    from trimtab.experiments.task_plans import job_ranks


    def load():
        if rank and case == "long":
            time.sleep(2.5)
        if rank and case == "raises":
            raise ValueError("no room for the data")
        return rank

    found, start = {}, time.monotonic()
    try:
        with limited_to(0.8 if case == "long" else 30.0), job_ranks() as ranks:
            found["made"] = [ranks.in_turn(load), ranks.in_turn(lambda: 5)]
            found["each"] = ranks.each(rank)
    except Exception as error:
        found["error"] = f"{type(error).__name__}: {error}"
        found |= {name: getattr(error, name, None) for name in ("is_echo", "code", "ranks")}
    found["seconds"] = time.monotonic() - start
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    cases = ("short", "long", "raises")
    return dict(zip(cases, run_cases(RANK, tmp_path_factory.mktemp("turns"), *cases), strict=True))


@pytest.mark.parametrize("case", ["short", "long"])
def test_a_rank_may_take_longer_than_the_time_limit(found, case):
    for rank, each in enumerate(found[case]):
        assert "error" not in each, each
        assert each["made"] == [rank, 5]
        assert each["each"] == [0.0, 1.0]


def test_one_that_fails_ends_all_by_its_reason_and_at_once(found):
    one, other = found["raises"]
    assert other["error"] == "ValueError: no room for the data"
    assert one["error"].startswith("RankError")
    assert (one["code"], one["ranks"]) == ("ranks.ended", [1])
    assert "ValueError: no room for the data" in one["error"]
    assert one["is_echo"]
    assert one["seconds"] < 20
