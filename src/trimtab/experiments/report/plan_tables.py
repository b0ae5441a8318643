"""Tables about planning: changes of every plan, rejected alternatives, cost and prediction error."""

from __future__ import annotations

import math

from trimtab.core.choice import Choice, Effect
from trimtab.core.memory_model import PARTS
from trimtab.experiments.comparison.arms import PLAN_ARMS, PLAN_LOOPS
from trimtab.experiments.comparison.comparison_result import Arm, Comparison
from trimtab.experiments.report import formatting as say
from trimtab.experiments.report.tables import Cell, Table, plan_kinds, plan_name
from trimtab.plans.plan import Plan
from trimtab.plans.profile import Candidate, Trial
from trimtab.settings import SEARCHED

MARKS = {Effect.BITWISE: "bitwise", Effect.ROUNDING: "rounding", Effect.TRAINING: "training"}


def change_table(plan: Plan, *, changed: bool) -> Table:
    """Return the settings changed (or left unchanged) by a plan, with numerical effect, reason and alternatives."""
    choices = [(name, choice) for name, choice in plan.choices() if choice.changed == changed]
    return Table(
        title="" if changed else "Unchanged settings",
        columns=("Setting", "Value", "Numerical effect", "Reason"),
        rows=tuple(_choice_row(name, choice) for name, choice in choices),
        empty="This plan changes nothing." if changed else "Every setting is changed.",
        folded=not changed,
        extras=tuple(_losers(choice) for _, choice in choices),
        extras_label="rejected",
    )


def _choice_row(name: str, choice: Choice) -> tuple[Cell, ...]:
    return (
        name.replace("_", " "),
        say.one_line(say.setting_text(choice.value)),
        MARKS[choice.effect],
        say.one_line(choice.reason),
    )


def _losers(choice: Choice) -> tuple[str, ...]:
    return tuple(
        f"{say.one_line(say.setting_text(loser.value))}: {say.one_line(loser.reason)}" for loser in choice.rejected
    )


def plan_sentences(plan: Plan, arm: Arm | None) -> tuple[str, ...]:
    """Return the introduction of a plan's table: the reference loop and the result of the gradient check."""
    lines = [f"Made for the {plan.reference.describe()} loop with {plan.batch_size} samples per optimizer step."]
    if plan.check is not None:
        verdict = "splitting the batch keeps the gradient" if plan.check.splittable else "the batch is not split"
        lines.append(f"Gradient check: {verdict}: {say.one_line(plan.check.reason)}.".replace("..", "."))
    else:
        lines.append("Gradient check: not run.")
    if arm is None:
        lines.append("This plan was not run as an arm of the comparison.")
    return tuple(lines)


def rejected_table(comparison: Comparison) -> Table:
    """Return all rejected alternatives of all settings, with the plans that rejected them."""
    found: dict[tuple[str, str, str], list[str]] = {}
    for plan_kind in plan_kinds(comparison.plans):
        for name, choice in comparison.plans[plan_kind].choices():
            for loser in choice.rejected:
                row = (name.replace("_", " "), say.one_line(say.setting_text(loser.value)), say.one_line(loser.reason))
                found.setdefault(row, []).append(say.PLANS.get(plan_kind, plan_kind))
    rows = tuple((*row, ", ".join(dict.fromkeys(names))) for row, names in found.items())
    return Table("Rejected settings", ("Setting", "Value", "Reason", "Plan"), rows, "No setting was rejected.")


def failed_table(comparison: Comparison) -> Table:
    """Return the trials that failed."""
    failed = [trial for trial in comparison.trials if trial.error or trial.step_s is None]
    rows = tuple(
        (
            say.one_line(trial.candidate.describe()),
            say.one_line(trial.stage),
            say.one_line(trial.error or say.UNMEASURED),
        )
        for trial in failed
    )
    return Table("Failed trials", ("Settings", "Stage", "Error"), rows, "No trial failed.")


def trial_table(comparison: Comparison) -> Table:
    """Return all planning trials."""
    rows = tuple(
        (
            say.one_line(trial.candidate.describe()),
            say.one_line(trial.stage),
            _timed(trial),
            say.size(trial.peak_bytes),
            "failed" if trial.error else role(comparison, trial),
        )
        for trial in comparison.trials
    )
    columns = ("Settings", "Stage", "Step", "Peak memory", "Role")
    return Table("All trials", columns, rows, "No trial was run.", "", ("Step", "Peak memory"), folded=True)


def _timed(trial: Trial) -> str:
    alone = "" if trial.is_whole or trial.step_s is None else f" ({trial.stage} only)"
    return say.seconds(trial.step_s) + alone


def role(comparison: Comparison, trial: Trial) -> str:
    """Return the role of a trial: reference loop, chosen by a plan, A/A control, or ""."""
    plans = comparison.plans
    loops = [_loop(key) for key, plan in plans.items() if trial.candidate == reference_candidate(plan)]
    roles = list(dict.fromkeys(loops))
    choosing = [
        say.PLANS.get(plan_kind, plan_kind)
        for plan_kind in plan_kinds(plans)
        if trial.candidate == chosen_candidate(plans[plan_kind])
    ]
    roles += [f"chosen ({', '.join(choosing)})"] if choosing else []
    return " and ".join(roles + (["A/A control"] if trial.control else []))


