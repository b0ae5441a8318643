"""Invalid combinations of settings: one table, checked for every plan and for every candidate of the search."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from trimtab.core.choice import CUDA_GRAPHS, Scalar, is_recorded
from trimtab.core.errors import ValueGivenError
from trimtab.settings import IN_STEP, SETTINGS
from trimtab.settings.precision import HALF
from trimtab.settings.recompute import names_operators
from trimtab.settings.sharding import KEPT, stages_with
from trimtab.settings.step_in_backward import in_parts

Values = Mapping[str, Any]


@dataclass(frozen=True)
class Conflict:
    """An invalid combination of values.

    Args:
        settings: the setting named by the error, and the conflicting setting.
        holds: returns True if the values are in conflict; called with the values of all settings, `num_ranks` and
            `batch_size`.
        error: returns the texts of the error: `got`, `expected`, and optionally `problem`, `hint` and `code`.
        example: values in conflict, for the test.
    """

    settings: tuple[str, str]
    holds: Callable[[Values], bool]
    error: Callable[[Values], dict[str, str]]
    example: dict[str, Scalar]


def _needs_stage(name: str, example: Scalar) -> Conflict:
    """Return the conflict of a sharding setting (or several ranks) with an unwrapped model."""
    kept = KEPT.get(name, 1)
    return Conflict(
        (name, "zero_stage"),
        holds=lambda values: values["zero_stage"] is None and values[name] != kept,
        error=lambda values: {
            "got": repr(values[name]),
            "expected": "a plan with zero_stage",
            "problem": f"plan.{name}={values[name]!r} needs plan.zero_stage, which is None.",
            "hint": "Set zero_stage to 0 for DDP, or to 1, 2 or 3 for ZeRO.",
            "code": "plan.needs_zero_stage",
        },
        example={name: example},
    )


def _unsupported_stage(name: str, example: Scalar, stage: int) -> Conflict:
    """Return the conflict of a sharding setting with unsupported ZeRO stages."""

    def holds(values: Values) -> bool:
        changed = values["zero_stage"] is not None and values[name] != KEPT[name]
        return changed and values["zero_stage"] not in stages_with(name, values["engine"])

    def error(values: Values) -> dict[str, str]:
        stages = stages_with(name, values["engine"])
        return {
            "got": f"{values[name]!r} with zero_stage={values['zero_stage']} and engine={values['engine']!r}",
            "expected": f"{KEPT[name]!r}" + (f", or zero_stage in {stages}" if stages else ""),
            "code": "plan.stage_unsupported",
        }

    return Conflict((name, "zero_stage"), holds, error, {name: example, "zero_stage": stage})


def _is_changed(name: str, values: Values) -> bool:
    return bool(values[name] != SETTINGS[name].default)


def _steps_before(name: str, example: Scalar, is_set: Callable[[Values], bool]) -> Conflict:
    """Return the conflict of a step within the backward pass with a value that acts on the gradient of a whole step."""
    return Conflict(
        ("step_in_backward", name),
        holds=lambda values: bool(values["step_in_backward"]) and is_set(values),
        error=lambda values: {
            "got": f"True with {name}={values[name]!r}",
            "expected": f"False, or another {name}",
            "problem": f"plan.step_in_backward updates each parameter before run.step() applies "
            f"{name}={values[name]!r}.",
            "hint": "Set step_in_backward=False.",
            "code": "step_in_backward.gradient_needed",
        },
        example={"step_in_backward": True, name: example},
    )


def _needs_plain_state(name: str, example: Scalar, allowed: tuple[Scalar, ...], reason: str) -> Conflict:
    """Return the conflict of low-bit optimizer state with a setting that has other values than `allowed`."""

    def error(values: Values) -> dict[str, str]:
        kept = " or ".join(map(repr, allowed))
        return {
            "got": f"{values['optimizer_state']!r} with {name}={values[name]!r}",
            "expected": f"{name}={kept} with low-bit state",
            "problem": f"plan.optimizer_state={values['optimizer_state']!r} does not support {name}={values[name]!r}: "
            f"{reason}.",
            "hint": f"Set optimizer_state='user', or {name}={kept}.",
            "code": f"optimizer_state.{name}",
        }

    return Conflict(
        ("optimizer_state", name),
        holds=lambda values: values["optimizer_state"] != "user" and values[name] not in allowed,
        error=error,
        example={"optimizer_state": "8bit", name: example},
    )


def _float8_needs(name: str, example: Scalar, allowed: tuple[Scalar, ...], reason: str) -> Conflict:
    """Return the conflict of float8 products with a setting that has other values than `allowed`."""
    return Conflict(
        ("float8", name),
        holds=lambda values: values["float8"] is not None and values[name] not in allowed,
        error=lambda values: {
            "got": f"{values['float8']} with {name}={values[name]!r}",
            "expected": f"{name}={allowed[0]!r} with float8",
            "problem": f"plan.float8={values['float8']} does not support {name}={values[name]!r}: {reason}.",
            "hint": f"Set float8=None, or {name}={allowed[0]!r}.",
            "code": f"float8.{name}",
        },
        example={"float8": 256, "precision": "bf16", name: example},
    )


def _keeps_tensors(name: str, example: Scalar, is_set: Callable[[Values], bool], reason: str) -> Conflict:
    """Return the conflict of activation offload with a value that itself decides what a forward saves."""
    return Conflict(
        ("offload", name),
        holds=lambda values: values["offload"] is not None and is_set(values),
        error=lambda values: {
            "got": f"{values['offload']} with {name}={values[name]!r}",
            "expected": f"None, or another {name}",
            "problem": f"plan.offload={values['offload']} does not support {name}={values[name]!r}: {reason}.",
            "hint": f"Set offload=None, or {name}={SETTINGS[name].default!r}.",
            "code": f"offload.{name}",
        },
        example={"offload": 2, name: example},
    )


CONFLICTS = (
    Conflict(
        ("fp32_modules", "precision"),
        holds=lambda values: values["fp32_modules"] is not None and values["precision"] not in HALF,
        error=lambda values: {
            "got": f"{values['fp32_modules']!r} with precision={values['precision']!r}",
            "expected": "None, or precision 'bf16' or 'fp16'",
            "problem": f"plan.fp32_modules={values['fp32_modules']!r} has no effect with "
            f"precision={values['precision']!r}, because the model does not run under autocast.",
            "hint": "Set fp32_modules=None, or precision='bf16'.",
            "code": "fp32_modules.no_autocast",
        },
        example={"fp32_modules": "head"},
    ),
    Conflict(
        ("warmup_fraction", "schedule"),
        holds=lambda values: values["warmup_fraction"] is not None and values["schedule"] == "user",
        error=lambda values: {
            "got": f"{values['warmup_fraction']} with schedule='user'",
            "expected": "None, or another schedule",
        },
        example={"warmup_fraction": 0.2},
    ),
    Conflict(
        ("optimizer", "zero_stage"),
        holds=lambda values: values["optimizer"] == "muon" and values["zero_stage"] not in (None, 0),
        error=lambda values: {
            "got": f"'muon' with zero_stage={values['zero_stage']}",
            "expected": "zero_stage None or 0 with 'muon'",
            "problem": f"plan.optimizer='muon' does not support zero_stage={values['zero_stage']}: Muon needs "
            "unsharded matrices.",
            "hint": "Set optimizer='user', or zero_stage=0.",
        },
        example={"optimizer": "muon", "zero_stage": 1},
    ),
    Conflict(
        ("step_in_backward", "micro_batch"),
        holds=lambda values: bool(values["step_in_backward"]) and values["micro_batch"] < values["batch_size"],
        error=lambda values: in_parts(values["step_in_backward"], "several micro-batches"),
        example={"step_in_backward": True, "micro_batch": 4},
    ),
    Conflict(
        ("recompute", "dropout"),
        # torch runs no random operator for a probability of 0 or 1, so that the operators behind have other numbers.
        holds=lambda values: names_operators(values["recompute"]) and values["dropout"] in (0, 1),
        error=lambda values: {
            "got": f"{values['recompute']!r:.80} with dropout={values['dropout']}",
            "expected": "a schedule without numbers of operators, or another dropout",
            "problem": f"plan.recompute={values['recompute']!r:.80} names operators by number, and "
            f"dropout={values['dropout']} removes the operators that draw random numbers, so the numbers would change.",
            "hint": "Write ~7 in place of ~7[0,2], or set dropout=None.",
            "code": "recompute.dropout",
        },
        example={"recompute": "~0[0]", "dropout": 0.0},
    ),
    _steps_before("precision", "fp16", lambda values: values["precision"] == "fp16"),
    _steps_before("compiled", CUDA_GRAPHS, lambda values: is_recorded(values["compiled"])),
    *(_steps_before(name, setting.examples[0], partial(_is_changed, name)) for name, setting in IN_STEP.items()),
    _steps_before("zero_stage", 0, partial(_is_changed, "zero_stage")),
    _steps_before("num_ranks", 2, lambda values: values["num_ranks"] > 1),
    _needs_plain_state("zero_stage", 1, (None, 0), "the shards of the state are not converted"),
    _needs_plain_state("optimizer", "muon", ("user",), "the momentum of Muon is not converted"),
    _needs_plain_state("fused_optimizer", True, (False,), "parameters with low-bit state always take the fused step"),
    _keeps_tensors(
        "recompute", "every_block", partial(_is_changed, "recompute"), "recomputed blocks save no activations"
    ),
    _keeps_tensors(
        "compiled", CUDA_GRAPHS, partial(_is_changed, "compiled"), "compiled and captured code fixes its saved tensors"
    ),
    _keeps_tensors(
        "zero_stage", 3, lambda values: values["zero_stage"] in (2, 3), "gathered weights would be moved as activations"
    ),
    _float8_needs("precision", "fp32", ("bf16",), "the layers between the products run under autocast to bf16"),
    _float8_needs("zero_stage", 3, (None, 0, 1), "the weights are sharded"),
    _float8_needs("engine", "deepspeed", ("torch",), "DeepSpeed casts the weights itself"),
    _float8_needs("offload", 2, (None,), "saved operands in float8 are not moved"),
    _needs_stage("engine", "deepspeed"),
    _needs_stage("reduce_dtype", "bf16"),
    _needs_stage("bucket_bytes", 1024),
    _needs_stage("reduces_once", False),
    _needs_stage("powersgd_rank", 2),
    _needs_stage("num_ranks", 2),
    _unsupported_stage("bucket_bytes", 1024, stage=2),
    _unsupported_stage("powersgd_rank", 2, stage=1),
    _unsupported_stage("reduces_once", False, stage=0),
)


def find_conflict(values: Values, conflicts: Sequence[Conflict] = CONFLICTS) -> Conflict | None:
    """Return the first conflict among the values of all settings, `num_ranks` and `batch_size`, or None."""
    return next((conflict for conflict in conflicts if conflict.holds(values)), None)


def check_conflicts(values: Values) -> None:
    """Raise `ValueGivenError` for the first conflict among the values of `find_conflict`."""
    if (conflict := find_conflict(values)) is not None:
        raise ValueGivenError(f"plan.{conflict.settings[0]}", **conflict.error(values))
