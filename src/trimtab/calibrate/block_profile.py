"""Measurement of a model's blocks for activation checkpointing: bytes and seconds of the chain of stages."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from trimtab.calibrate.candidate_traces import at_two_sizes, has_two_sizes, recurrent_layer
from trimtab.calibrate.exception_text import describe
from trimtab.calibrate.recompute_timing import measure_seconds, with_schedule
from trimtab.calibrate.training_loop import TrainingLoop
from trimtab.calibrate.trial_steps import step_until_applied
from trimtab.core.block_costs import BlockChainModel
from trimtab.core.errors import ModelError
from trimtab.core.profile import Candidate, RecomputableBlocks
from trimtab.core.recompute_schedule import EVERY_BLOCK, KeptBlock, RecomputedSegment, Schedule, schedule_of
from trimtab.decide.recompute_solver import by_shares
from trimtab.measure.block_graph import BlockGraph
from trimtab.measure.block_memory import chains_through, trace_stages
from trimtab.measure.block_timing import forward_seconds
from trimtab.measure.peak_memory import state_tensors, storage_bytes
from trimtab.measure.storage_lifetimes import LossFn
from trimtab.runtime.activation_checkpoint import use_schedule
from trimtab.runtime.batch import to_device

NO_BLOCKS = "the model has no blocks that run once in a forward"
_FORWARDS = 3  # Steps in which the forwards of blocks are timed against each other.


def measure_recomputable(subject: TrainingLoop, candidate: Candidate, *, splits: bool = True) -> RecomputableBlocks:
    """Return the costs and savings of recomputing a candidate's blocks, or the reason for failing.

    Takes training steps; the caller restores the state.

    Args:
        splits: True if the batch may be split into more micro-batches than the candidate's.
    """
    try:
        return _measured(subject, candidate, splits=splits)
    except Exception as error:  # For example, a block overwrites its input.
        return RecomputableBlocks(candidate, refusal=describe(error), code="recompute.failed")


def _measured(subject: TrainingLoop, candidate: Candidate, *, splits: bool) -> RecomputableBlocks:
    names = subject.blocks.names
    if not names:
        return RecomputableBlocks(candidate, refusal=NO_BLOCKS, code="recompute.no_blocks")
    recurrent = recurrent_layer(subject.model)
    if recurrent is not None:
        why = f"{type(recurrent).__name__} holds memory outside of tensors for its backward"
        refusal = f"the memory that recomputation saves is unknown, because {why}"
        return RecomputableBlocks(candidate, refusal=refusal, code="recompute.recurrent")
    if not has_two_sizes(subject.batch, subject.batching):
        refusal = f"the batch of {subject.rows} samples cannot be traced at two micro-batch sizes"
        return RecomputableBlocks(candidate, refusal=refusal, code="recompute.batch_too_small")
    chains, parts, seconds = _traced(subject, candidate)
    forward_s = sum(seconds)
    shares = [each / forward_s if forward_s > 0 else 1 / len(names) for each in seconds]
    schedules = [schedule_of(EVERY_BLOCK, len(names)), *([in_part_of(len(names))] if parts else [])]
    step_s, lines = measure_seconds(subject, candidate, schedules, splits=splits, forward_s=forward_s)
    if parts:
        chains = [chain.with_parts(part) for chain, part in zip(chains, parts, strict=True)]
    again, in_part = (lambda index, rows, line=line: shares[index] * line.at(rows) for line in (lines[0], lines[-1]))
    chains = [chain.with_seconds(again, in_part) for chain in chains]
    held = _state_bytes(subject.optimizer) + subject.start_bytes
    whole, sliced = (chain.holding(held) for chain in chains)
    return RecomputableBlocks(candidate, names, whole, sliced, step_s, by_shares(whole.at(subject.rows)))


def _traced(
    subject: TrainingLoop, candidate: Candidate
) -> tuple[list[BlockChainModel], list[BlockChainModel], list[float]]:
    """Return the chains, the chains with blocks kept in part ([] if not possible), and the blocks' forward seconds.

    Each list of chains holds the first micro-batch of a window and a later one.
    """
    names = subject.blocks.names
    with subject.start(candidate) as run:

        def step() -> None:
            run.train_step(run.window(subject.batch), subject.loss_fn)

        batch = to_device(subject.batch, subject.device)

        def trace(**given: Any) -> list[BlockChainModel]:
            every = functools.partial(
                trace_chain,
                run.model,
                subject.loss_fn,
                subject.blocks,
                autocast=run.autocast,
                counts_scratch=subject.device.type == "cpu",
                **given,
            )
            return at_two_sizes(batch, every, subject.batching)

        chains = trace()
        step_until_applied(run, subject)
        # Raises if the blocks cannot be swapped.
        with_schedule(run.model, names, schedule_of(EVERY_BLOCK, len(names)), step)
        if not runs_in_segments(run.model, subject.blocks, step):
            chains = [chain.unlinked() for chain in chains]
        try:
            in_part = in_part_of(len(names))
            parts = trace(prepare=lambda copy: use_schedule(copy, names, in_part), drops=False)
            with_schedule(run.model, names, in_part, step)
        except (ModelError, RuntimeError):  # For example, a block overwrites a tensor that is kept.
            parts = []
        forward_s = forward_seconds(step, run.model, names, subject.device, steps=_FORWARDS)
    return chains, parts, list(forward_s)


def in_part_of(number: int) -> Schedule:
    """Return the schedule that keeps only the expensive part of each of `number` blocks."""
    return tuple(KeptBlock(index, in_part=True) for index in range(number))


def runs_in_segments(model: nn.Module, blocks: BlockGraph, step: Callable[[], None]) -> bool:
    """Return True if a step runs with a segment of several blocks; blocks with hooks cannot form segments."""
    first = next((index for index, is_linked in enumerate(blocks.links) if is_linked), None)
    if first is None:
        return True
    kept = [KeptBlock(index) for index in range(len(blocks.names))]
    schedule: Schedule = (*kept[:first], RecomputedSegment(tuple(kept[first : first + 2])), *kept[first + 2 :])
    try:
        with_schedule(model, blocks.names, schedule, step)
    except ModelError:
        return False
    return True


def trace_chain(
    model: nn.Module, loss_fn: LossFn, blocks: BlockGraph, rows: tuple[int, int], batches: Sequence[Any], **how: Any
) -> list[BlockChainModel]:
    """Return the chains of the first and of a later micro-batch, without seconds; `how` as of `trace_stages`.

    Args:
        rows: the two sizes, in samples, in ascending order.
        batches: batches of these sizes.

    Raises:
        ModelError: the step cannot be traced.
    """
    few, many = (trace_stages(model, loss_fn, batch, blocks, **how) for batch in batches)
    return chains_through(few, many, rows)


def _state_bytes(optimizer: torch.optim.Optimizer) -> int:
    return storage_bytes(state_tensors(optimizer))
