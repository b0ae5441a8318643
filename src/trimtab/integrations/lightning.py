"""Lightning: a Trainer strategy that trains through a run, and a run on objects of Fabric.

The Trainer keeps data, callbacks, logging, clipping, schedules, validation and checkpoints. It calls the strategy's
`training_step`, `backward` and `optimizer_step` in turn. Here, `training_step` collects batches and trains on the
window at its last batch, `backward` brings back the gradients, which the Trainer zeroes in between, and
`optimizer_step` steps. The Trainer's mixed precision and clipping by norm are the baseline of the plan; the run opens
the autocast of training steps and scales losses.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import DDPStrategy
from lightning.pytorch.callbacks import ThroughputMonitor, Timer
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.trainer.states import RunningStage
from torch import Tensor, nn
from torch.autograd.graph import Node

from trimtab.api import plan as make_plan
from trimtab.core.errors import ValueGivenError
from trimtab.core.objective import Reference
from trimtab.integrations.ignored_labels import counts_nothing
from trimtab.integrations.join_batches import WindowBatches
from trimtab.integrations.planning_messages import announced
from trimtab.integrations.trainer_rules import (
    checked_plan,
    follow_plan_precision,
    following,
    refuse_arguments,
    require_shared,
    start_in_process_group,
    start_until_closed,
)
from trimtab.losses import Summed
from trimtab.plans.plan import Plan
from trimtab.training.run import Run

# A zero loss in place of a mean over no terms, whose value and gradients are NaN even at weight 0.


def zero_loss(mean: Tensor) -> Tensor:
    """Return a zero loss with zero gradients for exactly the parameters that `mean` depends on.

    Other parameters keep the gradient None: with a zero gradient, an optimizer would apply weight decay.

    Raises:
        ValueGivenError: the graph of `mean` shows no trained parameter.
    """
    # Sums of empty slices, since elements may be infinite.
    parts = [leaf.reshape(-1)[:0].sum().to(mean) for leaf in _leaves(mean)]
    if not parts:
        raise ValueGivenError(
            "loss",
            problem="The loss is a mean over no labels and depends on no parameter, so its gradient would be NaN.",
            hint="Return sum / count.clamp(min=1), which is zero if no label counts.",
            code="loss.no_labels",
        )
    return torch.stack(parts).sum()


def _leaves(loss: Tensor) -> Iterator[Tensor]:
    """Yield each leaf tensor that a backward of `loss` reaches."""
    waiting: list[Node | None] = [loss.grad_fn]
    seen: set[Node] = set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if isinstance(leaf := getattr(node, "variable", None), Tensor) and leaf.is_leaf:
            yield leaf
        waiting += [each for each, _ in node.next_functions]


_HOST = "the Trainer"
_DEVICES = {"CUDAAccelerator": "cuda:0", "MPSAccelerator": "mps:0"}
# Precisions of Lightning, and those of a plan. Weights and inputs in half precision are not a choice of plans.
_PRECISIONS = dict.fromkeys(("32", "32-true", "64", "64-true"), "fp32") | {"bf16-mixed": "bf16", "16-mixed": "fp16"}
_RANKS = "For several ranks, use Fabric with trimtab.integrations.lightning.start, or a plain loop (docs/ranks.md)."


class TrimtabStrategy(SingleDeviceStrategy):
    """Trains a `LightningModule` on one device through a run: `Trainer(strategy=TrimtabStrategy())`.

    A step has `accumulate_grad_batches` loader batches; the plan decides how to split them into micro-batches. The
    Trainer's mixed precision and clipping are the baseline of the plan, and the precision stays if no other is better.
    After planning, one line is logged, and loggers receive `planning_seconds`.

    Args:
        device: device to train on; None uses the first device of the Trainer's `accelerator`.
        plan: the plan; None makes a plan from the batches of the first window before training on them.
        planning: further arguments of `trimtab.plan`, such as `budget`.
        running: further arguments of `trimtab.start`, such as `record`.
        count: if the loss is not a mean over samples: key, in the dict that `training_step` returns, of the number of
            terms that "loss" is a mean of.

    Attributes:
        plan: the plan in effect; None before planning.
        run: the run during training, else None.

    Raises:
        ValueGivenError: at the start of training, if the Trainer sets something that a plan decides.
    """

    strategy_name = "trimtab"
    _window: WindowBatches  # Set when the run starts.

    def __init__(
        self,
        device: str | torch.device | None = None,
        *,
        plan: Plan | None = None,
        planning: Mapping[str, Any] | None = None,
        running: Mapping[str, Any] | None = None,
        count: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(device or "cpu", **kwargs)
        self._follows = device is None
        refuse_arguments(plan, planning, running)
        self.plan, self.run = checked_plan(plan, _HOST), None
        self._precision = "fp32"
        self._planning, self._running, self._count = dict(planning or {}), dict(running or {}), count
        self._collected: list[Any] = []
        self._held: list[tuple[Tensor, Tensor]] = []
        self._is_last = self._has_loss = False

    def setup_environment(self) -> None:
        """Use the device of the Trainer's accelerator if no device was given."""
        if self._follows and self.accelerator is not None:
            self._root_device = torch.device(_DEVICES.get(type(self.accelerator).__name__, "cpu"))
        super().setup_environment()

    def setup(self, trainer: pl.Trainer) -> None:
        """Raise `ValueGivenError` for several devices or nodes, then set up as usual."""
        asked = trainer._accelerator_connector
        given, num_nodes = getattr(asked, "_parallel_devices", None) or [], getattr(asked, "_num_nodes_flag", 1)
        if num_nodes > 1 or len(given) > 1:
            raise ValueGivenError(
                "Trainer.devices",
                problem=f"TrimtabStrategy supports one device; the Trainer has {len(given)} device(s) on {num_nodes} "
                "node(s).",
                hint=_RANKS,
                code="trainer.several_devices",
            )
        own = self.root_device.index or 0
        if given and isinstance(given[0], torch.device) and (given[0].index or 0) != own:
            raise ValueGivenError(
                "Trainer.devices",
                problem=f"The Trainer uses {given[0]}, but the strategy uses {self.root_device}.",
                hint=f'Pass the device to the strategy: TrimtabStrategy("{given[0]}").',
                code="trainer.device_differs",
            )
        super().setup(trainer)

    def on_train_start(self) -> None:
        """Raise `ValueGivenError` for settings that a plan decides."""
        super().on_train_start()
        _refuse(self.lightning_module, len(self.optimizers))
        self._precision = _precision_of("Trainer.precision", self.precision_plugin.precision)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Drop batches left over from an epoch that ended within a window."""
        if batch_idx % self.lightning_module.trainer.accumulate_grad_batches == 0:
            self._collected = []

    def training_step(self, batch: Any, *rest: Any, **named: Any) -> Any:
        """Collect a batch; at the last batch of a window, train on the window up to the optimizer step.

        Returns:
            Mean loss, with other values returned by the module for the last micro-batch; None if the module returned
            None for all micro-batches. Zero before the last batch.
        """
        if self._skips_backward:  # Without autograd: a batch that the plan splits may not fit with it.
            with torch.no_grad(), self.run.autocast() if self.run else contextlib.nullcontext():
                return super().training_step(batch, *rest, **named)
        self._collected.append(batch)
        if not self._is_last:
            return torch.zeros((), device=self.root_device)
        batches, self._collected = self._collected, []
        others: dict[str, Any] = {}

        def loss_fn(model: nn.Module, micro: Any) -> Any:
            others.clear()  # Freed before the next values are computed.
            # The run has opened the autocast of the plan.
            with contextlib.nullcontext() if self._is_mixed else self.precision_plugin.train_step_context():
                said = self._forward_redirection(model, self.lightning_module, "training_step", micro, *rest, **named)
            others.update(_beside_loss(said))
            return self._loss_of(said)

        run = self.run or self._started(loss_fn, batches)
        self._has_loss = False
        loss = run.accumulate(run.window(*self._window.joined(batches, run.plan)), loss_fn)
        if not self._has_loss:
            run.discard()
            return None
        run.unscale()  # The Trainer clips and shows unscaled gradients to callbacks.
        self._hold()
        return {**others, "loss": loss} if others else loss

    def backward(self, closure_loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Restore the window's gradients, computed by `training_step`; callbacks are called as usual."""
        # Without the loss scale of mixed precision, since the gradients are those of the run.
        own = Precision() if self._is_mixed else self.precision_plugin
        closure_loss = own.pre_backward(closure_loss, self.lightning_module)
        for parameter, gradient in self._held:
            parameter.grad = gradient
        self._held = []
        return own.post_backward(closure_loss, self.lightning_module)

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """Train on a window, clip through the Trainer, and step the run unless there was no loss."""
        if self._skips_backward:  # The gradients are those of the previous window, which has been stepped.
            return closure()
        self._is_last = True
        try:
            result = self.precision_plugin._wrap_closure(model or self.lightning_module, optimizer, closure)
        finally:
            self._is_last = False
        if self._has_loss:
            self.run.step()
        return result

    def on_train_end(self) -> None:
        """Close the run."""
        self._close()
        super().on_train_end()

    def on_exception(self, exception: BaseException) -> None:
        """Close the run."""
        self._close(exception)
        super().on_exception(exception)

    def teardown(self) -> None:
        """Close the run."""
        self._close()
        super().teardown()

    @property
    def _is_mixed(self) -> bool:
        return isinstance(self.precision_plugin, MixedPrecision)

    @property
    def _skips_backward(self) -> bool:
        """True if the Trainer runs forwards only, to update batch statistics after weight averaging."""
        return getattr(self.lightning_module.trainer.fit_loop, "_skip_backward", False)

    def _loss_of(self, said: Any) -> Any:
        """Return the loss of a module's training step: a mean over samples, or a sum with its count.

        None, with which a module skips a batch, becomes a zero loss that depends on no parameter.
        """
        if said is None and self.run is not None:  # Before the run exists, planning needs a loss.
            zero = torch.zeros((), device=self.root_device, requires_grad=True)
            return zero if self._count is None else Summed(zero, 0)
        loss = said.get("loss") if isinstance(said, Mapping) else said
        if not isinstance(loss, Tensor):
            raise ValueGivenError(
                "training_step",
                got=f"{_kind(said)} as return value",
                expected="a tensor, or a dict with a tensor 'loss'",
                code="loss.invalid",
            )
        self._has_loss = True
        if self._count is None:
            return loss
        if not isinstance(said, Mapping) or self._count not in said:
            raise ValueGivenError(
                "training_step",
                got=f"{_kind(said)} as return value",
                expected=f"a dict with 'loss' and the number of terms {self._count!r}",
                hint="Return the number of terms, or create TrimtabStrategy without count.",
                code="loss.count_missing",
            )
        count = said[self._count]
        # Other counts raise later, where the loss is read.
        is_one = not isinstance(count, Tensor) or count.numel() == 1
        if loss.requires_grad and is_one and counts_nothing(count):
            return Summed(zero_loss(loss), count)
        return Summed(loss * count, count)

    def _started(self, loss_fn: Callable[[nn.Module, Any], Any], batches: Sequence[Any]) -> Run:
        module, optimizer = self.lightning_module, self.optimizers[0]
        self._window = WindowBatches(module, self._planning)
        if self.plan is None:
            self.plan = self._planned(loss_fn, batches)
        self.plan = following(self.plan, self._precision)
        self.run = start_in_process_group(module, optimizer, self.plan, **self._running)
        return self.run

    def _planned(self, loss_fn: Callable[[nn.Module, Any], Any], batches: Sequence[Any]) -> Plan:
        module, optimizer, trainer = self.lightning_module, self.optimizers[0], self.lightning_module.trainer
        steps, by_norm = trainer.estimated_stepping_batches, trainer.gradient_clip_algorithm in (None, "norm")
        clip_norm = float(trainer.gradient_clip_val) if trainer.gradient_clip_val and by_norm else None
        known: dict[str, Any] = {"reference": Reference(self._precision, clip_norm)}
        if steps != float("inf"):
            known["total_steps"] = max(1, int(steps) - trainer.global_step)

        def planned(progress: Callable[[str], None]) -> Plan | None:
            make = functools.partial(make_plan, module, optimizer, loss_fn)
            with _unlogged(module):
                return checked_plan(self._window.planned(batches, make, known | {"progress": progress}), _HOST)

        plan, seconds = announced(planned, optimizer)
        _leave_out(trainer.callbacks, seconds)
        for logger in trainer.loggers:
            logger.log_metrics({"planning_seconds": seconds}, step=trainer.global_step)
        return plan

    def _hold(self) -> None:
        """Move the gradients aside, because the Trainer zeroes gradients between training step and backward."""
        groups = self.optimizers[0].param_groups
        self._held = [(p, p.grad) for group in groups for p in group["params"] if p.grad is not None]
        for parameter, _ in self._held:
            parameter.grad = None

    def _close(self, error: BaseException | None = None) -> None:
        self._collected, self._held = [], []
        if self.run is not None:
            run, self.run = self.run, None
            run.close(error)


