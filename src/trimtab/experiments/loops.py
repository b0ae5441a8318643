"""Parts of the user's training loop (`Loop`), and two ways to train: as written by the user, and with a plan.

`plain_steps` takes the user's steps, `planned_steps` trains through a run. Both draw from a `DataStream`: loops with
equal seeds see equal batches in the same order, also if the steps draw different random numbers.
"""

from __future__ import annotations

import contextlib
import random
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from trimtab.api import start
from trimtab.core import validation
from trimtab.core.errors import LoopError, ValueGivenError
from trimtab.core.objective import ASSUMED_REFERENCE, Reference
from trimtab.distributed.ddp import BUFFERS
from trimtab.distributed.process_group import has_peers
from trimtab.losses import parts_of
from trimtab.measure.finite_check import nonfinite_parameter
from trimtab.plans.plan import Plan
from trimtab.state import process_state
from trimtab.training.batch import BatchSplitting, Count, Split, to_device
from trimtab.training.run import LossFn
from trimtab.training.split_conditions import UnprovedSplitWarning

Step = Callable[[nn.Module, torch.optim.Optimizer, Any], Any]
Evaluate = Callable[[nn.Module], Any]


@dataclass(frozen=True)
class Loop:
    """The parts of a training loop, as `setup(seed)` returns them.

    Args:
        model: the model, on its device.
        optimizer: its optimizer.
        loss_fn: `loss_fn(model, batch)`, as in `trimtab.plan`.
        loader: iterable of batches for repeated iteration: a DataLoader with workers and augmentation, a list, a
            stream. Batches may have different lengths.
        evaluate: `evaluate(model)` returns a number, or numbers by name; called after the last step, untimed.
        step: `step(model, optimizer, batch)`, the user's training step, called for every batch of the loader, with
            autocast, gradient scaler, accumulation, clipping and scheduler. The baseline of a comparison; may return
            the loss. None: a plain step in the precision, and with the clipping, of `reference`.
        after_step: called without arguments after optimizer steps of trimtab, for example `scheduler.step`. A user's
            `step` includes this call.
        accumulate: batches of the loader per optimizer step.
        reference: precision and clipping of the loop. By default the precision is observed in a step, and clipping is
            assumed to be absent.
        longest_batch, modules, count, split: as in `trimtab.plan`.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    loss_fn: LossFn
    loader: Iterable[Any]
    evaluate: Evaluate | None = None
    step: Step | None = None
    after_step: Callable[[], Any] | None = None
    accumulate: int = 1
    reference: Reference | None = None
    longest_batch: Any = None
    modules: tuple[nn.Module, ...] = ()
    count: Count | None = None
    split: Split | None = None

    def __post_init__(self) -> None:
        kinds = {"model": nn.Module, "optimizer": torch.optim.Optimizer}
        for name, kind in kinds.items():
            if not isinstance(value := getattr(self, name), kind):
                raise ValueGivenError(f"Loop.{name}", got=f"a {type(value).__name__}", expected=f"a {kind.__name__}")
        for name in ("loss_fn", "evaluate", "step", "after_step"):
            value = getattr(self, name)
            if not callable(value) and (value is not None or name == "loss_fn"):
                raise ValueGivenError(f"Loop.{name}", got=f"a {type(value).__name__}", expected="a function")
        if not isinstance(self.loader, Iterable) or isinstance(self.loader, Iterator | Tensor):
            raise ValueGivenError(
                "Loop.loader",
                got=f"a {type(self.loader).__name__}",
                expected="an iterable of batches that can be iterated again, such as a DataLoader",
                hint="Wrap a generator function in a class with __iter__." if isinstance(self.loader, Iterator) else "",
                code="loop.loader",
            )
        validation.integer("Loop.accumulate", self.accumulate)
        validation.dataclass_or("Loop.reference", self.reference, Reference, None)

    @property
    def device(self) -> torch.device:
        """The model's device."""
        return next(self.model.parameters()).device

    @property
    def batching(self) -> BatchSplitting:
        """How samples of a batch are counted."""
        return BatchSplitting(self.count, self.split)


def seed_everything(seed: int, *, devices: bool = True) -> None:
    """Seed the generators of Python, numpy and torch; without `devices`, only the generators on the host."""
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed) if devices else torch.default_generator.manual_seed(seed)


class _Generators(NamedTuple):
    """State of the generators on the host."""

    python: Any
    numpy: Any
    torch: Tensor

    @classmethod
    def capture(cls) -> _Generators:
        return cls(random.getstate(), numpy.random.get_state(), torch.get_rng_state())

    def restore(self) -> None:
        random.setstate(self.python)
        numpy.random.set_state(self.numpy)
        torch.set_rng_state(self.torch)


