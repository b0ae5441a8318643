"""A plan: the value, reason, numerical effect and rejected alternatives of every setting.

Numerical effects: *bitwise* keeps results equal bit by bit; *rounding* changes rounding only; *training* changes the
training. A plan that does not change the training is equivalent, any other is tuned. The equivalence tests
are generated from these effects.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
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
    Rejected,
    Scalar,
    SplitCheck,
    check_compiled,
    is_by_compiler,
)
from trimtab.core.energy_reading import NO_METER, MeterFacts
from trimtab.core.errors import FormatError, ValueGivenError
from trimtab.core.objective import ASSUMED_REFERENCE, PRECISIONS, Reference
from trimtab.core.parallelism import KEPT, check_sharing
from trimtab.core.recompute_schedule import check_recompute
from trimtab.core.units import format_bytes, format_seconds


@dataclass(frozen=True)
class ZeroStageCost:
    """A ZeRO stage with its best settings within the limits.

    Args:
        zero_stage: 0 to 3.
        reduces_once: True if gradients are reduced once per window, False if after each micro-batch.
        refusal: reason for excluding the stage, in which case the other figures are None; else "".
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


__all__ = ["Choice", "Effect", "FrontPoint", "MeasuredCost", "Plan", "Proof", "Rejected", "Scalar", "SplitCheck"]

PLAN_SCHEMA = 14
MEMORY_LAYOUTS = ("keep", "channels_last")
ALLOCATORS = ("keep", "retain")
OPTIMIZERS = ("user", "muon")
SCHEDULES = ("user", "warmup_cosine", "warmup_linear")
BY_HAND = "plan.by_hand"  # Code of the choices of a plan that was set by hand.
_BOUNDS: dict[str, dict[str, Any]] = {
    "dropout": {"low": 0, "high": 1},
    "weight_decay": {"low": 0},
    "warmup_fraction": {"low": 0, "high": 0.9},
    "clip_norm": {"low": 0, "open_low": True},
}
UNPROVED_SPLIT = "not proved to keep the gradient of the whole batch"

UNCHANGED = "plan.unchanged"  # Code of the choices that keep the user's value.


def _unchanged(value: Scalar, effect: Effect) -> Choice:
    return Choice(value, "unchanged", effect, code=UNCHANGED)


