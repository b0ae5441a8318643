"""Loops of trainers: the training step of a Transformers Trainer or of a Lightning module, as a `Loop`.

Neither package is imported, because the user passes the trainer. Logging, callbacks and evaluation are not timed.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from trimtab.core.errors import ValueGivenError
from trimtab.core.objective import Reference
from trimtab.experiments.loops import Loop
from trimtab.integrations.trainer_rules import counting_alone
from trimtab.losses import Summed

_IGNORED = -100  # Label of Transformers' losses for tokens that do not count.


def loop_of_trainer(found: Any) -> Loop | None:
    """Return the loop of a trainer; None for an object of any different class.

    Args:
        found: a `transformers.Trainer`, or a tuple (Lightning Trainer, module, loader).
    """
    if _is_a(found, "transformers", "Trainer"):
        return _of_transformers(found)
    if isinstance(found, tuple) and len(found) == 3 and _is_a(found[0], "lightning", "Trainer"):
        return _of_lightning(*found)
    return None


def _is_a(value: Any, package: str, name: str) -> bool:
    """Return True if a base class of the value has this name and package, or the package with prefix `pytorch_`."""
    packages = (package, f"pytorch_{package}")
    return any(kind.__name__ == name and kind.__module__.split(".")[0] in packages for kind in type(value).__mro__)


def _of_transformers(trainer: Any) -> Loop:
    """Return the loop of a Transformers Trainer: loader, loss, optimizer, clipping and scheduler.

    Raises:
        ValueGivenError: an argument of the Trainer acts outside of the training step.
    """
    args = trainer.args
    _refuse_outside_step(args)
    # In newer releases, "gradient_checkpointing" is a former name of "activation_checkpointing".
    if getattr(args, "activation_checkpointing", None) or args.gradient_checkpointing:
        enable = getattr(trainer.model, "activation_checkpointing_enable", None)
        (enable or trainer.model.gradient_checkpointing_enable)(args.gradient_checkpointing_kwargs)
    loader = trainer.get_train_dataloader()
    epochs = args.num_train_epochs / args.gradient_accumulation_steps
    steps = int(args.max_steps) if args.max_steps > 0 else _num_steps(loader, epochs)
    trainer.create_optimizer_and_scheduler(steps)
    scheduler = trainer.lr_scheduler
    clip_norm = args.max_grad_norm if args.max_grad_norm and args.max_grad_norm > 0 else None
    precision = {"bf16": "bf16", "fp16": "fp16"}.get(trainer.accelerator.mixed_precision, "fp32")
    accumulate = int(args.gradient_accumulation_steps)
    prepared: list[Any] = []
    waiting: list[tuple[Any, Tensor]] = []  # Batches of an unfinished step, with the losses returned for them.

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> Tensor:
        if not prepared:  # Only in the arm that trains as the Trainer does: it adds autocast to the model's forward.
            prepared.extend(trainer.accelerator.prepare(model, optimizer))
        model, optimizer = prepared
        loss = torch.zeros((), device=trainer.args.device)
        waiting.append((batch, loss))
        if len(waiting) < accumulate:  # The Trainer counts the tokens of all batches before the first forward.
            return loss
        trainer.current_gradient_accumulation_steps = accumulate  # Set by the Trainer's loop.
        batches, count = trainer.get_batch_samples(iter([each for each, _ in waiting]), accumulate, args.device)
        for each, (_, mean) in zip(batches, waiting, strict=True):
            mean.copy_(trainer.training_step(model, each, count) * accumulate)
        waiting.clear()
        if clip_norm is not None:
            trainer.accelerator.clip_grad_norm_(model.parameters(), clip_norm)
        optimizer.step()
        scheduler.step()
        model.zero_grad()
        return loss

    predicts_next = any(word in type(trainer.model).__name__ for word in ("CausalLM", "LMHeadModel"))

    def loss_fn(model: nn.Module, batch: Any) -> Any:
        # The Trainer's own count, which in some releases includes a first token without prediction.
        with counting_alone(args):
            count = trainer.get_batch_samples(iter([batch]), 1, args.device)[1]
            if count is not None:
                terms = torch.as_tensor(count).clamp(min=1)
                return Summed(trainer.compute_loss(model, dict(batch), num_items_in_batch=terms) * terms, count)
        loss = trainer.compute_loss(model, dict(batch))
        labels = batch.get("labels") if isinstance(batch, Mapping) else None
        if not predicts_next or not isinstance(labels, Tensor) or labels.dim() < 2:
            return loss
        count = (labels[..., 1:] != _IGNORED).sum()  # The last token predicts nothing.
        return Summed(loss * count, count)

    return Loop(
        trainer.model,
        trainer.optimizer,
        loss_fn,
        loader,
        step=step,
        after_step=scheduler.step,
        accumulate=accumulate,
        reference=Reference(precision, clip_norm=clip_norm),
    )


def _refuse_outside_step(args: Any) -> None:
    """Raise for arguments with an effect outside of `Trainer.training_step`, because only the step is timed."""
    names = (
        "neftune_noise_alpha",
        "torch_compile",
        "deepspeed",
        "fsdp",
        "label_smoothing_factor",
    )
    given = [name for name in names if getattr(args, name, None)]
    if given:
        raise ValueGivenError(
            "setup",
            problem=f"The Trainer sets {', '.join(given)}, which its training step alone does not include, so that a "
            "comparison would not measure it.",
            hint="Remove these arguments for the comparison, or return a trimtab.Loop with a step of your own.",
            code="setup.trainer_arguments",
        )


def _num_steps(loader: Any, epochs: float) -> int:
    try:
        return max(1, int(len(loader) * epochs))
    except TypeError:
        return 1


def _of_lightning(trainer: Any, module: Any, loader: Any) -> Loop:
    """Return the loop of a Lightning module: training step, optimizer, clipping and scheduler.

    Raises:
        ValueGivenError: manual optimization, several optimizers, an unsupported precision, or clipping by value.
    """
    precisions = {"32-true": "fp32", "32": "fp32", "bf16-mixed": "bf16"}
    if str(trainer.precision) not in precisions or trainer.gradient_clip_algorithm == "value":
        raise ValueGivenError(
            "setup",
            got=f"precision {trainer.precision} and clipping by {trainer.gradient_clip_algorithm or 'norm'}",
            expected=f"precision {' or '.join(precisions)}, and clipping by norm",
            hint="Return a trimtab.Loop with a step of your own.",
            code="setup.trainer_arguments",
        )
    if not module.automatic_optimization:
        raise ValueGivenError(
            "setup",
            got="a Lightning module with manual optimization",
            expected="automatic optimization",
            hint="Return a trimtab.Loop whose step is the module's training step.",
            code="setup.manual_optimization",
        )
    optimizer, scheduler = _configured(_optimizers_of(trainer, module, loader))
    accumulate, clip_norm = int(trainer.accumulate_grad_batches), trainer.gradient_clip_val or None
    precision = precisions[str(trainer.precision)]
    place = {"number": 0}

    forward, redirect = trainer.precision_plugin.forward_context, trainer.strategy._forward_redirection

    def loss_of(model: nn.Module, batch: Any) -> Any:
        # Calls the training step within the module's forward, as Lightning's strategies do for wrapped modules.
        with warnings.catch_warnings():  # Values that the module logs have no receiver outside of Trainer.fit.
            warnings.filterwarnings("ignore", message="You are trying to `self.log")
            found = redirect(model, module, "training_step", batch, place["number"])
        return found["loss"] if isinstance(found, Mapping) else found

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> Tensor:
        batch = model.transfer_batch_to_device(batch, next(model.parameters()).device, 0)  # type: ignore[operator]
        with forward():
            loss: Tensor = loss_of(model, batch)
        (loss / accumulate).backward()
        place["number"] += 1
        if place["number"] % accumulate == 0:
            if clip_norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), float(clip_norm))
            optimizer.step()
            if scheduler is not None:
                scheduler()
            optimizer.zero_grad()
        return loss

    return Loop(
        module,
        optimizer,
        loss_of,
        loader,
        step=step,
        after_step=scheduler,
        accumulate=accumulate,
        reference=Reference(precision, clip_norm=None if clip_norm is None else float(clip_norm)),
    )


def _optimizers_of(trainer: Any, module: Any, loader: Any) -> Any:
    """Return what `configure_optimizers` returns, with the trainer attached as in `fit`.

    Raises:
        ValueGivenError: `configure_optimizers` raised an exception.
    """
    module.trainer = trainer
    trainer.strategy.connect(module)
    trainer._data_connector.attach_data(module, train_dataloaders=loader)  # For estimated_stepping_batches.
    try:
        return module.configure_optimizers()
    except Exception as error:
        raise ValueGivenError(
            "setup",
            got=f"{type(error).__name__}: {error}",
            expected="configure_optimizers() that works before fit",
            problem=f"{type(module).__name__}.configure_optimizers() failed outside of Trainer.fit "
            f"({type(error).__name__}: {error}).",
            hint="Correct it. It may read trainer.estimated_stepping_batches, but nothing that exists only in fit.",
            code="setup.configure_optimizers",
        ) from error
    finally:
        module.trainer = None  # With a trainer, the module would log to a loop of the trainer, which does not run.


def _configured(found: Any) -> tuple[torch.optim.Optimizer, Callable[[], Any] | None]:
    """Return the optimizer, and the step function of a scheduler with the interval "step", or None."""
    schedulers: list[Any] = []
    if isinstance(found, Mapping):
        schedulers = [found["lr_scheduler"]] if found.get("lr_scheduler") is not None else []
        found = found["optimizer"]
    elif isinstance(found, tuple) and len(found) == 2 and isinstance(found[0], list):
        found, schedulers = found
    optimizers = list(found) if isinstance(found, list | tuple) else [found]
    if len(optimizers) != 1 or len(schedulers) > 1:
        raise ValueGivenError(
            "setup",
            got=f"{len(optimizers)} optimizers and {len(schedulers)} schedulers",
            expected="one optimizer, and at most one scheduler",
            code="setup.several_optimizers",
        )
    return optimizers[0], next(_stepped(schedulers), None)


def _stepped(schedulers: list[Any]) -> Iterator[Callable[[], Any]]:
    for each in schedulers:
        config = each if isinstance(each, Mapping) else {"scheduler": each}
        if config.get("interval", "epoch") == "step":
            yield config["scheduler"].step
