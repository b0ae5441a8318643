"""Peak memory and operators of candidates without running them: traced on fake tensors at two micro-batch sizes."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from trimtab.core.errors import ModelError, TrimtabError
from trimtab.core.memory_model import PeakMemoryModel
from trimtab.measure.fake_tensors import kernels_of
from trimtab.measure.memory_trace import SizeTrace, trace_peaks
from trimtab.measure.storage_tracker import WorkspaceTooLarge
from trimtab.planner.target_device_candidates import recorded_candidates
from trimtab.plans.plan import Plan
from trimtab.plans.profile import Candidate, Profile, TracedCandidate
from trimtab.profiling.measurement_notes import Notes
from trimtab.profiling.smoke_test import CrashTest
from trimtab.profiling.training_loop import TrainingLoop
from trimtab.settings import loss_chunk
from trimtab.settings.fp32_modules import prepare_copy
from trimtab.techniques import optimizers
from trimtab.techniques.low_bit_state import use_low_bit
from trimtab.techniques.mixed_precision import autocast
from trimtab.techniques.optimizer_in_backward import refusal_of
from trimtab.training.batch import BY_CONTAINERS, BatchSplitting, to_device
from trimtab.training.run import LossFn

Told = TypeVar("Told")
Sizes = tuple[int, int]
Batches = tuple[Any, Any]

MIN_SAMPLES = 3  # The smaller of two sizes needs 2 samples, because operators treat a single sample differently.
HERE = torch.device("cpu")


def trace_candidates(
    subject: TrainingLoop,
    candidates: Iterable[Candidate],
    progress: Callable[[str], None],
    guard: CrashTest,
    notes: Notes,
) -> tuple[TracedCandidate, ...]:
    """Return the traces of candidates; a candidate that cannot be traced is left to the trials, with a note.

    So is a candidate that ends its test process, because operator workspaces are found by running operators.
    """
    found: list[TracedCandidate] = []
    for candidate in candidates:
        if guard.refusal(candidate) is not None:
            continue
        progress(f"tracing: {candidate.describe()}")
        traced = functools.partial(_trace_candidate, subject, candidate)
        found += notes.attempt(
            "peaks.not_traced", "the peak memory of other micro-batch sizes is unknown", traced, list[TracedCandidate]()
        )
    return tuple(found)


def _trace_candidate(subject: TrainingLoop, candidate: Candidate) -> list[TracedCandidate]:
    with subject.start(candidate) as run:
        traced = _trace(
            run.model,
            subject.optimizer,
            subject.loss_fn,
            to_device(subject.batch, subject.device),
            subject.batching,
            autocasts=[run.autocast],
            counts_scratch=subject.device.type == "cpu",
            prepare=prepare_copy(candidate.fp32_modules, subject.device.type),
            by_parameter=not refusal_of(subject.optimizer),
        )

    def held(model: PeakMemoryModel | None) -> Any:  # A run holds these bytes throughout.
        return model and model.beside(subject.start_bytes)

    return [
        TracedCandidate(
            candidate,
            held(each.whole),
            held(each.sliced),
            each.work,
            held(each.step),
            held(each.early),
            held(each.early_fused),
        )
        for each in traced
    ]


def trace_optimizer_states(subject: TrainingLoop, plan: Plan, kinds: Sequence[str]) -> dict[str, int]:
    """Return the traced peak of a step of a plan by storage of the optimizer's state, "user" and `kinds`.

    {} if the batch is too small to be split, or the step cannot be traced, as with recomputation.
    """
    if plan.recompute.value is not None:  # Copies of recomputed blocks would call the original blocks.
        return {}
    rows, found = subject.batching.require(subject.batch), {}
    batch = to_device(subject.batch, subject.device)
    with contextlib.suppress(ModelError), subject.start_plan(plan) as run:
        for kind in ("user", *kinds):
            traced = _trace(
                run.model,
                subject.optimizer,
                subject.loss_fn,
                batch,
                subject.batching,
                autocasts=[run.autocast],
                counts_scratch=subject.device.type == "cpu",
                prepare=prepare_copy(plan.fp32_modules.value, subject.device.type),
                prepare_optimizer=None if kind == "user" else functools.partial(use_low_bit, kind=kind),
            )
            micro_batch = run.plan.micro_batch_of(rows)
            is_whole = micro_batch >= rows and not subject.adapts_batch_size
            for sizes in traced:
                model = sizes.whole if is_whole else sizes.sliced
                found[kind] = model.peak_bytes(micro_batch) + subject.start_bytes
    return found


def trace_elsewhere(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss_fn: LossFn,
    batch: Any,
    candidates: Sequence[Candidate],
    batching: BatchSplitting = BY_CONTAINERS,
    kind: str = "cuda",
) -> tuple[TracedCandidate, ...]:
    """Return the candidates' traces as for a device; () if the batch is too small to be split.

    Args:
        candidates: candidates that differ in precision only.
        kind: kind of the device, "cuda" or "cpu".

    Raises:
        ModelError: the step cannot be traced, or has recurrent layers, whose memory is mostly outside of tensors.
    """
    recurrent = recurrent_layer(model)
    if recurrent is not None:
        raise ModelError(
            "model",
            got=f"a {type(recurrent).__name__} layer",
            expected="a model without recurrent layers",
            problem=f"The memory of {type(recurrent).__name__} layers cannot be predicted for another device, because "
            "their operators hold memory outside of tensors.",
            hint="Run trimtab.plan on the device itself, which measures the memory.",
            code="model.recurrent",
        )
    forwards = [functools.partial(autocast, candidate.precision, HERE) for candidate in candidates]
    with apply_candidate(model, optimizer, candidates[0]), kernels_of(kind):
        found = _trace(model, optimizer, loss_fn, batch, autocasts=forwards, batching=batching)
    return tuple(
        TracedCandidate(candidate, *traced) for candidate, traced in zip(candidates, found, strict=bool(found))
    )


def recurrent_layer(model: nn.Module) -> nn.RNNBase | None:
    """Return a layer whose operators use, and save for the backward, memory outside of tensors; None without one."""
    return next((module for module in model.modules() if isinstance(module, nn.RNNBase)), None)


def trace_for_others(
    subject: TrainingLoop, profile: Profile, progress: Callable[[str], None]
) -> tuple[TracedCandidate, ...]:
    """Return traces of CUDA's operators for target devices; () if the loop is not on the CPU."""
    if subject.device.type != "cpu":
        return ()
    found: list[TracedCandidate] = []
    for candidates in recorded_candidates(profile):
        progress(f"tracing for other devices: {', '.join(each.describe() for each in candidates)}")
        with contextlib.suppress(TrimtabError):
            loop = subject.model, subject.optimizer, subject.loss_fn, subject.batch
            found += trace_elsewhere(*loop, candidates, subject.batching)
    return tuple(found)


