"""ZeRO stages as numbers for JSON output."""

from __future__ import annotations

from trimtab.core.plan import ZeroStageCost
from trimtab.planner.zero_stage import RefusedStage, StageCost, Stages


def stage_figures(stages: Stages) -> tuple[ZeroStageCost, ...]:
    """Return the costs of all ways to shard the model, in table order."""
    return tuple(map(_figures, stages))


def _figures(each: StageCost | RefusedStage) -> ZeroStageCost:
    stage, reduces_once = each.way
    if isinstance(each, RefusedStage):
        return ZeroStageCost(stage, reduces_once, each.refusal, code=each.code)
    return ZeroStageCost(
        stage,
        reduces_once,
        peak_bytes=each.peak_bytes,
        window_s=each.window_s,
        waiting_s=each.cost.exposed_s,
        micro_batch=int(each.plan.micro_batch.value or 1),
        num_micro_batches=each.plan.num_micro_batches,
        reduce_dtype=str(each.plan.reduce_dtype.value),
    )