class DataStream(Iterator[Any]):
    """The batches of a loader, epoch after epoch, drawn with separate random generators.

    Shuffling and augmentation depend on the seed alone, not on random numbers drawn by training steps: dropout in
    different micro-batches does not change the batches.

    Attributes:
        num_epochs: number of completed epochs.
    """

    def __init__(self, loader: Iterable[Any], seed: int) -> None:
        self._loader = loader
        self._batches: Iterator[Any] | None = None
        self.num_epochs, self._is_empty = 0, True
        self._aside_s = 0.0
        outside = _Generators.capture()
        seed_everything(seed, devices=False)
        self._own = _Generators.capture()
        outside.restore()

    def take_aside_s(self) -> float:
        """Return the seconds spent on exchanging generators since the last call; not part of the loop."""
        found, self._aside_s = self._aside_s, 0.0
        return found

    def __next__(self) -> Any:
        begin = time.perf_counter()
        outside = _Generators.capture()
        self._own.restore()
        self._aside_s += time.perf_counter() - begin
        try:
            while True:
                if self._batches is None:
                    self._batches, self._is_empty = iter(self._loader), True
                try:
                    batch = next(self._batches)
                except StopIteration:
                    self._batches = None
                    if self._is_empty:
                        raise _ended(self._loader, self.num_epochs) from None
                    self.num_epochs += 1
                    continue
                self._is_empty = False
                return batch
        finally:
            begin = time.perf_counter()
            self._own = _Generators.capture()
            outside.restore()
            self._aside_s += time.perf_counter() - begin

    def close(self) -> None:
        """End the workers of the loader's iterator."""
        self._batches = None


def _ended(loader: Any, num_epochs: int) -> LoopError:
    kind = type(loader).__name__
    return LoopError(
        "loader",
        problem=f"The loader, a {kind}, has no batches" + (f" after {num_epochs} epochs." if num_epochs else "."),
        hint="A loader must yield its batches each time it is iterated.",
        code="loader.empty",
    )


class StepResult(NamedTuple):
    """Samples of an optimizer step, and the mean loss as a detached scalar; None if the step returns no loss."""

    samples: int
    loss: Tensor | float | None


_HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}


def autocast(precision: str, device: torch.device) -> torch.autocast:
    """Return `torch.autocast` for a precision, disabled for fp32 and tf32."""
    return torch.autocast(device.type, dtype=_HALF.get(precision), enabled=precision in _HALF)


def plain_steps(loop: Loop, batches: Iterator[Any]) -> Iterator[StepResult]:
    """Train with the user's step or a plain step; yield after every optimizer step.

    In a job of several ranks, a plain step has the model in DistributedDataParallel.
    """
    if loop.step is not None:
        yield from _own_steps(loop, loop.step, batches)
        return
    reference = loop.reference or ASSUMED_REFERENCE
    put_back = process_state.hold_tf32() if reference.precision == "tf32" else None
    try:
        yield from _reference_steps(loop, reference, batches)
    finally:
        if put_back is not None:
            put_back()


def separate_steps(loop: Loop, batches: Iterator[Any]) -> Iterator[StepResult]:
    """Train as `plain_steps`, without communication between ranks."""
    return _reference_steps(loop, loop.reference or ASSUMED_REFERENCE, batches, is_alone=True)


def strict_steps(loop: Loop, batches: Iterator[Any]) -> Iterator[StepResult]:
    """Train as `plain_steps`, with TF32 and all reduced-precision fp32 modes disabled everywhere."""
    # A written mode no longer inherits, so only modes different from "ieee" are written.
    changed = [(place, place.fp32_precision) for place in process_state.fp32_places()]
    changed = [(place, mode) for place, mode in changed if mode != "ieee"]
    for place, _ in changed:
        place.fp32_precision = "ieee"
    try:
        yield from plain_steps(loop, batches)
    finally:
        for place, mode in changed:
            place.fp32_precision = mode


