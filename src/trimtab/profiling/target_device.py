"""Profile of a loop for a target device: traced, nothing is run, all figures are predictions."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from trimtab.core.block_costs import KeptResults
from trimtab.core.choice import SplitCheck
from trimtab.core.errors import ModelError, TrimtabError, ValueGivenError
from trimtab.core.hardware import DeviceSpec
from trimtab.core.memory_model import Operation, operations
from trimtab.core.objective import Budget, Objective, Reference
from trimtab.core.progress import silent
from trimtab.core.recompute_schedule import EVERY_BLOCK, schedule_of
from trimtab.measure.block_memory import chains_through, require_runs, trace_stages
from trimtab.measure.blocks import blocks_of
from trimtab.measure.fake_tensors import FakeTensors, kernels_of
from trimtab.measure.machine import environment
from trimtab.measure.memory_trace import cannot_trace, trace_state_bytes
from trimtab.planner.target_device_candidates import traced_for, with_blocks
from trimtab.plans.profile import Candidate, LoopFacts, Profile, TracedBlocks, TracedCandidate
from trimtab.profiling.block_profile import NO_BLOCKS, in_part_of, runs_in_segments, with_schedule
from trimtab.profiling.candidate_traces import HERE, MIN_SAMPLES, apply_candidate, trace_elsewhere, two_sizes
from trimtab.profiling.loop_facts import loop_facts
from trimtab.profiling.measurement_notes import describe
from trimtab.profiling.training_loop import TrainingLoop, one_at_a_time
from trimtab.settings.loss_chunk import count_head_tokens, plain_head_use
from trimtab.techniques.activation_checkpointing import use_schedule
from trimtab.techniques.mixed_precision import autocast
from trimtab.techniques.optimizers import check_ownership
from trimtab.training.batch import BY_CONTAINERS, BatchSplitting
from trimtab.training.run import LossFn
from trimtab.training.split_conditions import has_batch_statistics

_SPLITS = "no module normalises over the batch; the splitting check runs when planning on the target device"


def trace_blocks(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss_fn: LossFn,
    batch: Any,
    candidate: Candidate,
    named: tuple[str, ...] = (),
    *,
    splits: bool = True,
    batching: BatchSplitting = BY_CONTAINERS,
    kind: str = "cuda",
) -> TracedBlocks | str:
    """Return a candidate's blocks as traced for a device, or the reason for failing.

    Args:
        batch: a batch of 3 or more samples, on the CPU or the meta device.
        named: names of the blocks, instead of those found in the module tree.
        splits: True if the batch may be split.
        kind: kind of the device, "cuda" or "cpu".
    """
    forward = functools.partial(autocast, candidate.precision, HERE)
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(apply_candidate(model, optimizer, candidate))
            stack.enter_context(kernels_of(kind))
            blocks = blocks_of(model, loss_fn, batch, named)
            names, number = blocks.names, len(blocks.names)
            if not number:
                return NO_BLOCKS
            again = schedule_of(EVERY_BLOCK, number)
            with_schedule(model, names, again, _run_nothing)  # Raises if blocks cannot be swapped.
            rows, batches = two_sizes(batch, batching=batching)
            trace = functools.partial(trace_stages, model, loss_fn, blocks=blocks, autocast=forward, twice=splits)
            few, many = (trace(each) for each in batches)
            require_runs(  # Raises if a block overwrites its input.
                model, loss_fn, batches[0], autocast=forward, prepare=lambda copy: use_schedule(copy, names, again)
            )
            chains = chains_through(few, many, rows)
            in_part: tuple[Operation, ...] = ()
            if not runs_in_segments(model, blocks, _run_nothing):
                chains = [chain.unlinked() for chain in chains]
            with contextlib.suppress(ModelError):  # A block may overwrite a tensor that is kept.
                schedule = in_part_of(number)
                parts = [
                    trace(each, prepare=lambda copy: use_schedule(copy, names, schedule), drops=False)
                    for each in batches
                ]
                in_part = operations(parts[0].work, parts[1].work, rows)
                of_parts = chains_through(parts[0], parts[1], rows)
                results, shares = (None,) * number, (0.0,) * number  # The shares are unknown.
                chains = [
                    chain.with_parts([KeptResults(part, results, shares)])
                    for chain, part in zip(chains, of_parts, strict=True)
                ]
            held = trace_state_bytes(model, optimizer)
        except TrimtabError as error:
            return describe(error)
    whole, sliced = (chain.holding(held) for chain in chains)
    forwards = tuple(operations(*pair, rows) for pair in list(zip(few.forwards, many.forwards, strict=True))[:number])
    return TracedBlocks(candidate, names, whole, sliced, forwards, operations(few.work, many.work, rows), in_part)


def _run_nothing() -> None:
    """Do nothing. Passed where a model's blocks are replaced during a call, to test only if they can be replaced."""


