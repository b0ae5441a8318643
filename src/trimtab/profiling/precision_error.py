"""Error of the gradient in half precision, and the modules causing the error (per-layer precision, paper, section VI).

Half precision rounds activations and their gradients. If a loop subtracts nearly equal numbers (a variance as a
difference of means, a finite difference, the residual of a differential equation), the error can exceed the gradient
itself, although every operation is correct to rounding.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

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
_MOST_S = 10.0  # Seconds after which no further modules are measured.


@dataclass(frozen=True)
class SufficientModules:
    """Result of a search for modules that make a half precision accurate if they run in fp32.

    Attributes:
        precision: "bf16" or "fp16".
        whole: relative error with all modules in half precision; infinite if non-finite.
        modules: the modules by name; {} if no tried modules suffice.
        relative: relative error with these modules in fp32.
        is_complete: False if the time limit ended the search.
    """

    precision: str
    whole: float
    modules: Mapping[str, nn.Module]
    relative: float = math.inf
    is_complete: bool = True

    @property
    def names(self) -> str:
        """Value of the setting `fp32_modules`."""
        return ",".join(self.modules)

    @property
    def text(self) -> str:
        """The result as a sentence."""
        size = f"an error of {self.whole:.2g} (relative)" if math.isfinite(self.whole) else "NaN or infinite values"
        start = f"in {self.precision} the gradient has {size}"
        if self.modules:
            return f"{start}, and an error of {self.relative:.2g} with these modules in fp32"
        if self.is_complete:
            return f"{start}, and no part of the modules in fp32 makes it accurate"
        return f"{start}; no modules that were measured in fp32 make it accurate, and others were not measured"


def sufficient_modules(
    model: nn.Module, precision: str, error: GradientError, error_with: ErrorWith
) -> SufficientModules:
    """Return a small set of modules that make the gradient accurate if they run in fp32.

    All modules of a class are tried, the class with the fewest parameters first; then the modules of the first two
    classes, three, and so on. From the first sufficient set, halves, quarters and at last single modules are left out
    as long as the rest suffices.
    """
    end = time.monotonic() + _MOST_S
    kinds = _kinds(model)
    unions = [
        {name: each for kind in kinds[:number] for name, each in kind.items()} for number in range(2, 1 + len(kinds))
    ]
    size = _num_parameters([model])
    for named in (*kinds, *(union for union in unions if _num_parameters(union.values()) < size)):
        if time.monotonic() > end:
            return SufficientModules(precision, error.relative, {}, is_complete=False)
        relative = error_with(list(named.values()))
        if GradientError(relative, error.by_weights).is_rounding:
            return _reduced(SufficientModules(precision, error.relative, named, relative), error, error_with, end)
    return SufficientModules(precision, error.relative, {})


def _reduced(found: SufficientModules, error: GradientError, error_with: ErrorWith, end: float) -> SufficientModules:
    """Return a sufficient set from which no tried part can be left out."""
    size = len(found.modules) // 2
    while size:
        start = 0
        while start < len(found.modules) > size and time.monotonic() <= end:
            names = list(found.modules)
            rest = {name: found.modules[name] for name in (*names[:start], *names[start + size :])}
            relative = error_with(list(rest.values()))
            if GradientError(relative, error.by_weights).is_rounding:
                found = replace(found, modules=rest, relative=relative)
            else:
                start += size
        size //= 2
    return found


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