def _kind(said: Any) -> str:
    """Return a description of a training step's return value."""
    if isinstance(said, Mapping):
        return f"a dict with {', '.join(map(repr, said)) or 'no items'}"
    return f"a {type(said).__name__}"


def _beside_loss(said: Any) -> dict[str, Any]:
    """Return the values of a training step other than the loss, detached."""
    named = said.items() if isinstance(said, Mapping) else ()
    return {name: each.detach() if isinstance(each, Tensor) else each for name, each in named if name != "loss"}


@contextlib.contextmanager
def _unlogged(module: pl.LightningModule) -> Iterator[None]:
    """Disable the module's logging during planning, which is not training."""
    for name in ("log", "log_dict"):
        object.__setattr__(module, name, lambda *given, **named: None)
    try:
        yield
    finally:
        for name in ("log", "log_dict"):
            object.__delattr__(module, name)


def _leave_out(callbacks: Sequence[pl.Callback], seconds: float) -> None:
    """Move the start of training by the seconds of planning in callbacks that measure time, such as `max_time`."""
    for each in callbacks:
        starts = each._start_time if isinstance(each, Timer) else getattr(each, "_t0s", {})
        if isinstance(each, (Timer, ThroughputMonitor)) and starts.get(RunningStage.TRAINING) is not None:
            starts[RunningStage.TRAINING] += seconds


