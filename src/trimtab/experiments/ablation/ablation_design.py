"""Design of an ablation: the loop with a single change of a plan, and the plan without a single change (table III)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from trimtab.core.choice import Scalar
from trimtab.core.errors import TrimtabError
from trimtab.core.objective import Reference
from trimtab.plans.plan import Plan
from trimtab.settings import SETTINGS, unchanged

# Names of the arms: the user's loop, trimtab's loop without changes, the whole plan, and repetitions as A/A controls.
REFERENCE, UNCHANGED, PLAN = "reference", "unchanged", "plan"
UNCHANGED_AGAIN, PLAN_AGAIN = "unchanged_again", "plan_again"

Changes = frozenset[str]
_BELONGS = {"warmup_fraction": "schedule"}  # settings that only refine another setting -> that setting


def changes_of(plan: Plan, reference: Reference) -> tuple[str, ...]:
    """Return the names of the choices with a value different from the user's loop, in the plan's order.

    `Choice.changed` is ignored. Refinements of a choice, such as `warmup_fraction` of the schedule, are left out.
    """
    loop = _loop_values(plan, reference)
    return tuple(name for name, choice in plan.choices() if choice.value != loop[name] and name not in _BELONGS)


def with_only(plan: Plan, kept: Collection[str], reference: Reference) -> Plan:
    """Return a plan with only the given changes; all other choices keep the loop's value.

    Raises:
        ValueGivenError, FormatError: a kept change requires a change that is left out.
    """
    loop = _loop_values(plan, reference)
    values: dict[str, Any] = {
        name: replace(unchanged(name), value=value)
        for name, value in loop.items()
        if _BELONGS.get(name, name) not in kept and getattr(plan, name).value != value
    }
    if "batch_policy" in values:
        values["batch_rule"] = None
    if "recompute" in values:
        values["recompute_blocks"] = ()
    # These fields describe the whole plan, so they do not apply to a reduced one.
    return replace(
        plan, **values, predicted=None, measured=None, verified=None, timing_noise=None, front=(), stages=(), advice=()
    )


def _loop_values(plan: Plan, reference: Reference) -> dict[str, Scalar]:
    """Return the value of every setting in the unchanged loop; the loop's own fused optimizer counts as unchanged."""
    kept: dict[str, Scalar] = {name: setting.default for name, setting in SETTINGS.items()}
    kept |= {"micro_batch": plan.batch_size, "precision": reference.precision, "clip_norm": reference.clip_norm}
    kept |= {} if plan.fused_optimizer.changed else {"fused_optimizer": plan.fused_optimizer.value}
    return kept if plan.num_ranks == 1 else kept | {"zero_stage": 0}


@dataclass(frozen=True)
class AblationDesign:
    """Arms of an ablation: each arm is a plan with a distinct subset of the changes.

    Args:
        changes: names of all changes of the plan.
        pairwise: add an arm for every pair of changes.
    """

    changes: tuple[str, ...]
    pairwise: bool = False

    @property
    def arms(self) -> Mapping[str, Changes]:
        """Set of changes by arm name, without the controls."""
        every = frozenset(self.changes)
        sets = [frozenset[str](), *(frozenset({name}) for name in self.changes)]
        if self.pairwise:
            sets += map(frozenset, itertools.combinations(self.changes, 2))
        sets += [*(every - {name} for name in self.changes), every]
        return {self.name_of(each): each for each in dict.fromkeys(sets)}

    @property
    def controls(self) -> Mapping[str, str]:
        """Repeated arms, by the name of the repetition: the unchanged loop, and the plan if it has several changes."""
        if not self.changes:
            return {}
        return {UNCHANGED_AGAIN: UNCHANGED} | ({PLAN_AGAIN: PLAN} if len(self.changes) > 1 else {})

    def name_of(self, changes: Changes) -> str:
        """Return the name of the arm with these changes."""
        every = frozenset(self.changes)
        if not changes or changes == every:
            return PLAN if changes else UNCHANGED
        ordered = [name for name in self.changes if name in changes]
        if len(changes) == len(every) - 1 and len(changes) > 1:
            return f"without_{min(every - changes)}"
        return "with_" + "_and_".join(ordered)

    def alone(self, change: str) -> tuple[str, str]:
        """Return two arms, with and without the change, to measure the effect of the change alone."""
        return self.name_of(frozenset({change})), UNCHANGED

    def within(self, change: str) -> tuple[str, str]:
        """Return two arms, with and without the change, to measure the effect of the change in the plan."""
        return PLAN, self.name_of(frozenset(self.changes) - {change})

    def beside(self, change: str, other: str) -> tuple[str, str]:
        """Return two arms, with and without the change, to measure its effect in the presence of a second change."""
        return self.name_of(frozenset({change, other})), self.name_of(frozenset({other}))

    @property
    def pairs(self) -> tuple[tuple[str, str], ...]:
        """Pairs of changes for measured interactions.

        Empty for two changes, because the plan is the pair. With three changes, a pair is a leave-one-out arm.
        """
        told = self.pairwise or len(self.changes) == 3
        return tuple(itertools.combinations(self.changes, 2)) if told and len(self.changes) > 2 else ()


def plans_of(plan: Plan, design: AblationDesign, reference: Reference) -> tuple[dict[str, Plan], dict[str, str]]:
    """Return the plan of each valid arm, and the refusal of each invalid arm."""
    plans, refusals = {}, {}
    for name, kept in design.arms.items():
        try:
            plans[name] = with_only(plan, kept, reference)
        except TrimtabError as error:
            refusals[name] = str(error)
    return plans, refusals


def power_of_all(changes: int) -> float:
    """Return the noise of the total interaction of all changes, relative to the noise of a pairwise interaction.

    Both are logarithms of ratios. A pairwise interaction has four loops with exponent 1. In the total interaction, the
    plan and the single-change loops have exponent 1, and the unchanged loop has exponent `changes - 1`.

    Args:
        changes: number of changes.
    """
    return math.sqrt((1 + changes + (changes - 1) ** 2) / 4)
