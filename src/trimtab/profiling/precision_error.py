"""Error of the gradient in half precision, and the modules causing the error (per-layer precision, paper, section VI).

Half precision rounds activations and their gradients. If a loop subtracts nearly equal numbers (a variance as a
difference of means, a finite difference, the residual of a differential equation), the error can exceed the gradient
itself, although every operation is correct to rounding.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from torch import nn

from trimtab.settings.fp32_modules import fp32_obstacle

INACCURATE = "proof.inaccurate"
# A gradient in half precision is accepted if its error is below this fraction of its norm, or below this multiple of
# the effect of rounding the weights alone. Near a minimum the gradient is small, and both errors exceed its norm alike.
MOST_ERROR, _TIMES = 0.3, 30.0


@dataclass(frozen=True)
class GradientError:
    """Error of a gradient in half precision against the user's precision.

    Attributes:
        relative: 2-norm of the difference of all gradients, as a fraction of the norm; infinite if non-finite.
        by_weights: the same for the user's precision with weights perturbed in the last bit of half precision.
    """

    relative: float
    by_weights: float

    @property
    def ratio(self) -> float:
        """Error in units of the largest accepted error."""
        if math.isinf(self.relative):
            return math.inf
        return self.relative / max(MOST_ERROR, _TIMES * self.by_weights)

    @property
    def is_rounding(self) -> bool:
        """True if the error is accepted."""
        return self.ratio <= 1

    def text(self, precision: str, reference: str) -> str:
        """Return the error as a sentence."""
        found = f"the gradients of your loop in {precision} and {reference} differ by {self.relative:.2g} (relative); "
        return found + f"rounding only the weights to {precision} changes the gradient by {self.by_weights:.2g}"


ErrorWith = Callable[[Sequence[nn.Module]], float]  # Relative error with some modules in fp32.
_MOST_MEMBERS = 12  # Largest number of modules of a kind that are measured one by one.
_MOST_S = 10.0  # Seconds after which no further modules are measured.


def advice(model: nn.Module, precision: str, error: GradientError, error_with: ErrorWith) -> str:
    """Return a sentence with the smallest modules to run in fp32, or with the reason for having none.

    The kinds of modules are measured in the order of their number of parameters, up to the first sufficient kind.
    """
    size = f"an error of {error.relative:.2g} (relative)" if math.isfinite(error.relative) else "NaN or infinite values"
    whole, end, measured = f"in {precision} the gradient has {size}", time.monotonic() + _MOST_S, 0
    for named in _kinds(model):
        if time.monotonic() > end:
            return (
                f"{whole}; none of the first {measured} kinds of modules in fp32 makes it accurate, others not measured"
            )
        relative, measured = error_with(list(named.values())), measured + 1
        if not GradientError(relative, error.by_weights).is_rounding:
            continue
        for name, module in named.items() if 1 < len(named) <= _MOST_MEMBERS else ():
            if time.monotonic() > end:
                break
            alone = error_with([module])
            if GradientError(alone, error.by_weights).is_rounding:
                named, relative = {name: module}, alone
                break
        names = ",".join(named)
        text = f"{whole}, and an error of {relative:.2g} with {names} in fp32: set precision={precision!r} and "
        return f"{text}fp32_modules={names!r} in a plan by hand, and measure its speed"
    return f"{whole}, and no single kind of module in fp32 makes it accurate"


def _kinds(model: nn.Module) -> list[dict[str, nn.Module]]:
    """Return the modules of each class that can run in fp32, by name; classes with the fewest parameters first.

    Without classes whose modules hold all parameters, which would be fp32 throughout.
    """
    found: dict[type[nn.Module], dict[str, nn.Module]] = {}
    for name, module in model.named_modules():
        if name and fp32_obstacle(module) is None:
            found.setdefault(type(module), {})[name] = module

    sizes = {kind: _num_parameters(named.values()) for kind, named in found.items()}
    return [found[kind] for kind in sorted(found, key=sizes.__getitem__) if sizes[kind] < _num_parameters([model])]


def _num_parameters(modules: Iterable[nn.Module]) -> int:
    distinct = {id(each): each.numel() for module in modules for each in module.parameters()}
    return sum(distinct.values())