def _precision_of(field: str, name: str) -> str:
    """Return the precision of a plan for one of Lightning; raises `ValueGivenError` for a precision without one."""
    if name not in _PRECISIONS:
        raise ValueGivenError(
            field,
            problem=f"{field} is {name!r}, which trimtab does not support.",
            hint="Use 'bf16-mixed', '16-mixed' or '32-true'.",
            code="trainer.precision_unsupported",
        )
    return _PRECISIONS[name]


def _refuse(module: pl.LightningModule, num_optimizers: int) -> None:
    """Raise if the module sets something that a plan decides.

    Raises:
        ValueGivenError: names the setting, with a hint.
    """
    if not module.automatic_optimization:
        raise ValueGivenError(
            "automatic_optimization",
            problem=f"{type(module).__name__} sets automatic_optimization=False, which TrimtabStrategy does not "
            "support.",
            hint="Use automatic optimization, or call trimtab.start in the module's manual loop.",
            code="trainer.manual_optimization",
        )
    if type(module).backward is not pl.LightningModule.backward:
        raise ValueGivenError(
            "LightningModule.backward",
            problem=f"{type(module).__name__} overrides backward, which a run calls per micro-batch by itself.",
            hint="Remove the override.",
            code="trainer.backward_overridden",
        )
    if num_optimizers != 1:
        raise ValueGivenError(
            "configure_optimizers",
            problem=f"configure_optimizers returns {num_optimizers} optimizers, but a run has exactly one.",
            hint="Use one optimizer with several parameter groups.",
            code="trainer.several_optimizers",
        )


