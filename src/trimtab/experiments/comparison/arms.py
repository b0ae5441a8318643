"""The arms of a comparison: what a person reads of each, what runs it, and what it is held against."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

_PLANS = "experiments/racing/loops.py"


@dataclass(frozen=True)
class ArmKind:
    """What is known of an arm before it runs.

    Args:
        label: what a person reads. source: the file that runs it.
        tier: "" of recipes, else that of its plan. plan: the plan's key, which is no tier: the plan for the strong
            recipe is of tier S as well. made_for: the arm whose loop the plan was made for.
        rivals: recipes that its speed and memory are held against besides the reference's.
        times: recipes that its time to a target is held against besides the reference's; None: that is not told.
        has_quality: whether its final metric is held against the reference's. has_thirds: its progress by thirds.
    """

    label: str
    source: str
    tier: str = ""
    plan: str = ""
    made_for: str = "reference"
    rivals: tuple[str, ...] = ()
    times: tuple[str, ...] | None = None
    has_quality: bool = False
    has_thirds: bool = False

    @property
    def is_charged(self) -> bool:
        """Whether planning and search are counted into its times: of plans for the reference's loop."""
        return bool(self.plan) and self.times is not None


# In the order that reports have them. Only tier F may train as P2 and P3 do.
ARMS: Mapping[str, ArmKind] = {
    "reference": ArmKind("P0 reference", "recipes/reference.py"),
    "self": ArmKind("reference again (A/A control)", "recipes/reference.py"),
    "plan_S": ArmKind(
        "trimtab, same maths",
        _PLANS,
        "S",
        plan="S",
        rivals=("strong", "muon", "strict"),
        times=("paper", "strict"),
        has_quality=True,
        has_thirds=True,
    ),
    "plan_F": ArmKind(
        "trimtab, freed",
        _PLANS,
        "F",
        plan="F",
        times=("paper", "strong", "muon", "strict"),
        has_quality=True,
        has_thirds=True,
    ),
    "strict": ArmKind("P0 in strict fp32, without TF32", "recipes/strict.py", times=()),
    "paper": ArmKind("P1 paper, literal", "recipes/paper.py", times=(), has_thirds=True),
    "strong": ArmKind("P2 strong, hand-tuned", "recipes/strong.py", times=()),
    "muon": ArmKind("P3 strong, with Muon", "recipes/muon.py", times=()),
    "strong_plan": ArmKind("trimtab's plan for P2", _PLANS, "S", plan="strong", made_for="strong"),
}
_REPLICA = "recipes/replica.py"
ON_RANKS: Mapping[str, ArmKind] = dict(ARMS) | {
    "reference": ArmKind("P0 reference, in DDP", _REPLICA),
    "self": ArmKind("reference in DDP again (A/A control)", _REPLICA),
}
# Key of a plan -> the arm that runs it; and the arm of the loop that it was made for, where that is not the reference.
PLAN_ARMS = {kind.plan: name for name, kind in ARMS.items() if kind.plan}
PLAN_LOOPS = {kind.plan: kind.made_for for kind in ARMS.values() if kind.made_for != "reference"}
