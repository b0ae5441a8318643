"""The dropout setting of a plan: one probability for all dropout modules while a run is active.

This covers torch's dropout layers, and modules with a float attribute with "dropout" in its name, such as attention and
recurrent layers. Modules whose probability is 0 are left unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from trimtab.core import validation
from trimtab.core.choice import Effect, Scalar
from trimtab.core.errors import ModelError
from trimtab.settings.base import LiveLoop, Setting, Undo

if TYPE_CHECKING:
    from torch import nn

    from trimtab.plans.plan import Plan


class Dropout(Setting):
    """Probability of every dropout module."""

    name = "dropout"
    default = None
    effect = Effect.TRAINING
    summary = "Probability of all dropout modules of the model."
    values = "a number from 0 to 1, or None to leave every module unchanged"
    examples = (0.0, 0.8)

    def check(self, value: Scalar, plan: Plan) -> None:
        if value is not None:
            validation.number(self.field, value, low=0, high=1)

    def require(self, loop: LiveLoop, value: Scalar) -> None:
        require_dropout(loop.model, float(value or 0.0))

    def apply(self, loop: LiveLoop, value: Scalar) -> Undo | None:
        return use_dropout(loop.model, float(value or 0.0))


def dropout_modules(model: nn.Module) -> tuple[tuple[nn.Module, str], ...]:
    """Return all modules with a positive dropout probability, each with the attribute name."""
    return tuple((module, name) for module in model.modules() for name in _probabilities(module))


def _probabilities(module: nn.Module) -> Iterator[str]:
    from torch.nn.modules.dropout import _DropoutNd

    if isinstance(module, _DropoutNd):
        yield from ["p"] if module.p > 0 else []
        return
    for name, value in vars(module).items():
        if "dropout" in name and isinstance(value, float) and 0 < value <= 1:
            yield name


def require_dropout(model: nn.Module, probability: float) -> None:
    """Raise `ModelError` if the model has no active dropout."""
    if not dropout_modules(model):
        raise ModelError(
            "model",
            problem=f"The plan sets dropout={probability:g}, but {type(model).__name__} has no dropout module with a "
            "probability above 0.",
            hint="Use a plan with dropout=None.",
            code="dropout.no_modules",
        )


def use_dropout(model: nn.Module, probability: float) -> Callable[[], None]:
    """Set the probability of all active dropout modules; return a function that restores the previous values.

    Raises:
        ModelError: the model has no active dropout.
    """
    require_dropout(model, probability)
    found = [(module, name, getattr(module, name)) for module, name in dropout_modules(model)]
    for module, name, _ in found:
        setattr(module, name, float(probability))

    def undo() -> None:
        for module, name, before in found:
            setattr(module, name, before)

    return undo
