"""Tuned plans: tries the training settings that the user allowed, on the user's data."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from trimtab.calibrate.lr_range_test import range_test
from trimtab.calibrate.paired_training import NUM_STEPS, short_race
from trimtab.calibrate.planning_lock import one_at_a_time
from trimtab.calibrate.training_loop import TrainingLoop
from trimtab.core import validation
from trimtab.core.batch_rule import BatchRule
from trimtab.core.errors import ValueGivenError
from trimtab.core.objective import Budget
from trimtab.core.plan import KEEP_DROPOUT, KEEP_OPTIMIZER, KEEP_SCHEDULE, Plan
from trimtab.decide.learning_rate import choose_rate
from trimtab.decide.paired_training_verdict import judge_rival
from trimtab.decide.tuned_plan import adapt_dropout, adapt_learning_rate, adapt_optimizer, adapt_schedule, within_limits
from trimtab.runtime.data_position import length_of
from trimtab.runtime.dropout import dropout_modules
from trimtab.runtime.lr_schedule import rate_unset
from trimtab.runtime.muon import hidden_matrices, require_muon

ADAPTATIONS = ("learning_rate", "batch", "optimizer", "schedule", "dropout")
# Settings compared in short paired trainings, and all settings that need short trainings.
RACED = frozenset({"optimizer", "schedule", "dropout"})
TRAINED = RACED | {"learning_rate"}
# Optimizers that normalise the gradient by its magnitude, from the first step on.
_SCALE_FREE = (torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.Adamax)
_MUON = replace(KEEP_OPTIMIZER, value="muon", reason="raced", changed=True)
_NONE_DROPPED = replace(KEEP_DROPOUT, value=0.0, reason="raced", changed=True)
_LINEAR = replace(KEEP_SCHEDULE, value="warmup_linear", reason="raced", changed=True)

Say = Callable[[str], None]


@dataclass(frozen=True)
class RunLength:
    """Length of the planned run in steps and epochs; None if unknown."""

    steps: int | None = None
    passes: float | None = None

    @classmethod
    def of(cls, data: Iterable[Any] | None, total_steps: int | None) -> RunLength:
        """Return the length of a run of `total_steps` steps over the data."""
        number = length_of(data)
        return cls(total_steps, None if total_steps is None or not number else total_steps / number)


def tunable_settings(adapt: str | Collection[str] | None, data: Iterable[Any] | None) -> frozenset[str]:
    """Return the names of the settings that may be tuned.

    Raises:
        ValueGivenError: an unknown name, missing training batches, or "schedule" without "learning_rate".
    """
    names = (adapt,) if isinstance(adapt, str) or not isinstance(adapt, Collection) else tuple(adapt)
    freed = frozenset(validation.one_of("adapt", name, ADAPTATIONS) for name in names if name is not None)
    if freed & TRAINED and data is None:
        raise ValueGivenError(
            "data",
            got="no data",
            expected="training batches",
            problem=f'adapt="{sorted(freed & TRAINED)[0]}" trains on batches of data=, which was not passed.',
            hint="Pass the training loader: trimtab.plan(..., data=loader).",
            code="adapt.needs_data",
        )
    require_rate(freed)
    return freed


def batch_rule_of(is_freed: bool, rule: BatchRule | None) -> BatchRule | None:
    """Return the batch rule, given or default; None if the batch size is constant.

    Raises:
        ValueGivenError: not a batch rule, or a rule that changes the batch size without adapt="batch".
    """
    found: BatchRule | None = validation.dataclass_or("batch_rule", rule, BatchRule, BatchRule() if is_freed else None)
    if found is not None and not is_freed and not found.only_measures:
        raise ValueGivenError(
            "batch_rule",
            got=f'policy "{found.policy}" with k = {found.k}',
            expected='adapt="batch", or BatchRule("fixed")',
            problem=f'batch_rule changes the batch size (policy "{found.policy}", k = {found.k}), but adapt does not '
            'contain "batch".',
            hint='Add "batch" to adapt, or pass BatchRule("fixed"), which only measures the gradient noise scale.',
            code="batch_rule.needs_adapt",
        )
    return found


def require_rate(freed: Collection[str]) -> None:
    """Raise if the schedule may be tuned but not the learning rate: a plan's schedule scales the plan's peak rate."""
    if "schedule" in freed and "learning_rate" not in freed:
        raise ValueGivenError(
            "adapt",
            got='"schedule" without "learning_rate"',
            expected="both or neither",
            problem='adapt contains "schedule" without "learning_rate", but a planned schedule scales the planned '
            "peak learning rate.",
            hint='Pass adapt=("learning_rate", "schedule"), or remove "schedule" to keep your own scheduler.',
            code="adapt.schedule_without_rate",
        )


def require_adaptable(
    freed: frozenset[str], model: nn.Module, optimizer: torch.optim.Optimizer, *, is_alone: bool
) -> None:
    """Raise `UsageError` if a setting cannot be tuned for this model, optimizer and number of ranks.

    Args:
        is_alone: True if this process is the only rank.
    """
    if (raced := sorted(freed & RACED)) and not is_alone:
        raise ValueGivenError(
            "adapt",
            got=f'"{raced[0]}" on one of several ranks',
            expected="a single process",
            problem=f'adapt="{raced[0]}" runs short trainings in a single process, but this process is one of several '
            "ranks.",
            hint="Plan in a single process and save the plan, then start that plan on every rank with the model in "
            "DistributedDataParallel.",
            code="adapt.needs_single_process",
        )
    if "optimizer" in freed:
        require_muon(hidden_matrices(model, optimizer))
    if "learning_rate" in freed and any(group.get("lr") is None for group in optimizer.param_groups):
        raise rate_unset("adapt", optimizer)
    if "learning_rate" in freed and not any(float(group["lr"]) for group in optimizer.param_groups):
        raise ValueGivenError(
            "optimizer",
            got="a learning rate of 0",
            expected="a positive learning rate",
            problem="All parameter groups of the optimizer have a learning rate of 0, as at the start of a warm-up, "
            "so the learning-rate range test has no rate to multiply.",
            hint="Call trimtab.plan before you create the scheduler.",
            code="optimizer.rate_is_zero",
        )


@one_at_a_time
def tune_plan(
    subject: TrainingLoop,
    base: Plan,
    freed: Collection[str],
    data: Iterable[Any],
    progress: Say,
    length: RunLength = RunLength(),
    budget: Budget | None = None,
) -> Plan:
    """Return an equivalent plan extended to a tuned plan by short trainings on `data`; state is restored.

    The settings are tried in this order, each with the choices made before: no dropout (paired runs), a peak learning
    rate (range test), the shape of the schedule, and Muon (both paired runs; Muon with a range test for itself if the
    rate may be tuned).

    Args:
        length: length of the planned run.
        budget: limits per step, which slower settings must meet too.

    Raises:
        ModelError, OptimizerError: Muon has no matrices to step.
        ValueGivenError: too few batches.
    """
    if "optimizer" in freed:
        hidden_matrices(subject.model, subject.optimizer)
    by_range, budget = "learning_rate" in freed, budget or Budget()
    if "dropout" in freed:
        base = _dropout_raced(subject, base, data, progress, length.passes, budget)
    stands = find_rate(subject, base, data, progress, length.steps) if by_range else base
    if "schedule" in freed and stands.schedule.value != "user":
        stands = _schedule_raced(subject, stands, data, progress)
    if "optimizer" not in freed:
        return stands
    begin = time.perf_counter()
    rival = replace(base, optimizer=_MUON)
    rival = find_rate(subject, rival, data, progress, length.steps) if by_range else rival
    if rival.schedule.value != "user" and stands.schedule.value != "user":
        rival = replace(rival, schedule=stands.schedule)
    verdict = within_limits(budget, rival, judge_rival(short_race(subject, stands, rival, data, progress), "Muon"))
    return adapt_optimizer(stands, rival, verdict, time.perf_counter() - begin)


def find_rate(
    subject: TrainingLoop, base: Plan, data: Iterable[Any], progress: Say, run_steps: int | None = None
) -> Plan:
    """Return a plan with a peak learning rate from a range test, and a schedule for a run of `run_steps` steps."""
    begin = time.perf_counter()
    points = range_test(subject, base, data, progress)
    rates, may_clip = choose_rate(points), _divides_by_size(subject.optimizer)
    return adapt_learning_rate(base, rates, time.perf_counter() - begin, may_clip=may_clip, run_steps=run_steps)


def _divides_by_size(optimizer: torch.optim.Optimizer) -> bool:
    """Return True if the optimizer's step length is independent of the gradient scale.

    Clipping then only shortens rare large steps. False if weight decay is added to the clipped gradients, because
    clipping would raise the relative weight of the decay.
    """
    if not isinstance(optimizer, _SCALE_FREE):
        return False
    return isinstance(optimizer, torch.optim.AdamW) or not any(
        group.get("weight_decay") and not group.get("decoupled_weight_decay") for group in optimizer.param_groups
    )


def _schedule_raced(subject: TrainingLoop, stands: Plan, data: Iterable[Any], progress: Say) -> Plan:
    """Return the plan with the better of its schedule and a linear decay, from paired runs."""
    begin = time.perf_counter()
    rival = replace(stands, schedule=_LINEAR)
    pairs = short_race(subject, stands, rival, data, progress, same_step=True)
    return adapt_schedule(stands, rival, judge_rival(pairs, "a linear decay"), time.perf_counter() - begin)


def _dropout_raced(
    subject: TrainingLoop, stands: Plan, data: Iterable[Any], progress: Say, passes: float | None, budget: Budget
) -> Plan:
    """Return the plan without dropout if paired runs reach the same loss on unseen batches sooner, else unchanged."""
    if why := _not_raced(subject, data, passes):
        return replace(stands, dropout=replace(KEEP_DROPOUT, reason=why))
    begin = time.perf_counter()
    rival = replace(stands, dropout=_NONE_DROPPED)
    pairs = short_race(subject, stands, rival, data, progress, by_unseen=True)
    verdict = within_limits(budget, rival, judge_rival(pairs, "training without dropout"))
    length = "1 epoch" if passes == 1 else f"{passes:.2g} epochs"
    how = f"compared by the loss of batches before they are trained on, for a run of {length}"
    explained = replace(verdict, reason=f"{how}: {verdict.reason}")
    return adapt_dropout(stands, rival, explained, time.perf_counter() - begin)


def _not_raced(subject: TrainingLoop, data: Iterable[Any], passes: float | None) -> str:
    """Return the reason for not trying a model without dropout, or ""."""
    if not dropout_modules(subject.model):
        return "unchanged: the model has no dropout"
    if passes is None:
        return (
            "unchanged: training without dropout was not tried, because the number of epochs is unknown (pass "
            "total_steps and data with a length), and dropout reduces overfitting to repeated samples"
        )
    if passes > 1:
        return (
            f"unchanged: training without dropout was not tried, because the run takes {passes:.2g} epochs, and a "
            "short training on unseen batches does not show overfitting to repeated samples"
        )
    number = length_of(data)
    if number is not None and number < NUM_STEPS:
        return (
            f"unchanged: training without dropout was not tried, because data has {number} batches and a short "
            f"training takes {NUM_STEPS}"
        )
    return ""
