"""Settings of several ranks: ZeRO stage, engine, and reduction of gradients (paper section III).

The stage and its communication are chosen together by `planner.zero_stage`, and applied by the backends in
`trimtab.distributed`. The remaining settings need a ZeRO stage.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from trimtab.core import validation
from trimtab.core.choice import Effect, Scalar
from trimtab.core.parallelism import ENGINES, REDUCE_DTYPES
from trimtab.settings.base import Setting, one_of, true_or_false

if TYPE_CHECKING:
    from trimtab.plans.plan import Plan


class _Shared(Setting):
    """Setting that has no effect on an unwrapped model."""

    def is_shown(self, values: Mapping[str, Scalar]) -> bool:
        return values["zero_stage"] is not None


class ZeroStage(_Shared):
    """Sharding of an unwrapped model."""

    name = "zero_stage"
    title = "ZeRO stage"
    default = None
    effect = Effect.ROUNDING
    summary = (
        "Sharding of an unwrapped model: 0 replicates it (DDP), 1 shards the optimizer state, 2 gradients too, 3 "
        "parameters too."
    )
    values = "0, 1, 2, 3, or None for an unwrapped model"
    examples = (0, 1, 2, 3)

    def check(self, value: Scalar, plan: Plan) -> None:
        if value is not None:
            validation.integer(self.field, value, low=1 if plan.engine.value == "deepspeed" else 0, high=3)


class Engine(_Shared):
    """Library that shards the model."""

    name = "engine"
    title = "sharding library"
    default = "torch"
    effect = Effect.ROUNDING
    summary = "Library that shards the model; deepspeed at ZeRO stages 1 to 3."
    values = "torch or deepspeed"
    examples = ("deepspeed",)

    def check(self, value: Scalar, plan: Plan) -> None:
        one_of(self, value, ENGINES)


class ReduceDtype(_Shared):
    """Precision of the gradients on the link."""

    name = "reduce_dtype"
    default = "fp32"
    effect = Effect.ROUNDING
    summary = "dtype of the gradient reduction; bf16 sends half the bytes."
    values = "fp32 or bf16"
    examples = ("bf16",)

    def check(self, value: Scalar, plan: Plan) -> None:
        one_of(self, value, REDUCE_DTYPES)


class BucketBytes(_Shared):
    """Size of the messages of a gradient reduction."""

    name = "bucket_bytes"
    default = None
    effect = Effect.ROUNDING
    summary = "Size of DDP's gradient buckets."
    values = "a whole number of bytes, or None for the engine's default"
    examples = (1 << 20,)

    def check(self, value: Scalar, plan: Plan) -> None:
        if value is not None:
            validation.integer(self.field, value)


class ReducesOnce(_Shared):
    """When gradients are reduced at ZeRO stages 2 and 3."""

    name = "reduces_once"
    default = True
    effect = Effect.ROUNDING
    summary = (
        "At stages 2 and 3: true reduces gradients once per window and holds them unsharded until then, false reduces "
        "them after every micro-batch and holds a shard."
    )
    values = "true or false"
    examples = (False,)

    def check(self, value: Scalar, plan: Plan) -> None:
        true_or_false(self, value)


class PowerSgdRank(_Shared):
    """Compression of gradients (Vogels et al. 2019)."""

    name = "powersgd_rank"
    title = "PowerSGD rank"
    default = None
    effect = Effect.TRAINING
    summary = "With DDP: rank of the PowerSGD factors that gradients are sent as (Vogels et al. 2019)."
    values = "a whole number, or None for no compression"
    examples = (2,)

    def check(self, value: Scalar, plan: Plan) -> None:
        if value is not None:
            validation.integer(self.field, value)


SHARDING: tuple[Setting, ...] = (ZeroStage(), Engine(), ReduceDtype(), BucketBytes(), ReducesOnce(), PowerSgdRank())
# Values of the settings that need a ZeRO stage, without one.
KEPT: dict[str, Scalar] = {setting.name: setting.default for setting in SHARDING[1:]}


def weight_sharding(plan: Plan) -> str:
    """Return the engine that divides the weights among ranks between forward and backward (ZeRO stage 3), or ""."""
    return str(plan.engine.value) if plan.zero_stage.value == 3 else ""


def stages_with(name: str, engine: Scalar) -> tuple[int, ...]:
    """Return the ZeRO stages that support another value than the default, for a setting with limited support."""
    if engine == "deepspeed":
        stages: dict[str, tuple[int, ...]] = {"bucket_bytes": (1, 2, 3), "reduces_once": (2, 3)}
    else:
        stages = {"bucket_bytes": (0, 1), "powersgd_rank": (0,), "reduces_once": (2, 3)}
    return stages.get(name, ())
