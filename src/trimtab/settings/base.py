"""Interface of a setting: values of a property of the training loop, their selection, application and undo.

A setting is a class in a separate file, with an instance in `trimtab.settings.SETTINGS`. Plans, candidates, the
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
BY_HAND = "plan.by_hand"  # Code of the choices of a plan that was set by hand.


@dataclass
class LiveLoop:
    """Objects of a training loop for the application of a plan.

    Args:
        called: the callable of the loop: `model` or a wrapper of `model`.
        note_forward: called before every forward of the model.
        compiled_call: replacement of the model's call, set by the setting `compiled`.
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
    """Property of the loop with the values of a plan.

    Attributes:
        name: name of the setting; a field of `Plan`, and of `Candidate` if `is_searched`.
        default: value of the unchanged loop.
        effect: largest numerical effect of a change; selects the generated equivalence test.
        summary: one sentence for the documentation.
        values: accepted values in words.
        examples: changed values for the generated tests.
        is_searched: True if planning tries values in trials of the loop.
        value_type: type of the values of a searched setting, for reading profiles.
        blamed_last: True if a failed proof is due to this setting only if no single other change explains the failure.
        before_sharding: True if the setting must be applied before ranks shard the model.
        acts_in_step: True if the setting acts between backward pass and optimizer step; not supported by loops with
            optimizer steps within the backward pass.
        title: name in texts, such as "memory format"; the name with spaces if not given.
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
    blamed_last: ClassVar[bool] = False
    before_sharding: ClassVar[bool] = False
    acts_in_step: ClassVar[bool] = False
    trainer_decides: ClassVar[bool] = False
    title: ClassVar[str] = ""

    def __init_subclass__(cls) -> None:
        if not cls.title and hasattr(cls, "name"):
            cls.title = cls.name.replace("_", " ")

    @property
    def field(self) -> str:
        """Name of the setting in error messages, such as "plan.precision"."""
        return f"plan.{self.name}"

    def unchanged(self) -> Choice:
        """Return the choice of a plan that keeps the user's value."""
        return Choice(self.default, "unchanged", self.effect, code=UNCHANGED)

    def by_hand(self, value: Any) -> Any:
        """Return the value of a plan for a value set by hand, which may have another spelling."""
        return value

    def check(self, value: Scalar, plan: Plan) -> None:
        """Raise `ValueGivenError` or `FormatError` if a plan does not accept a value.

        Invalid combinations with another setting belong in `trimtab.settings.conflicts`.
        """
        raise NotImplementedError

    def is_shown(self, values: Mapping[str, Scalar]) -> bool:
        """Return True if the setting can have an effect in a plan with some values, and is listed."""
        return True

    # Selection.

    def in_loop(self, profile: Profile) -> Scalar:
        """Return the value of the user's loop, the reference of all comparisons."""
        return self.default

    def refusal(self, profile: Profile) -> Note | None:
        """Return the reason not to try the setting in this loop on this machine, or None."""
        return None

    def candidates(self, profile: Profile, best: Candidate) -> Sequence[Scalar]:
        """Return the values to try, each together with the fastest precision and memory format (`best`).

        The search runs the values in a phase named after the setting, and combines successful values with all settings.
        Required for a searched setting, except those in `trimtab.settings.SPECIAL`.
        """
        return ()

    def label(self, value: Scalar) -> str:
        """Return a value as part of a candidate's description, such as "bf16"; "" for the default."""
        return "" if value == self.default else f"{self.name.replace('_', ' ')} {value}"

    def title_of(self, value: Scalar) -> str:
        """Return a value as the name of a change, such as "bf16 precision"."""
        return (self.label(value) or f"{self.title} {value}").replace("_", " ")

    def value_text(self, value: Scalar) -> str:
        """Return a value beside the setting's title, such as "on" or "8 samples"."""
        if value is None or isinstance(value, bool):
            return "on" if value else "off"
        return "your loop's" if value in ("keep", "user") else str(value).replace("_", " ")

    def phrase(self, value: Scalar) -> str:
        """Return a value as the object of a comparison, such as "chunks of 512 tokens" in "1.2x the speed of ..."."""
        words = self.name.replace("_", " ")
        if isinstance(value, bool):
            return f"the loop {'with' if value else 'without'} {words}"
        return f"{words} {value}"

    # Application.

    def require(self, loop: LiveLoop, value: Scalar) -> None:
        """Raise if the loop does not support the value; called for all changed settings before anything changes."""

    def apply(self, loop: LiveLoop, value: Scalar) -> Undo | None:
        """Change the live objects and return a function that restores them; None if the run itself reads the value."""
        return None


def one_of(setting: Setting, value: Scalar, allowed: Sequence[str]) -> None:
    """Raise `ValueGivenError` unless a value is among some names."""
    validation.one_of(setting.field, value, allowed)


def true_or_false(setting: Setting, value: Scalar) -> None:
    """Raise `FormatError` unless a value is a bool."""
    if not isinstance(value, bool):
        raise FormatError(setting.field, got=repr(value), expected="true or false")
