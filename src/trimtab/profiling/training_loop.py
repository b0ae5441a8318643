"""The loop under trial: the user's model, optimizer, loss and example batch; one loop is planned at a time."""

from __future__ import annotations

import contextlib
import copy
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from trimtab.core.choice import Choice, Effect
from trimtab.core.errors import BatchError, LossError, ModelError
from trimtab.losses import Count, as_loss, require_loss_function
from trimtab.measure.blocks import BlockGraph, blocks_of
from trimtab.measure.machine import MEASURED
from trimtab.plans.plan import Plan
from trimtab.plans.profile import Candidate
from trimtab.settings import SEARCHED
from trimtab.state.loop_state import LoopState
from trimtab.state.object_snapshots import version_of
from trimtab.state.peak_memory import alive_between_steps
from trimtab.techniques.mixed_precision import autocast
from trimtab.techniques.optimizers import check_ownership, with_auxiliary_modules
from trimtab.training.apply_plan import require_free
from trimtab.training.batch import (
    BY_CONTAINERS,
    BatchSplitting,
    deep_copy,
    map_leaves,
    tensors_in,
    to_device,
    with_new_containers,
)
from trimtab.training.run import LossFn, Run
from trimtab.training.sample_count import is_leaf, is_record, is_sequence

P = ParamSpec("P")
R = TypeVar("R")
_planning = threading.RLock()  # Reentrant, because planning functions that hold it call each other.