def trace_here(
    model: nn.Module, optimizer: torch.optim.Optimizer, loss_fn: LossFn, batch: Any, candidate: Candidate
) -> TracedCandidate | None:
    """Return the trace of a candidate on the model's own device; None if there are too few samples."""
    device = next(model.parameters()).device
    autocasts = [functools.partial(autocast, candidate.precision, device)]
    with apply_candidate(model, optimizer, candidate):
        found = _trace(model, optimizer, loss_fn, batch, autocasts=autocasts, counts_scratch=device.type == "cpu")
    return TracedCandidate(candidate, *found[0]) if found else None


@contextlib.contextmanager
def apply_candidate(model: nn.Module, optimizer: torch.optim.Optimizer, candidate: Candidate) -> Iterator[None]:
    """Apply a candidate's loss head and optimizer step inside the context."""
    with contextlib.ExitStack() as undo:
        if candidate.loss_chunk is not None:
            undo.callback(loss_chunk.use_chunks(model, candidate.loss_chunk))
        if candidate.fused_optimizer and not optimizers.is_fused(optimizer):
            undo.callback(optimizers.use_fused(optimizer))
        yield


def _trace(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss_fn: LossFn,
    batch: Any,
    batching: BatchSplitting = BY_CONTAINERS,
    **how: Any,
) -> list[SizeTrace]:
    if not has_two_sizes(batch, batching):
        return []
    return at_two_sizes(batch, lambda sizes, pair: trace_peaks(model, optimizer, loss_fn, pair, sizes, **how), batching)


def has_two_sizes(batch: Any, batching: BatchSplitting = BY_CONTAINERS) -> bool:
    """Return True if a batch can be traced at two sizes."""
    reading = batching.read(batch)
    return reading.is_splittable and (reading.samples or 0) >= MIN_SAMPLES


def at_two_sizes(batch: Any, trace: Callable[[Sizes, Batches], Told], batching: BatchSplitting = BY_CONTAINERS) -> Told:
    """Return the result of a trace at two micro-batch sizes, reduced if an operator is too large to run."""
    rows = batching.require(batch)
    while True:
        try:
            return trace(*two_sizes(batch, rows, batching))
        except WorkspaceTooLarge:
            if rows // 2 < MIN_SAMPLES:
                raise
            rows //= 2


def two_sizes(batch: Any, most: int | None = None, batching: BatchSplitting = BY_CONTAINERS) -> tuple[Sizes, Batches]:
    """Return two micro-batch sizes, half of the samples and all of them (at most `most`), and batches of these sizes.

    Half is enough for a loss in chunks of a quarter of the batch's tokens: it has several chunks at both sizes.
    """
    rows = batching.require(batch)
    large = rows if most is None else most
    sizes = max(MIN_SAMPLES - 1, large // 2), large
    few, many = (next(batching.slices(batch, rows, size))[0] for size in sizes)
    return sizes, (few, many)
