"""A plan's dropout: one probability of every module that drops values at random, while a run is active.

Those are torch's own dropout layers, and every module that keeps a probability as a number whose name has "dropout" in
it, as attention and recurrent layers do. What drops nothing as the loop has it is left alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from trimtab.core.errors import ModelError

Dropper = tuple[nn.Module, str]


def droppers(model: nn.Module) -> tuple[Dropper, ...]:
    """Return the modules of a model that drop something, each with the name of its probability."""
    return tuple((module, name) for module in model.modules() for name in _probabilities(module))


def _probabilities(module: nn.Module) -> Iterator[str]:
    if isinstance(module, _DropoutNd):
        yield from ["p"] if module.p > 0 else []
        return
    for name, value in vars(module).items():
        if "dropout" in name and isinstance(value, float) and 0 < value <= 1:
            yield name


def use_dropout(model: nn.Module, probability: float) -> Callable[[], None]:
    """Set the probability of all that drops something; returns what puts each back.

    Raises:
        ModelError: there is none.
    """
    found = [(module, name, getattr(module, name)) for module, name in droppers(model)]
    if not found:
        raise ModelError(
            "model",
            given="no module that drops values",
            expected="dropout layers, for a plan that sets their probability",
            way_out="Leave dropout as it is.",
        )
    for module, name, _ in found:
        setattr(module, name, float(probability))

    def undo() -> None:
        for module, name, before in found:
            setattr(module, name, before)

    return undo