@dataclass(frozen=True)
class TrainingLoop:
    """A training loop to be measured.

    Args:
        batch: data of an optimizer step; the longest batch, if lengths vary.
        clip_norm: gradient-norm limit of the user's loop, or None.
        adapts_batch_size: True if windows may span several batches, so that accumulated gradients are held during a
            forward.
        start_bytes: bytes that a run keeps in order to repeat a failed window; trials do not keep them.
        named_blocks: names of the modules that may be recomputed; (): the blocks found in the module tree.
        example: batch of usual length if `batch` is the longest; the splitting check covers both.
        modules: further modules that the same optimizer trains, such as a criterion with parameters.
        second: a different batch of the loop's data with an equal number of samples, as a second example for proofs.

    Raises:
        ModelError, OptimizerError, BatchError, ValueGivenError: the objects do not fit together, or cannot be measured.
        LoopError: a run holds the model, so no trial can start.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    loss_fn: LossFn
    batch: Any
    clip_norm: float | None = None
    adapts_batch_size: bool = False
    start_bytes: int = 0
    named_blocks: tuple[str, ...] = ()
    example: Any = None
    modules: tuple[nn.Module, ...] = ()
    batching: BatchSplitting = BY_CONTAINERS
    second: Any = None

    def __post_init__(self) -> None:
        check_ownership(self.model, self.optimizer, self.modules, self.loss_fn)
        if self.device.type not in MEASURED:  # Only enqueueing could be timed there, and only host memory counted.
            places = " and ".join(MEASURED)
            raise ModelError(
                "model",
                got=f"parameters on {self.device}",
                expected=f"parameters on {' or '.join(MEASURED)}",
                problem=f"The model is on {self.device}, but trimtab measures time and memory on {places} only.",
                hint="Move the model to a supported device, then build its optimizer.",
                code="model.device_unsupported",
            )
        require_free(self.model)
        require_loss_function(own_loss(self.loss_fn))
        require_repeatable(self.batch)
        object.__setattr__(self, "loss_fn", protect_batch(self.loss_fn))
        _ = self.rows
        if self.named_blocks:
            _ = self.blocks

    @property
    def device(self) -> torch.device:
        """The model's device."""
        return next(self.model.parameters()).device

    @functools.cached_property
    def trained(self) -> nn.Module:
        """The model, or a container of the model and `modules`."""
        return with_auxiliary_modules(self.model, self.modules)

    @property
    def rows(self) -> int:
        """Samples of the example batch; 1 if unknown, in which case the batch is a single unit."""
        return self.batching.read(self.batch).samples or 1

    @property
    def unknown(self) -> str:
        """Reason for an unknown number of samples, or ""."""
        reading = self.batching.read(self.batch)
        return reading.reason if reading.samples is None else ""

    def first(self, number: int) -> TrainingLoop:
        """Return the loop with the first samples of its batch; `BatchError` if the batch cannot be split."""
        if number >= self.rows:
            return self
        batch, second = (
            None if each is None else next(self.batching.slices(each, self.rows, number))[0]
            for each in (self.batch, self.second)
        )
        return replace(self, batch=batch, second=second)

    @functools.cached_property
    def blocks(self) -> BlockGraph:
        """Blocks of the model that run once per forward, with their links. Errors are those of `blocks_of`."""
        return blocks_of(self.model, self.loss_fn, to_device(self.batch, self.device), self.named_blocks)

    def start(self, candidate: Candidate) -> Run:
        """Return a run with the candidate's settings."""
        values = {name: getattr(candidate, name) for name in SEARCHED if name != "micro_batch"}
        plan = Plan.fixed(self.rows, candidate.micro_batch, **values | {"recompute": None})
        if candidate.offload is not None:
            plan = plan.having(recompute_blocks=self.blocks.names)
        if candidate.recompute is not None:
            plan = plan.recomputing(candidate.recompute, self.blocks.names, "on trial")
        if self.clip_norm is not None:
            plan = plan.having(clip_norm=Choice(self.clip_norm, "the reference", Effect.TRAINING))
        return self.start_plan(plan)

    def start_plan(self, plan: Plan, total_samples: int | None = None) -> Run:
        """Return a run of a plan on trial."""
        return Run(
            self.model,
            self.optimizer,
            plan,
            total_samples=total_samples,
            out_of_memory="stop",
            modules=self.modules,
            batching=self.batching,
            on_trial=True,
        )

    def step(self, run: Run, *batches: Any) -> Tensor:
        """Take an optimizer step of a run on some batches, by default on the example batch; returns the loss."""
        return run.train_step(run.window(*(batches or (self.batch,))), self.loss_fn)

    def loss(self, batch: Any | None = None, precision: str = "fp32") -> tuple[Tensor, Count | None]:
        """Return (loss, count or None) of a batch on the model's device; the forward uses the precision's autocast.

        `LossError` if the loss function raises, or the result is not a loss.
        """
        is_part = batch is not None
        batch = to_device(self.batch if batch is None else batch, self.device)
        try:
            with autocast(precision, self.device):
                result = self.loss_fn(self.model, batch)
        except (TypeError, KeyError, IndexError, AttributeError) as error:
            raise LossError(
                "loss_fn",
                got=f"{type(error).__name__}: {error}",
                expected="a function of (model, batch)",
                problem=f"loss_fn(model, batch) raised {type(error).__name__}: {error}.",
                hint="Pass a function that takes the model and a batch, and an example batch that the function "
                "accepts.",
                code="loss.failed",
            ) from error
        loss, count, _ = as_loss(result, is_auxiliary=is_part)  # The loss of the whole batch was validated before.
        return loss, count

    def state(self, *, peak_bytes: int | None = None) -> LoopState:
        """Return a snapshot of everything that a step can change, as a context manager that restores it.

        Objects that the loss function refers to are included, such as a recurrent hidden state that a loss keeps:
        after a bf16 trial this state would be bf16, and the next trial would start from it.

        Args:
            peak_bytes: expected peak of GPU memory while the snapshot exists. Copies stay on the GPU if they fit in
            addition
                to it; None stores them on the CPU.
        """
        return LoopState(self.trained, self.optimizer, loss_fn=self.loss_fn, peak_bytes=peak_bytes)

    def live_tensors(self) -> Iterator[Tensor]:
        """Yield the tensors alive between two steps: parameters, buffers, optimizer state, the batch."""
        yield from alive_between_steps(self.trained, self.optimizer)
        yield from tensors_in(self.batch)


@contextlib.contextmanager
def in_mode(model: nn.Module, *, training: bool) -> Iterator[None]:
    """Put all modules into training or evaluation mode inside the context."""
    modes = [(module, module.training) for module in model.modules()]
    model.train(training)
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def one_at_a_time(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a planning function so that concurrent calls run sequentially.

    Random generators, fp32 modes, the allocator's mode, `torch.compile`'s stance and garbage collection are
    process-wide.
    """

    @functools.wraps(function)
    def alone(*args: P.args, **kwargs: P.kwargs) -> R:
        with _planning:
            return function(*args, **kwargs)

    return alone


# Protection of the example batch against in-place changes: every call of the loss receives the same values.


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

    Containers are copied for every call, so the loss may take items out of them. The first call in every mode receives
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
