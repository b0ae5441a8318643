"""Rules shared by all trainer integrations: the declared baseline, settings left to the trainer, and ranks."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from types import MethodType
from typing import Any

import torch
from torch import nn

from trimtab.api import start
from trimtab.core.errors import ValueGivenError
from trimtab.core.objective import ASSUMED_REFERENCE, Reference
from trimtab.core.parallelism import STAGES
from trimtab.distributed.process_group import limited_to
from trimtab.plans.plan import Plan, without_graphs
from trimtab.settings import SETTINGS, unchanged
from trimtab.settings.step_in_backward import switched_off
from trimtab.training.run import Run

# Seconds: the default timeout of torch's gloo groups. A checkpoint of the trainer may delay a rank for minutes.
LIMIT_S = 1800.0


@contextlib.contextmanager
def counting_alone(arguments: Any) -> Iterator[None]:
    """Restrict a Transformers Trainer's token counts to this rank within the block: a run adds up the ranks' counts."""
    before = arguments.average_tokens_across_devices
    arguments.average_tokens_across_devices = False
    try:
        yield
    finally:
        arguments.average_tokens_across_devices = before


def following(plan: Plan | None, precision: str) -> Plan | None:
    """Return the plan, with the trainer's precision if it was made by hand without a precision."""
    if not isinstance(plan, Plan) or plan.check is not None or plan.baseline is not None:
        return plan
    if plan.precision.code != unchanged("precision").code:
        return plan
    kept = replace(plan.precision, value=precision, reason="unchanged: the trainer's precision")
    return plan.having(precision=kept, reference=replace(plan.reference, precision=precision, declared=True))


def follow_plan_precision(
    model: nn.Module,
    autocast: Callable[[], contextlib.AbstractContextManager[Any]],
    convert: Callable[[Any], Any],
    bare: Callable[[Any], Any] = lambda forward: forward,
) -> Callable[[], None]:
    """Let a run decide the autocast of a model's forward in training mode; return a function that undoes the change.

    In evaluation mode, the forward runs under the trainer's own autocast.

    Args:
        model: the model, whose `forward` is replaced on the instance.
        autocast: returns the trainer's autocast context.
        convert: converts half-precision outputs to fp32, as the trainer does.
        bare: returns a forward function without the trainer's decorators.
    """
    own: Any = model.forward
    is_method = hasattr(own, "__func__")
    written = bare(own.__func__ if is_method else own)
    attributes = vars(model)
    before = {"forward": attributes["forward"]} if "forward" in attributes else {}

    @functools.wraps(written)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with contextlib.nullcontext() if self.training else autocast():
            return convert(written(self, *args, **kwargs) if is_method else written(*args, **kwargs))

    # A method and not a closure over the model, so that a copy of the model calls its own forward.
    model.forward = MethodType(forward, model)

    def undo() -> None:
        attributes.pop("forward", None)
        attributes.update(before)

    return undo


def accumulation_arguments(planning: Mapping[str, Any], num_batches: int, window: int) -> dict[str, Any]:
    """Return arguments of `trimtab.plan` for the example batch of an accumulated step.

    The number of batches in the user's own `reference` takes precedence. Trainers may read gradients before the step.

    Args:
        planning: arguments of `trimtab.plan`.
        num_batches: batches joined in the example; 1 for a plan of single batches.
        window: batches of an optimizer step.
    """
    reference = planning.get("reference") or ASSUMED_REFERENCE
    if not isinstance(reference, Reference):
        return {**planning}
    reference = replace(reference, keeps_gradients=True)
    if reference.accumulate > 1 or window == 1:
        return {**planning, "reference": reference}
    if num_batches == 1:
        return {"accumulate": window, **planning, "reference": reference}
    return {**planning, "reference": replace(reference, accumulate=num_batches)}


