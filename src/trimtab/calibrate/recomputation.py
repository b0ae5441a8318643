"""A loop's chain of blocks as schedules are found for: what each takes, in bytes and seconds."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import nn

from trimtab.core.errors import ModelError
from trimtab.core.recompute import Kept, Schedule
from trimtab.decide.checkpoint_schedule import DearPart, Stage, keep_all
from trimtab.measure.block_seconds import forward_seconds
from trimtab.measure.blocks import find_blocks
from trimtab.measure.chain import find_chain
from trimtab.measure.stages import ChainBytes, trace_stages
from trimtab.measure.step_trace import Autocast, LossFn
from trimtab.measure.timing import time_call
from trimtab.runtime.activation_checkpoint import use_schedule

_TURNS = 5  # steps with all blocks kept in part, each after one with all of them whole


@dataclass(frozen=True)
class Recomputation:
    """What recomputing is decided upon.

    Args:
        blocks: in the order they run in. chain: a stage each, and one for what comes behind them, which is kept.
        held_bytes: before the first stage begins.
    """

    blocks: tuple[str, ...]
    chain: tuple[Stage, ...]
    held_bytes: int


def measure_chain(
    model: nn.Module, loss_fn: LossFn, batch: Any, step: Callable[[], object], autocast: Autocast
) -> Recomputation | None:
    """Return what recomputing a model's blocks would take and save; None where it has none that run once.

    Args:
        batch: of one micro-batch. step: trains on it, forward and backward at the least.

    Raises:
        ModelError: the step cannot be traced.
    """
    device = next(model.parameters()).device
    found = find_chain(model, loss_fn, batch, find_blocks(model))
    if not found.blocks:
        return None
    how = {"autocast": autocast, "counts_scratch": device.type == "cpu"}
    traced = trace_stages(model, loss_fn, batch, found.blocks, **how)  # type: ignore[arg-type]
    seconds = forward_seconds(step, model, found.blocks, device)
    links = [*found.links, False, False]  # the last block's result goes to what is no block
    chain = [
        Stage(s, is_linked=link, **asdict(each))
        for s, each, link in zip((*seconds, 0.0), traced.stages, links, strict=True)
    ]
    whole = Recomputation(found.blocks, tuple(chain), traced.held_bytes)
    trace = functools.partial(trace_stages, model, loss_fn, batch, found.blocks, autocast=autocast)
    return _with_parts(whole, model, step, trace)


def _with_parts(
    whole: Recomputation, model: nn.Module, step: Callable[[], object], trace: Callable[..., ChainBytes]
) -> Recomputation:
    """Add what keeping the dear part of each block takes; where blocks cannot be kept in part, leave it out."""
    number = len(whole.blocks)
    in_part = (*(Kept(index, in_part=True) for index in range(number)), Kept(number))
    try:
        traced = trace(prepare=lambda copy: use_schedule(copy, whole.blocks, in_part))
        more_s = _longer_s(model, whole.blocks, in_part, step)
    except (ModelError, RuntimeError):  # as where a block writes over what is kept
        return whole
    share = max(0.0, more_s) / (sum(stage.forward_s for stage in whole.chain) or 1.0)
    chain = [
        replace(stage, part=DearPart(b.saved_bytes, b.backward_bytes, share * stage.forward_s))
        for stage, b in zip(whole.chain[:-1], traced.stages, strict=False)
    ]
    return replace(whole, chain=(*chain, whole.chain[-1]))


def _longer_s(model: nn.Module, blocks: tuple[str, ...], schedule: Schedule, step: Callable[[], object]) -> float:
    """Return how much longer a step takes by a schedule than with all kept, in turns."""
    device, difference_s = next(model.parameters()).device, []
    for turn in range(_TURNS + 1):
        seconds = []
        for each in (keep_all(len(blocks)), schedule):
            undo = use_schedule(model, blocks, each)
            try:
                seconds.append(time_call(step, device))
            finally:
                undo()
        difference_s += [seconds[1] - seconds[0]] if turn else []
    return float(torch.tensor(difference_s).median())
