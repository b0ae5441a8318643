"""Tuned plans: tries the training settings that the user allowed, on the user's data."""

from __future__ import annotations

import itertools
import random
import statistics
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from trimtab.core import validation
from trimtab.core.batch_rule import BatchRule
from trimtab.core.choice import Rejected
from trimtab.core.errors import ValueGivenError
from trimtab.core.objective import Budget, Objective
from trimtab.losses import parts_of
from trimtab.measure.timing import synchronize
from trimtab.planner.smaller_state import ends_comparison, judge_smaller, peak_reduction, with_lower_peak
from trimtab.planner.trial_statistics import WORTH_SAVING, over_budget
from trimtab.planner.tuned_plan import (
    RatePoint,
    ShortPair,
    ShortRun,
    adapt_learning_rate,
    adapt_schedule,
    adapt_setting,
    choose_rate,
    has_diverged,
    is_lost,
    judge_rival,
    within_limits,
)
from trimtab.plans.plan import Plan
from trimtab.profiling.candidate_traces import trace_optimizer_states
from trimtab.profiling.training_loop import TrainingLoop, in_mode, one_at_a_time, own_loss
from trimtab.settings import unchanged
from trimtab.settings.dropout import dropout_modules
from trimtab.settings.float8 import require_layers
from trimtab.settings.recompute import names_operators
from trimtab.settings.schedule import rate_unset
from trimtab.state.data_state import draw_and_restore_data
from trimtab.state.loop_state import unchanged_by
from trimtab.state.peak_memory import is_profiled, peak_bytes
from trimtab.state.process_state import separate_heaps
from trimtab.techniques.float8_products import require_capability
from trimtab.techniques.learning_rate import scaled_rates
from trimtab.techniques.low_bit_state import bytes_saved, require_low_bit
from trimtab.techniques.muon import hidden_matrices, require_muon
from trimtab.training.batch import iterate, to_device
from trimtab.training.data_position import length_of
from trimtab.training.run import Run

RANGE_TEST_STEPS = 40
WIDEST = 300.0
_NO_LIMIT = 1e30  # Limit on the gradient norm that never clips: the factor is exactly 1.
PAIR_STEPS = 60
NUM_PAIRS = 5  # Fewer pairs cannot give a verdict (math: section 8).
ADAPTATIONS = ("learning_rate", "batch", "optimizer", "schedule", "dropout", "optimizer_state", "float8")
# Settings compared in short paired trainings, and all settings that need short trainings.
RACED = frozenset({"optimizer", "schedule", "dropout", "optimizer_state", "float8"})
TRAINED = RACED | {"learning_rate"}
# Optimizers that normalise the gradient by its magnitude, from the first step on.
_SCALE_FREE = (torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.Adamax)
_MUON = replace(unchanged("optimizer"), value="muon", reason="compared", changed=True)
_NONE_DROPPED = replace(unchanged("dropout"), value=0.0, reason="compared", changed=True)
# Tried until the first is accepted. 4 bits are left to the user: they save little more than 8, with larger errors.
_STORAGES = ("8bit", "bf16")
_FLOAT8_FROM = 1024  # Least features of the layers tried in float8: casts take a large part of smaller products.
_OWN_STEP = replace(unchanged("fused_optimizer"), reason="low-bit optimizer state has its own fused step")
_LINEAR = replace(unchanged("schedule"), value="warmup_linear", reason="compared", changed=True)
Say = Callable[[str], None]


def range_test(
    subject: TrainingLoop,
    plan: Plan,
    batches: Iterable[Any],
    progress: Callable[[str], None],
    num_steps: int = RANGE_TEST_STEPS,
    widest: float = WIDEST,
) -> tuple[RatePoint, ...]:
    """Return loss and gradient norm at learning rates from 1 to `widest` times the user's own; state is restored.

    The test ends early with fewer than `num_steps` batches; `ValueGivenError` if there are none. A loader is restored
    by `draw_and_restore_data`.
    """
    points: list[RatePoint] = []
    optimizer = subject.optimizer
    if plan.clip_norm.value is None:  # A run computes gradient norms only for clipping; this limit never clips.
        plan = plan.having(clip_norm=replace(plan.clip_norm, value=_NO_LIMIT))
    with (
        draw_and_restore_data(batches) as lent,
        unchanged_by(own_loss(subject.loss_fn), subject.trained, optimizer),
        subject.start_plan(plan) as run,
    ):
        for index, batch in zip(range(num_steps), iterate("data", lent), strict=False):
            scale = widest ** (index / (num_steps - 1))
            progress(f"learning-rate range test: step {index + 1} of {num_steps}, {scale:.3g}x")
            with scaled_rates(optimizer, scale):
                loss = subject.step(run, batch)
            norm = None if run.grad_norm is None else float(run.grad_norm)
            points.append(RatePoint(scale, float(loss), norm))
            if index > 10 and has_diverged([point.loss for point in points]):
                break
    if not points:
        raise ValueGivenError(
            "data",
            got="no batches",
            expected="training batches",
            problem="data yields no batches, but the learning-rate range test trains on some.",
            hint="Pass a loader that yields at least one batch.",
            code="data.too_few_batches",
        )
    return tuple(points)


