"""Measurement of a model's blocks for activation checkpointing: bytes and seconds of the chain of stages."""

from __future__ import annotations

import contextlib
import functools
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn

from trimtab.core.block_costs import BlockChainModel, KeptResults, levels_of
from trimtab.core.errors import ModelError
from trimtab.core.recompute_schedule import EVERY_BLOCK, KeptBlock, RecomputedSegment, Schedule, schedule_of
from trimtab.measure.block_memory import chains_through, trace_stages
from trimtab.measure.blocks import BlockGraph, hook_blocks
from trimtab.measure.timing import clock_s, seconds_between, stamp, synchronize
from trimtab.planner.recompute_cost import keep_all
from trimtab.planner.recompute_solver import by_shares
from trimtab.plans.profile import Candidate, RecomputableBlocks
from trimtab.profiling.candidate_traces import at_two_sizes, has_two_sizes, recurrent_layer
from trimtab.profiling.measurement_notes import describe
from trimtab.profiling.training_loop import TrainingLoop
from trimtab.profiling.trials import step_until_applied, timer
from trimtab.state.peak_memory import state_tensors, storage_bytes
from trimtab.techniques.activation_checkpointing import survey_operators, use_schedule
from trimtab.training.batch import to_device

T = TypeVar("T")
_MEASURING_S = 1.0  # Seconds per schedule, if more than the fewest steps fit.
_MOST = 10
_OTHERS = 16  # Steps for finding loss scales, trying blocks and timing their forwards and operators.
_MOST_LEVELS = 4  # Sets of kept results traced for each block.
_SMALLER = 4  # Ratio of the larger to the smaller micro-batch.
# Lower bounds, as fractions of the blocks' forward time, for recomputation of whole blocks and in part, because the
# measured difference may be lost in noise.
_LEAST, _LEAST_IN_PART = 0.5, 0.1
NO_BLOCKS = "the model has no blocks that run once in a forward"
_FORWARDS = 3  # Steps in which the forwards of blocks are timed against each other.


def forward_seconds(
    step: Callable[[], object], model: nn.Module, blocks: Sequence[str], device: torch.device, *, steps: int = 5
) -> tuple[float, ...]:
    """Return the median forward time of every block in seconds, after a warm-up step.

    Blocks are timed inside a step, because alone they would find other cache contents. The device is not synchronized
    between blocks.
    """
    seconds: list[list[float]] = [[] for _ in blocks]
    for index in range(steps + 1):
        with _stamped(model, blocks, device) as stamps:
            step()
        synchronize(device)
        if index:
            for each, pair in zip(seconds, stamps, strict=True):
                each.append(seconds_between(*pair))
    return tuple(map(statistics.median, seconds))


@contextlib.contextmanager
def _stamped(model: nn.Module, blocks: Sequence[str], device: torch.device) -> Iterator[list[list[Any]]]:
    stamps: dict[str, list[Any]] = {name: [] for name in blocks}

    def note(name: str, *_: Any) -> None:
        if len(stamps[name]) < 2:  # Else recomputed in the backward by the model's own activation checkpointing.
            event = stamp(device)
            stamps[name].append(clock_s() if event is None else event)

    with hook_blocks(model, blocks, note, note):
        yield list(stamps.values())


@dataclass(frozen=True)
class SecondsPerSample:
    """Seconds of a micro-batch as a linear function of its samples."""

    fixed_s: float
    sample_s: float

    def at(self, rows: int) -> float:
        """Return the seconds of a micro-batch of `rows` samples."""
        return self.fixed_s + self.sample_s * rows


def line_through(points: Sequence[tuple[int, float]]) -> SecondsPerSample:
    """Return the non-negative, non-decreasing line through one or two points (samples, seconds), larger size first."""
    (more, high), (fewer, low) = points[0], points[-1]
    high, low = max(0.0, high), max(0.0, low)
    sample_s = high / more if more == fewer else (high - low) / (more - fewer)
    if sample_s <= 0:  # More samples take no longer: only the overhead per call counts, or the rest is lost in noise.
        return SecondsPerSample((high + low) / 2, 0.0)
    fixed_s = high - sample_s * more
    return SecondsPerSample(fixed_s, sample_s) if fixed_s >= 0 else SecondsPerSample(0.0, high / more)


