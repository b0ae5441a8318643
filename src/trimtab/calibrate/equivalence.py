"""The gradient-equivalence proof: does splitting the user's batch keep the user's maths? (math: section 2)

In fp32, on the user's own model and batch: the gradient of the whole batch against that of an unequal split weighted
as the run weighs it. Dropout is off for the comparison (a split draws other masks from the same distribution); batch
statistics stay on, because they are what splitting would change.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from trimtab.calibrate.subject import Subject
from trimtab.core.errors import BatchError
from trimtab.core.plan import Check
from trimtab.measure.snapshot import Snapshot
from trimtab.runtime.accumulation import WindowWeights
from trimtab.runtime.batches import slices

TOLERANCE = 1e-4


def check_splitting(subject: Subject) -> Check:
    """Return whether micro-batches smaller than the batch compute the same gradient. Leaves no trace.

    Raises:
        LossError: the loss function's result is not a loss.
    """
    with Snapshot(subject.model, subject.optimizer):
        subject.loss()
        if subject.rows < 2:
            return Check(False, "the batch has one row")
        try:
            pieces = list(_unequal_split(subject.batch, subject.rows))
        except BatchError as error:
            return Check(False, f"the batch cannot be split: {error.given}")
        stateful = _modules_with_batch_state(subject)
        try:
            difference = _difference(subject, pieces, stateful)
        except Exception as error:  # the user's model may refuse a part of its batch in any way; the reason is kept
            lines = str(error).splitlines() or [""]
            failure = f"a part of the batch does not run alone: {type(error).__name__}: {lines[0][:200]}"
            return Check(False, _state_reason(stateful) if stateful else failure)
    if stateful:
        return Check(False, _state_reason(stateful), difference)
    if difference is None:
        return Check(False, "the gradient of the whole batch is zero or not finite: nothing can be proved")
    if difference > TOLERANCE:
        return Check(False, f"the gradient of an unequal split differs by {difference:.2g}, relative", difference)
    reason = f"an unequal split changes the gradient by {difference:.1e}, relative (limit {TOLERANCE:g})"
    return Check(True, reason, difference)


def _unequal_split(batch: Any, rows: int) -> Iterator[tuple[Any, int]]:
    """Yield pieces of about 5/8, 2/8 and 1/8 of the rows."""
    (large, first), *rest = slices(batch, rows, max(1, round(rows * 0.625)))
    yield large, first
    for piece, size in rest:
        yield from slices(piece, size, max(1, round(size * 0.667)))


def _modules_with_batch_state(subject: Subject) -> tuple[nn.Module, ...]:
    """Return modules whose own buffers a training forward changes: batch statistics, counters, power iterations."""
    model = subject.model
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    with torch.no_grad(), contextlib.suppress(Exception):
        subject.loss_fn(model, subject.batch)
    changed = {name for name, buffer in model.named_buffers() if not _same(buffer, before.get(name))}
    owners = {name.rpartition(".")[0] for name in changed}
    return tuple(module for name, module in model.named_modules() if name in owners)


def _same(left: Tensor, right: Tensor | None) -> bool:
    return right is not None and left.shape == right.shape and torch.equal(left, right)


def _state_reason(modules: Sequence[nn.Module]) -> str:
    kinds = ", ".join(sorted({type(module).__name__ for module in modules}))
    return f"{kinds} computes over the batch: smaller micro-batches would change its statistics"


def _difference(subject: Subject, pieces: Sequence[tuple[Any, int]], stateful: Sequence[nn.Module]) -> float | None:
    try:
        with _without_dropout(subject.model, keep=stateful):
            whole = _gradient(subject, [(subject.batch, subject.rows)])
            split = _gradient(subject, pieces)
    except Exception:  # such as a model that returns predictions, and no loss, in evaluation mode
        keep = [module for module in subject.model.modules() if not _drops_out(module)]
        with _without_dropout(subject.model, keep=keep):
            whole = _gradient(subject, [(subject.batch, subject.rows)])
            split = _gradient(subject, pieces)
    error = math.sqrt(sum(float((a - b).double().square().sum()) for a, b in zip(whole, split, strict=True)))
    norm = math.sqrt(sum(float(a.double().square().sum()) for a in whole))
    return error / norm if norm > 0 and math.isfinite(error / norm) else None


def _gradient(subject: Subject, pieces: Sequence[tuple[Any, int]]) -> list[Tensor]:
    parameters = [p for p in subject.model.parameters() if p.requires_grad]
    subject.model.zero_grad(set_to_none=True)
    weights = WindowWeights()
    weights.open(sum(rows for _, rows in pieces), len(pieces))
    for piece, rows in pieces:
        loss, count = subject.loss(piece)
        weights.weigh(loss, count, rows).backward()
    factor = weights.correction
    return [torch.zeros_like(p) if p.grad is None else p.grad * factor for p in parameters]


def _drops_out(module: nn.Module) -> bool:
    """Return whether a module on its own is one that drops values at random: torch's, or named like them."""
    rate = getattr(module, "dropout", 0.0)
    by_rate = isinstance(rate, float | int) and rate > 0 and not any(module.children())
    return by_rate or "drop" in type(module).__name__.lower() or isinstance(module, nn.MultiheadAttention | nn.RNNBase)


@contextlib.contextmanager
def _without_dropout(model: nn.Module, keep: Sequence[nn.Module]) -> Iterator[None]:
    """Run the model in evaluation mode, but for the modules to keep: those that compute over the batch, above all."""
    modes = [(module, module.training) for module in model.modules()]
    training = {id(module) for module in keep if module.training}
    for module, _ in modes:
        module.training = id(module) in training
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
