"""A plan: the value, reason, numerical effect and rejected alternatives of every setting.

Numerical effects: *bitwise* keeps results equal bit by bit; *rounding* changes rounding only; *training* changes the
training. A plan that does not change the training is equivalent, any other is tuned. The equivalence tests
are generated from these effects.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trimtab.core import validation
from trimtab.core.batch_rule import BatchRule
from trimtab.core.choice import (
    Choice,
    Effect,
    FrontPoint,
    MeasuredCost,
    Note,
    Proof,
    Scalar,
    SplitCheck,
    is_by_compiler,
    is_recorded,
)
from trimtab.core.energy_reading import NO_METER, MeterFacts
from trimtab.core.errors import FormatError
from trimtab.core.objective import ASSUMED_REFERENCE, Reference
from trimtab.core.serialization import read_json, to_json, write_result
from trimtab.plans import plan_text
from trimtab.settings import SETTINGS, unchanged
from trimtab.settings.base import BY_HAND
from trimtab.settings.conflicts import check_conflicts


@dataclass(frozen=True)
class ZeroStageCost:
    """A ZeRO stage with the best settings within the limits.

    Args:
        zero_stage: 0 to 3.
        reduces_once: True if gradients are reduced once per window, False if after every micro-batch.
        refusal: reason for excluding the stage, or ""; all figures are then None.
        peak_bytes: peak of a rank; None if unknown.
        window_s: seconds per window.
        waiting_s: part of `window_s` spent waiting for communication.
        micro_batch: samples per micro-batch.
        num_micro_batches: k, the micro-batches of a full window.
        reduce_dtype: dtype of the gradient reduction.
        code: stable identifier of the refusal, such as "budget.memory", or "".
    """

    zero_stage: int
    reduces_once: bool
    refusal: str = ""
    peak_bytes: int | None = None
    window_s: float | None = None
    waiting_s: float | None = None
    micro_batch: int | None = None
    num_micro_batches: int | None = None
    reduce_dtype: str | None = None
    code: str = ""


PLAN_SCHEMA = 14

# One field per setting, from `trimtab.settings.SETTINGS`; all but the micro-batch keep the user's value by default.
_Choices: Any = dataclasses.make_dataclass(
    "_Choices",
    [
        ("batch_size", int),
        ("micro_batch", Choice),
        *((name, Choice, unchanged(name)) for name in SETTINGS if name != "micro_batch"),
    ],
    frozen=True,
)


@dataclass(frozen=True)
class Plan(_Choices):  # type: ignore[misc]
    """All settings that `start` applies, with the measurements behind them.

    Every setting (the list is in the documentation, and `trimtab.settings.SETTINGS`) is a field with its `Choice`:
    `plan.precision.value`.

    Args:
        batch_size: samples that the loader yields per optimizer step and rank (B_base / R).
        micro_batch: choice of the samples per forward and backward.
        num_ranks: number of processes, each with `batch_size` samples per step.
        batch_rule: policy and bounds of the adaptive batch size; None for a constant batch size.
        recompute_blocks: names of the modules that the schedule refers to, in forward order; (): the blocks found in
            the module tree, in its order.
        check: result of the splitting check; None if it was not run.
        proof: comparison of the applied plan with the unchanged loop; None if it was not run.
        reference: loop that the plan was compared with.
        baseline: cost of the reference loop.
        target_device: name of the target device that all figures are predicted for; "" for a measured plan.
        peak_margin: safety margin on traced peaks, as a fraction, or None.
        seconds_margin: safety margin on predicted seconds, as a fraction, when they are compared with a limit; or
            None.
        predicted: predicted cost of the chosen settings.
        measured: cost measured in the final trials against the reference, or None.
        verified: 95% interval of the speed-up over the reference in the final trials; None if not tried.
        timing_noise: largest relative difference of identical runs in the final trials that the timing does not
            resolve (A/A control); None if not tried.
        stands_between: range of the memory weight, as a fraction of the weights of time and memory, in which the
            choice stays best; None if unknown.
        front: Pareto front of all settings considered, fastest first.
        stages: predicted cost of each ZeRO stage, for a plan made without the ranks.
        meter: energy meter used while planning, or the reason for having none.
        planning_s: seconds spent on planning.
        search_s: part of `planning_s` spent on tuning the training (tuned plan).
        advice: possible gains from changes that a plan may not make.
        notes: figures and settings that planning left out, with the reasons.
    """

    num_ranks: int = 1
    batch_rule: BatchRule | None = None
    recompute_blocks: tuple[str, ...] = ()
    check: SplitCheck | None = None
    proof: Proof | None = None
    reference: Reference = ASSUMED_REFERENCE
    baseline: MeasuredCost | None = None
    target_device: str = ""
    peak_margin: float | None = None
    seconds_margin: float | None = None
    predicted: MeasuredCost | None = None
    measured: MeasuredCost | None = None
    verified: tuple[float, float] | None = None
    timing_noise: float | None = None
    stands_between: tuple[float, float] | None = None
    front: tuple[FrontPoint, ...] = ()
    stages: tuple[ZeroStageCost, ...] = ()
    meter: MeterFacts = NO_METER
    planning_s: float = 0.0
    search_s: float = 0.0
    advice: tuple[Note, ...] = ()
    notes: tuple[Note, ...] = ()
    schema: int = PLAN_SCHEMA

    def __post_init__(self) -> None:
        if self.schema != PLAN_SCHEMA:
            raise FormatError("plan.schema", got=repr(self.schema), expected=str(PLAN_SCHEMA))
        validation.integer("plan.batch_size", self.batch_size)
        validation.integer("plan.num_ranks", self.num_ranks)
        for name, setting in SETTINGS.items():
            setting.check(getattr(self, name).value, self)
        check_conflicts(self.values | {"num_ranks": self.num_ranks, "batch_size": self.batch_size})
        if self.splits and self.check is not None and not self.check.splittable and not self.splits_as_the_loop:
            object.__setattr__(self, "micro_batch", replace(self.micro_batch, effect=Effect.TRAINING))

    @classmethod
    def fixed(
        cls,
        batch_size: int,
        micro_batch: int | None = None,
        *,
        num_ranks: int = 1,
        batch_rule: BatchRule | None = None,
        **values: Scalar,
    ) -> Plan:
        """Return a plan set by hand: `Plan.fixed(128, micro_batch=32, precision="bf16")`.

        Args:
            batch_rule: makes the batch size adaptive; `batch_policy` is set to its policy.

        Raises:
            ValueGivenError: a value is out of range.
            FormatError: an unknown field.
        """
        names = [name for name in SETTINGS if name != "batch_policy"]  # The policy is set through `batch_rule`.
        if unknown := sorted(values.keys() - set(names)):
            raise FormatError(
                f"plan.{unknown[0]}",
                got="an unknown setting",
                expected="one of " + ", ".join(names),
                code="plan.unknown_setting",
            )
        rows = validation.integer("plan.batch_size", batch_size)
        values = {name: SETTINGS[name].by_hand(value) for name, value in values.items()}
        choices = {
            name: Choice(
                value, "set by hand", SETTINGS[name].effect, changed=value != SETTINGS[name].default, code=BY_HAND
            )
            for name, value in values.items()
        }
        micro = rows if micro_batch is None else micro_batch
        by_hand = "set by hand" if micro == rows else f"set by hand; {plan_text.UNPROVED_SPLIT}"
        split = Choice(micro, by_hand, SETTINGS["micro_batch"].effect, changed=micro != rows, code=BY_HAND)
        plan: Plan = cls(batch_size=rows, micro_batch=split, num_ranks=num_ranks, **choices)  # type: ignore[call-arg]
        return plan if batch_rule is None else plan.freed(batch_rule, "set by hand", BY_HAND)

    def freed(self, rule: BatchRule, reason: str, code: str = "") -> Plan:
        """Return the plan with a batch rule. A rule that only measures leaves the batch size unchanged."""
        if rule.only_measures:
            reason, code = "the gradient noise scale is measured, and the batch size is constant", "batch.only_measured"
        policy = Choice(rule.policy, reason, Effect.TRAINING, changed=not rule.only_measures, code=code)
        return self.having(batch_rule=rule, batch_policy=policy)

    @classmethod
    def effects(cls) -> dict[str, Effect]:
        """Return the numerical effect of every setting.

        In a plan that splits a batch although its check failed, the micro-batch changes the training.
        """
        return {name: setting.effect for name, setting in SETTINGS.items()}

    def recomputing(self, schedule: str, blocks: tuple[str, ...], reason: str) -> Plan:
        """Return the plan with activation checkpointing of some blocks."""
        choice = replace(unchanged("recompute"), value=schedule, reason=reason, changed=True, code="")
        return self.having(recompute=choice, recompute_blocks=blocks)

    def having(self, **changes: Any) -> Plan:
        """Return the plan with new choices of settings, or new facts."""
        return replace(self, **changes)

    @property
    def values(self) -> dict[str, Scalar]:
        """The value of every setting by name."""
        return {name: getattr(self, name).value for name in SETTINGS}

    def choices(self) -> Iterator[tuple[str, Choice]]:
        """Yield (name, choice) of every setting that can have an effect in this plan, in the order of `SETTINGS`."""
        values = self.values
        for name, setting in SETTINGS.items():
            if setting.is_shown(values):
                yield name, getattr(self, name)

    @property
    def splits_as_the_loop(self) -> bool:
        """True if the micro-batch equals a batch of the user's own gradient accumulation."""
        accumulate = self.reference.accumulate
        return accumulate > 1 and self.micro_batch.value == math.ceil(self.batch_size / accumulate)

    @property
    def num_micro_batches(self) -> int:
        """k: micro-batches in a full window."""
        return math.ceil(self.batch_size / int(self.micro_batch.value or 1))

    def micro_batch_of(self, rows: int) -> int:
        """Return the samples per micro-batch in a window of `rows` samples.

        A plan that does not split keeps larger windows whole too, unless its check proved that splitting keeps the
        gradient: with batch statistics, a split window would train differently.
        """
        return int(self.micro_batch.value or 1) if self.splits or self.proves_splitting else max(rows, 1)

    @property
    def proves_splitting(self) -> bool:
        """True if the check proved that splitting a batch keeps the gradient."""
        return self.check is not None and self.check.splittable

    @property
    def splits(self) -> bool:
        """True if a full batch is split into micro-batches."""
        return int(self.micro_batch.value or 1) < self.batch_size

    @property
    def changes(self) -> tuple[str, ...]:
        """Names of the fields with changes from the reference; empty if nothing changes."""
        return tuple(name for name, choice in self.choices() if choice.changed)

    @property
    def changes_in_words(self) -> str:
        """The changes and values as text; "" if nothing changes."""
        return self.values_in_words(self.changes)

    def values_in_words(self, names: Iterable[str]) -> str:
        """Return names and values of choices as text."""
        return ", ".join(f"{name.replace('_', ' ')} {getattr(self, name).value}" for name in names)

    @property
    def plan_kind(self) -> str:
        """ "equivalent" for an equivalent plan; "tuned" for a tuned plan, which changes the training."""
        dynamics = any(choice.changed and choice.effect is Effect.TRAINING for _, choice in self.choices())
        return "tuned" if dynamics else "equivalent"

    def save(self, path: str | Path) -> Path:
        """Write the plan as a JSON file, replacing an existing file at once, and return the path."""
        path = Path(path)
        write_result(path, to_json(self, indent=1))
        return path

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Return a plan from the JSON file that `save` or `trimtab plan --out` wrote.

        Raises:
            FormatError: the file is missing, damaged or has another schema.
        """
        return read_json(cls, path)

    @property
    def speed(self) -> float | None:
        """Speed relative to the baseline, in the final trials if they were run, else predicted; None if unknown."""
        if self.verified is not None and all(map(math.isfinite, self.verified)) and self.verified[0] > 0:
            # The bounds are those of a mean of logarithms, so their geometric mean is the estimate.
            return math.sqrt(self.verified[0] * self.verified[1])
        cost = self.predicted if self.verified is None else self.measured
        return None if self.baseline is None or cost is None else self.baseline.step_s / cost.step_s

    @property
    def headline(self) -> str:
        """Speed, memory and numerics against the baseline: "1.9x faster, 64 % less memory, same up to rounding"."""
        return plan_text.headline(self)

    def __str__(self) -> str:
        """Return the plan on a screen of at most 20 lines and 80 columns, or the terminal's width."""
        return plan_text.screen(self)

    def explain(self) -> str:
        """Return every setting with its reason, all rejected alternatives, checks, advice and notes."""
        return plan_text.explanation(self)


def without_graphs(plan: Plan, why: str) -> Plan:
    """Return a plan without CUDA graphs and without the measurements and predictions of graphs."""
    value = plan.compiled.value
    if not is_recorded(value):
        return plan
    without = is_by_compiler(value)
    rejected = tuple(loser for loser in plan.compiled.rejected if loser.value != without)
    reason = f"without CUDA graphs: {why}. Trials with CUDA graphs: {plan.compiled.reason}"
    chosen = replace(
        plan.compiled, value=without, reason=reason, changed=without, rejected=rejected, code="graphs.removed"
    )
    figures = dict.fromkeys(("predicted", "measured", "verified", "timing_noise", "stands_between"))
    return plan.having(compiled=chosen, front=(), **figures)
