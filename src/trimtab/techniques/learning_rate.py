"""Scaling of learning rates within the optimizer's step, and by the batch size (paper eq. 11; math: section 5)."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Iterator, Mapping

import torch

from trimtab.core import validation
from trimtab.core.stateful import Load, Stateful, require_keys


def applied_rate(optimizer: torch.optim.Optimizer, factor: float) -> float | None:
    """Return the first group's learning rate times a factor; None if the optimizer sets its own."""
    own = optimizer.param_groups[0].get("lr")
    return None if own is None else own * factor


def is_scale_invariant(optimizer: torch.optim.Optimizer) -> bool:
    """Return True if the step size is independent of the gradient's scale, as in Adam; assumed for all but SGD."""
    return not isinstance(getattr(optimizer, "optim", optimizer), torch.optim.SGD | torch.optim.ASGD)


class RateFollower(Stateful):
    """Learning rate factor that follows the batch size relative to the user's batch size (`ratio`).

    The rule "linear" uses the ratio (SGD; paper eq. 11), "sqrt" its square root (Adam family; Malladi et al. 2022,
    whose rule also changes betas and epsilon, unlike this class). An increase is spread over ten applied windows per
    doubling, a decrease applies at once. A window smaller than decided, such as the last of a loader, gets a lower
    factor without affecting later windows. A larger window, made to measure noise, gets no higher factor, since the
    ramp exists to avoid jumps of the learning rate.
    """

    RAMP = 10

    def __init__(self, rule: str) -> None:
        self.rule = rule
        self._level = 1.0
        self._settled: tuple[float, float] | None = None  # Ratio and decided ratio for which the level is final.

    @classmethod
    def for_optimizer(cls, rule: str, optimizer: torch.optim.Optimizer) -> RateFollower:
        """Return the follower for a rule; "auto" selects "linear" for SGD and "sqrt" for all other optimizers."""
        if rule == "auto":
            rule = "sqrt" if is_scale_invariant(optimizer) else "linear"
        return cls(rule)

    def factor(self, ratio: float, decided: float) -> float:
        """Return the factor for a window.

        Args:
            ratio: size of the window relative to the user's batch.
            decided: decided size relative to the user's batch.
        """
        if self._settled == (ratio, decided):
            return self._level
        level = min(self._wanted(decided), max(1.0, self._level) * 2 ** (1 / self.RAMP))
        return min(level, self._wanted(ratio))

    def applied(self, ratio: float, decided: float) -> None:
        """Advance the ramp after an applied window; arguments as for `factor`."""
        if self._settled == (ratio, decided):
            return
        level, wanted = max(self._level, self.factor(min(ratio, decided), decided)), self._wanted(decided)
        self._level = min(level, wanted)
        self._settled = (ratio, decided) if ratio == decided and self._level == wanted else None

    def _wanted(self, ratio: float) -> float:
        return {"linear": ratio, "sqrt": math.sqrt(ratio), "none": 1.0}[self.rule]

    def state_dict(self) -> dict[str, float]:
        return {"level": self._level}

    def loading(self, state: Mapping[str, float]) -> Load:
        require_keys("state.rate", state, ("level",))
        level = validation.number("state.rate.level", state["level"], low=0, open_low=True)
        return lambda: vars(self).update(_level=level, _settled=None)


@contextlib.contextmanager
def scaled_rates(optimizer: torch.optim.Optimizer, factor: float) -> Iterator[None]:
    """Multiply every group's learning rate within the block, and restore the user's values afterwards.

    If the factor remained, a scheduler that reads the learning rate back would compound it.
    """
    if factor == 1.0:
        yield
        return
    before = [group["lr"] for group in optimizer.param_groups]
    multiplied = [None if rate is None else rate * factor for rate in before]
    try:
        for group, rate in zip(optimizer.param_groups, multiplied, strict=True):
            group["lr"] = rate
        yield
    finally:
        groups = optimizer.param_groups  # A group may have been added meanwhile.
        changed = [group["lr"] is not rate for group, rate in zip(groups, multiplied, strict=False)]
        for group, rate in zip(groups, before, strict=False):
            group["lr"] = rate
        if any(changed):
            warnings.warn(
                "A learning rate was changed within optimizer.step(), for which the plan scales it, so the change was "
                "undone. Call scheduler.step() after run.step() or run.train_step(), not in a hook of the optimizer.",
                stacklevel=2,
            )
