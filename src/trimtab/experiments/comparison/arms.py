"""Definition of the arms of a comparison: label, source file and comparisons."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

_PLANS = "experiments/paired_runs/plan_loops.py"


@dataclass(frozen=True)
class ArmKind:
    """Static description of an arm.

    Args:
        label: name shown in reports.
        source: the file with the training loop.
        plan_kind: "" for recipes, otherwise the kind of plan ("equivalent" or "tuned").
        plan: key of the plan; the plan for the hand-tuned recipe is also "equivalent", so keys differ from tiers.
        made_for: the arm whose loop the plan was made for.
        rivals: recipes to compare speed and memory with, in addition to the reference.
        times: recipes to compare time to target with, in addition to the reference; None for no such comparison.
        has_quality: True if the final metric is compared with the reference.
        has_thirds: True if progress is compared by thirds of training.
    """

    label: str
    source: str
    plan_kind: str = ""
    plan: str = ""
    made_for: str = "reference"
    rivals: tuple[str, ...] = ()
    times: tuple[str, ...] | None = None
    has_quality: bool = False
    has_thirds: bool = False

    @property
    def is_charged(self) -> bool:
        """True if times to target include planning and search, as for plans of the reference loop."""
        return bool(self.plan) and self.times is not None


# In report order, without the baselines of a task. Only a tuned plan may train as the hand-tuned recipes do.
ARMS: Mapping[str, ArmKind] = {
    "reference": ArmKind("P0 reference", "experiments/baselines/reference.py"),
    "self": ArmKind("reference again (A/A control)", "experiments/baselines/reference.py"),
    "equivalent_plan": ArmKind(
        "trimtab, equivalent plan",
        _PLANS,
        "equivalent",
        plan="equivalent",
        rivals=("strong", "muon", "strict"),
        times=("strict",),
        has_quality=True,
        has_thirds=True,
    ),
    "tuned_plan": ArmKind(
        "trimtab, tuned plan",
        _PLANS,
        "tuned",
        plan="tuned",
        times=("strong", "muon", "strict"),
        has_quality=True,
        has_thirds=True,
    ),
    "strict": ArmKind("P0 in strict fp32 (no TF32)", "experiments/comparison/compare.py", times=()),
    "strong": ArmKind("P2 hand-tuned recipe", "experiments/baselines/strong.py", times=()),
    "muon": ArmKind("P3 hand-tuned recipe with Muon", "experiments/baselines/strong.py", times=()),
    "strong_plan": ArmKind("trimtab's plan for P2", _PLANS, "equivalent", plan="strong", made_for="strong"),
}
_REPLICA = "experiments/baselines/replica.py"
ON_RANKS: Mapping[str, ArmKind] = dict(ARMS) | {
    "reference": ArmKind("P0 reference, in DDP", _REPLICA),
    "self": ArmKind("reference in DDP again (A/A control)", _REPLICA),
}
# PLAN_ARMS: arm by key of its plan. PLAN_LOOPS: the loop a plan was made for, by key, for loops other than the
# reference.
PLAN_ARMS = {kind.plan: name for name, kind in ARMS.items() if kind.plan}
PLAN_LOOPS = {kind.plan: kind.made_for for kind in ARMS.values() if kind.made_for != "reference"}


def with_baselines(labels: Mapping[str, str], num_ranks: int = 1) -> dict[str, ArmKind]:
    """Return the arms in report order, with a task's own baselines after "strict".

    Args:
        labels: label in reports, by name of a baseline.
        num_ranks: number of ranks.
    """
    found: dict[str, ArmKind] = {}
    for name, kind in (ARMS if num_ranks == 1 else ON_RANKS).items():
        is_compared = name in ("equivalent_plan", "tuned_plan")
        found[name] = replace(kind, times=(*labels, *(kind.times or ()))) if is_compared else kind
        if name == "strict":
            found |= {each: ArmKind(label, "", times=(), has_thirds=True) for each, label in labels.items()}
    return found
