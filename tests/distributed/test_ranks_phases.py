"""Phases of a step on two ranks, clocked in step: communication of replicas is told, and of shards what is not."""

from __future__ import annotations

from pathlib import Path

import pytest
from ranks import run_cases

from trimtab.core.serialization import read_json
from trimtab.experiments.phase_result import PhaseResult, bound_seconds

TASKS = Path(__file__).parents[1] / "unit" / "experiments"
RANK = """
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank))
    sys.path.insert(0, case)
    from tiny_task import task
    import trimtab
    from trimtab.core.serialization import to_json
    from trimtab.plans.plan import Plan
    from trimtab.experiments.subject import RunOptions
    from trimtab.experiments.task_plans import job_ranks
    with job_ranks() as ranks:
        for stage in (0, 3):
            plan = Plan.fixed(batch_size=16, micro_batch=8, num_ranks=2, zero_stage=stage)
            result = trimtab.phases(task, plan=plan, rounds=2, options=RunOptions(together=ranks))
            (folder / f"found-{stage}-{rank}.json").write_text(to_json(result))
"""


@pytest.fixture(scope="module")
def gains(tmp_path_factory) -> dict[int, PhaseResult]:
    """What rank 0 found of a plan for replicas, and of one that shares parameters out."""
    folder = tmp_path_factory.mktemp("phases")
    run_cases(RANK, folder, str(TASKS))
    return {stage: read_json(PhaseResult, folder / f"0/found-{stage}-0.json") for stage in (0, 3)}


def test_ranks_wait_for_one_another_in_both_loops(gains):
    for gain in gains.values():
        assert gain.num_ranks == 2
        for arm in ("baseline", "plan"):
            waiting = gain.seconds(arm, "phase:communication")
            assert sum(waiting) > 0
            assert bound_seconds(gain, arm)["communication-bound"] == pytest.approx(sum(waiting) / len(waiting))


def test_roofs_of_replicas_are_of_a_sample(gains):
    """Not of a micro-batch or a rank's batch, which have 8 and 16.

    Whether compute or memory bounds an operator depends on the machine, so their sums are compared.
    """
    table = gains[0].table
    bounds = [
        sum(table.value(f"roof:{kind}:forward", arm) for kind in ("compute", "memory")) for arm in ("baseline", "plan")
    ]
    assert 0.5 < bounds[1] / bounds[0] < 2
    assert "plan" not in gains[0].notes


def test_of_shards_it_is_said_what_is_not_told(gains):
    assert gains[3].table.value("roof:compute:forward", "plan") is None
    (note,) = gains[3].notes["plan"]
    assert "parameters are sharded" in note
    assert gains[3].table.value("roof:compute:forward", "baseline") is not None
