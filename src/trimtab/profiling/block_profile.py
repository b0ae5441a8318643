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

from trimtab.core.block_costs import BlockChainModel, KeptResults, fastest
from trimtab.core.errors import ModelError
from trimtab.core.recompute_schedule import EVERY_BLOCK, KeptBlock, RecomputedSegment, Schedule, schedule_of
from trimtab.measure.block_memory import chains_through, trace_stages
from trimtab.measure.blocks import BlockGraph, hook_blocks
from trimtab.measure.memory_trace import Prepare, as_it_is, trace_update_bytes
from trimtab.measure.timing import clock_s, seconds_between, stamp, synchronize
from trimtab.planner.recompute_cost import keep_all
from trimtab.planner.recompute_solver import by_shares
from trimtab.plans.profile import Candidate, RecomputableBlocks
from trimtab.profiling.candidate_traces import at_two_sizes, has_two_sizes, recurrent_layer
from trimtab.profiling.measurement_notes import Notes, describe
from trimtab.profiling.training_loop import TrainingLoop
from trimtab.profiling.trials import step_until_applied, timer
from trimtab.settings.fp32_modules import prepare_copy
from trimtab.state.peak_memory import state_tensors, storage_bytes
from trimtab.techniques.activation_checkpointing import survey_operators, use_schedule
from trimtab.techniques.optimizer_in_backward import refusal_of
from trimtab.training.batch import to_device

