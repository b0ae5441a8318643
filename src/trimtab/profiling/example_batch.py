"""Protection of the example batch against in-place changes: every call of the loss receives the same values."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from trimtab.core.errors import BatchError
from trimtab.state.object_snapshots import version_of
from trimtab.training.batch import deep_copy, map_leaves, tensors_in, with_new_containers
from trimtab.training.run import LossFn
from trimtab.training.sample_count import is_leaf, is_record, is_sequence


class _CallRecord:
    """Modes in which the loss was called, and a flag for in-place changes of the batch."""

    __slots__ = ("changes", "modes")  # Slots, because a snapshot of the loss's side effects would restore attributes.

    def __init__(self) -> None:
        self.modes: set[tuple[bool, bool]] = set()
        self.changes = False


def require_repeatable(batch: Any) -> None:
    """Raise `BatchError` for an example batch that can be read only once: planning calls the loss many times."""
    parts = batch.values() if isinstance(batch, dict) else batch if isinstance(batch, list | tuple) else ()
    for each in (batch, *parts):
        if isinstance(each, Iterator):
            raise BatchError(
                "example_batch",
                got=f"an iterator ({type(each).__name__})",
                expected="a batch that can be read several times",
                problem=f"The example batch is or contains an iterator ({type(each).__name__}), which can be read "
                "only once, but planning calls the loss function many times.",
                hint="Replace the iterator by a list of its items: list(iterator).",
                code="batch.iterator",
            )


def protect_batch(loss_fn: LossFn) -> LossFn:
    """Return the loss function wrapped so that it cannot change the caller's batch.

    Containers are copied for every call, so the loss may take items out of them. The first call in each mode receives
    copies of all tensors. If a tensor is changed in place (detected by version, value or `requires_grad_`), later
    calls receive copies too; otherwise they receive the original tensors.
    """
    if getattr(loss_fn, "_is_protected", False):
        return loss_fn
    look = _CallRecord()

    def loss(model: nn.Module, batch: Any) -> Any:
        mode = model.training, torch.is_grad_enabled()
        if look.changes:
            return loss_fn(model, deep_copy(batch))
        if mode in look.modes or any(isinstance(each, FakeTensor) for each in tensors_in(batch)):
            return loss_fn(model, map_leaves(with_new_containers(batch), _new_object))
        given = deep_copy(batch)
        before = [(each, each.requires_grad, version_of(each)) for each in tensors_in(given)]
        originals = list(tensors_in(batch))
        try:
            result = loss_fn(model, given)
        finally:
            look.changes = look.changes or _differ(before, originals)
        look.modes.add(mode)
        return result

    loss._is_protected = True  # type: ignore[attr-defined]
    return functools.update_wrapper(loss, loss_fn, updated=())


def own_loss(loss_fn: LossFn) -> LossFn:
    """Return the function wrapped by `protect_batch`."""
    return getattr(loss_fn, "__wrapped__", loss_fn) if getattr(loss_fn, "_is_protected", False) else loss_fn


def _differ(before: Sequence[tuple[Tensor, bool, int | None]], originals: Sequence[Tensor]) -> bool:
    """Return True if copied tensors were changed in place; changes through `.data` do not raise the version."""
    for (each, requires_grad, version), original in zip(before, originals, strict=False):
        if each.requires_grad != requires_grad or version_of(each) != version or not have_same_values(each, original):
            return True
    return False


def have_same_values(left: Tensor, right: Tensor) -> bool:
    """Return True for equal shapes, dtypes and values; NaN equals NaN."""
    if left.is_meta or right.is_meta:
        return True
    if left.layout is not right.layout or left.dtype != right.dtype or left.is_nested != right.is_nested:
        return False
    return all(
        ours.shape == theirs.shape and bool(((ours == theirs) | (ours != ours) & (theirs != theirs)).all())
        for ours, theirs in zip(_dense(left.detach()), _dense(right.detach()), strict=True)
    )


def _dense(tensor: Tensor) -> Sequence[Tensor]:
    if tensor.is_nested:
        return tensor.unbind()
    if tensor.layout is torch.sparse_coo:
        return tensor._values(), tensor._indices()
    return (tensor if tensor.layout is torch.strided else tensor.values(),)


def _new_object(leaf: Any) -> Any:
    """Return a shallow copy of an object of an unknown class, with copied containers; the object itself on failure."""
    if is_leaf(leaf):
        return leaf
    try:
        made = copy.copy(leaf)
        for name, value in list(vars(made).items()):
            if is_record(value) or is_sequence(value):
                made.__dict__[name] = with_new_containers(value)
    except Exception:  # The object may refuse to be copied.
        return leaf
    return made
