"""A plan's learning rate: its scale and schedule, and what follows the batch (paper eqs. 10, 11; math: section 5).

Applied only inside the step.
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Iterator, Mapping

import torch

from trimtab.core import checks
from trimtab.core.errors import OptimizerError
from trimtab.core.plan import Plan
from trimtab.core.schedule import factor_of
from trimtab.core.state_parts import Load, Part, require_keys


def rate_factor(plan: Plan, progress: float | None) -> float:
    """Return the plan's factor on the user's learning rates: its scale, times its schedule's value.

    Args:
        progress: consumed over planned *after* the window that is about to be applied; needed when the plan has a
            schedule.
    """
    scale = float(plan.learning_rate_scale.value or 1.0)
    if plan.schedule.value == "user":
        return scale
    assert progress is not None
    rises = plan.warmup_fraction.value
    return scale * factor_of(str(plan.schedule.value), progress, None if rises is None else float(rises))


def require_rates(plan: Plan, optimizer: torch.optim.Optimizer) -> None:
    """Raise `OptimizerError` where a plan scales learning rates and the optimizer has none to scale."""
    follows = (
        plan.batch_rule is not None and not plan.batch_rule.only_measures and plan.batch_rule.learning_rate != "none"
    )
    scales = plan.schedule.value != "user" or plan.learning_rate_scale.value != 1.0 or follows
    if scales and any(group.get("lr") is None for group in optimizer.param_groups):
        raise rate_unset("plan.learning_rate_scale" if plan.schedule.value == "user" else "plan.schedule", optimizer)


def rate_unset(field: str, optimizer: torch.optim.Optimizer) -> OptimizerError:
    """Return the error for a learning rate of a plan's and an optimizer without one."""
    return OptimizerError(
        field,
        given=f"a learning rate of the plan's, and {type(optimizer).__name__} with lr=None",
        expected="an optimizer with a learning rate in each group, or a plan that leaves rates unchanged",
        way_out="Give the optimizer a learning rate (Adafactor: relative_step=False), or plan without adapt=.",
        code="optimizer.rate_unset",
    )


def applied_rate(optimizer: torch.optim.Optimizer, factor: float) -> float | None:
    """Return the learning rate of the first group times a factor; None if the optimizer sets its own."""
    own = optimizer.param_groups[0].get("lr")
    return None if own is None else own * factor


def normalises(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether a step has no size of its gradient's, as Adam's: of all but SGD, sharded or not, it is assumed."""
    return not isinstance(getattr(optimizer, "optim", optimizer), torch.optim.SGD | torch.optim.ASGD)


class RateFollower(Part):
    """The factor on the learning rate for the batch of a window, against the user's: `ratio` times as large.

    "linear": the ratio (SGD; paper eq. 11). "sqrt": its root (Adam family; Malladi et al. 2022, whose rule also moves
    betas and epsilon, which this does not). A rise is taken over ten applied windows a doubling, a fall at once. A
    window smaller than was decided, as a loader's last, has less and costs no level; a larger one, as one that is to be
    measured, has no more: a jump of the rate is what a rise over some windows avoids.
    """

    RAMP = 10

    def __init__(self, rule: str) -> None:
        self.rule = rule
        self._level = 1.0
        self._settled: tuple[float, float] | None = None  # the ratio, as decided, at which the level stands

    @classmethod
    def for_optimizer(cls, rule: str, optimizer: torch.optim.Optimizer) -> RateFollower:
        """Return the follower of a rule; "auto" is linear for SGD and the root for all else."""
        if rule == "auto":
            rule = "sqrt" if normalises(optimizer) else "linear"
        return cls(rule)

    def factor(self, ratio: float, decided: float) -> float:
        """Return the factor for a window that is `ratio` times the user's batch, where the rule is `decided` times."""
        if self._settled == (ratio, decided):
            return self._level
        level = min(self._wanted(decided), max(1.0, self._level) * 2 ** (1 / self.RAMP))
        return min(level, self._wanted(ratio))

    def applied(self, ratio: float, decided: float) -> None:
        """A window of `ratio` was applied, where one of `decided` is the rule."""
        if self._settled == (ratio, decided):
            return
        level, wanted = max(self._level, self.factor(min(ratio, decided), decided)), self._wanted(decided)
        self._level = min(level, wanted)
        self._settled = (ratio, decided) if ratio == decided and self._level == wanted else None

    def _wanted(self, ratio: float) -> float:
        return {"linear": ratio, "sqrt": math.sqrt(ratio), "none": 1.0}[self.rule]

    def state_dict(self) -> dict[str, float]:
        """Return what a resumed run needs."""
        return {"level": self._level}

    def loading(self, state: Mapping[str, float]) -> Load:
        """Return what continues from `state_dict()`; raises `FormatError` or `ValueGivenError` where it is none."""
        require_keys("state.rate", state, ("level",))
        level = checks.number("state.rate.level", state["level"], low=0, open_low=True)

        def load() -> None:
            self._level, self._settled = level, None

        return load


def scaled_rates(optimizer: torch.optim.Optimizer, factor: float) -> contextlib.AbstractContextManager[None]:
    """Multiply every group's learning rate while the block runs; the user's own values stand again after it.

    Left in place, the factor would compound with a scheduler that reads the rate back.
    """
    return contextlib.nullcontext() if factor == 1.0 else _multiplied(optimizer, factor)


_CHANGED = (
    "a learning rate was changed within optimizer.step(), while the plan's factor was in it; it is put back as it was "
    "before: step your scheduler after run.step() or run.train_step(), not in a hook of the optimizer"
)


@contextlib.contextmanager
def _multiplied(optimizer: torch.optim.Optimizer, factor: float) -> Iterator[None]:
    before = [group["lr"] for group in optimizer.param_groups]
    multiplied = [None if rate is None else rate * factor for rate in before]
    try:
        for group, rate in zip(optimizer.param_groups, multiplied, strict=True):
            group["lr"] = rate
        yield
    finally:
        groups = optimizer.param_groups  # one more, where one was added meanwhile
        changed = [group["lr"] is not rate for group, rate in zip(groups, multiplied, strict=False)]
        for group, rate in zip(groups, before, strict=False):
            group["lr"] = rate
        if any(changed):
            warnings.warn(_CHANGED, stacklevel=2)
