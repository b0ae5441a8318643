"""Traces of a model's blocks for a CUDA target device, in bytes and operators."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from trimtab.calibrate.block_profile import NO_BLOCKS, in_part_of, runs_in_segments
from trimtab.calibrate.candidate_traces import HERE, apply_candidate, two_sizes
from trimtab.calibrate.exception_text import describe
from trimtab.calibrate.recompute_timing import with_schedule
from trimtab.calibrate.training_loop import TrainingLoop
from trimtab.core.errors import ModelError, TrimtabError
from trimtab.core.operator_costs import Operation, operations
from trimtab.core.profile import Candidate, Profile, TracedBlocks
from trimtab.core.recompute_schedule import EVERY_BLOCK, schedule_of
from trimtab.measure.block_graph import blocks_of
from trimtab.measure.block_memory import BlockMemoryTrace, chains_through, require_runs, trace_stages
from trimtab.measure.fake_cuda import FakeCudaMode
from trimtab.measure.memory_trace import trace_state_bytes
from trimtab.measure.storage_lifetimes import LossFn
from trimtab.runtime.activation_checkpoint import use_schedule
from trimtab.runtime.batch_splitting import BY_CONTAINERS, BatchSplitting
from trimtab.runtime.precision import autocast


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
) -> TracedBlocks | str:
    """Return a candidate's blocks as traced for CUDA, or the reason for failing.

    Args:
        model: the model, on the CPU or the meta device.
        optimizer: its optimizer.
        batch: a batch of 3 or more samples, on the CPU or the meta device.
        named: names of the blocks, instead of those found in the module tree.
        splits: True if the batch may be split.
    """
    try:
        with apply_candidate(model, optimizer, candidate), FakeCudaMode():
            return _traced(model, optimizer, loss_fn, batch, candidate, named, splits=splits, batching=batching)
    except TrimtabError as error:
        return describe(error)


def _traced(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss_fn: LossFn,
    batch: Any,
    candidate: Candidate,
    named: tuple[str, ...],
    *,
    splits: bool,
    batching: BatchSplitting = BY_CONTAINERS,
) -> TracedBlocks | str:
    blocks = blocks_of(model, loss_fn, batch, named)
    number = len(blocks.names)
    if not number:
        return NO_BLOCKS
    again = schedule_of(EVERY_BLOCK, number)
    with_schedule(model, blocks.names, again, _run_nothing)  # Raises if blocks cannot be swapped.
    rows, batches = two_sizes(batch, batching=batching)
    forward = functools.partial(autocast, candidate.precision, HERE)

    def trace(**how: Any) -> tuple[BlockMemoryTrace, BlockMemoryTrace]:
        few, many = (
            trace_stages(model, loss_fn, each, blocks, autocast=forward, twice=splits, **how) for each in batches
        )
        return few, many

    few, many = trace()
    require_runs(  # Raises if a block overwrites its input.
        model, loss_fn, batches[0], autocast=forward, prepare=lambda copy: use_schedule(copy, blocks.names, again)
    )
    chains = chains_through(few, many, rows)
    in_part: tuple[Operation, ...] = ()
    if not runs_in_segments(model, blocks, _run_nothing):
        chains = [chain.unlinked() for chain in chains]
    with contextlib.suppress(ModelError):  # A block may overwrite a tensor that is kept.
        parts = trace(prepare=lambda copy: use_schedule(copy, blocks.names, in_part_of(number)), drops=False)
        in_part = operations(parts[0].work, parts[1].work, rows)
        chains = [chain.with_parts(part) for chain, part in zip(chains, chains_through(*parts, rows), strict=True)]
    held = trace_state_bytes(model, optimizer)
    whole, sliced = (chain.holding(held) for chain in chains)
    forwards = tuple(operations(*pair, rows) for pair in list(zip(few.forwards, many.forwards, strict=True))[:number])
    return TracedBlocks(
        candidate, blocks.names, whole, sliced, forwards, operations(few.work, many.work, rows), in_part
    )


def _run_nothing() -> None:
    """Do nothing. Passed where a model's blocks are replaced during a call, to test only if they can be replaced."""


def trace_blocks_for_others(
    subject: TrainingLoop, profile: Profile, progress: Callable[[str], None]
) -> tuple[TracedBlocks, ...]:
    """Return the blocks of all candidates traced for target devices, as traced for CUDA."""
    wanted = [each.candidate for each in profile.target_device_traces]
    loop = (subject.model, subject.optimizer, subject.loss_fn, subject.batch)
    how: Any = {"splits": profile.check.splittable, "batching": subject.batching}
    found = []
    for candidate in wanted:
        progress(f"tracing blocks for other devices: {candidate.describe()}")
        found.append(trace_blocks(*loop, candidate, subject.named_blocks, **how))
    return tuple(each for each in found if not isinstance(each, str))
