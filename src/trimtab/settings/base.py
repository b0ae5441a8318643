"""Interface of a setting: what a plan can choose for one property of a training loop, and how the choice is applied.

A setting is a class in a file of its own, with one instance in `trimtab.settings.SETTINGS`. Plans, candidates, the
search, explanations, checkpoints, the documentation table and the generated equivalence tests read that list, so a new
setting needs no change to them. Reading a plan must not import torch: `apply` and `require` import it when called.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from trimtab.core import validation
from trimtab.core.choice import Choice, Effect, Note, Scalar
from trimtab.core.errors import FormatError

if TYPE_CHECKING:
    import torch
    from torch import nn

    from trimtab.plans.plan import Plan
    from trimtab.plans.profile import Candidate, Profile

Undo = Callable[[], None]
UNCHANGED = "plan.unchanged"  # Code of the choices that keep the user's value.


@dataclass
class LiveLoop:
    """The objects of a training loop that a plan is applied to.

    Args:
        called: the model as the loop calls it: `model` or its wrapper.
        note_forward: called before every forward of the model.
        compiled_call: set by the setting `compiled`: the object that replaces the model's call.
    """

    model: nn.Module
    called: nn.Module
    optimizer: torch.optim.Optimizer
    plan: Plan
    note_forward: Callable[[], None] = lambda: None
    compiled_call: Any = None

    @property
    def device(self) -> torch.device:
        """The model's device."""
        return next(self.model.parameters()).device


class Setting:
    """A property of the loop that a plan can change.

    Attributes:
        name: name of the setting; a field of `Plan`, and of `Candidate` if `is_searched`.
        default: value that leaves the user's loop unchanged.
        effect: largest numerical effect of a change; decides which equivalence test is generated.
        summary: one sentence for the documentation.
        values: accepted values in words.
        examples: changed values for the generated tests.
        is_searched: True if planning tries values in trials of the loop.
        value_type: type of the values of a searched setting, for reading profiles.
        is_mode: True if trials of whole steps are made for every value of this setting (precision, memory format); the
            cost of other settings is measured relative to a mode.
        changes_peak: False if the peak memory of a step hardly depends on the value.
        shards_first: True if the setting must be applied before the model is sharded.
        acts_in_step: True if the setting acts between the backward pass and the optimizer step, which a loop that steps
            within the backward pass does not have.
        trainer_decides: True if a trainer's own configuration decides the setting (Transformers, Lightning,
            Accelerate).
    """

    name: ClassVar[str]
    default: ClassVar[Scalar]
    effect: ClassVar[Effect]
    summary: ClassVar[str]
    values: ClassVar[str]
    examples: ClassVar[tuple[Scalar, ...]]
    is_searched: ClassVar[bool] = False
    value_type: ClassVar[Any] = Scalar
    is_mode: ClassVar[bool] = False
    changes_peak: ClassVar[bool] = True
    shards_first: ClassVar[bool] = False
    acts_in_step: ClassVar[bool] = False
    trainer_decides: ClassVar[bool] = False

    @property
    def field(self) -> str:
        """Name of the setting in error messages, such as "plan.precision"."""
        return f"plan.{self.name}"

    def unchanged(self) -> Choice:
        """Return the choice of a plan that keeps the user's value."""
        return Choice(self.default, "unchanged", self.effect, code=UNCHANGED)

    def check(self, value: Scalar, plan: Plan) -> None:
        """Raise `ValueGivenError` or `FormatError` if a plan cannot have a value, regardless of its other settings."""
        raise NotImplementedError

    def is_shown(self, values: Mapping[str, Scalar]) -> bool:
        """Return True if a plan with these values lists the setting; False where it cannot have an effect."""
        return True

    # Selection.

    def in_loop(self, profile: Profile) -> Scalar:
        """Return the value of the user's loop, the reference of all comparisons."""
        return self.default

    def refusal(self, profile: Profile) -> Note | None:
        """Return the reason not to try the setting in this loop on this machine, or None."""
        return None

    def candidates(self, profile: Profile, best: Candidate) -> Sequence[Scalar]:
        """Return the values to try, each together with the other settings of the best candidate so far.

        The search runs them in a phase of the setting's own, beside the best candidate. Settings whose trials are
        special (`search.STAGES`) leave this empty.
        """
        return ()

    def label(self, value: Scalar) -> str:
        """Return a value as part of a candidate's description, such as "bf16"; "" if there is nothing to say."""
        return "" if value == self.default else f"{self.name.replace('_', ' ')} {value}"

    def phrase(self, value: Scalar) -> str:
        """Return a value as the object of a comparison, such as "chunks of 512 tokens"."""
        return str(value)

    # Application.

    def require(self, loop: LiveLoop, value: Scalar) -> None:
        """Raise if the loop does not support the value; called for all changed settings before anything changes."""

    def apply(self, loop: LiveLoop, value: Scalar) -> Undo | None:
        """Change the live objects and return a function that restores them; None if the run itself reads the value."""
        return None


def one_of(setting: Setting, value: Scalar, allowed: Sequence[str]) -> None:
    """Raise `ValueGivenError` unless a value is one of some names."""
    validation.one_of(setting.field, value, allowed)


def true_or_false(setting: Setting, value: Scalar) -> None:
    """Raise `FormatError` unless a value is a bool."""
    if not isinstance(value, bool):
        raise FormatError(setting.field, got=repr(value), expected="true or false")
