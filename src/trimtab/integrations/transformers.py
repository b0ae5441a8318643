"""Hugging Face Trainer with training through a run: use `TrimtabTrainer` in place of `Trainer`.

The Trainer keeps data, callbacks, logging, clipping, schedule, evaluation and checkpoints. Three of its methods are
used. `training_step` collects the batches of a window and runs the window at its last batch. The Trainer's optimizer
wrapper calls the run's step. The end of the inner training loop closes the run. With several ranks, process group and
sharding of data are the Trainer's, and the run wraps the model in DDP as the plan specifies. The Trainer's precision,
clipping and activation checkpointing are the baseline of the plan; the run opens the autocast of the training forward.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor, nn
from transformers import Trainer, TrainingArguments
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from trimtab.api import plan as make_plan
from trimtab.core.errors import ValueGivenError
from trimtab.core.objective import Reference
from trimtab.integrations.accelerate import leave_precision_to_plan, precision_of, refuse_compiling, refuse_sharded
from trimtab.integrations.ignored_labels import (
    IGNORED,
    WindowLabels,
    counts_nothing,
    counts_unpredicted,
    has_ignored,
    labels_of,
    smooths_by_itself,
)
from trimtab.integrations.join_batches import WindowBatches
from trimtab.integrations.planning_messages import announced
from trimtab.integrations.trainer_rules import (
    checked_plan,
    counting_alone,
    following,
    refuse_arguments,
    require_shared,
    start_in_process_group,
)
from trimtab.losses import Summed
from trimtab.plans.plan import Plan
from trimtab.training.run import Run

# Fields of TrainingArguments that a plan decides or a run replaces, with hints.
_SHARDS = "The plan chooses a ZeRO stage (docs/ranks.md)."
_REDUCES = "The plan decides how ranks reduce gradients, once per optimizer step."
_DECIDED = {
    "auto_find_batch_size": "A step that runs out of memory is repeated with smaller micro-batches.",
    "torch_compile": "The plan compiles if this saves time within the run.",
    "deepspeed": _SHARDS,
    "fsdp": _SHARDS,
    "parallelism_config": "Ranks are supported for data parallelism only.",
    "ddp_find_unused_parameters": "Freeze the parameters that no loss uses with requires_grad_(False).",
    "ddp_broadcast_buffers": "Each rank has its own buffers; at the end of training they are those of rank 0.",
    "ddp_bucket_cap_mb": _REDUCES,
    "ddp_static_graph": _REDUCES,
    "torch_empty_cache_steps": "A step that runs out of memory empties the cache and is repeated.",
}
_HOST = "TrainingArguments"
# ZeRO stages with whole gradients and weights on each rank, as the Trainer's clipping and saving require.
_REPLICAS = (0,)
_OWN_STEP = ("lomo", "adalomo")  # Optimizers that step within backward.


class TrimtabTrainer(Trainer):
    """A `transformers.Trainer` that trains through a trimtab run, with micro-batches by the plan and weights by tokens.

    A step has `per_device_train_batch_size * gradient_accumulation_steps` samples as before; the plan decides how to
    split the samples. Learning rate, schedule and clipping follow the TrainingArguments. Their precision, clipping and
    activation checkpointing are the baseline of the plan. After planning, one line is logged; the metric
    `planning_seconds` is separate from `train_runtime`. Other arguments are as in `Trainer`.

    Args:
        plan: the plan; None makes a plan from the batches of the first window before training on them.
        planning: further arguments of `trimtab.plan`, such as `budget`.
        running: further arguments of `trimtab.start`, such as `record`.

    Attributes:
        plan: the plan in effect; None before planning.
        run: the run during training, else None.
        metric_attributes: names of the trainer's attributes that `compute_loss` fills for the log only, in every call.
            Planning leaves their values unchanged and may split the batch, so that each micro-batch adds to a metric,
            as each batch does with gradient accumulation. The default names the metrics of TRL's trainers; a subclass
            adds its own.

    Raises:
        ValueGivenError: an argument sets something that a plan decides.
    """

    metric_attributes: Collection[str] = ("_metrics", "_total_train_tokens")
    _window: WindowBatches  # Set when the run starts.

    def __init__(
        self,
        *args: Any,
        plan: Plan | None = None,
        planning: Mapping[str, Any] | None = None,
        running: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._num_ranks = self.accelerator.num_processes
        refuse_sharded(self.accelerator)
        refuse_conflicts(self.args, self._num_ranks)
        refuse_compiling(self.accelerator)  # An environment variable may request it without any argument.
        if getattr(self, "loss_is_scaled_for_ga", None) is False:  # Some versions lack this attribute.
            raise ValueGivenError(
                "loss_is_scaled_for_ga",
                got="False",
                expected="None or True",
                hint="Divide the loss by num_items_in_batch in compute_loss.",
                code="loss.not_scaled",
            )
        refuse_arguments(plan, planning, running)
        self._precision = self._own_precision()
        self.plan = self._checked(following(plan, self._precision))
        self.run: Run | None = None
        self._undo = contextlib.ExitStack()  # Changes that the end of training undoes.
        self._planning_s: float | None = None
        self._planning, self._running = dict(planning or {}), dict(running or {})
        self._collected: list[Any] = []
        self._labels = WindowLabels(())

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Tensor | int | None = None) -> Tensor:
        """Collect a batch; at the last batch of a window, train on the window up to the optimizer step.

        Returns:
            Mean loss of the window; zero before the last batch.
        """
        self._collected.append(self._prepare_inputs(inputs))
        if not self.accelerator.sync_gradients:
            return torch.zeros((), device=self.args.device)
        batches, self._collected = self._collected, []
        model.train()
        if callable(getattr(self.optimizer, "train", None)):
            self.optimizer.train()
        run = self.run or self._started(batches)
        batches = self._window.joined(batches, run.plan)
        self._labels = WindowLabels(batches, is_known=self._counts_labels)
        loss = run.accumulate(run.window(*batches), self._counted_loss)
        run.unscale()  # The Trainer clips and shows unscaled gradients to callbacks.
        # If the loss counts tokens, the Trainer averages over ranks each rank's part of the global mean.
        return loss if num_items_in_batch is None else loss * run.loss_share

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> tuple[list[Any], Tensor | int | None]:
        """Draw a window's batches as in `Trainer`, counting on this rank only, since the run sums over ranks."""
        self._collected = []  # A callback may have ended an epoch within a window.
        with counting_alone(self.args):
            return super().get_batch_samples(*args, **kwargs)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """Save weights as contiguous tensors, as safetensors requires: a plan may use another memory format."""
        weights = self.model.state_dict() if state_dict is None else state_dict
        apart = {name: each for name, each in weights.items() if isinstance(each, Tensor) and not each.is_contiguous()}
        if apart:
            state_dict = {**weights, **{name: each.contiguous() for name, each in apart.items()}}
        super()._save(output_dir, state_dict)

    def _checked(self, plan: Plan | None) -> Plan | None:
        require_shared(plan, self._num_ranks, _REPLICAS)
        return checked_plan(plan, _HOST)

    def _count(self, micro: Any) -> Tensor | int | None:
        """Return the Trainer's token count of a micro-batch; None if it does not count."""
        return self.get_batch_samples(iter([micro]), 1, self.args.device)[1]

    @property
    def _counts_labels(self) -> bool:
        """True if tokens are counted by the Trainer's own code rather than by an override in a subclass."""
        own, name = type(self), "_get_num_items_in_batch"
        is_drawn = own.get_batch_samples is TrimtabTrainer.get_batch_samples
        return is_drawn and getattr(own, name, None) is getattr(Trainer, name, self)

    def _counted_loss(self, model: nn.Module, micro: Any) -> Any:
        """Return the Trainer's loss of a micro-batch: a `Summed`, or a mean over samples without a token count."""
        count = self._count(micro)
        micro = {**micro}  # A copy: the Trainer removes labels from its inputs, and a window may be repeated.
        with counting_alone(self.args):
            if count is None:
                return self.compute_loss(model, micro)
            is_part = self._num_ranks > 1 or not self._labels.is_whole(len(micro.get("labels", ())))
            if is_part and not self._labels.count_in_all_rows and counts_nothing(count):
                _, outputs = self.compute_loss(model, micro, return_outputs=True, num_items_in_batch=1)
                return Summed(nothing_of(outputs), count)
            return Summed(self.compute_loss(model, micro, num_items_in_batch=count) * count, count)

    def _loss_of_trial(self, model: nn.Module, micro: Any) -> Any:
        """Return `_counted_loss`, and leave the metrics unchanged."""
        attributes = vars(self)
        before = {name: attributes[name] for name in self.metric_attributes if name in attributes}
        attributes.update(copy.deepcopy(before))
        try:
            return self._counted_loss(model, micro)
        finally:
            attributes.update(before)

    def _started(self, batches: Sequence[Any]) -> Run:
        labels, running = labels_of(batches), self._running
        self._leave_precision()
        is_told = self._count(batches[0]) is not None
        # The loss is then a mean over an unknown number of labels in each micro-batch.
        is_mean = not is_told and has_ignored(labels)
        are_apart = is_mean or (not is_told and any(each.dim() > 1 for each in labels))
        self._window = WindowBatches(self.model, self._planning, are_apart=are_apart)
        self.plan = plan = self.plan or self._planned(batches)
        self._refuse_means(plan, labels, is_mean=is_mean)
        if is_mean:
            running = {"out_of_memory": "stop"} | running
        limit_s = float(self.args.ddp_timeout)
        self.run = run = start_in_process_group(self.model, self.optimizer.optimizer, plan, limit_s, **running)
        self._use(StepsRun(run, self.optimizer))
        return run

    def _planned(self, batches: Sequence[Any]) -> Plan:
        clip_norm = self.args.max_grad_norm or None
        known = {
            "total_steps": max(1, self.state.max_steps - self.state.global_step),
            "reference": Reference(self._precision, None if clip_norm is None else float(clip_norm)),
        }

        def planned(progress: Callable[[str], None]) -> Plan:
            def make(example: Any, **how: Any) -> Plan:
                # Planning may try other numbers of samples, and trace shapes only.
                self._labels = WindowLabels([example], is_known=False)
                return make_plan(self.model, self.optimizer.optimizer, self._loss_of_trial, example, **how)

            how = known | {"progress": progress}
            return self._checked(self._window.planned(batches, make, how, is_alone=self._num_ranks == 1))

        speaks = self.is_world_process_zero()
        plan, self._planning_s = announced(planned, self.optimizer.optimizer, speaks=speaks)
        return plan

    def _own_precision(self) -> str:
        precision = precision_of(self.accelerator)
        is_tf32 = precision == "fp32" and self.args.tf32 and self.args.device.type == "cuda"
        return "tf32" if is_tf32 else precision

    def _leave_precision(self) -> None:
        """Let the run open autocast and scale losses, in place of the Trainer."""
        accelerator = self.accelerator
        self._undo.callback(leave_precision_to_plan(accelerator, self.model))
        if self._precision == "fp16":  # The Accelerator would unscale gradients again before clipping.
            before = {name: vars(accelerator)[name] for name in ("native_amp", "scaler")}
            self._undo.callback(vars(accelerator).update, before)
            accelerator.native_amp, accelerator.scaler = False, None

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log as in `Trainer`, with planning left out of speeds and run time, and reported as `planning_seconds`."""
        planning_s = self._planning_s
        if planning_s is not None and start_time is not None:
            start_time += planning_s
        if planning_s is not None and "train_runtime" in logs and logs["train_runtime"] > planning_s:
            before, runtime = logs["train_runtime"], logs["train_runtime"] - planning_s
            for name in ("train_samples_per_second", "train_steps_per_second", "train_tokens_per_second"):
                if name in logs:
                    logs[name] = round(logs[name] * before / runtime, 3)
            logs.update(train_runtime=round(runtime, 4), planning_seconds=round(planning_s, 4))
        super().log(logs, start_time)

    def _refuse_means(self, plan: Plan, labels: Sequence[Tensor], *, is_mean: bool) -> None:
        """Raise `ValueGivenError` if the plan splits batches with a mean loss over something that is not counted."""
        if not plan.splits:
            return
        if is_mean:
            raise ValueGivenError(
                "labels",
                problem=f"The plan splits batches that have ignored labels ({IGNORED}), but "
                f"{type(self.model).__name__} does not accept num_items_in_batch, so the mean over labels would "
                "change.",
                hint="Pass compute_loss_func, which receives num_items_in_batch, or use Plan.fixed(rows) with the "
                "rows of a loader batch.",
                code="labels.not_counted",
            )
        if self._smooths_by_itself and not plan.proves_splitting and counts_unpredicted(labels):
            raise ValueGivenError(
                "args.label_smoothing_factor",
                problem="The plan splits batches, but label smoothing in this version of transformers does not "
                f"count the first label of a sequence, which is not {IGNORED}, so the mean over labels would change.",
                hint=f"Set the first labels to {IGNORED}, update transformers, or use Plan.fixed(rows) with the rows "
                "of a loader batch.",
                code="labels.not_counted",
            )

    @property
    def _smooths_by_itself(self) -> bool:
        """True if an older Trainer divides smoothed losses of next tokens by its own count of predicted tokens."""
        is_of_words = type(self.model).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
        return self.compute_loss_func is None and is_of_words and smooths_by_itself(self.label_smoother)

    def _use(self, optimizer: AcceleratedOptimizer) -> None:
        """Replace the Trainer's wrapper of the optimizer."""
        known = self.accelerator._optimizers
        known[:] = [optimizer if each is self.optimizer else each for each in known]
        self.optimizer = self.callback_handler.optimizer = optimizer

    def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
        self._planning_s = None
        try:
            with _left_bare(self.model, self._num_ranks):
                found = super()._inner_training_loop(*args, **kwargs)
        except BaseException as error:
            self._end(error)
            raise
        self._end(None)
        return found

    def _end(self, error: BaseException | None) -> None:
        self._collected = []
        with self._undo:
            if self.run is not None:
                run, self.run = self.run, None
                self._use(self.optimizer.wrapped)
                run.close(error)