def _reference_steps(
    loop: Loop, reference: Reference, batches: Iterator[Any], *, is_alone: bool = False
) -> Iterator[StepResult]:
    device, scaler = loop.device, torch.amp.GradScaler(loop.device.type, enabled=reference.precision == "fp16")
    parameters = [parameter for group in loop.optimizer.param_groups for parameter in group["params"]]
    model = loop.model
    if has_peers() and not is_alone and not isinstance(model, DistributedDataParallel):
        model = DistributedDataParallel(model, **{BUFFERS: True})
    while True:
        loop.optimizer.zero_grad()
        samples, losses, counts = 0, [], []
        for index in range(loop.accumulate):
            batch = to_device(next(batches), device)
            samples += loop.batching.read(batch).samples or 1
            is_last = index == loop.accumulate - 1
            waits = is_last or not isinstance(model, DistributedDataParallel)
            with contextlib.nullcontext() if waits else model.no_sync():
                with autocast(reference.precision, device):
                    found = parts_of(loop.loss_fn(model, batch))
                is_alone = loop.accumulate == 1 and found.count is not None
                part, count = (found.loss / found.count, 1.0) if is_alone else (found.loss, found.count)
                scaler.scale(part).backward()
            losses.append(part.detach())
            counts.append(1.0 if count is None else count)
        total = sum(counts)
        if reference.clip_norm is not None or reference.precision == "fp16":
            scaler.unscale_(loop.optimizer)
        if loop.accumulate > 1:
            gradients = [each.grad for each in parameters if each.grad is not None]
            torch._foreach_div_(gradients, total)
        if reference.clip_norm is not None:
            nn.utils.clip_grad_norm_(parameters, reference.clip_norm)
        scaler.step(loop.optimizer)
        scaler.update()
        if loop.after_step is not None:
            loop.after_step()
        yield StepResult(samples, torch.stack(losses).sum() / total)


def _own_steps(loop: Loop, step: Step, batches: Iterator[Any]) -> Iterator[StepResult]:
    while True:
        samples, losses = 0, []
        for _ in range(loop.accumulate):
            batch = next(batches)
            samples += loop.batching.read(batch).samples or 1
            losses.append(step(loop.model, loop.optimizer, batch))
        known = [each.detach() if isinstance(each, Tensor) else each for each in losses if each is not None]
        mean = sum(known) / len(known) if len(known) == loop.accumulate else None
        yield StepResult(samples, mean)


def planned_steps(
    loop: Loop, batches: Iterator[Any], plan: Plan, *, total_samples: int | None = None
) -> Iterator[StepResult]:
    """Train through a run with a plan; yield after every optimizer step.

    Args:
        total_samples: samples of the whole run, for a plan with a schedule of the learning rate.
    """
    clip_norm = None if loop.reference is None else loop.reference.clip_norm
    options: dict[str, Any] = {"modules": loop.modules, "count": loop.count, "split": loop.split}
    options["total_samples"] = total_samples
    drawn = _CountedBatches(batches, loop.batching)
    with warnings.catch_warnings():
        # Reported once, when the arm is made.
        warnings.simplefilter("ignore", UnprovedSplitWarning)
        started = start(loop.model, loop.optimizer, plan, clip_norm=clip_norm, **options)
    with started as run:
        if loop.accumulate > 1 and plan.batch_rule is None:
            run.of_batches(loop.accumulate)
        for window in run.windows(drawn):
            loss = run.train_step(window, loop.loss_fn)
            if loop.after_step is not None:
                loop.after_step()
            samples, drawn.samples = drawn.samples, 0
            yield StepResult(samples, loss)


class _CountedBatches(Iterator[Any]):
    """Batches with samples counted as in a plain step.

    Attributes:
        samples: samples of all batches drawn since the attribute was set.
    """

    def __init__(self, batches: Iterator[Any], batching: BatchSplitting) -> None:
        self._batches, self._batching, self.samples = batches, batching, 0

    def __next__(self) -> Any:
        batch = next(self._batches)
        self.samples += self._batching.read(batch).samples or 1
        return batch


def evaluated(loop: Loop) -> dict[str, float]:
    """Return the values of the loop's evaluation by name, empty without one; module modes are restored.

    Raises:
        ValueGivenError: a value is no number.
    """
    if loop.evaluate is None:
        return {}
    modes = [(module, module.training) for module in loop.model.modules()]
    found = loop.evaluate(loop.model)
    for module, mode in modes:
        module.training = mode
    named = found if isinstance(found, Mapping) else {"evaluation": found}
    try:
        return {
            name: float(value.item() if isinstance(value, Tensor) else value)  # One synchronisation per evaluation.
            for name, value in named.items()
        }
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueGivenError(
            "Loop.evaluate",
            got=repr(found)[:100],
            expected="a number, or numbers by name",
            code="evaluate.not_number",
        ) from error


def nonfinite_in(loop: Loop, loss: float | None) -> str:
    """Return a description of a non-finite loss or parameter, or ""."""
    if loss is not None and not numpy.isfinite(loss):
        return f"the loss is {loss:g}"
    name = nonfinite_parameter(loop.model)
    return "" if name is None else f"parameter {name} contains NaN or infinity"