def short_race(
    subject: TrainingLoop,
    stands: Plan,
    rival: Plan,
    batches: Iterable[Any],
    progress: Callable[[str], None],
    num_steps: int = PAIR_STEPS,
    num_pairs: int = NUM_PAIRS,
    *,
    by_unseen: bool = False,
    same_step: bool = False,
    ends: Callable[[ShortPair], bool] | None = None,
) -> tuple[ShortPair, ...]:
    """Return the completed pairs: all, or up to the first that the rival lost. State is restored.

    A pair is three short trainings from the same weights: `stands` (the current plan), `rival`, and `stands` again
    with another seed. A learning-rate schedule runs to its end in each. Pairs differ in batches (in the order of
    batches, if there are few) and random seeds. Within a pair, both plans use the same batches and seed.

    Args:
        batches: training batches; repeated if they run out. `ValueGivenError` if there are too few.
        by_unseen: True to compare the loss of every batch in evaluation mode before training on it, for settings that
            change the training loss itself. No training repeats data then.
        same_step: True to assume equal step times, so that only samples are compared.
        ends: returns True for a pair, without its repetition, that decides against the rival; by default `is_lost`.
    """
    pairs: list[ShortPair] = []
    with (
        draw_and_restore_data(batches) as lent,
        unchanged_by(own_loss(subject.loss_fn), subject.trained, subject.optimizer) as snapshot,
    ):
        drawn = _repeated(lent, num_steps if by_unseen else 1)
        for index in range(num_pairs):
            data = list(itertools.islice(drawn, num_steps))
            if len(data) < num_steps:
                raise ValueGivenError(
                    "data",
                    got=f"{len(data)} batches",
                    expected=f"at least {num_steps} batches",
                    problem=f"data yielded {len(data)} batches for pair {index + 1} of {num_pairs}, but each pair of "
                    f"short trainings takes {num_steps}.",
                    hint=f"Pass a loader (not an iterator) with at least {num_steps} batches per epoch.",
                    code="data.too_few_batches",
                )
            if index:
                # Few batches, never shuffled by the loader, would come in the same order in each pair.
                random.Random(index).shuffle(data)

            def run(name: str, plan: Plan, seed: int, data: list[Any] = data, index: int = index) -> ShortRun:
                progress(f"short training with {name}: pair {index + 1} of {num_pairs}")
                snapshot.restore()
                torch.manual_seed(seed)
                found = _train(subject, plan, data, by_unseen=by_unseen)
                return replace(found, step_s=1.0) if same_step else found

            pair = ShortPair(run("the current plan", stands, index), run("the rival plan", rival, index))
            if (ends or is_lost)(pair):
                return (*pairs, pair)
            again = run("the current plan, repeated", stands, num_pairs + index)
            pairs.append(ShortPair(pair.stands, pair.rival, again))
    return tuple(pairs)


def _train(subject: TrainingLoop, plan: Plan, data: list[Any], *, by_unseen: bool) -> ShortRun:
    rows = sum(map(subject.batching.require, data))
    losses, seconds = [], []
    with subject.start_plan(plan, total_samples=rows) as run:
        for batch in data:
            unseen = _evaluated(run, subject, batch) if by_unseen else None
            synchronize(subject.device)
            begin = time.perf_counter()
            loss = subject.step(run, batch)
            synchronize(subject.device)
            seconds.append(time.perf_counter() - begin)
            losses.append(loss if unseen is None else unseen)
    return ShortRun(tuple(float(loss) for loss in losses), statistics.median(seconds))


@torch.no_grad()
def _evaluated(run: Run, subject: TrainingLoop, batch: Any) -> torch.Tensor:
    """Return the mean loss of a batch in evaluation mode, in the plan's precision and micro-batches."""
    rows = subject.batching.require(batch)
    total, terms = torch.zeros((), device=subject.device), torch.zeros((), device=subject.device)
    parts = subject.batching.slices(to_device(batch, subject.device), rows, run.plan.micro_batch_of(rows))
    with in_mode(run.model, training=False):
        for part, size in parts:
            with run.autocast():
                result = subject.loss_fn(run.model, part)
            loss, count, _ = parts_of(result)
            total += loss * size if count is None else loss
            terms += size if count is None else count
    return total / terms