def trace_blocks_for_others(
    subject: TrainingLoop, wanted: Sequence[Candidate], profile: Profile, progress: Callable[[str], None]
) -> tuple[TracedBlocks, ...]:
    """Return the blocks of candidates, as traced for CUDA."""
    loop = (subject.model, subject.optimizer, subject.loss_fn, subject.batch)
    how: Any = {"splits": profile.check.splittable, "batching": subject.batching}
    found = []
    for candidate in wanted:
        progress(f"tracing blocks for other devices: {candidate.describe()}")
        found.append(trace_blocks(*loop, candidate, subject.named_blocks, **how))
    return tuple(each for each in found if not isinstance(each, str))


@one_at_a_time
def profile_elsewhere(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss_fn: LossFn,
    batch: Any,
    device: DeviceSpec,
    *,
    reference: Reference,
    objective: Objective,
    budget: Budget,
    named_blocks: tuple[str, ...] = (),
    rows: int | None = None,
    progress: Callable[[str], None] = silent,
) -> Profile:
    """Trace the loop in every precision of the device; if memory counts, also its loss head in chunks and its blocks.

    Args:
        rows: samples per step, if not those of the batch.

    Raises:
        ModelError: a step cannot be traced, or the model is not on the CPU.
        ValueGivenError: fewer than 3 samples, too few for traces at two sizes; or a device of unknown bandwidth or
            peaks.
    """
    start = time.perf_counter()
    check_ownership(model, optimizer)
    _check_traceable(model, batch, device)
    if named_blocks:
        blocks_of(model, loss_fn, batch, named_blocks)
    facts = _of_rows(_facts(model, optimizer, loss_fn, batch), rows)
    check = SplitCheck(True, _SPLITS, code="split.assumed")
    if has_batch_statistics(model):
        check = SplitCheck(False, "a module normalises over the batch", code="split.batch_statistics")
    profile = Profile(device, facts, check, reference, environment=environment(), objective=objective, budget=budget)

    def trace(candidates: Sequence[Candidate]) -> Sequence[TracedCandidate]:
        progress(f"tracing: {', '.join(each.describe() for each in candidates)}")
        return trace_elsewhere(model, optimizer, loss_fn, batch, candidates, kind=device.kind)

    profile = traced_for(profile, trace)

    def blocks(candidate: Candidate) -> TracedBlocks | str:
        progress(f"tracing blocks: {candidate.describe()}")
        how: dict[str, Any] = {"splits": check.splittable, "kind": device.kind}
        return trace_blocks(model, optimizer, loss_fn, batch, candidate, named_blocks, **how)

    profile = with_blocks(profile, blocks)
    return replace(profile, profiling_s=time.perf_counter() - start)


def _check_traceable(model: nn.Module, batch: Any, device: DeviceSpec) -> None:
    place, rows = next(model.parameters()).device.type, BY_CONTAINERS.require(batch, "example_batch")
    if place != "cpu":
        raise ModelError(
            "model",
            got=f"parameters on {place}",
            expected="parameters on the CPU or the meta device",
            problem=f"The model is on {place}, but planning for another device traces it on the CPU.",
            hint="Move the model to the CPU, or create it under torch.device('meta').",
            code="model.not_on_cpu",
        )
    if rows < MIN_SAMPLES:
        raise ValueGivenError(
            "example_batch",
            got=f"{rows} samples",
            expected=f"at least {MIN_SAMPLES} samples",
            hint="Pass a larger batch: memory is traced for two micro-batch sizes.",
            code="batch.too_small",
        )
    if not device.bandwidth_bytes_s or not device.peak_flops:
        raise ValueGivenError(
            "device",
            got=f"{device.name} without peak FLOP/s or memory bandwidth",
            expected="a device with both figures",
            problem=f"The peak FLOP/s or the memory bandwidth of {device.name} is unknown, so step times cannot be "
            "predicted.",
            hint="Pass a trimtab.core.hardware.DeviceSpec with peak_flops and bandwidth_bytes_s.",
            code="device.peaks_unknown",
        )


def _facts(model: nn.Module, optimizer: torch.optim.Optimizer, loss_fn: LossFn, batch: Any) -> LoopFacts:
    fakes = FakeTensors()
    model_there, batch_there = fakes.copy((model, batch))
    try:
        with fakes, torch.no_grad(), count_head_tokens(model_there) as heads:
            loss_fn(model_there, batch_there)
        with fakes, torch.enable_grad():
            plain = plain_head_use(model_there, lambda: loss_fn(model_there, batch_there))
    except Exception as error:
        raise cannot_trace(error) from error
    facts = loop_facts(model, optimizer, BY_CONTAINERS.require(batch), heads | plain.tokens)
    return replace(facts, head_refusal=plain.refusal)


def _of_rows(facts: LoopFacts, rows: int | None) -> LoopFacts:
    if rows is None or rows == facts.batch_size:
        return facts
    share = rows / facts.batch_size
    return replace(
        facts,
        batch_size=rows,
        terms_per_step=share * facts.terms_per_step,
        flops_per_step=None if facts.flops_per_step is None else share * facts.flops_per_step,
        scores_bytes=round(share * facts.scores_bytes),
        head_tokens=None if facts.head_tokens is None else round(share * facts.head_tokens),
        logits=None if facts.logits is None else (max(1, round(share * facts.logits[0])), facts.logits[1]),
    )