@dataclass(frozen=True)
class Plan:
    """All settings that `start` applies, with the measurements behind them.

    Args:
        batch_size: samples that the loader yields per optimizer step and rank (B_base / R).
        micro_batch: samples per forward and backward.
        precision: fp32, tf32, bf16 or fp16.
        memory_layout: memory format, "keep" or "channels_last".
        allocator: "keep", or "retain" to keep freed host memory in the process (CPU training, glibc).
        fused_optimizer: True for the fused implementation of the optimizer.
        loss_chunk: tokens whose logits a `trimtab.nn.LossHead` holds at once; None leaves the head unchanged.
        recompute: activation checkpointing of the model's blocks: "every_block", or a schedule in the notation of
            `trimtab.core.recompute_schedule`; None adds none to the loop's own.
        compiled: True for `torch.compile` of the model's forward, on its first call; "cuda_graphs" to capture forward
            and backward once and replay them; "compiled_cuda_graphs" for both.
        zero_stage: sharding of an unwrapped model: 0 replicates it (DDP), 1 shards the optimizer state, 2 gradients
            too, 3 parameters too; None leaves the model unwrapped.
        engine: sharding backend, "torch" or "deepspeed" (stages 1 to 3).
        reduce_dtype: dtype of the gradient reduction, "fp32" (unchanged) or "bf16".
        bucket_bytes: size of DDP's gradient buckets; None: torch's default.
        reduces_once: at stages 2 and 3: True reduces gradients once per window and holds them unsharded until then;
            False reduces them after every micro-batch and holds a shard.
        powersgd_rank: with DDP: rank of the PowerSGD factors that gradients are sent as (Vogels et al. 2019); None:
            no compression.
        dropout: probability of every dropout module; None leaves each unchanged.
        weight_decay: weight decay of all parameter groups that have a non-zero one; None leaves each unchanged.
        optimizer: "user", or "muon": Muon for the matrices of the model's blocks, and the user's AdamW for the rest.
        schedule: learning-rate schedule: "user" (unchanged), or by progress "warmup_cosine" (paper eq. 10) or
            "warmup_linear".
        warmup_fraction: warm-up of such a schedule as a fraction of the run; None: 5%.
        learning_rate_scale: factor on the user's learning rates.
        batch_policy: "user" (windows of one batch), or the policy of `batch_rule`.
        clip_norm: limit on the global gradient norm (paper eq. 12), or None.
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

    batch_size: int
    micro_batch: Choice
    precision: Choice = _unchanged("fp32", Effect.ROUNDING)
    memory_layout: Choice = _unchanged("keep", Effect.ROUNDING)
    allocator: Choice = _unchanged("keep", Effect.BITWISE)
    fused_optimizer: Choice = _unchanged(False, Effect.ROUNDING)
    loss_chunk: Choice = _unchanged(None, Effect.ROUNDING)
    recompute: Choice = _unchanged(None, Effect.BITWISE)
    compiled: Choice = _unchanged(False, Effect.ROUNDING)
    zero_stage: Choice = _unchanged(None, Effect.ROUNDING)
    engine: Choice = _unchanged("torch", Effect.ROUNDING)
    reduce_dtype: Choice = _unchanged("fp32", Effect.ROUNDING)
    bucket_bytes: Choice = _unchanged(None, Effect.ROUNDING)
    reduces_once: Choice = _unchanged(True, Effect.ROUNDING)
    powersgd_rank: Choice = _unchanged(None, Effect.TRAINING)
    dropout: Choice = _unchanged(None, Effect.TRAINING)
    weight_decay: Choice = _unchanged(None, Effect.TRAINING)
    optimizer: Choice = _unchanged("user", Effect.TRAINING)
    schedule: Choice = _unchanged("user", Effect.TRAINING)
    warmup_fraction: Choice = Choice(None, "5% of the run, as in the paper", Effect.TRAINING, code=UNCHANGED)
    learning_rate_scale: Choice = _unchanged(1.0, Effect.TRAINING)
    batch_policy: Choice = _unchanged("user", Effect.TRAINING)
    clip_norm: Choice = _unchanged(None, Effect.TRAINING)
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
        validation.integer("plan.micro_batch", self.micro_batch.value, high=self.batch_size)
        validation.one_of("plan.precision", self.precision.value, PRECISIONS)
        validation.one_of("plan.memory_layout", self.memory_layout.value, MEMORY_LAYOUTS)
        validation.one_of("plan.allocator", self.allocator.value, ALLOCATORS)
        validation.one_of("plan.optimizer", self.optimizer.value, OPTIMIZERS)
        validation.one_of("plan.schedule", self.schedule.value, SCHEDULES)
        validation.number("plan.learning_rate_scale", self.learning_rate_scale.value, low=0, open_low=True)
        for name, bounds in _BOUNDS.items():
            if (number := getattr(self, name).value) is not None:
                validation.number(f"plan.{name}", number, **bounds)
        if self.warmup_fraction.value is not None and self.schedule.value == "user":
            given = f"{self.warmup_fraction.value} with schedule='user'"
            raise ValueGivenError("plan.warmup_fraction", got=given, expected="None, or another schedule")
        if self.loss_chunk.value is not None:
            validation.integer("plan.loss_chunk", self.loss_chunk.value)
        check_recompute(self.recompute.value, len(self.recompute_blocks))
        sharing = {name: getattr(self, name).value for name in KEPT}
        check_sharing(self.num_ranks, self.zero_stage.value, sharing)
        if self.optimizer.value == "muon" and self.zero_stage.value not in (None, 0):
            stage = self.zero_stage.value
            raise ValueGivenError(
                "plan.optimizer",
                got=f"'muon' with zero_stage={stage}",
                expected="zero_stage None or 0 with 'muon'",
                problem=f"plan.optimizer='muon' does not support zero_stage={stage}: Muon needs unsharded matrices.",
                hint="Set optimizer='user', or zero_stage=0.",
            )
        policy = "user" if self.batch_rule is None else self.batch_rule.policy
        if self.batch_policy.value != policy:
            expected = (
                f"{policy!r}, the policy of batch_rule" if self.batch_rule else f"{policy!r} without a batch_rule"
            )
            raise FormatError("plan.batch_policy", got=repr(self.batch_policy.value), expected=expected)
        if not isinstance(value := self.fused_optimizer.value, bool):
            raise FormatError("plan.fused_optimizer", got=repr(value), expected="true or false")
        check_compiled(self.compiled.value, num_ranks=self.num_ranks)
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
        marks = cls.effects()
        marks.pop("batch_policy")  # The policy is set through `batch_rule`.
        if unknown := sorted(values.keys() - marks.keys()):
            raise FormatError(
                f"plan.{unknown[0]}",
                got="an unknown setting",
                expected="one of " + ", ".join(marks),
                code="plan.unknown_setting",
            )
        rows = validation.integer("plan.batch_size", batch_size)
        kept = {f.name: f.default.value for f in fields(cls) if isinstance(f.default, Choice)}
        choices = {
            name: Choice(value, "set by hand", marks[name], changed=value != kept[name], code=BY_HAND)
            for name, value in values.items()
        }
        micro = rows if micro_batch is None else micro_batch
        by_hand = "set by hand" if micro == rows else f"set by hand; {UNPROVED_SPLIT}"
        split = Choice(micro, by_hand, marks["micro_batch"], changed=micro != rows, code=BY_HAND)
        plan = cls(rows, split, num_ranks=num_ranks, **choices)  # type: ignore[arg-type]
        return plan if batch_rule is None else plan.freed(batch_rule, "set by hand", BY_HAND)

    def freed(self, rule: BatchRule, reason: str, code: str = "") -> Plan:
        """Return the plan with a batch rule. A rule that only measures leaves the batch size unchanged."""
        if rule.only_measures:
            reason, code = "the gradient noise scale is measured, and the batch size is constant", "batch.only_measured"
        policy = Choice(rule.policy, reason, Effect.TRAINING, changed=not rule.only_measures, code=code)
        return replace(self, batch_rule=rule, batch_policy=policy)

    def recomputing(self, schedule: str, blocks: tuple[str, ...], reason: str) -> Plan:
        """Return the plan with activation checkpointing of some blocks."""
        choice = Choice(schedule, reason, Plan.recompute.effect, changed=True)
        return replace(self, recompute=choice, recompute_blocks=blocks)

    @classmethod
    def effects(cls) -> dict[str, Effect]:
        """Return the numerical effect of each setting.

        In a plan that splits a batch although its check failed, the micro-batch changes the training.
        """
        named = {f.name: f.default for f in fields(cls) if isinstance(f.default, Choice)}
        return {"micro_batch": Effect.BITWISE} | {name: choice.effect for name, choice in named.items()}

    def choices(self) -> Iterator[tuple[str, Choice]]:
        """Yield (field name, choice) in reading order.

        The settings for sharding are left out without a ZeRO stage, the warm-up fraction without a schedule.
        """
        for field in fields(self):
            if self.zero_stage.value is None and (field.name == "zero_stage" or field.name in KEPT):
                continue
            if self.schedule.value == "user" and field.name == "warmup_fraction":
                continue
            value = getattr(self, field.name)
            if isinstance(value, Choice):
                yield field.name, value

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
        """Names of the fields that differ from the reference; empty if nothing changes."""
        return tuple(name for name, choice in self.choices() if choice.changed)

    @property
    def changes_in_words(self) -> str:
        """The changes with their values as text; "" if nothing changes."""
        return ", ".join(f"{name.replace('_', ' ')} {getattr(self, name).value}" for name in self.changes)

    @property
    def plan_kind(self) -> str:
        """ "equivalent" for an equivalent plan; "tuned" for a tuned plan, which changes the training."""
        dynamics = any(choice.changed and choice.effect is Effect.TRAINING for _, choice in self.choices())
        return "tuned" if dynamics else "equivalent"

    def __str__(self) -> str:
        return _explain(self)


def _explain(plan: Plan) -> str:
    lines = [_verdict(plan), "", f"baseline: {plan.reference.describe()} loop, {_rows(plan)} per step"]
    lines.append(
        _cost("baseline, predicted" if plan.target_device else "baseline, measured", plan.baseline, plan.meter)
    )
    lines.append(_cost("this plan, predicted", plan.predicted, plan.meter))
    if plan.measured is not None:
        lines.append(_cost("this plan, measured", plan.measured, plan.meter))
    if plan.peak_margin is not None:
        lines.append(
            f"peak memory: traced, plus a margin of {100 * plan.peak_margin:.2g}% for memory that a trace does not "
            "show; not calibrated"
        )
    if plan.seconds_margin is not None:
        lines.append(
            f"step time: from the data sheet of the device; {100 * plan.seconds_margin:.2g}% is added before "
            "comparison with a limit; not calibrated"
        )
    if plan.meter != NO_METER:
        lines.append(f"energy: {plan.meter.describe()}")
    lines.append("")
    for name, choice in plan.choices():
        lines += _choice(name, choice)
    if plan.check is not None:
        refused = (
            "only the loop's own micro-batch is allowed" if plan.splits_as_the_loop else "splitting is not allowed"
        )
        verdict = "splitting the batch keeps the gradient" if plan.check.splittable else refused
        lines += ["", f"check: {verdict}: {plan.check.reason}"]
    if plan.proof is not None:
        lines.append(f"proof: {plan.proof.reason}")
    if plan.stands_between is not None:
        low, high = plan.stands_between
        lines.append(f"objective: the same plan is chosen for memory weights from {low:.2g} to {high:.2g}")
    lines += [f"advice: {each.text}" for each in plan.advice]
    lines += [f"note: {note.text}" for note in plan.notes]
    if plan.planning_s:
        search = f", including {format_seconds(plan.search_s)} of search for the tuned plan" if plan.search_s else ""
        lines.append(f"planning took {format_seconds(plan.planning_s)}{search}")
    return "\n".join(lines)


def _verdict(plan: Plan) -> str:
    if not plan.changes and plan.target_device:
        return f"Change nothing: no settings are predicted to be better on {plan.target_device}. No step was run."
    if plan.check is None and plan.proof is None and plan.predicted is None and plan.measured is None:
        split = f" The split into micro-batches is {UNPROVED_SPLIT}." if plan.splits else ""
        return f"Change {plan.changes_in_words or 'nothing'}: set by hand, neither measured nor proved.{split}"
    if not plan.changes:
        return "Change nothing: no setting was significantly better than the unchanged loop."
    text = f"Change {plan.changes_in_words} ({plan.plan_kind} plan)"
    if plan.baseline and plan.measured and plan.verified:
        text += f": {plan.baseline.step_s / plan.measured.step_s:.2f}x the speed in trials{_certainty(plan.verified)}"
    elif plan.baseline and plan.predicted:
        where = f" on {plan.target_device}" if plan.target_device else ""
        ran = "not run" if plan.measured is None else "not compared with the loop in paired runs"
        text += f": {plan.baseline.step_s / plan.predicted.step_s:.2f}x the speed{where}, predicted and {ran}"
    if plan.splits and plan.check is None:
        text += f". The split into micro-batches is {UNPROVED_SPLIT}"
    return text + "."


def _rows(plan: Plan) -> str:
    if plan.check is not None and plan.check.code == "batch.samples_unknown":
        return "an unknown number of samples"
    return f"{plan.batch_size} samples" + (f" on each of {plan.num_ranks} ranks" if plan.num_ranks > 1 else "")


def _certainty(verified: tuple[float, float] | None) -> str:
    if verified is None or not all(map(math.isfinite, verified)):
        return ""
    low, high = verified
    doubt = "" if low > 1 or high < 1 else ", not significant"
    return f" (95% {low:.2f} to {high:.2f}{doubt})"


def _cost(label: str, cost: MeasuredCost | None, meter: MeterFacts) -> str:
    if cost is None:
        return f"{label.partition(',')[0]}: not measured"
    between = ""
    if cost.between_s is not None:
        between = " ({} to {})".format(*map(format_seconds, cost.between_s))
    energy = "" if cost.energy_j is None else f", energy {meter.told(cost.energy_j)}"
    peak = format_bytes(cost.peak_bytes)
    return f"{label}: {format_seconds(cost.step_s)} per step{between}, peak memory {peak}{energy}"


def _choice(name: str, choice: Choice) -> list[str]:
    sign = "*" if choice.changed else " "
    lines = [f"{sign} {name.replace('_', ' '):<20} {choice.value!s:<14} [{choice.effect}] {choice.reason}"]
    return lines + [f"      not {loser.value}: {loser.reason}" for loser in choice.rejected]


def without_graphs(plan: Plan, why: str) -> Plan:
    """Return a plan without CUDA graphs; measurements and predictions that used graphs are removed."""
    value = plan.compiled.value
    if not isinstance(value, str):
        return plan
    without = is_by_compiler(value)
    rejected = tuple(loser for loser in plan.compiled.rejected if loser.value != without)
    reason = f"without CUDA graphs: {why}. Trials with CUDA graphs: {plan.compiled.reason}"
    chosen = replace(
        plan.compiled, value=without, reason=reason, changed=without, rejected=rejected, code="graphs.removed"
    )
    return replace(plan, compiled=chosen, predicted=None, measured=None, verified=None, stands_between=None, front=())
