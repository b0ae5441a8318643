"""Conversion of a single-process plan to several ranks: gradient communication, chosen by the measured link."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from trimtab.core.choice import Choice, Note, Rejected, Scalar
from trimtab.core.hardware import LinkCalibration
from trimtab.core.parallelism import Parallelism, StepShape
from trimtab.core.units import format_bytes, format_seconds
from trimtab.planner.communication_cost import WindowCost, bucket_sizes, window_s
from trimtab.plans.plan import Plan, without_graphs
from trimtab.settings.sharding import KEPT

# Bucket sizes to consider, in bytes; None is torch's default.
BUCKETS = (None, 2**20, 2**22, 2**27)
# Steps are predicted and not run, so a smaller relative saving changes nothing.
WORTH = 0.05
_MARKS = Plan.effects()


class GradientCommunication(NamedTuple):
    """A way to send gradients, and its predicted cost."""

    reduce_dtype: str
    bucket_bytes: int | None
    cost: WindowCost
    cast_s: float

    @property
    def total_s(self) -> float:
        """Seconds of a step."""
        return self.cost.total_s + self.cast_s


def for_replicas(plan: Plan, num_ranks: int, why: str = "") -> Plan:
    """Return a plan of one rank's part of a batch for ranks with a full replica; a plan with a ZeRO stage is unchanged.

    `why` is the reason for not considering sharding; "" if sharding was not requested.
    """
    if plan.zero_stage.value is not None or num_ranks == 1:
        return plan
    reason = "DDP: every rank holds the whole model, and gradients are reduced once per step"
    reason += f"; {why}" if why else ""
    stage = Choice(0, reason, _MARKS["zero_stage"], code="ranks.replicated")
    single = without_graphs(plan, "communication between ranks is not captured in CUDA graphs")
    return single.having(num_ranks=num_ranks, zero_stage=stage)


def for_one_process(plan: Plan) -> Plan:
    """Return a multi-rank plan as a single-process plan, the inverse of `for_replicas`."""
    kept: dict[str, Any] = {
        name: Choice(value, "a single process", _MARKS[name], code="ranks.one_process")
        for name, value in {"zero_stage": None, **KEPT}.items()
    }
    return replace(plan, num_ranks=1, **kept)


def with_fastest_communication(plan: Plan, calibration: LinkCalibration, shape: StepShape) -> Plan:
    """Return the plan with the fastest predicted way to send gradients, if the saving justifies a change."""
    ways = ways_to_send(plan, calibration, shape)
    usual = ways["fp32", None]
    best = min(ways.values(), key=lambda way: (way.total_s, way.reduce_dtype != "fp32", way.bucket_bytes or 0))
    chosen = best if best.total_s < (1 - WORTH) * usual.total_s else usual
    before, after = format_seconds(usual.total_s), format_seconds(chosen.total_s)
    won = Note("predicted.best", f"a step is predicted to take {after} instead of {before}")
    if chosen is usual:
        text = f"no other dtype or bucket size is predicted to make a step {100 * WORTH:.0f}% shorter"
        won = Note("predicted.no_gain", text)
    link, size = calibration.link, format_bytes(sum(shape.block_bytes))
    gathered = " and gathered parameters" if int(plan.zero_stage.value or 0) >= 2 else ""
    traffic = (
        f"sending {size} of gradients{gathered} over {link.name} ({format_seconds(link.latency_s)} per hop, "
        f"{format_bytes(int(link.bytes_per_s))}/s) takes {format_seconds(usual.cost.communication_s)}; {won.text}"
    )
    plan = plan.having(reduce_dtype=_choice("reduce_dtype", chosen, ways, replace(won, text=traffic)))
    if int(plan.zero_stage.value or 0) >= 2:
        return plan
    return plan.having(bucket_bytes=_choice("bucket_bytes", chosen, ways, won))


def ways_to_send(
    plan: Plan, calibration: LinkCalibration, shape: StepShape
) -> Mapping[tuple[str, int | None], GradientCommunication]:
    """Return the cost of all ways to send gradients, by (reduce_dtype, bucket_bytes)."""
    stage, k, is_torch = int(plan.zero_stage.value or 0), plan.num_micro_batches, plan.engine.value == "torch"
    reduces_once, size = bool(plan.reduces_once.value), sum(shape.block_bytes)
    dtypes = ("fp32", "bf16") if is_torch else ("fp32",)
    found = {}
    for dtype, bucket in itertools.product(dtypes, BUCKETS if is_torch and stage < 2 else (None,)):
        how = Parallelism(plan.num_ranks, stage, dtype, bucket, overlaps=is_torch, reduces_once=reduces_once)
        cost = window_s(how, calibration.link, shape, k, overlap_share=calibration.overlap_share)
        # Casting all gradients to bf16 and back; replicas use a hook per bucket.
        hooks = len(bucket_sizes(size, bucket)) if stage < 2 else 0
        cast_s = calibration.cast_s_per_byte * size + calibration.hook_s * hooks
        casts = (1 if reduces_once else k) if dtype == "bf16" else 0
        found[dtype, bucket] = GradientCommunication(dtype, bucket, cost, casts * cast_s)
    return found


def _choice(
    name: str, chosen: GradientCommunication, ways: Mapping[tuple[str, int | None], GradientCommunication], why: Note
) -> Choice:
    value: Scalar = getattr(chosen, name)
    others: dict[Scalar, float] = {}
    for way in ways.values():
        other = getattr(way, name)
        if other != value:
            others[other] = min(way.total_s, others.get(other, way.total_s))
    rejected = tuple(
        Rejected(other, f"predicted at {format_seconds(seconds)} per step at best", "predicted.worse")
        for other, seconds in others.items()
    )
    changed = value != ("fp32" if name == "reduce_dtype" else None)
    return Choice(value, why.text, _MARKS[name], changed, rejected, why.code)