def measure_seconds(
    subject: TrainingLoop, candidate: Candidate, schedules: Sequence[Schedule], *, splits: bool, forward_s: float
) -> tuple[float, list[SecondsPerSample]]:
    """Return the seconds of a step without recomputation, and every schedule's extra seconds per micro-batch.

    Args:
        schedules: recomputation of all blocks, then of all blocks in part.
        forward_s: forward seconds of the blocks per micro-batch.
    """
    rows = min(candidate.micro_batch, subject.rows)
    sizes = (rows, -(-rows // _SMALLER)) if splits and rows > 1 else (rows,)
    found = [_longer(subject, candidate.having(micro_batch=size), schedules) for size in sizes]
    lines = []
    for index, share in zip(range(len(schedules)), (_LEAST, _LEAST_IN_PART), strict=False):
        each_s = [longer[index] * size / subject.rows for size, (_, longer) in zip(sizes, found, strict=True)]
        least_s = [share * forward_s * size / rows for size in sizes]
        lines.append(line_through([*zip(sizes, map(max, each_s, least_s), strict=True)]))
    return found[0][0], lines


def num_steps(step_s: float) -> int:
    """Return the approximate number of steps for measuring the blocks of a candidate with `step_s` seconds per step."""
    turns = 2 * 3 * (1 + _turns(step_s))  # Two sizes; everything kept, recomputed, and recomputed in part.
    return turns + _OTHERS


def _turns(step_s: float) -> int:
    return max(2, min(_MOST, int(_MEASURING_S / step_s))) if step_s > 0 else _MOST


def _longer(subject: TrainingLoop, candidate: Candidate, schedules: Sequence[Schedule]) -> tuple[float, list[float]]:
    """Return the seconds of a step that keeps all activations, and the extra seconds of every schedule."""
    names = subject.blocks.names
    with subject.start(candidate) as run:
        step = functools.partial(subject.step, run)
        step_until_applied(run, subject)
        timed = functools.partial(timer(candidate), step, subject.device)
        ways = [keep_all(len(names)), *schedules]
        taken = [
            [with_schedule(run.model, names, each, timed) for each in (ways if turn % 2 else reversed(ways))]
            for turn in range(1 + _turns(timed()))
        ]
    ordered = (each if turn % 2 else each[::-1] for turn, each in enumerate(taken))
    _, *counted = ordered  # The heap grows in the first round.
    own, *others = zip(*counted, strict=True)
    differences = ([ours - theirs for ours, theirs in zip(each, own, strict=True)] for each in others)
    return statistics.median(own), [statistics.median(each) for each in differences]


def with_schedule(model: nn.Module, names: tuple[str, ...], schedule: Schedule, call: Callable[[], T]) -> T:
    """Return the result of a call while the model's blocks use a recomputation schedule."""
    undo = use_schedule(model, names, schedule)
    try:
        return call()
    finally:
        undo()


def measure_recomputable(subject: TrainingLoop, candidate: Candidate, *, splits: bool = True) -> RecomputableBlocks:
    """Return the costs and savings of recomputing a candidate's blocks, or the reason for failing.

    Takes training steps; the caller restores the state. `splits`: the batch may be split into more micro-batches.
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
    chains, parts, levels, seconds = _traced(subject, candidate)
    forward_s = sum(seconds)
    shares = [each / forward_s if forward_s > 0 else 1 / len(names) for each in seconds]
    schedules = [schedule_of(EVERY_BLOCK, len(names)), *([in_part_of(len(names))] if parts else [])]
    step_s, lines = measure_seconds(subject, candidate, schedules, splits=splits, forward_s=forward_s)
    if parts:
        chains = [chain.with_parts(*each) for chain, *each in zip(chains, parts, levels, strict=True)]
    again, in_part = (lambda index, rows, line=line: shares[index] * line.at(rows) for line in (lines[0], lines[-1]))
    chains = [chain.with_seconds(again, in_part) for chain in chains]
    held = storage_bytes(state_tensors(subject.optimizer)) + subject.start_bytes
    whole, sliced = (chain.holding(held) for chain in chains)
    buffers = (buffer for name in names for buffer in subject.model.get_submodule(name).buffers())
    return RecomputableBlocks(
        candidate,
        names,
        whole,
        sliced,
        step_s,
        by_shares(whole.at(subject.rows)),
        has_buffers=next(buffers, None) is not None,
    )


def _traced(
    subject: TrainingLoop, candidate: Candidate
) -> tuple[list[BlockChainModel], list[BlockChainModel], list[list[KeptResults]], list[float]]:
    """Return the chains, the chains with blocks kept in part ([] if not possible), and the blocks' forward seconds.

    The third entry has, for every chain, those with other sets of kept results.
    """
    names = subject.blocks.names
    with subject.start(candidate) as run:
        step = functools.partial(subject.step, run)
        batch = to_device(subject.batch, subject.device)

        def trace(**how: Any) -> list[BlockChainModel]:
            how |= {"autocast": run.autocast, "counts_scratch": subject.device.type == "cpu"}

            def at(rows: tuple[int, int], batches: Sequence[Any]) -> list[BlockChainModel]:
                few, many = (trace_stages(run.model, subject.loss_fn, each, subject.blocks, **how) for each in batches)
                return chains_through(few, many, rows)

            return at_two_sizes(batch, at, subject.batching)

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
            levels = _levels(run.model, names, step, trace)
        except (ModelError, RuntimeError):  # For example, a block overwrites a tensor that is kept.
            parts, levels = [], []
        forward_s = forward_seconds(step, run.model, names, subject.device, steps=_FORWARDS)
    return chains, parts, levels, list(forward_s)


def _levels(
    model: nn.Module, names: Sequence[str], step: Callable[[], object], trace: Callable[..., list[BlockChainModel]]
) -> list[list[KeptResults]]:
    """Return sets of kept results of the blocks, traced with the chain of every kind."""
    survey_operators(model, names, step)  # Allocates memory.
    surveys = survey_operators(model, names, step)
    of_blocks = [levels_of(each.found, each.forward_s, _MOST_LEVELS) for each in surveys]
    found: list[list[KeptResults]] = []
    for place in range(max(map(len, of_blocks))):
        # Blocks with fewer sets repeat their last set.
        chosen = [each[min(place, len(each) - 1)] if each else ((), 0.0) for each in of_blocks]
        results, shares = tuple(kept for kept, _ in chosen), tuple(share for _, share in chosen)
        schedule = tuple(KeptBlock(index, in_part=True, results=kept) for index, kept in enumerate(results))
        traced = trace(prepare=lambda copy, schedule=schedule: use_schedule(copy, names, schedule), drops=False)
        found.append([KeptResults(chain, results, shares) for chain in traced])
    return [list(each) for each in zip(*found, strict=True)]


def in_part_of(number: int) -> Schedule:
    """Return the schedule that keeps only the expensive part of each of `number` blocks."""
    return tuple(KeptBlock(index, in_part=True) for index in range(number))


def runs_in_segments(model: nn.Module, blocks: BlockGraph, step: Callable[[], object]) -> bool:
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