def _repeated(data: Iterable[Any], group: int = 1) -> Iterator[Any]:
    """Yield batches over epochs, each in whole groups; ends if an epoch has none or an iterator is exhausted."""
    while True:
        epoch, is_empty = iterate("data", data), True
        while len(batches := list(itertools.islice(epoch, group))) == group:
            is_empty = False
            yield from batches
        if is_empty or isinstance(data, Iterator):
            return


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

    `ValueGivenError` for an unknown name, missing training batches, or "schedule" without "learning_rate".
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
    return freed


def batch_rule_of(is_freed: bool, rule: BatchRule | None) -> BatchRule | None:
    """Return the batch rule, given or default; None if the batch size is constant.

    `ValueGivenError` if it is no batch rule, or changes the batch size without adapt="batch".
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


def require_adaptable(
    freed: frozenset[str], model: nn.Module, optimizer: torch.optim.Optimizer, *, is_alone: bool
) -> None:
    """Raise an error if a setting cannot be tuned for this model and optimizer, or on one of several ranks."""
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
    if "optimizer_state" in freed:
        require_low_bit(model, optimizer)
    if "float8" in freed:
        require_capability(next(model.parameters()).device)
        require_layers(model, _FLOAT8_FROM)
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
@separate_heaps()
def tune_plan(
    subject: TrainingLoop,
    base: Plan,
    freed: Collection[str],
    data: Iterable[Any],
    progress: Say,
    length: RunLength = RunLength(),
    budget: Budget | None = None,
    objective: Objective | None = None,
) -> Plan:
    """Return an equivalent plan extended to a tuned plan by short trainings on `data`; state is restored.

    The settings are tried in this order, each with the choices made before: no dropout (paired runs), a peak learning
    rate (range test), the shape of the schedule, Muon (both paired runs; Muon with a range test for itself if the
    rate may be tuned), float8 products (paired runs), and low-bit optimizer state (paired runs to equal loss, judged by
    time and memory with the weights of `objective`). Slower settings must also meet the limits of `budget`.

    Raises:
        ModelError, OptimizerError: Muon has no matrices to step.
        ValueGivenError: too few batches.
    """
    if "optimizer" in freed:
        hidden_matrices(subject.model, subject.optimizer)
    by_range, budget, objective = "learning_rate" in freed, budget or Budget(), objective or Objective()
    if "dropout" in freed:
        base = _dropout_raced(subject, base, data, progress, length.passes, budget)
    stands = find_rate(subject, base, data, progress, length.steps) if by_range else base
    if "schedule" in freed and stands.schedule.value != "user":
        begin, rival = time.perf_counter(), stands.having(schedule=_LINEAR)
        verdict = judge_rival(short_race(subject, stands, rival, data, progress, same_step=True), "a linear decay")
        stands = adapt_schedule(stands, rival, verdict, time.perf_counter() - begin)
    if "optimizer" in freed:
        begin = time.perf_counter()
        rival = base.having(optimizer=_MUON)
        rival = find_rate(subject, rival, data, progress, length.steps) if by_range else rival
        if rival.schedule.value != "user" and stands.schedule.value != "user":
            rival = rival.having(schedule=stands.schedule)
        verdict = within_limits(budget, rival, judge_rival(short_race(subject, stands, rival, data, progress), "Muon"))
        what = "Muon for the matrices of the blocks, AdamW for the rest"
        stands = adapt_setting("optimizer", stands, rival, verdict, time.perf_counter() - begin, what)
    if "float8" in freed:
        stands = _float8_raced(subject, stands, data, progress, budget)
    if "optimizer_state" in freed:
        stands = _state_raced(subject, stands, data, progress, budget, objective)
    return stands


def _float8_raced(subject: TrainingLoop, stands: Plan, data: Iterable[Any], progress: Say, budget: Budget) -> Plan:
    """Return the plan with float8 products if paired runs reach the same loss sooner, else unchanged."""
    kept = unchanged("float8")
    if stands.precision.value != "bf16":
        why = f"unchanged: float8 products need bf16, and the plan's precision is {stands.precision.value}"
        return stands.having(float8=replace(kept, reason=why))
    begin, rival = time.perf_counter(), stands.having(float8=replace(kept, value=_FLOAT8_FROM, changed=True))
    pairs = short_race(subject, stands, rival, data, progress)
    verdict = within_limits(budget, rival, judge_rival(pairs, "float8 products"))
    if verdict.is_gain:
        rival = _with_counted_peak(subject, rival)
        peak = None if rival.measured is None else rival.measured.peak_bytes
        if (over := over_budget(None, peak, budget)) is not None:
            verdict = replace(verdict, is_gain=False, reason=f"{over.text}; {verdict.reason}", code=over.code)
    return adapt_setting("float8", stands, rival, verdict, time.perf_counter() - begin)


def _state_raced(
    subject: TrainingLoop, stands: Plan, data: Iterable[Any], progress: Say, budget: Budget, objective: Objective
) -> Plan:
    """Return the plan with the first storage of optimizer state that trains to the same loss and is worth its cost."""
    kept = unchanged("optimizer_state")
    if stands.optimizer.value != "user":
        return stands.having(optimizer_state=replace(kept, reason="unchanged: not combined with Muon"))
    progress("tracing the peak memory with low-bit optimizer state")
    peaks, found = trace_optimizer_states(subject, stands, _STORAGES), stands
    for kind in _STORAGES:
        begin = time.perf_counter()
        reduction = peak_reduction(stands, peaks, kind, bytes_saved(subject.optimizer, kind))
        if reduction is None or reduction[1] < WORTH_SAVING:
            known = "unknown" if reduction is None else f"lowered by {100 * reduction[1]:.2g}% only"
            why = f"{kind} state was not tried: the peak memory would be {known}"
            rejected = (*found.optimizer_state.rejected, Rejected(kind, why, "setting.not_tried"))
            return found.having(optimizer_state=replace(found.optimizer_state, rejected=rejected))
        choice = replace(kept, value=kind, reason="compared", changed=True)
        rival = with_lower_peak(stands, reduction[0]).having(optimizer_state=choice, fused_optimizer=_OWN_STEP)
        pairs = short_race(subject, stands, rival, data, progress, ends=ends_comparison)
        verdict = within_limits(budget, rival, judge_smaller(pairs, stands, objective, kind, reduction[1]))
        before = found.optimizer_state.rejected
        found = adapt_setting("optimizer_state", found, rival, verdict, time.perf_counter() - begin)
        rejected = (*before, *found.optimizer_state.rejected)
        found = found.having(optimizer_state=replace(found.optimizer_state, rejected=rejected))
        if verdict.is_gain:
            return _with_counted_peak(subject, found)
    return found


def _with_counted_peak(subject: TrainingLoop, plan: Plan) -> Plan:
    """Return a measured plan with the counted peak of its second step; state is restored."""
    if plan.measured is None or is_profiled():
        return plan
    with unchanged_by(own_loss(subject.loss_fn), subject.trained, subject.optimizer), subject.start_plan(plan) as run:
        subject.step(run)
        subject.optimizer.zero_grad(set_to_none=True)  # Gradients alive before the measurement would not be counted.
        counted = peak_bytes(lambda: subject.step(run), subject.device, subject.live_tensors)
    return replace(plan, measured=replace(plan.measured, peak_bytes=counted + subject.start_bytes))


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

    Clipping then only shortens rare large steps. Weight decay that is added to the clipped gradients would gain weight.
    """
    if not isinstance(optimizer, _SCALE_FREE):
        return False
    return isinstance(optimizer, torch.optim.AdamW) or not any(
        group.get("weight_decay") and not group.get("decoupled_weight_decay") for group in optimizer.param_groups
    )


