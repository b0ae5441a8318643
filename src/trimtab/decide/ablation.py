"""Which plans tell what each change of a plan is worth: the loop with it alone, and the plan without it (table III)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from trimtab.core.choice import Choice
from trimtab.core.errors import TrimtabError
from trimtab.core.objective import Reference
from trimtab.core.plan import Plan, Scalar

# Arms by what they are: the user's loop; the engine that changes nothing of it; all changes; and the controls.
REFERENCE, UNCHANGED, PLAN = "reference", "unchanged", "plan"
UNCHANGED_AGAIN, PLAN_AGAIN = "unchanged_again", "plan_again"

Changes = frozenset[str]
_BELONGS = {"warmup_fraction": "schedule"}  # choices that say how another is, by that one


def changes_of(plan: Plan, reference: Reference) -> tuple[str, ...]:
    """Return the choices whose value is not the loop's, in the plan's order; whatever the plan itself calls changed.

    What belongs to another of them is none by itself.
    """
    loop = _loop_values(plan, reference)
    return tuple(name for name, choice in plan.choices() if choice.value != loop[name] and name not in _BELONGS)


def reduced(plan: Plan, kept: Collection[str], reference: Reference) -> Plan:
    """Return a plan with these of its changes alone, the rest as the loop has it.

    Raises:
        ValueGivenError, FormatError: one of them needs one that is left out.
    """
    loop = _loop_values(plan, reference)
    values: dict[str, Any] = {
        name: Choice(value, "as the loop has it: left out", Plan.marks()[name])
        for name, value in loop.items()
        if _BELONGS.get(name, name) not in kept and getattr(plan, name).value != value
    }
    if "batch_policy" in values:
        values["batch_rule"] = None
    if "recompute" in values:
        values["recompute_blocks"] = ()
    # What was told and measured is of the whole plan.
    return replace(plan, **values, predicted=None, measured=None, verified=None, front=(), stages=(), advice=())


def _loop_values(plan: Plan, reference: Reference) -> dict[str, Scalar]:
    """Return what each choice is where nothing is changed. A step that is fused, and not by the plan, is the loop's."""
    kept: dict[str, Scalar] = {f.name: f.default.value for f in fields(Plan) if isinstance(f.default, Choice)}
    kept |= {"micro_batch": plan.batch_rows, "precision": reference.precision, "clip_norm": reference.clip_norm}
    kept |= {} if plan.fused_optimizer.changed else {"fused_optimizer": plan.fused_optimizer.value}
    return kept if plan.num_ranks == 1 else kept | {"zero_stage": 0}


@dataclass(frozen=True)
class Design:
    """The arms of an ablation, each a plan with some of the changes: as many as differ.

    Args:
        changes: all of the plan's. pairwise: whether each two of them are run together too.
    """

    changes: tuple[str, ...]
    pairwise: bool = False

    @property
    def arms(self) -> Mapping[str, Changes]:
        """Each arm's changes by its name, the controls not among them."""
        every = frozenset(self.changes)
        sets = [frozenset[str](), *(frozenset({name}) for name in self.changes)]
        if self.pairwise:
            sets += map(frozenset, itertools.combinations(self.changes, 2))
        sets += [*(every - {name} for name in self.changes), every]
        return {self.name_of(each): each for each in dict.fromkeys(sets)}

    @property
    def controls(self) -> Mapping[str, str]:
        """The arms that are run twice, by the name of their second run; the plan where it has changes to leave out."""
        if not self.changes:
            return {}
        return {UNCHANGED_AGAIN: UNCHANGED} | ({PLAN_AGAIN: PLAN} if len(self.changes) > 1 else {})

    def name_of(self, changes: Changes) -> str:
        """Return the arm that has these changes."""
        every = frozenset(self.changes)
        if not changes or changes == every:
            return PLAN if changes else UNCHANGED
        ordered = [name for name in self.changes if name in changes]
        if len(changes) == len(every) - 1 and len(changes) > 1:
            return f"without_{min(every - changes)}"
        return "with_" + "_and_".join(ordered)

    def alone(self, change: str) -> tuple[str, str]:
        """Return the two arms that tell what a change is worth alone: with it, and without."""
        return self.name_of(frozenset({change})), UNCHANGED

    def within(self, change: str) -> tuple[str, str]:
        """Return the two arms that tell what it is worth in the plan: with it, and without."""
        return PLAN, self.name_of(frozenset(self.changes) - {change})

    def beside(self, change: str, other: str) -> tuple[str, str]:
        """Return the two arms that tell what it is worth beside one other: with it, and without."""
        return self.name_of(frozenset({change, other})), self.name_of(frozenset({other}))

    @property
    def pairs(self) -> tuple[tuple[str, str], ...]:
        """The changes that are told two by two; of two the plan is the pair, of three each pair is one left out."""
        told = self.pairwise or len(self.changes) == 3
        return tuple(itertools.combinations(self.changes, 2)) if told and len(self.changes) > 2 else ()


def plans_of(plan: Plan, design: Design, reference: Reference) -> tuple[dict[str, Plan], dict[str, str]]:
    """Return the plan of each arm that can be, and why the others cannot."""
    plans, refusals = {}, {}
    for name, kept in design.arms.items():
        try:
            plans[name] = reduced(plan, kept, reference)
        except TrimtabError as error:
            refusals[name] = str(error)
    return plans, refusals


def power_of_all(changes: int) -> float:
    """Return how many times the noise of an interaction, as a logarithm, is in all changes' worth over each one's.

    An interaction is of four loops, each once. Here the plan is once, each change's loop too, and the unchanged one,
    which each of them is divided by, once for the plan and as often for them: changes less one.
    """
    return math.sqrt((1 + changes + (changes - 1) ** 2) / 4)
