"""The gradient-equivalence proof: does splitting the user's batch keep the user's maths? (math: section 2)

In fp32, on the user's own model and batch: the gradient of the whole batch against that of an unequal split weighted
as the run weighs it. In training mode, because that is what trains: a balancing loss or a centring may exist in no
other. Only dropout is off (a split draws other masks from the same distribution). A model whose gradient is random
even so, or that does not run so, is proved in evaluation mode, and the verdict says it. One that is handed over in that
mode is proved as it would train: nobody asks again. One whose modules keep state of the batch, as batch statistics are,
needs no proof to be refused.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from trimtab.calibrate.failures import describe
from trimtab.calibrate.own_forward import require_own_forward
from trimtab.calibrate.subject import Subject
from trimtab.core.errors import BatchError
from trimtab.core.plan import Check
from trimtab.measure.snapshot import Snapshot
from trimtab.runtime.accumulation import WindowWeights
from trimtab.runtime.batches import slices
from trimtab.runtime.out_of_memory import is_out_of_memory
from trimtab.runtime.splitting import normalises_by_batch

TOLERANCE = 1e-4
_SUMMED = "; it is a sum over rows: its mean, or trimtab.Summed(loss_sum, count), may be split"
_BY_TERMS = (
    "; a mean over terms that rows have unlike numbers of, as tokens, may be split as trimtab.Summed(loss_sum, count)"
)
_WIDER = "weights in fp32 may be split, and a plan's bf16 computes as fast with them"
_FP32_BYTES, _ROUNDED = 4, 0.02  # half precision rounds a gradient by less


def check_splitting(subject: Subject, precision: str = "fp32") -> Check:
    """Return whether micro-batches smaller than the batch compute the same gradient. Leaves no trace.

    Of the longest batch and of an example both: a mean over tokens is split as it should be where no row has padding.
    Where the whole batch does not fit in memory, the proof is on as many of its first rows as do.

    Args:
        precision: the loop's own. It runs once so, to be seen to work; the proof is in fp32.

    Raises:
        LossError: the loss function's result is not a loss.
    """
    check = _check_of_batch(subject, precision)
    if subject.example is None or not check.splittable:
        return check
    other = _check_of_batch(replace(subject, batch=subject.example, example=None), precision)
    return check if other.splittable else replace(other, reason=f"{other.reason}; of the example batch")


def _check_of_batch(subject: Subject, precision: str) -> Check:
    rows = subject.rows
    while True:
        part = subject if rows == subject.rows else _leading(subject, rows)
        try:
            with Snapshot(subject.trained, subject.optimizer):
                check = _check(part, precision)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
        else:
            fewer = f"; on the first {rows} of {subject.rows} rows, as more do not fit in memory"
            return check if part is subject else replace(check, reason=check.reason + fewer)
        rows //= 2  # out of the handler, whose error would hold on to what did not fit
        if rows < 2 or not _can_split(subject):
            return Check(False, "the batch runs out of memory in fp32: nothing can be proved")


def _leading(subject: Subject, rows: int) -> Subject:
    return replace(subject, batch=next(slices(subject.batch, subject.rows, rows))[0])


def _can_split(subject: Subject) -> bool:
    try:
        next(slices(subject.batch, subject.rows, 1))
    except BatchError:
        return False
    return True


def _check(subject: Subject, precision: str) -> Check:
    stateful = _modules_with_batch_state(subject, precision)
    if subject.rows < 2:
        return Check(False, "the batch has one row")
    if stateful:
        return Check(False, _state_reason(stateful))
    try:
        pieces = list(_unequal_split(subject.batch, subject.rows))
    except BatchError as error:
        return Check(False, f"the batch cannot be split: {error.given}")
    proof = _proof(subject, pieces)
    if proof.failure is not None:
        return Check(False, proof.failure + proof.mode)
    if proof.difference is None:
        return Check(False, "the gradient of the whole batch is zero or not finite: nothing can be proved" + proof.mode)
    if proof.difference > TOLERANCE:
        reason = f"the gradient of an unequal split differs by {proof.difference:.2g}, relative"
        return Check(False, reason + proof.mode + _hint(subject, proof), proof.difference)
    reason = f"an unequal split changes the gradient by {proof.difference:.1e}, relative (limit {TOLERANCE:g})"
    return Check(True, reason + proof.mode, proof.difference)


def _hint(subject: Subject, proof: _Proof) -> str:
    """Return what may be behind a gradient that a split changes, and the way out."""
    if proof.is_sum:
        return _SUMMED
    halves = {p.dtype for p in subject.trained.parameters() if p.requires_grad and p.element_size() < _FP32_BYTES}
    if halves and proof.difference is not None and proof.difference < _ROUNDED:
        name = str(halves.pop()).removeprefix("torch.")
        return f"; its weights are {name}, and so are sums of its gradients: {_WIDER}"
    return _BY_TERMS


def _unequal_split(batch: Any, rows: int) -> Iterator[tuple[Any, int]]:
    """Yield pieces of about 5/8, 2/8 and 1/8 of the rows."""
    (large, first), *rest = slices(batch, rows, max(1, round(rows * 0.625)))
    yield large, first
    for piece, size in rest:
        yield from slices(piece, size, max(1, round(size * 0.667)))


def _modules_with_batch_state(subject: Subject, precision: str) -> tuple[nn.Module, ...]:
    """Return modules whose own buffers a training forward changes: batch statistics, counters, power iterations.

    The forward is the loop's own, gradients and precision included: its failure is the loop's, and is passed on. A
    model that was handed over in evaluation mode runs in the other too, as in the proof, whose failure is told there.
    """
    model = subject.trained
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    require_own_forward(subject, precision)
    if not model.training:
        with _without_dropout(model, _not_dropping(model)), contextlib.suppress(Exception):
            subject.loss(precision=precision)
    changed = {name for name, buffer in model.named_buffers() if not _same(buffer, before.get(name))}
    owners = {name.rpartition(".")[0] for name in changed}
    by_batch = () if model.training else tuple(filter(normalises_by_batch, model.modules()))  # once it trains
    return tuple(module for name, module in model.named_modules() if name in owners or module in by_batch)


def _same(left: Tensor, right: Tensor | None) -> bool:
    return right is not None and left.shape == right.shape and torch.equal(left, right)


def _state_reason(modules: Sequence[nn.Module]) -> str:
    kinds = ", ".join(sorted({type(module).__name__ for module in modules}))
    return f"{kinds} computes over the batch: smaller micro-batches would change its statistics"


@dataclass(frozen=True)
class _Proof:
    """Relative difference of the gradients (None: the whole batch's is zero or not finite), or why there is none.

    `mode` says in which mode it was proved, where that is not the one that trains. `is_sum`: the gradient of the whole
    is the sum of those of its pieces.
    """

    difference: float | None = None
    failure: str | None = None
    mode: str = ""
    is_sum: bool = False


def _proof(subject: Subject, pieces: Sequence[tuple[Any, int]]) -> _Proof:
    try:
        with _without_dropout(subject.trained, keep=_not_dropping(subject.trained)):
            whole = _gradient(subject, [(subject.batch, subject.rows)])
            again = relative(whole, _gradient(subject, [(subject.batch, subject.rows)]))
            if again is None or again <= TOLERANCE:
                return _compared(subject, whole, pieces)
        why = "in training mode its gradient is random"
    except Exception as error:
        _pass_on_memory(error)
        why = f"in training mode without dropout it fails ({describe(error)})"
    mode = f"; proved in evaluation mode: {why}"
    try:
        with _without_dropout(subject.trained):
            return replace(_compared(subject, _gradient(subject, [(subject.batch, subject.rows)]), pieces), mode=mode)
    except Exception as error:  # such as a model that returns predictions, and no loss, in evaluation mode
        _pass_on_memory(error)
        return _Proof(failure=f"nothing can be proved: {why}, and in evaluation mode it fails ({describe(error)})")


def _compared(subject: Subject, whole: list[Tensor], pieces: Sequence[tuple[Any, int]]) -> _Proof:
    try:
        split = _gradient(subject, pieces)
    except Exception as error:  # the user's model may refuse a part of its batch in any way; the reason is kept
        _pass_on_memory(error)
        return _Proof(failure=f"a part of the batch does not run alone: {describe(error)}")
    difference = relative(whole, split)
    if difference is None or difference <= TOLERANCE:
        return _Proof(difference)
    each = [_gradient(subject, [piece]) for piece in pieces]
    summed = relative(whole, [torch.stack(parts).sum(0) for parts in zip(*each, strict=True)])
    return _Proof(difference, is_sum=summed is not None and summed <= TOLERANCE)


def relative(whole: Sequence[Tensor], other: Sequence[Tensor]) -> float | None:
    """Return |whole - other| / |whole| over all parameters; None where it is not a finite number."""
    error = math.sqrt(sum(float((a - b).double().square().sum()) for a, b in zip(whole, other, strict=True)))
    norm = math.sqrt(sum(float(a.double().square().sum()) for a in whole))
    return error / norm if norm > 0 and math.isfinite(error / norm) else None


def _pass_on_memory(error: Exception) -> None:
    if is_out_of_memory(error):
        raise error


def _gradient(subject: Subject, pieces: Sequence[tuple[Any, int]]) -> list[Tensor]:
    parameters = [p for p in subject.trained.parameters() if p.requires_grad]
    subject.trained.zero_grad(set_to_none=True)
    weights = WindowWeights()
    weights.open(sum(rows for _, rows in pieces), len(pieces))
    for piece, rows in pieces:
        loss, count = subject.loss(piece)
        weights.weigh(loss, count, rows).backward()
    factor = weights.correction
    return [torch.zeros_like(p) if p.grad is None else p.grad * factor for p in parameters]


def _not_dropping(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if not _drops_out(module)]


def _drops_out(module: nn.Module) -> bool:
    """Return whether a module on its own is one that drops values at random: torch's, or named like them."""
    rate = getattr(module, "dropout", 0.0)
    whole = not any(module.children()) or isinstance(module, nn.MultiheadAttention | nn.RNNBase)
    by_rate = isinstance(rate, float | int) and rate > 0 and whole
    return by_rate or "drop" in type(module).__name__.lower()


@contextlib.contextmanager
def _without_dropout(model: nn.Module, keep: Sequence[nn.Module] = ()) -> Iterator[None]:
    """Run the model in evaluation mode, but for the modules to keep in the mode they train in."""
    modes = [(module, module.training) for module in model.modules()]
    training = {id(module) for module in keep if module.training or not model.training}
    for module, _ in modes:
        module.training = id(module) in training
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
