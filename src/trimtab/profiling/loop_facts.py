"""Properties of a loop: visible without running a step, and counted in a plain step (FLOP, loss terms, softmaxes)."""

from __future__ import annotations

import contextlib
import math
from dataclasses import replace
from typing import Any, NamedTuple, NoReturn

import torch
from torch import nn

from trimtab.core.errors import LossError, TrimtabError
from trimtab.measure.fake_tensors import EagerDispatchMode
from trimtab.measure.flops import count_flops
from trimtab.plans.profile import LoopFacts
from trimtab.profiling.measurement_notes import Notes, loss_failed
from trimtab.profiling.training_loop import TrainingLoop
from trimtab.techniques.compiled_blocks import repeated_blocks
from trimtab.techniques.compiled_call import is_compiled
from trimtab.techniques.memory_format import is_channels_last, sparse_module
from trimtab.techniques.optimizer_in_backward import late_reason
from trimtab.techniques.optimizer_self_test import fused_difference
from trimtab.techniques.optimizers import is_fused, supports_fused
from trimtab.training.out_of_memory import is_out_of_memory
from trimtab.training.user_hooks import GradientHook, bitwise_reason, gradient_hooks

_SMALLEST = 16  # minimum size of two equal dimensions to count as attention scores
_REFUSED = "torch's FLOP counter does not support an operator of the model, or a shape of its inputs"


def loop_facts(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    rows: int,
    heads: dict[nn.Linear, int],
    hooks: tuple[GradientHook, ...] | None = None,
) -> LoopFacts:
    """Return the facts of a loop with `rows` samples per step, counted as terms.

    Args:
        heads: number of feature vectors per step of every loss head.
    """
    parameters = list(model.parameters())
    bitwise_only = bitwise_reason(gradient_hooks(model) if hooks is None else hooks)
    sizes = [(tokens, head.out_features) for head, tokens in heads.items() if tokens]
    largest = max(sizes, key=math.prod, default=None)
    groups = repeated_blocks(model)
    return LoopFacts(
        num_parameters=sum(p.numel() for p in parameters),
        trainable_parameters=sum(p.numel() for p in parameters if p.requires_grad),
        parameter_bytes=sum(p.numel() * p.element_size() for p in parameters),
        optimizer=type(optimizer).__name__,
        batch_size=rows,
        terms_per_step=float(rows),
        terms="rows",
        flops_per_step=None,
        has_convolutions=any(p.dim() == 4 for p in parameters),
        has_workspaces=any(isinstance(module, nn.modules.conv._ConvNd) for module in model.modules()),
        supports_fused=supports_fused(optimizer) and not bitwise_only and not sparse_module(model, optimizer),
        bitwise_only=bitwise_only,
        is_fused=is_fused(optimizer),
        layout="channels_last" if is_channels_last(model) else "contiguous",
        is_compiled=is_compiled(model),
        head_tokens=largest and largest[0],
        head_words=largest and largest[1],
        kinds_of_blocks=len(groups) / sum(map(len, groups.values())) if groups else None,
        wide_gradient_bytes=sum(
            p.numel() * (torch.float32.itemsize - p.element_size())
            for p in parameters
            if p.requires_grad and p.element_size() < torch.float32.itemsize
        ),
        by_parameter_refusal=late_reason(optimizer),
    )


def with_tested_step(facts: LoopFacts, optimizer: torch.optim.Optimizer) -> LoopFacts:
    """Return the facts without support for a fused optimizer step that differs from the plain step on this machine."""
    if not facts.supports_fused or facts.is_fused or not (difference := fused_difference(optimizer)):
        return facts
    refusal = f"the fused step of {facts.optimizer} differs from its unfused step on this machine: {difference}"
    return replace(facts, supports_fused=False, fused_refusal=refusal)


class SoftmaxDetector(EagerDispatchMode):
    """Dispatch mode that records the bytes of softmaxes over square scores, and the shape of the largest logits."""

    def __init__(self) -> None:
        super().__init__()
        self.kept_bytes = 0
        self.logits: tuple[int, int] | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._softmax.default:
            is_square = result.dim() >= 3 and result.shape[-1] == result.shape[-2] >= _SMALLEST
            self.kept_bytes += result.nbytes if is_square else 0
        if func is torch.ops.aten._log_softmax.default and result.numel() > math.prod(self.logits or (0,)):
            self.logits = result.numel() // result.shape[-1], result.shape[-1]
        return result


class StepCounts(NamedTuple):
    """Counts of the forward and backward of the example batch, in the loop's precision.

    Attributes:
        terms: number of terms of the loss; the number of samples if the loss was not seen.
        kind: "rows" or "tokens".
    """

    flops: float | None
    terms: float
    kind: str
    seen: SoftmaxDetector


def count_step(subject: TrainingLoop, precision: str, notes: Notes) -> StepCounts:
    """Count a step; an instrument that fails is left out, with a note. `LossError` if the plain step fails."""
    terms: list[Any] = []  # Counts of all completed forwards.
    flop_error: Exception | str = _REFUSED
    watch_error: Exception | str = _REFUSED
    flops, seen = None, SoftmaxDetector()
    for watches, counts in ((True, True), (False, True), (True, False), (False, False)):
        try:
            flops, seen = _run(subject, precision, terms, watches=watches, counts=counts)
        except Exception as error:
            if not (watches or counts or is_out_of_memory(error)):
                _raise_of_loss(error)
            # The first error names the cause; later attempts leave the instrument out.
            flop_error = error if flop_error is _REFUSED else flop_error
            watch_error = error if watch_error is _REFUSED else watch_error
            if is_out_of_memory(error):
                notes.add("flops.not_counted", "FLOP were not counted", error)
                break
            continue
        if counts and flops is None:
            continue
        if not counts:
            notes.add("flops.not_counted", "FLOP were not counted", flop_error)
        if not watches:
            notes.add("attention.not_watched", "the sizes of softmaxes were not recorded", watch_error)
        break
    count = terms[-1] if terms else None
    number, kind = (float(subject.rows), "rows") if count is None else (float(count), "tokens")
    return StepCounts(flops, number, kind, seen)


def require_plain_step(subject: TrainingLoop, precision: str) -> None:
    """Raise `LossError` if the plain forward and backward fail for another reason than memory."""
    try:
        _run(subject, precision, [], watches=False, counts=False)
    except Exception as error:
        if not is_out_of_memory(error):
            _raise_of_loss(error)


def is_of_loss(error: Exception) -> bool:
    """Return True if an error was made by `TrainingLoop.loss` from an exception of the user's code."""
    return isinstance(error, LossError) and isinstance(error.__cause__, Exception)


def _raise_of_loss(error: Exception) -> NoReturn:
    """Raise the typed error for a failed forward or backward, with the user's exception as its cause."""
    if isinstance(error, TrimtabError) and not is_of_loss(error):
        raise error  # The result was refused, because it is not a loss.
    cause = error.__cause__ if is_of_loss(error) else error
    assert isinstance(cause, Exception)
    raise loss_failed(cause) from cause


def _run(
    subject: TrainingLoop, precision: str, terms: list[Any], *, watches: bool, counts: bool
) -> tuple[float | None, SoftmaxDetector]:
    """Run forward and backward; returns FLOP and softmaxes, and appends the loss's count to `terms`."""
    seen = SoftmaxDetector()

    def forward_backward() -> None:
        with seen if watches else contextlib.nullcontext():
            loss, count = subject.loss(precision=precision)
        terms.append(count)
        loss.backward()

    with subject.state():
        if counts:
            return count_flops(forward_backward), seen
        forward_backward()
    return None, seen