T = TypeVar("T")
_MEASURING_S = 1.0  # Seconds per schedule, if more than the fewest steps fit.
_MOST = 10
_OTHERS = 14  # Steps for finding loss scales, trying blocks and timing their forwards.
_MOST_LEVELS = 4  # Sets of kept results traced for each block, in addition to matrix products and attention.
_SMALLER = 4  # Ratio of the larger to the smaller micro-batch.
# Lower bound, as a fraction of the blocks' forward time, for recomputation of whole blocks, because the measured
# difference may be lost in noise.
_LEAST = 0.5
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
    subject: TrainingLoop, candidate: Candidate, *, splits: bool, forward_s: float
) -> tuple[float, SecondsPerSample]:
    """Return the seconds of a step without recomputation, and the extra seconds per micro-batch with all recomputed.

    Args:
        forward_s: forward seconds of the blocks per micro-batch.
    """
    rows = min(candidate.micro_batch, subject.rows)
    sizes = (rows, -(-rows // _SMALLER)) if splits and rows > 1 else (rows,)
    found = [_longer(subject, candidate.having(micro_batch=size)) for size in sizes]
    each_s = [longer * size / subject.rows for size, (_, longer) in zip(sizes, found, strict=True)]
    least_s = [_LEAST * forward_s * size / rows for size in sizes]
    return found[0][0], line_through([*zip(sizes, map(max, each_s, least_s), strict=True)])


def num_steps(step_s: float) -> int:
    """Return the approximate number of steps for measuring the blocks of a candidate with `step_s` seconds per step."""
    times = 2 * 2 + 1  # Two sizes; everything kept and recomputed; and measurement of the operators.
    return times * (1 + _turns(step_s)) + _OTHERS


def _turns(step_s: float) -> int:
    return max(2, min(_MOST, int(_MEASURING_S / step_s))) if step_s > 0 else _MOST


def _longer(subject: TrainingLoop, candidate: Candidate) -> tuple[float, float]:
    """Return the seconds of a step that keeps all activations, and the extra seconds if all blocks recompute them."""
    names = subject.blocks.names
    with subject.start(candidate) as run:
        step = functools.partial(subject.step, run)
        step_until_applied(run, subject)
        timed = functools.partial(timer(candidate), step, subject.device)
        ways = [keep_all(len(names)), schedule_of(EVERY_BLOCK, len(names))]
        taken = [
            [with_schedule(run.model, names, each, timed) for each in (ways if turn % 2 else reversed(ways))]
            for turn in range(1 + _turns(timed()))
        ]
    ordered = (each if turn % 2 else each[::-1] for turn, each in enumerate(taken))
    _, *counted = ordered  # The heap grows in the first round.
    return statistics.median(own for own, _ in counted), statistics.median(other - own for own, other in counted)


def with_schedule(model: nn.Module, names: tuple[str, ...], schedule: Schedule, call: Callable[[], T]) -> T:
    """Return the result of a call while the model's blocks use a recomputation schedule."""
    undo = use_schedule(model, names, schedule)
    try:
        return call()
    finally:
        undo()


def measure_recomputable(
    subject: TrainingLoop, candidate: Candidate, *, splits: bool = True, notes: Notes | None = None
) -> RecomputableBlocks:
    """Return the costs and savings of recomputing a candidate's blocks, or the reason for failing.

    Takes training steps; the caller restores the state. `splits`: the batch may be split into more micro-batches.
    `notes` receives the reason if only whole blocks can be recomputed.
    """
    try:
        return _measured(subject, candidate, Notes() if notes is None else notes, splits=splits)
    except Exception as error:  # For example, a block overwrites its input.
        return RecomputableBlocks(candidate, refusal=describe(error), code="recompute.failed")


def _measured(subject: TrainingLoop, candidate: Candidate, notes: Notes, *, splits: bool) -> RecomputableBlocks:
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
    chains, seconds = _traced(subject, candidate, notes)
    forward_s = sum(seconds)
    shares = [each / forward_s if forward_s > 0 else 1 / len(names) for each in seconds]
    step_s, line = measure_seconds(subject, candidate, splits=splits, forward_s=forward_s)
    chains = [chain.with_seconds(lambda index, rows: shares[index] * line.at(rows)) for chain in chains]
    held = storage_bytes(state_tensors(subject.optimizer)) + subject.start_bytes
    whole, sliced, *early = (chain.holding(held) for chain in chains)
    buffers = (buffer for name in names for buffer in subject.model.get_submodule(name).buffers())
    return RecomputableBlocks(
        candidate,
        names,
        whole,
        sliced,
        step_s,
        by_shares(whole.at(subject.rows)),
        has_buffers=next(buffers, None) is not None,
        early=early[0] if early else None,
    )


def _traced(subject: TrainingLoop, candidate: Candidate, notes: Notes) -> tuple[list[BlockChainModel], list[float]]:
    """Return the chains, with the costs of blocks kept in part if possible, and the blocks' forward seconds."""
    names = subject.blocks.names
    with subject.start(candidate) as run:
        step = functools.partial(subject.step, run)
        batch = to_device(subject.batch, subject.device)

        prepare_precision = prepare_copy(candidate.fp32_modules, subject.device.type)
        can_step = not refusal_of(subject.optimizer)
        updates = trace_update_bytes(run.model, subject.optimizer) if can_step else None

        def trace(prepare: Prepare = as_it_is, **how: Any) -> list[BlockChainModel]:
            def prepared(copy: nn.Module) -> None:
                prepare_precision(copy)
                prepare(copy)

            how |= {"autocast": run.autocast, "counts_scratch": subject.device.type == "cpu", "prepare": prepared}
            how["updates"] = updates

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

        def with_parts() -> list[BlockChainModel]:
            with_schedule(run.model, names, in_part_of(len(names)), step)
            parts = _parts(run.model, names, step, trace)
            return [chain.with_parts(each) for chain, each in zip(chains, parts, strict=True)]

        # For example, a block overwrites a tensor that is kept; whole blocks may be recomputed nevertheless.
        what = "only whole blocks are recomputed, no operators inside of them"
        chains = notes.attempt("recompute.whole_blocks", what, with_parts, chains)
        forward_s = forward_seconds(step, run.model, names, subject.device, steps=_FORWARDS)
    return chains, list(forward_s)


def _parts(
    model: nn.Module, names: Sequence[str], step: Callable[[], object], trace: Callable[..., list[BlockChainModel]]
) -> Iterator[list[KeptResults]]:
    """Yield the sets of kept results of the blocks, for each chain of `trace`."""
    start = clock_s()
    survey_operators(model, names, step)  # The heap grows in the first step.
    surveys = [survey_operators(model, names, step) for _ in range(_turns(clock_s() - start))]
    levels = [fastest(each).levels(_MOST_LEVELS) for each in zip(*surveys, strict=True)]
    found = []
    for place in range(max(map(len, levels))):
        # Blocks with fewer sets repeat their last set.
        results, shares = zip(*(each[min(place, len(each) - 1)] for each in levels), strict=True)
        schedule = tuple(KeptBlock(index, in_part=True, results=kept) for index, kept in enumerate(results))
        traced = trace(prepare=functools.partial(_prepare, names, schedule), drops=False)
        found.append([KeptResults(chain, results, shares) for chain in traced])
    yield from map(list, zip(*found, strict=True))


def _prepare(names: Sequence[str], schedule: Schedule, copy: nn.Module) -> None:
    use_schedule(copy, names, schedule)


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