def _dropout_raced(
    subject: TrainingLoop, stands: Plan, data: Iterable[Any], progress: Say, passes: float | None, budget: Budget
) -> Plan:
    """Return the plan without dropout if paired runs reach the same loss on unseen batches sooner, else unchanged."""
    if why := _not_raced(subject, stands, data, passes):
        return stands.having(dropout=replace(unchanged("dropout"), reason=why))
    begin = time.perf_counter()
    rival = stands.having(dropout=_NONE_DROPPED)
    pairs = short_race(subject, stands, rival, data, progress, by_unseen=True)
    verdict = within_limits(budget, rival, judge_rival(pairs, "training without dropout"))
    length = "1 epoch" if passes == 1 else f"{passes:.2g} epochs"
    how = f"compared by the loss of batches before they are trained on, for a run of {length}"
    explained = replace(verdict, reason=f"{how}: {verdict.reason}")
    return adapt_setting("dropout", stands, rival, explained, time.perf_counter() - begin)


def _not_raced(subject: TrainingLoop, stands: Plan, data: Iterable[Any], passes: float | None) -> str:
    """Return the reason for not trying a model without dropout, or ""."""
    if not dropout_modules(subject.model):
        return "unchanged: the model has no dropout"
    if names_operators(stands.recompute.value):
        return (
            "unchanged: training without dropout was not tried, because the plan recomputes operators by number, and "
            "the numbers would change without the random operators"
        )
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
    if number is not None and number < PAIR_STEPS:
        return (
            f"unchanged: training without dropout was not tried, because data has {number} batches and a short "
            f"training takes {PAIR_STEPS}"
        )
    return ""