class StepsRun(AcceleratedOptimizer):
    """The Trainer's optimizer wrapper, with the run's step; the optimizer inside is the same object."""

    def __init__(self, run: Run, wrapped: AcceleratedOptimizer) -> None:
        # Excludes `step`, which a learning rate scheduler has replaced on the instance to record its calls.
        self.__dict__.update({name: value for name, value in wrapped.__dict__.items() if name != "step"})
        self.wrapped, self._run = wrapped, run

    def step(self, closure: Any = None) -> None:
        """Step the run, and store whether the step was skipped.

        Raises:
            ValueGivenError: a closure was given, which would run the window again.
        """
        if closure is not None:
            raise ValueGivenError(
                "closure",
                problem="optimizer.step received a closure, but the gradients of the step are computed already.",
                hint="Call step() without arguments.",
                code="optimizer.closure_unsupported",
            )
        self._is_overflow = not self._run.step()
        self.wrapped._opt_called = True


@contextlib.contextmanager
def _left_bare(model: nn.Module, num_ranks: int) -> Iterator[None]:
    """Mark the model as prepared within the block: with several ranks the run wraps the model, not Accelerate."""
    if num_ranks == 1:
        yield
        return
    before, model._is_accelerate_prepared = getattr(model, "_is_accelerate_prepared", False), True
    try:
        yield
    finally:
        model._is_accelerate_prepared = before


