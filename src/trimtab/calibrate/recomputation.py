"""A loop's chain of blocks as schedules are found for: what each takes, in bytes and seconds."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from trimtab.calibrate.failures import describe
from trimtab.calibrate.subject import Subject
from trimtab.calibrate.tracing import MIN_ROWS, recurrent_layer, two_sizes
from trimtab.calibrate.trials import step_until_applied, timer
from trimtab.core.chain import Chain, ChainModel, DearPart
from trimtab.core.errors import ModelError
from trimtab.core.profile import Candidate, Recomputable
from trimtab.core.recompute import EVERY_BLOCK, Kept, Schedule, Segment, schedule_of
from trimtab.decide.checkpoint_schedule import keep_all
from trimtab.decide.optimal_schedule import by_shares
from trimtab.measure.block_seconds import forward_seconds
from trimtab.measure.linked_blocks import LinkedBlocks
from trimtab.measure.memory import storage_bytes
from trimtab.measure.stages import trace_stages
from trimtab.measure.step_trace import LossFn
from trimtab.runtime.activation_checkpoint import use_schedule

T = TypeVar("T")
_MEASURING_S = 1.5  # of a step's repetitions, where more than the fewest fit
_MOST = 6


def measure_recomputable(subject: Subject, candidate: Candidate) -> Recomputable:
    """Return what recomputing the blocks of a candidate's model takes and saves, or why it cannot be told.

    Trains: the caller puts back what was before.
    """
    try:
        return _measured(subject, candidate)
    except Exception as error:  # whatever the model does with its blocks, as writing over what goes into one
        return Recomputable(candidate, refusal=describe(error))


def _measured(subject: Subject, candidate: Candidate) -> Recomputable:
    if not subject.blocks.names:
        return Recomputable(candidate, refusal="the model has no blocks that run once in a forward")
    recurrent = recurrent_layer(subject.model)
    if recurrent is not None:
        given = f"its {type(recurrent).__name__} keeps more for its backward than tensors show"
        return Recomputable(candidate, refusal=f"what recomputing saves cannot be told: {given}")
    if subject.rows < MIN_ROWS:
        return Recomputable(candidate, refusal=f"a batch of {subject.rows} cannot be traced at two sizes")
    with subject.start(candidate) as run:

        def step() -> None:
            run.train_step(run.window(subject.batch), subject.loss_fn)

        sizes, batches = two_sizes(subject.batch)
        how = {"autocast": run.autocast, "counts_scratch": subject.device.type == "cpu"}
        trace = functools.partial(trace_chain, run.model, subject.loss_fn, batches, sizes, subject.blocks)
        chains = trace(**how)
        names = subject.blocks.names
        step_until_applied(run, subject)
        _with(run.model, names, schedule_of(EVERY_BLOCK, len(names)), step)  # or it says why not
        if not _runs_in_segments(run.model, subject.blocks, step):
            chains = [_unlinked(chain) for chain in chains]
        timed = functools.partial(timer(candidate), step, subject.device)
        repeats = max(1, min(_MOST, int(_MEASURING_S / timed())))
        step_s = statistics.median(timed() for _ in range(repeats))
        longer = subject.rows / min(candidate.micro_batch, subject.rows)  # a forward of the whole batch
        forward_s = forward_seconds(step, run.model, names, subject.device, steps=repeats)
        chains = [_with_seconds(chain, [longer * each for each in forward_s]) for chain in chains]
        chains = _with_parts(chains, run.model, names, timed, trace, repeats, autocast=run.autocast)
        held = _state_bytes(subject.optimizer) + subject.start_bytes
    whole, sliced = (_holding(chain, held) for chain in chains)
    return Recomputable(candidate, names, whole, sliced, step_s, by_shares(whole.at(subject.rows)))


def _runs_in_segments(model: nn.Module, blocks: LinkedBlocks, step: Callable[[], None]) -> bool:
    """Return whether segments of several blocks run; those of a block with hooks of its own do not."""
    pairs = (index for index, is_linked in enumerate(blocks.links) if is_linked)
    first = next(pairs, None)
    if first is None:
        return True
    kept = [Kept(index) for index in range(len(blocks.names))]
    try:
        _with(model, blocks.names, (*kept[:first], Segment(tuple(kept[first : first + 2])), *kept[first + 2 :]), step)
    except ModelError:
        return False
    return True


def _unlinked(model: ChainModel) -> ChainModel:
    few, many = (
        replace(chain, stages=tuple(replace(stage, is_linked=False) for stage in chain.stages))
        for chain in (model.few, model.many)
    )
    return replace(model, few=few, many=many)


def trace_chain(
    model: nn.Module, loss_fn: LossFn, batches: Sequence[Any], rows: tuple[int, int], blocks: LinkedBlocks, **how: Any
) -> list[ChainModel]:
    """Return the chain of a first micro-batch, and of a later one, without seconds; `how` as of `trace_stages`.

    Args:
        batches: of `rows`, the smaller one first.

    Raises:
        ModelError: the step cannot be traced.
    """
    few, many = (trace_stages(model, loss_fn, batch, blocks, **how) for batch in batches)
    return [ChainModel(*pair, rows) for pair in zip(few, many, strict=True)]


def _with_seconds(model: ChainModel, forward_s: Sequence[float]) -> ChainModel:
    seconds = (*forward_s, 0.0)
    stages = (replace(stage, forward_s=each) for stage, each in zip(model.many.stages, seconds, strict=True))
    return replace(model, many=replace(model.many, stages=tuple(stages)))


def _with_parts(
    chains: list[ChainModel],
    model: nn.Module,
    names: tuple[str, ...],
    timed: Callable[[], float],
    trace: Callable[..., list[ChainModel]],
    turns: int,
    **how: Any,
) -> list[ChainModel]:
    """Add what keeping the dear part of each block takes; where blocks cannot be kept in part, leave it out."""
    number = len(names)
    in_part = (*(Kept(index, in_part=True) for index in range(number)), Kept(number))
    try:
        traced = trace(prepare=lambda copy: use_schedule(copy, names, in_part), **how)
        more_s = _longer_s(model, names, in_part, timed, turns)
    except (ModelError, RuntimeError):  # as where a block writes over what is kept
        return chains
    whole_s = sum(stage.forward_s for stage in chains[0].many.stages) or 1.0
    return [_with_part(chain, parts, max(0.0, more_s) / whole_s) for chain, parts in zip(chains, traced, strict=True)]


def _with_part(model: ChainModel, traced: ChainModel, share: float) -> ChainModel:
    """Return the chain with the dear parts as they were traced; each takes this share of its forward again."""

    def part_of(chain: Chain, parts: Chain) -> Chain:
        *blocks, last = chain.stages
        found = (
            replace(
                stage, part=DearPart(part.saved_bytes, part.backward_bytes, share * stage.forward_s, part.passing_bytes)
            )
            for stage, part in zip(blocks, parts.stages, strict=False)
        )
        return replace(chain, stages=(*found, last))

    return replace(model, few=part_of(model.few, traced.few), many=part_of(model.many, traced.many))


def _longer_s(
    model: nn.Module, names: tuple[str, ...], schedule: Schedule, timed: Callable[[], float], turns: int
) -> float:
    """Return how much longer a step takes by a schedule than with all kept, in turns."""
    difference_s = []
    for turn in range(turns + 1):
        kept_s, taken_s = (_with(model, names, each, timed) for each in (keep_all(len(names)), schedule))
        difference_s += [taken_s - kept_s] if turn else []
    return statistics.median(difference_s)


def _with(model: nn.Module, names: tuple[str, ...], schedule: Schedule, call: Callable[[], T]) -> T:
    undo = use_schedule(model, names, schedule)
    try:
        return call()
    finally:
        undo()


def _state_bytes(optimizer: torch.optim.Optimizer) -> int:
    values = (value for state in optimizer.state.values() for value in state.values())
    return storage_bytes(value for value in values if isinstance(value, Tensor))


def _holding(model: ChainModel, more_bytes: int) -> ChainModel:
    few, many = (replace(each, held_bytes=each.held_bytes + more_bytes) for each in (model.few, model.many))
    return replace(model, few=few, many=many)
