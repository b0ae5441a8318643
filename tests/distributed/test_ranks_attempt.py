"""What ranks try in step, and may fail at: all go on alike, or all end by one reason."""

from __future__ import annotations

from pathlib import Path

import pytest
from ranks import run_cases

from trimtab.distributed.coordinator import ALONE

TASKS = Path(__file__).parents[1] / "unit" / "experiments"
RANK = """
    case, tasks = case
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank))
    sys.path.insert(0, tasks)
    from tiny_task import task
    from trimtab.core.errors import RankError
    from trimtab.distributed import process_group, host_gather
    from trimtab.experiments import loop_setup, loops, paired_run
    from trimtab.experiments.paired_run import Arm, measure_step
    from trimtab.experiments.task_loops import TaskLoops
    from trimtab.experiments.task_plans import job_ranks

    host_gather._ANSWER_S = 1.0
    process_group.TIMEOUT_S = 8.0
    its_count = paired_run.count_flops

    def count(step):
        if case == "all" or (rank and case == "before"):
            raise ValueError(f"too much for rank {rank}")
        found = its_count(step)
        if rank and case == "after":
            raise ValueError("too much for it")
        if case == "a rank's end":
            raise RankError("rank", problem="A rank ended.", hint="Look at its log.")
        return found

    paired_run.count_flops = count
    found = {}
    try:
        with job_ranks() as ranks:
            arm = Arm("baseline", lambda seed: loop_setup.build(TaskLoops(task).setup, seed), loops.plain_steps)
            rows = measure_step(arm, is_baseline=True, failures={}, together=ranks)
            found["flops"] = next((row.value for row in rows if row.metric == "flops_per_sample"), None)
            found["after"] = ranks.each(rank)
    except Exception as error:
        found["error"], found["ranks"] = f"{type(error).__name__}: {error}", getattr(error, "ranks", None)
    paired_run.count_flops = its_count
    if case == "before":  # the other rank waits inside a collective, until this one ends
        (folder / f"rank-{rank}.json").write_text(json.dumps(found))
        os._exit(0)
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    cases = ("none", "all", "after", "a rank's end", "before")  # whose ranks end inside a collective
    ranks = run_cases(RANK, tmp_path_factory.mktemp("attempt"), *((case, str(TASKS)) for case in cases))
    return dict(zip(cases, ranks, strict=True))


def test_what_all_count_is_told(found):
    one, other = found["none"]
    assert one == other
    assert one["flops"] > 0


@pytest.mark.parametrize("case", ["all", "after"])
def test_a_count_that_fails_on_any_is_told_by_none_and_all_go_on(found, case):
    assert found[case] == [{"flops": None, "after": [0.0, 1.0]}] * 2


def test_a_rank_that_fails_where_the_others_wait_for_it_ends_all_by_its_reason(found):
    one, other = found["before"]
    assert "ValueError: too much for rank 1" in other["error"]
    assert one["error"].startswith("RankError")
    assert one["ranks"] == [1]
    assert "ValueError: too much for rank 1" in one["error"]


def test_a_rank_s_end_is_no_count_that_failed(found):
    for each in found["a rank's end"]:
        assert each["error"].startswith("RankError")


def test_one_process_tries_alone():
    assert ALONE.attempt(lambda: 5) == 5
    assert ALONE.attempt(lambda: [][0]) is None
