"""Profiles of one process as those of a rank: which candidates go with a stage."""

from __future__ import annotations

from dataclasses import replace

import pytest
from simulated_machine import CPU, Machine, measured

from trimtab.planner.rank_profile import profile_for_stage


def told(optimizer: str):
    """Return a profile of a device that is not here: nothing was tried, and fused steps alone are traced."""
    found = measured(Machine(fused_speed=10.0), device=replace(CPU, kind="cuda"), always=True, optimizer=optimizer)
    plain = [each for each in found.traces if each.candidate.memory_layout == "keep"]
    traces = dict.fromkeys(replace(each.candidate, fused_optimizer=True) for each in plain)
    found = replace(found, trials=(), traces=tuple(replace(plain[0], candidate=each) for each in traces))
    assert found.traces
    return found


@pytest.mark.parametrize(("optimizer", "fused"), [("AdamW", True), ("SGD", False)])
@pytest.mark.parametrize("stage", [2, 3])
def test_shards_of_a_device_that_is_not_here_have_no_fused_step_of_sgd(optimizer, fused, stage):
    profile = told(optimizer)
    found = profile_for_stage(profile, "torch", stage)
    assert [each.candidate for each in found.traces] == [
        replace(each.candidate, fused_optimizer=fused) for each in profile.traces
    ]


@pytest.mark.parametrize("stage", [0, 1])
def test_replicas_of_one_do(stage):
    profile = told("SGD")
    assert profile_for_stage(profile, "torch", stage).traces == profile.traces