def plan(
    fabric: Fabric, model: nn.Module, optimizer: torch.optim.Optimizer, loss_fn: Any, loader_or_batch: Any, **how: Any
) -> Plan:
    """Return `trimtab.plan` for a loop of Fabric, and log the result in one line.

    The baseline is the loop in Fabric's precision. The model is moved to Fabric's device.

    Args:
        fabric: the Fabric.
        model: the model, not set up by Fabric.
        optimizer: the optimizer, not set up by Fabric.
        loss_fn: the loss function.
        loader_or_batch: this rank's loader, or a batch of it.
        how: further arguments of `trimtab.plan`, such as `total_steps`.

    Raises:
        ValueGivenError: Fabric shards the model, or sets a precision that plans do not have.
    """
    reference = Reference(_precision_of_fabric(fabric))

    def make(progress: Callable[[str], None]) -> Plan:
        asked = {"reference": reference, "progress": progress} | how
        return make_plan(model.to(fabric.device), optimizer, loss_fn, loader_or_batch, **asked)

    undo = _leave_precision_to_plan(fabric, model)
    try:
        return announced(make, optimizer, speaks=fabric.is_global_zero)[0]
    finally:
        undo()


def start(fabric: Fabric, model: nn.Module, optimizer: torch.optim.Optimizer, plan: Plan, **running: Any) -> Run:
    """Return a run on Fabric's device, in place of `fabric.setup(model, optimizer)`; loaders stay Fabric's.

    `run.plan` is the plan.

    Args:
        fabric: the Fabric.
        model: the model, not set up by Fabric.
        optimizer: the optimizer, not set up by Fabric.
        plan: the plan; with several ranks, `zero_stage` decides on sharding. A plan made by hand without a precision
            keeps Fabric's.
        running: further arguments of `trimtab.start`.

    Raises:
        ValueGivenError: Fabric shards the model, or sets a precision that plans do not have.
    """
    precision = _precision_of_fabric(fabric)
    require_shared(plan, fabric.world_size)
    plan, undo = following(plan, precision), _leave_precision_to_plan(fabric, model)
    return start_until_closed(undo, model.to(fabric.device), optimizer, plan, **running)


def _precision_of_fabric(fabric: Fabric) -> str:
    if fabric.world_size > 1 and not isinstance(fabric.strategy, DDPStrategy):
        raise ValueGivenError(
            "Fabric(strategy=...)",
            problem=f"Fabric uses {type(fabric.strategy).__name__}, but on several ranks the plan decides how to "
            "distribute the model.",
            hint="Use Fabric(strategy='ddp').",
            code="trainer.decided_by_plan",
        )
    return _precision_of("Fabric(precision=...)", fabric.strategy.precision.precision)


def _leave_precision_to_plan(fabric: Fabric, model: nn.Module) -> Callable[[], None]:
    """Convert the model's outputs to fp32, and evaluate under autocast, as a model that Fabric has set up."""
    if _precision_of_fabric(fabric) == "fp32":
        return lambda: None
    return follow_plan_precision(model, fabric.autocast, fabric.strategy.precision.convert_output)