def nothing_of(outputs: Any) -> Tensor:
    """Return a zero loss with zero gradients for everything that a model's outputs, except its loss, depend on."""
    named = outputs.items() if isinstance(outputs, Mapping) else enumerate(outputs)
    parts = [
        part for name, part in named if name not in ("loss", 0) and isinstance(part, Tensor) and part.requires_grad
    ]
    if not parts:
        raise ValueGivenError(
            "labels",
            problem=f"All labels of a micro-batch are {IGNORED}, and the model returns no output except the loss.",
            hint="Return further outputs, such as logits, from the model's forward.",
            code="loss.no_labels",
        )
    return torch.stack([0.0 * part.sum() for part in parts]).sum()


def refuse_conflicts(args: TrainingArguments, num_processes: int = 1) -> None:
    """Raise if `TrainingArguments` set something that a plan decides or a run would undo.

    Raises:
        ValueGivenError: names the argument, with a hint.
    """
    for name, hint in _DECIDED.items():
        value = getattr(args, name, None)
        if value:
            raise ValueGivenError(
                f"args.{name}",
                problem=f"TrainingArguments sets {name}={value!r:.80}, which TrimtabTrainer does not support.",
                hint=f"Remove {name}. {hint}",
                code="trainer.decided_by_plan",
            )
    optim = str(getattr(args.optim, "value", args.optim))
    if optim in _OWN_STEP or optim.endswith("layerwise"):
        raise ValueGivenError(
            "args.optim",
            problem=f"The optimizer {optim} steps during backward, which TrimtabTrainer does not support.",
            hint="Use an optimizer that steps after backward, such as adamw_torch.",
            code="optimizer.steps_in_backward",
        )
    if num_processes > 1 and not args.average_tokens_across_devices:
        raise ValueGivenError(
            "args.average_tokens_across_devices",
            got="False",
            expected="True on several ranks",
            hint="Remove it; gradients are averaged over the tokens of all ranks.",
            code="trainer.decided_by_plan",
        )
    if args.n_gpu > 1:
        raise ValueGivenError(
            "TrimtabTrainer",
            problem=f"The process sees {args.n_gpu} GPUs, for which the Trainer uses DataParallel, which is not "
            "supported.",
            hint="Set CUDA_VISIBLE_DEVICES=0, or start one process per GPU with torchrun.",
            code="trainer.several_devices",
        )
