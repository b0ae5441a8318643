"""A model's blocks as they would run on a CUDA device that is not here: traced, in bytes and operators."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from trimtab.calibrate.subject import Subject
from trimtab.calibrate.tracing import HERE, applied, two_sizes
from trimtab.core.errors import ModelError, TrimtabError
from trimtab.core.profile import Candidate, Profile, TracedBlocks
from trimtab.core.recompute import Kept
from trimtab.core.work import operations
from trimtab.measure.as_cuda import AsCuda
from trimtab.measure.blocks import find_blocks
from trimtab.measure.linked_blocks import find_linked_blocks
from trimtab.measure.stages import Stages, chains_through, trace_stages
from trimtab.measure.step_trace import LossFn, trace_state_bytes
from trimtab.runtime.activation_checkpoint import use_schedule
from trimtab.runtime.precision import autocast


def trace_blocks(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss_fn: LossFn,
    batch: Any,
    candidate: Candidate,
    named: tuple[str, ...] = (),
) -> TracedBlocks | None:
    """Return a candidate's blocks as on CUDA; None where there are none, or they cannot be traced.

    Args:
        model, optimizer, batch: on this CPU, or without memory; of 3 rows or more. named: the blocks, where they are
            not those of the model's tree.
    """
    try:
        with applied(model, optimizer, candidate), AsCuda():
            return _traced(model, optimizer, loss_fn, batch, candidate, named)
    except TrimtabError:
        return None


def _traced(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss_fn: LossFn,
    batch: Any,
    candidate: Candidate,
    named: tuple[str, ...],
) -> TracedBlocks | None:
    blocks = find_linked_blocks(model, loss_fn, batch, find_blocks(model, named))
    number = len(blocks.names)
    if not number:
        return None
    rows, batches = two_sizes(batch)
    forward = functools.partial(autocast, candidate.precision, HERE)

    def trace(**how: Any) -> tuple[Stages, Stages]:
        few, many = (trace_stages(model, loss_fn, each, blocks, autocast=forward, **how) for each in batches)
        return few, many

    few, many = trace()
    chains, in_part = chains_through(few, many, rows), ()
    with contextlib.suppress(ModelError):  # as where a block writes over what is kept
        schedule = tuple(Kept(index, in_part=True) for index in range(number))
        parts = trace(prepare=lambda copy: use_schedule(copy, blocks.names, schedule))
        in_part = operations(parts[0].work, parts[1].work, rows)
        chains = [chain.with_parts(part) for chain, part in zip(chains, chains_through(*parts, rows), strict=True)]
    held = trace_state_bytes(model, optimizer)
    whole, sliced = (chain.holding(held) for chain in chains)
    forwards = tuple(operations(*pair, rows) for pair in list(zip(few.forwards, many.forwards, strict=True))[:number])
    return TracedBlocks(
        candidate, blocks.names, whole, sliced, forwards, operations(few.work, many.work, rows), in_part
    )


def trace_blocks_for_others(
    subject: Subject, profile: Profile, progress: Callable[[str], None]
) -> tuple[TracedBlocks, ...]:
    """Return blocks as on CUDA, for devices that are not here, of whatever else is traced for these."""
    wanted = [each.candidate for each in profile.elsewhere_traces]
    loop = (subject.model, subject.optimizer, subject.loss_fn, subject.batch)
    found = []
    for candidate in wanted:
        progress(f"tracing blocks for other devices: {candidate.describe()}")
        found.append(trace_blocks(*loop, candidate, subject.named_blocks))
    return tuple(each for each in found if each is not None)
