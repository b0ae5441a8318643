"""Decisions from a recorded profile: under other limits, or for a target device that is not present."""

from __future__ import annotations

from dataclasses import replace

from trimtab.core import validation
from trimtab.core.errors import FormatError
from trimtab.core.hardware import absent_device
from trimtab.core.objective import Budget, Objective
from trimtab.core.profile import Profile
from trimtab.core.serialization import read_json
from trimtab.planner.target_device_candidates import recorded_blocks, traced_for, with_blocks
from trimtab.planner.target_device_candidates import recorded_traces as recorded_traces


def recorded_profile(path: str, budget: Budget, objective: Objective, device: str | None) -> Profile:
    """Return the profile in a file, for the recorded device or for a target device that is not present.

    Raises:
        FormatError: the file is no profile, or has no traces of target devices.
    """
    recorded = read_json(Profile, path)
    for trial in recorded.trials:  # Times are compared as ratios, so they must be positive and finite.
        validation.positive_and_finite(f"{path}: trials.block_s", trial.block_s)
    if device is None:
        return recorded
    spec = absent_device(device)
    if not recorded.target_device_traces:
        raise FormatError(
            path,
            problem=f"The profile {path} has no traces for other devices, which a plan for {device} needs.",
            hint="Record the profile on a CPU with `trimtab profile TASK -o FILE.json`. If the new profile "
            "has no traces either, the task's steps cannot be traced.",
            code="profile.no_traces",
        )
    there = replace(recorded.for_device(spec), objective=objective, budget=budget.within(spec.memory_bytes))
    return with_blocks(traced_for(there, recorded_traces(recorded)), recorded_blocks(recorded))
