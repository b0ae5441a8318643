"""Validation of a plan's sharding settings (math: sections 2 and 4)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trimtab.core import validation
from trimtab.core.errors import FormatError, ValueGivenError

ENGINES = ("torch", "deepspeed")
REDUCE_DTYPES = GATHER_DTYPES = ("fp32", "bf16")
# Sharding settings and their defaults without a ZeRO stage; other values need a stage.
KEPT = {
    "engine": "torch",
    "reduce_dtype": "fp32",
    "bucket_bytes": None,
    "reduces_once": True,
    "powersgd_rank": None,
}
STAGES = {
    0: "every rank holds all (DDP)",
    1: "optimizer state is sharded",
    2: "gradients and optimizer state are sharded",
    3: "parameters, gradients and optimizer state are sharded",
}


def check_sharing(num_ranks: int, zero_stage: Any, values: Mapping[str, Any]) -> None:
    """Raise `ValueGivenError` or `FormatError` if sharding settings are out of range or incompatible.

    Args:
        values: the settings named in `KEPT`.
    """
    validation.integer("plan.num_ranks", num_ranks)
    validation.one_of("plan.engine", values["engine"], ENGINES)
    validation.one_of("plan.reduce_dtype", values["reduce_dtype"], REDUCE_DTYPES)
    if not isinstance(values["reduces_once"], bool):
        raise FormatError("plan.reduces_once", got=repr(values["reduces_once"]), expected="true or false")
    for name in ("bucket_bytes", "powersgd_rank"):
        if values[name] is not None:
            validation.integer(f"plan.{name}", values[name])
    if zero_stage is None:
        _require_kept(num_ranks, values)
        return
    lowest = 0 if values["engine"] == "torch" else 1
    stage = validation.integer("plan.zero_stage", zero_stage, low=lowest, high=3)
    for name, stages in _needs(values).items():
        if stage not in stages:
            expected = f"{KEPT[name]!r}" + (f", or zero_stage in {stages}" if stages else "")
            given = f"{values[name]!r} with zero_stage={stage} and engine={values['engine']!r}"
            raise ValueGivenError(f"plan.{name}", got=given, expected=expected, code="plan.stage_unsupported")


def _require_kept(num_ranks: int, values: Mapping[str, Any]) -> None:
    changed = {name: values[name] for name, kept in KEPT.items() if values[name] != kept}
    for name, value in (changed | ({"num_ranks": num_ranks} if num_ranks > 1 else {})).items():
        raise ValueGivenError(
            f"plan.{name}",
            got=repr(value),
            expected="a plan with zero_stage",
            problem=f"plan.{name}={value!r} needs plan.zero_stage, which is None.",
            hint="Set zero_stage to 0 for DDP, or to 1, 2 or 3 for ZeRO.",
            code="plan.needs_zero_stage",
        )


def _needs(values: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the ZeRO stages that support each setting with a non-default value."""
    by_engine = {"bucket_bytes": (0, 1), "powersgd_rank": (0,), "reduces_once": (2, 3), "reduce_dtype": (0, 1, 2, 3)}
    if values["engine"] == "deepspeed":
        by_engine = {"bucket_bytes": (1, 2, 3), "powersgd_rank": (), "reduces_once": (2, 3), "reduce_dtype": (1, 2, 3)}
    return {name: stages for name, stages in by_engine.items() if values[name] != KEPT[name]}
