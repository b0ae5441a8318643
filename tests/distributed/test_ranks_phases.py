"""Phases of a step on two ranks, clocked in step: communication of replicas is told, and of shards what is not."""

from __future__ import annotations

from pathlib import Path

import pytest
from ranks import run_ranks

from trimtab.core.serialization import read_json
from trimtab.core.step_phases import TimedGain
from trimtab.experiments.phase_attribution import bound_seconds
from trimtab.experiments.phase_result import PhaseResult

TASKS = Path(__file__).parents[1] / "unit" / "experiments"
RANK = """
    import os, sys
    from pathlib import Path
    rank, folder = int(sys.argv[1]), Path(sys.argv[2])
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank))
    sys.path.insert(0, sys.argv[3])
    import torch
    import torch.distributed as dist
    from trimtab.core.serialization import to_json
    from trimtab.core.plan import Plan
    from trimtab.experiments.phases_command import PhasesRequest, phases_of

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    for stage in (0, 3):
        plan = folder / f"plan-{rank}-{stage}.json"
        plan.write_text(to_json(Plan.fixed(batch_size=16, micro_batch=8, num_ranks=2, zero_stage=stage)))
        found = phases_of(PhasesRequest((f"{sys.argv[3]}/tiny_task.py:task",), plan=plan, rounds=2, ranks=2))
        assert (found is None) == bool(rank)
        if found is not None:
            (folder / f"found-{stage}.json").write_text(to_json(found))
"""


@pytest.fixture(scope="module")
def gains(tmp_path_factory) -> dict[int, TimedGain]:
    """What rank 0 found of a plan for replicas, and of one that shares parameters out."""
    folder = tmp_path_factory.mktemp("phases")
    run_ranks(RANK, folder, TASKS)
    return {stage: read_json(PhaseResult, folder / f"found-{stage}.json").gains[0] for stage in (0, 3)}


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
