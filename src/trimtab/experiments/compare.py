"""Comparison of training loops in paired runs: a loop and a plan (`compare`), several loops (`race`), every change of a
plan alone and left out (`ablate`).

Every pair has a seed. `setup(seed)` builds all arms, and the arms train on equal batches, alternating in blocks of a
few steps. The first arm, the baseline, runs twice; the second run is the A/A control. Peak memory is measured in
separate steps. With an output folder, every completed part is kept there, and an interrupted comparison continues.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from trimtab.core.choice import Effect
from trimtab.core.errors import TrimtabError, ValueGivenError
from trimtab.core.objective import Reference
from trimtab.core.progress import Progress, silent
from trimtab.experiments import loop_setup
from trimtab.experiments.comparison import Comparison
from trimtab.experiments.plan_changes import changes_of, with_only
from trimtab.experiments.result_table import BASELINE, CONTROL, PLANNED, TUNED
from trimtab.experiments.subject import PAIRS, Arms, RunOptions, Subject, fingerprint_of, plain_options, process_kept
from trimtab.experiments.task_loops import STRICT, Setup, require_recipes
from trimtab.plans.plan import Plan
from trimtab.tasks.task import Task


def compare(
    setup: Setup | Task,
    *,
    steps: int | None = None,
    pairs: int = PAIRS,
    plan: Plan | None = None,
    against: Sequence[str] | None = None,
    name: str = "setup",
    progress: Progress = silent,
    options: RunOptions | None = None,
    **planning: Any,
) -> Comparison:
    """Compare a training loop with a plan in paired runs.

    Args:
        setup: `setup(seed)` returns a `trimtab.Loop`, a Transformers Trainer, or a Lightning (trainer, module, loader).
            Every call must build a new model, optimizer and loader. Or a `trimtab.tasks.Task`.
        steps: optimizer steps of an arm per pair; 100 by default.
        pairs: paired runs with different seeds: five for a verdict, eight for a claim.
        plan: the plan; None to make a plan.
        against: recipes of a task that run too: "strict" (fp32 without TF32), "strong", "muon", or baselines of the
            task. A plan for "strong" is made and runs as well.
        name: name of the loop in the result and in errors.
        progress: called with a line of text and the completed fraction.
        options: all options of the paired runs, in place of `steps`, `pairs` and `progress`.
        planning: further arguments of `trimtab.plan`, such as `memory="8GiB"`. With `adapt`, a tuned plan runs beside
            the plan.

    Raises:
        ValueGivenError: `setup` returns no loop; its step and its loss differ; the task has no such recipe.
        LoopError: `setup` or the baseline raises.
        InfeasibleError: no settings meet the limits.
    """
    subject = Subject.of(setup, name, options or RunOptions(steps, pairs, progress=progress))
    recipes = tuple(against or ())
    if recipes and subject.task is None:
        raise ValueGivenError(
            "against",
            got=", ".join(recipes),
            expected="a task, which has recipes",
            hint="Compare functions with trimtab.race(setup, other).",
            code="against.not_task",
        )
    with process_kept():
        if subject.task is not None:
            require_recipes(subject.task, recipes)
        reference, made = subject.reference(), Arms()
        settings = {"command": "compare", "against": _digests(subject, recipes), "plan": plan}
        settings["planning"] = plain_options(planning)
        with subject.folder.claimed(subject.settings(reference, settings)):
            found = subject.plan(reference, plan, planning)
            made.plain(BASELINE, subject.setup, reference)
            same, budget = _equivalent_part(found, reference), subject.budget_samples
            made.planned(PLANNED, subject.setup, reference, same, samples=None, horizon=subject.horizon(same))
            if found is not same:
                length = min(budget or math.inf, (subject.task and subject.task.adapted_samples) or math.inf)
                samples = None if math.isinf(length) else int(length)
                horizon = samples or subject.horizon(found)
                made.planned(TUNED, subject.setup, reference, found, samples=samples, horizon=horizon)
            for recipe in recipes:
                subject.add_recipe(recipe, made, planning)
            notes = [] if plan is None else subject.notes_on(found)
            return subject.run(f"{subject.name}: plan against the loop", made, "comparison", reference, notes)


def race(
    setup: Setup | Task,
    *others: Setup | Task,
    steps: int | None = None,
    pairs: int = PAIRS,
    names: Sequence[str] = (),
    progress: Progress = silent,
    options: RunOptions | None = None,
) -> Comparison:
    """Compare any loops in paired runs, without a plan; the first is the baseline.

    Args:
        setup, others: functions or tasks as in `compare`.
        steps: optimizer steps of the first loop per pair; all loops train on an equal number of samples.
        pairs: paired runs with different seeds.
        names: names of the loops in the result; by default the names of the functions.
        progress: called with a line of text and the completed fraction.
        options: all options of the paired runs, in place of `steps`, `pairs` and `progress`.

    Raises:
        ValueGivenError: fewer than two loops, or names that are missing or equal.
    """
    given = options or RunOptions(steps, pairs, progress=progress)
    subjects = [Subject.of(each, "setup", given) for each in (setup, *others)]
    titles = list(names) or _names_of([each.setup for each in subjects])
    if len(subjects) < 2 or len(titles) != len(subjects) or len(set(titles)) < len(titles) or CONTROL in titles:
        number = "one loop" if len(subjects) == 1 else f"{len(subjects)} loops"
        raise ValueGivenError(
            "race",
            got=f"{number} named {', '.join(titles)}",
            expected="at least two loops, each with its own name",
            code="race.names",
        )
    with process_kept():
        made = Arms()
        for each in subjects:
            each.require_ready_for_ranks()
        references = [
            loop_setup.observed_reference(each.setup, 0, title) for title, each in zip(titles, subjects, strict=True)
        ]
        for title, each, reference in zip(titles, subjects, references, strict=True):
            made.plain(title, each.setup, reference)
        digests = {title: each.fingerprint() for title, each in zip(titles, subjects, strict=True)}
        settings = {"command": "race", "loops": digests}
        with subjects[0].folder.claimed(subjects[0].settings(references[0], settings)):
            return subjects[0].run(" against ".join(titles), made, "race", references[0])


def ablate(
    setup: Setup | Task,
    *,
    steps: int | None = None,
    pairs: int = PAIRS,
    plan: Plan | None = None,
    pairwise: bool = False,
    name: str = "setup",
    progress: Progress = silent,
    options: RunOptions | None = None,
    **planning: Any,
) -> Comparison:
    """Compare a loop with a plan, with every change of the plan alone, and with the plan without every change.

    Args:
        pairwise: True for every pair of changes, too.
        The rest and errors as in `compare`.
    """
    subject = Subject.of(setup, name, options or RunOptions(steps, pairs, progress=progress))
    with process_kept():
        reference, made = subject.reference(), Arms()
        settings = {"command": "ablate", "pairwise": pairwise, "plan": plan, "planning": plain_options(planning)}
        with subject.folder.claimed(subject.settings(reference, settings)):
            found = subject.plan(reference, plan, planning)
            made.plain(BASELINE, subject.setup, reference)
            changes, notes = changes_of(found, reference), [] if plan is None else subject.notes_on(found)
            for title, kept in _subsets(changes, pairwise=pairwise).items():
                try:
                    reduced = found if set(kept) == set(changes) else with_only(found, kept, reference)
                except TrimtabError as error:  # A change that needs another change.
                    notes.append(f"{title} is not possible: {error.reason}")
                    continue
                how: dict[str, Any] = {"samples": None, "horizon": subject.horizon(reduced)}
                made.planned(title, subject.setup, reference, reduced, **how)
                made.changes[title] = kept
            return subject.run(f"{subject.name}: changes of the plan", made, "ablation", reference, notes)


def _digests(subject: Subject, recipes: Sequence[str]) -> dict[str, str]:
    """Return the digests of recipes by name; "strict" is the loop itself."""
    made = subject.task_loops
    return {each: "" if made is None or each == STRICT else fingerprint_of(made.recipe(each), each) for each in recipes}


def _subsets(changes: Sequence[str], *, pairwise: bool) -> dict[str, tuple[str, ...]]:
    """Return the changes of every arm of an ablation, by name; every set of changes once."""
    found = {PLANNED: tuple(changes)}
    if len(changes) < 2:
        return found
    names = {change: change.replace("_", " ") for change in changes}
    found |= {f"{names[change]} alone": (change,) for change in changes}
    if len(changes) > 2:
        found |= {
            f"plan without {names[change]}": tuple(each for each in changes if each != change) for change in changes
        }
    if pairwise and len(changes) > 3:
        pairs = [(a, b) for index, a in enumerate(changes) for b in changes[index + 1 :]]
        found |= {f"{names[a]} and {names[b]} alone": (a, b) for a, b in pairs}
    return found


def _equivalent_part(plan: Plan, reference: Reference) -> Plan:
    """Return a plan without the settings that change the training; the plan itself if it has none."""
    if plan.plan_kind == "equivalent":
        return plan
    kept = [name for name in changes_of(plan, reference) if getattr(plan, name).effect is not Effect.TRAINING]
    return replace(with_only(plan, kept, reference), planning_s=plan.planning_s, search_s=0.0)


def _names_of(setups: Sequence[Setup]) -> list[str]:
    names = [getattr(each, "__name__", f"loop {index + 1}") for index, each in enumerate(setups)]
    return [
        f"{name} {names[: index + 1].count(name)}" if names.count(name) > 1 else name
        for index, name in enumerate(names)
    ]
