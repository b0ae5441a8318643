"""Peak memory of a rank per ZeRO stage without other ranks: torch's own sharding, traced on fake tensors."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import SGD, Optimizer

from trimtab.calibrate.candidate_traces import Batches, Sizes, apply_candidate, at_two_sizes, has_two_sizes
from trimtab.core.memory_model import PeakMemoryModel
from trimtab.core.parallelism import Parallelism
from trimtab.core.profile import Candidate
from trimtab.core.rank_peak_memory import WAYS, RankPeakMemory, Way
from trimtab.decide.rank_profile import steps_shards_fused
from trimtab.distributed.fake_process_group import absent_ranks, mesh_of_all
from trimtab.distributed.rebind_optimizer import names_of
from trimtab.measure.rank_memory_trace import trace_replica, trace_shard
from trimtab.measure.storage_lifetimes import Autocast, LossFn, cannot_trace
from trimtab.runtime.precision import autocast as autocast_of

# Kinds of micro-batches with different memory: first, middle, last.
_DIFFERENT = 3


def trace_rank(
    model: nn.Module,
    optimizer: Optimizer,
    loss_fn: LossFn,
    batches: tuple[Any, Any],
    rows: tuple[int, int],
    how: Parallelism,
    *,
    num_micro_batches: int = 1,
    autocast: Autocast = contextlib.nullcontext,
    counts_scratch: bool = False,
) -> PeakMemoryModel:
    """Return the peak memory of a rank's step as a function of its micro-batch size.

    Args:
        model: model of the loop.
        optimizer: optimizer of the loop.
        loss_fn: loss function of the loop.
        batches: two batches, the smaller first, with at least two samples.
        rows: sizes of `batches`.
        how: parallelism.
        num_micro_batches: micro-batches per step; more than three need no more memory than three.
        autocast: autocast context of the forward.
        counts_scratch: as in `trimtab.measure.memory_trace.trace_step`.

    Raises:
        ModelError: the step cannot be traced.
        ValueGivenError: a single rank.
        DependencyError: torch has no fake process group.
    """
    loop, many = (model, optimizer, loss_fn, batches, rows), min(num_micro_batches, _DIFFERENT)
    seen: dict[str, Any] = {"num_micro_batches": many, "autocast": autocast, "counts_scratch": counts_scratch}
    with absent_ranks(how.ranks):
        if how.zero_stage < 2:
            return trace_replica(*loop, share=_Part(model, optimizer, how), **seen)
        mesh = mesh_of_all(next(model.parameters()).device.type, how.ranks)
        return trace_shard(*loop, share=_Shard(how, mesh), **seen)


def trace_ways(
    model: nn.Module,
    optimizer: Optimizer,
    loss_fn: LossFn,
    batch: Any,
    candidate: Candidate,
    ranks: int,
    *,
    ways: Sequence[Way] = WAYS,
    counts_scratch: bool = False,
) -> tuple[RankPeakMemory, ...]:
    """Return a candidate's peaks for several ways to shard a model; empty if the batch has too few samples to split.

    Args:
        model: model of the loop.
        optimizer: optimizer of the loop.
        loss_fn: loss function of the loop.
        batch: a rank's part of a batch.
        candidate: settings.
        ranks: world size.
        ways: ways to shard the model.
        counts_scratch: as in `trimtab.measure.memory_trace.trace_step`.

    Raises:
        ModelError: the step cannot be traced.
    """
    if not has_two_sizes(batch):
        return ()
    forward = functools.partial(autocast_of, candidate.precision, next(model.parameters()).device)
    seen: dict[str, Any] = {"autocast": forward, "counts_scratch": counts_scratch}

    def peak(way: Way, number: int) -> PeakMemoryModel:
        stage, reduces_once = way
        how = Parallelism(ranks, stage, reduces_once=reduces_once)

        def trace(rows: Sizes, batches: Batches) -> PeakMemoryModel:
            return trace_rank(model, optimizer, loss_fn, batches, rows, how, num_micro_batches=number, **seen)

        return at_two_sizes(batch, trace)

    @functools.cache
    def whole(stage: int) -> PeakMemoryModel:  # with one micro-batch, gradients are reduced once in either way
        return peak((stage, True), 1)

    def of(way: Way) -> RankPeakMemory:
        fuses = way[0] < 2 or steps_shards_fused(type(optimizer).__name__)
        own = candidate if fuses else replace(candidate, fused_optimizer=False)
        with apply_candidate(model, optimizer, own):
            return RankPeakMemory(candidate, way, whole(way[0]), peak(way, _DIFFERENT))

    return tuple(map(of, ways))


class _Part:
    """Rank with the whole model; at stage 1, the rank with the largest part of the optimizer state."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, how: Parallelism) -> None:
        self._kept = _largest_part(model, optimizer) if how.zero_stage == 1 else None

    def spread(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Restrict the optimizer to the rank's parameters."""
        if self._kept is None:
            return
        part = {parameter for name, parameter in model.named_parameters() if name in self._kept}
        for group in optimizer.param_groups:
            group["params"] = [each for each in group["params"] if each in part]
        for parameter in [each for each in optimizer.state if each not in part]:
            del optimizer.state[parameter]

    def begin(self, *, last: bool) -> None:
        """Do nothing: DDP's buckets hold gradients in any case."""


def _largest_part(model: nn.Module, optimizer: Optimizer) -> set[str]:
    """Return the names of the parameters in the largest partition of torch's ZeroRedundancyOptimizer.

    Raises:
        ModelError: ZeroRedundancyOptimizer refuses the parameters.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # raised by torch's own import
        from torch.distributed.optim import ZeroRedundancyOptimizer

    groups = [{"params": list(group["params"])} for group in optimizer.param_groups]
    try:
        dealt = ZeroRedundancyOptimizer(groups, optimizer_class=SGD, lr=0.0)._partition_parameters()  # type: ignore[attr-defined]
    except Exception as error:  # for instance parameters of different dtypes
        raise cannot_trace(error) from error
    parts = [[parameter for group in part for parameter in group["params"]] for part in dealt]
    largest = set(max(parts, key=lambda part: sum(each.numel() for each in part)))
    return {name for name, parameter in model.named_parameters() if parameter in largest}


class _Shard:
    """Rank with a shard of every parameter, by FSDP2."""

    def __init__(self, how: Parallelism, mesh: DeviceMesh) -> None:
        from trimtab.distributed.fsdp2 import FsdpShards

        dtypes = {"reduce_dtype": how.reduce_dtype, "gather_dtype": how.gather_dtype}
        self._shards = FsdpShards(how.zero_stage, mesh, reduces_once=how.reduces_once, **dtypes)
        self.begin = self._shards.begin

    def spread(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Shard the model, and point the optimizer at the shards, without state."""
        names = names_of(model, optimizer)
        self._shards.make(model)
        shards = dict(model.named_parameters())
        optimizer.state.clear()
        for group, held in zip(optimizer.param_groups, names, strict=True):
            group["params"] = [shards[name] for name in held]
