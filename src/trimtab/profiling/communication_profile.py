"""Inputs of the communication model from a profile: bytes of the model's blocks, and seconds of a step's phases."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from trimtab.core.parallelism import StepShape
from trimtab.measure.blocks import find_blocks
from trimtab.planner.cost_model import seconds_of
from trimtab.plans.plan import Plan
from trimtab.plans.profile import Profile


def step_shape(model: nn.Module, profile: Profile, plan: Plan) -> StepShape | None:
    """Return the times and sizes of a plan's micro-batch; None if its seconds are unknown.

    The split between forward and backward is the measured one of the unchanged loop, or 1:2 if nothing was run. A
    block's fraction of the seconds is its fraction of the parameters used in products; embeddings are looked up, so
    they do not count.
    """
    cost = plan.measured or plan.predicted
    phases = profile.phases_s if profile.trials else _phases_there(profile, plan)
    if cost is None or not phases.get("forward") or not phases.get("backward"):
        return None
    whole_s = sum(phases.get(name, 0.0) for name in ("forward", "backward", "optimizer"))
    unit = cost.step_s / whole_s
    k = plan.num_micro_batches
    gathered, sizes, shares = zip(*_blocks(model), strict=True)
    return StepShape(
        unit * phases["forward"] / k,
        unit * phases["backward"] / k,
        unit * phases.get("optimizer", 0.0),
        sizes,
        shares if any(shares) else (1.0,) * len(sizes),
        sum(1 for p in model.parameters() if p.requires_grad),
        gathered,
    )


def _phases_there(profile: Profile, plan: Plan) -> Mapping[str, float]:
    """Return the predicted phases of a step on a target device, in the plan's precision; {} if unknown."""
    work = next((t.work for t in profile.traces if t.candidate.precision == plan.precision.value and t.work), None)
    if work is None:
        return {}
    how = (profile.device, str(plan.precision.value), int(plan.micro_batch.value or 1))
    micro_s, step_s = seconds_of(work.micro_batch, *how), seconds_of(work.step, *how)
    if micro_s is None or step_s is None:
        return {}
    k = plan.num_micro_batches
    return {"forward": k * micro_s / 3, "backward": 2 * k * micro_s / 3, "optimizer": step_s}


def _blocks(model: nn.Module) -> list[tuple[int, int, float]]:
    """Return (bytes, trainable bytes, weight in the seconds) of the model outside of its blocks, then of each block."""
    modules = dict(model.named_modules(remove_duplicate=False))
    blocks = [modules[name] for name in find_blocks(model)]
    inside = {parameter for block in blocks for parameter in block.parameters()}
    outside = [p for p in model.parameters() if p not in inside]
    looked_up = {p for m in model.modules() if isinstance(m, nn.Embedding) for p in m.parameters()}
    multiplied = {p for m in model.modules() if not isinstance(m, nn.Embedding) for p in m.parameters(recurse=False)}
    groups = [outside, *(list(block.parameters()) for block in blocks)]
    return [
        (
            sum(p.numel() * 4 for p in group),
            sum(p.numel() * 4 for p in group if p.requires_grad),
            float(sum(p.numel() for p in group if p in multiplied or p not in looked_up)),
        )
        for group in groups
    ]