def chosen_candidate(plan: Plan) -> Candidate:
    """Return the equivalent settings of a plan as a candidate."""
    values = {name: getattr(plan, name).value for name in SEARCHED}
    return Candidate(**values)


def reference_candidate(plan: Plan) -> Candidate:
    """Return the candidate of the unchanged loop, with the plan's changes reverted."""
    fused = plan.fused_optimizer
    was_fused = bool(fused.value) != fused.changed
    return Candidate(plan.batch_size, precision=plan.reference.precision, fused_optimizer=was_fused)


def arm_of(comparison: Comparison, key: str) -> Arm | None:
    """Return the arm that ran the plan with this key."""
    return comparison.arm(PLAN_ARMS.get(key, ""))


def _loop(key: str) -> str:
    """Return the arm with the loop that the plan was made for."""
    return PLAN_LOOPS.get(key, "reference")


def prediction_table(comparison: Comparison) -> Table:
    """Return predicted and measured step time and peak memory of all plans."""
    rows = tuple(_prediction_row(plan_kind, comparison) for plan_kind in plan_kinds(comparison.plans))
    columns = ("Plan", "Step, predicted", "measured", "error", "Peak, predicted", "measured ", "error ")
    note = "Error: predicted over measured, minus one. Measured: median over the arm's runs."
    return Table("", columns, rows, "No plan was made.", note, columns[1:])


def _prediction_row(plan_kind: str, comparison: Comparison) -> tuple[Cell, ...]:
    predicted, arm = comparison.plans[plan_kind].predicted, arm_of(comparison, plan_kind)
    times = (predicted.step_s if predicted else None, say.median_or_none(arm.step_s) if arm else None)
    peaks = (predicted.peak_bytes if predicted else None, arm.peak_bytes if arm else None)
    cells = [(say.seconds(a), say.seconds(b), _error(a, b)) for a, b in (times,)]
    cells += [(say.size(a), say.size(b), _error(a, b)) for a, b in (peaks,)]
    return (plan_name(plan_kind), *cells[0], *cells[1])


def memory_table(comparison: Comparison) -> Table:
    """Return the bytes by part at the peak of a step."""
    rows = tuple(
        (
            say.label_of_arm(comparison, name),
            step.peak.phase,
            *(say.size(step.peak.bytes_by_part.get(p, 0)) for p in PARTS),
        )
        for name, step in comparison.memory.items()
    )
    note = "Traced bytes at the peak. The table of all arms has the measured peaks."
    columns = ("Loop", "Peak in", *PARTS)
    return Table("", columns, rows, "No step could be traced.", note, tuple(PARTS))


def _error(predicted: float | None, measured: float | None) -> str:
    return say.percent(predicted / measured - 1) if predicted is not None and measured else say.UNMEASURED


def cost_table(comparison: Comparison) -> Table:
    """Return the planning cost of all plans, and the break-even step: cost over saving per step."""
    return Table(
        title="",
        columns=("Plan", "Planning", "of which search", "Charged", "Saved per step", "Break-even", "Throughput"),
        rows=tuple(_cost_row(plan_kind, comparison) for plan_kind in plan_kinds(comparison.plans)),
        empty="No plan was made.",
        note="Saved per step: median step time of the loop that the plan was made for, minus that of the plan. "
        "Break-even: charged seconds over seconds saved per step; for a tuned plan see also the time to "
        "target, because its steps have another effect on the metric. Throughput: the verdict; for the plan of the "
        "hand-tuned recipe, the non-inferiority test.",
        numeric=("Planning", "of which search", "Charged", "Saved per step", "Break-even"),
    )


def _cost_row(plan_kind: str, comparison: Comparison) -> tuple[Cell, ...]:
    plan, arm, loop = comparison.plans[plan_kind], arm_of(comparison, plan_kind), comparison.arm(_loop(plan_kind))
    charged = (arm.search_s if arm else 0.0) or plan.planning_s
    ours, theirs = (say.median_or_none(run.step_s) if run else None for run in (arm, loop))
    saved = None if ours is None or theirs is None else theirs - ours
    return (
        plan_name(plan_kind),
        say.seconds(plan.planning_s),
        say.seconds(plan.search_s),
        say.seconds(charged),
        _signed(saved),
        break_even(charged, saved),
        _speed_verdict(plan_kind, comparison),
    )


def _signed(value: float | None) -> str:
    return f"-{say.seconds(-value)}" if value is not None and value < 0 else say.seconds(value)


def break_even(charged_s: float, saved_s: float | None) -> str:
    """Return the number of steps to recover a cost, or "never" without a saving."""
    if saved_s is None or math.isnan(saved_s):
        return say.UNMEASURED
    # Rounded first, because 400.00000001 steps are 400 steps.
    return f"{math.ceil(round(charged_s / saved_s, 6)):,} steps" if saved_s > 0 else say.NEVER


def _speed_verdict(key: str, comparison: Comparison) -> str:
    """Return the verdict on a plan's speed against the loop it was made for."""
    rows = [row for row in comparison.ratios if (row.arm, row.against) == (PLAN_ARMS.get(key), _loop(key))]
    row = next((row for row in rows if row.metric in ("throughput", "do_no_harm")), None)
    return (
        say.verdict_with_enough_pairs(row.shown, row.ratio.n, counted=row.ratio.counted).kind if row else say.UNMEASURED
    )