def checked_plan(plan: Plan | None, host: str) -> Plan | None:
    """Return the plan without settings that a trainer makes unsafe, and without the clipping of its reference.

    CUDA graphs are removed, since trainers call the model in ways and with values that planning did not see. The
    trainer clips gradients itself.

    Raises:
        ValueGivenError: not a plan, or the plan sets something that the trainer decides.
    """
    if plan is None:
        return None
    if not isinstance(plan, Plan):
        raise ValueGivenError("plan", got=f"a {type(plan).__name__}", expected="a trimtab.Plan", code="plan.invalid")
    if plan.clip_norm.value is not None and plan.clip_norm.value == plan.reference.clip_norm:
        plan = plan.having(clip_norm=unchanged("clip_norm"))
    plan = switched_off(plan, f"{host} needs the gradient of the whole step")
    for name, value in plan.values.items():
        if SETTINGS[name].trainer_decides and value != SETTINGS[name].default:
            raise ValueGivenError(
                f"plan.{name}",
                problem=f"The plan sets {name} to {value!r}, but {host} decides this setting.",
                hint=f"Make a plan without adapt, and configure the setting in {host}.",
                code="plan.decided_by_trainer",
            )
    return without_graphs(plan, "the trainer may call the model in another way than the planned loop")


def refuse_arguments(plan: Plan | None, planning: Mapping[str, Any] | None, running: Mapping[str, Any] | None) -> None:
    """Raise `ValueGivenError` for planning arguments without effect, and options of the run that the trainer has."""
    if plan is not None and planning:
        raise ValueGivenError(
            "planning",
            problem="Both plan and planning are given, but arguments for planning have no effect on an existing plan.",
            hint="Remove one of them.",
            code="argument.conflict",
        )
    for name in ("clip_norm", "stop", "checkpoints", "total_samples", "total_tokens"):
        if (running or {}).get(name) is not None:
            raise ValueGivenError(
                f"running.{name}",
                problem=f"The option {name} cannot be passed in running: the trainer decides gradient clipping, the "
                "length of training and checkpoints.",
                hint="Use the trainer's own option.",
                code="run.decided_by_trainer",
            )


def require_shared(plan: Plan | None, num_processes: int, stages: Collection[int | None] = STAGES) -> None:
    """Raise `ValueGivenError` if a plan does not distribute the model over the trainer's processes.

    Args:
        plan: the plan, or None.
        num_processes: number of processes of the trainer.
        stages: ZeRO stages that the trainer supports.
    """
    if plan is None or num_processes == 1 or plan.zero_stage.value in stages:
        return
    raise ValueGivenError(
        "plan.zero_stage",
        got=f"{plan.zero_stage.value} on {num_processes} processes",
        expected=" or ".join(map(str, stages)),
        hint=f"Make the plan on these processes, or use Plan.fixed(rows, num_ranks={num_processes}, zero_stage=0)."
        if None not in stages
        else "Use a plan made for one process: Accelerate has wrapped the model in DistributedDataParallel.",
        code="plan.zero_stage_unsupported",
    )


def start_in_process_group(
    model: nn.Module, optimizer: torch.optim.Optimizer, plan: Plan, limit_s: float = LIMIT_S, **running: Any
) -> Run:
    """Return a run in the trainer's process group.

    Args:
        model: the model.
        optimizer: the optimizer.
        plan: the plan.
        limit_s: timeout in seconds after which a rank counts as dead.
        running: further arguments of `trimtab.start`.
    """
    with limited_to(limit_s):
        return start(model, optimizer, plan, **running)


def start_until_closed(
    undo: Callable[[], None], model: nn.Module, optimizer: torch.optim.Optimizer, plan: Plan, **running: Any
) -> Run:
    """Return a run in the trainer's process group, and call `undo` when the run closes or cannot start."""
    try:
        run = start_in_process_group(model, optimizer, plan, **running)
    except BaseException:
        undo()
        raise
    run.on_close(undo)
    return run
