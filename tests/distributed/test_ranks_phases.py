"""Phases of a step on two ranks, clocked in step: communication of replicas is told, and of shards what is not."""

from __future__ import annotations

from pathlib import Path

import pytest
from ranks import run_cases

from trimtab.core.serialization import read_json
from trimtab.core.step_phases import TimedGain
from trimtab.experiments.phase_attribution import bound_seconds
from trimtab.experiments.phase_result import PhaseResult

TASKS = Path(__file__).parents[1] / "unit" / "experiments"
RANK = """
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank))
    from trimtab.core.serialization import to_json
    from trimtab.plans.plan import Plan
    from trimtab.experiments.phases_command import PhasesRequest, phases_of
    for stage in (0, 3):
        plan = folder / f"plan-{rank}-{stage}.json"
        plan.write_text(to_json(Plan.fixed(batch_size=16, micro_batch=8, num_ranks=2, zero_stage=stage)))
        result = phases_of(PhasesRequest((f"{case}/tiny_task.py:task",), plan=plan, rounds=2, ranks=2))
        assert (result is None) == bool(rank)
        if result is not None:
            (folder / f"found-{stage}.json").write_text(to_json(result))
"""


@pytest.fixture(scope="module")
def gains(tmp_path_factory) -> dict[int, TimedGain]:
    """What rank 0 found of a plan for replicas, and of one that shares parameters out."""
    folder = tmp_path_factory.mktemp("phases")
    run_cases(RANK, folder, str(TASKS))
    return {stage: read_json(PhaseResult, folder / f"0/found-{stage}.json").gains[0] for stage in (0, 3)}


def test_ranks_wait_for_one_another_in_both_loops(gains):
    for gain in gains.values():
        assert gain.num_ranks == 2
        for arm in (gain.reference, gain.plan):
            assert arm.mean_s("communication") > 0
            assert bound_seconds(arm)["communication-bound"] == pytest.approx(arm.mean_s("communication"))


def test_roofs_of_replicas_are_of_a_ranks_share(gains):
    """Sixteen rows of the tiny network's first layer and the others, forward."""
    assert gains[0].reference.roofs["forward"].flops == 2 * 16 * (16 * 64 + 64 * 64 + 64 * 4)
    assert gains[0].plan.roofs["forward"].flops == gains[0].reference.roofs["forward"].flops
    assert gains[0].plan.notes == ()


def test_of_shards_it_is_said_what_is_not_told(gains):
    assert gains[3].plan.roofs == {}
    (note,) = gains[3].plan.notes
    assert "parameters are sharded" in note
    assert gains[3].reference.roofs
