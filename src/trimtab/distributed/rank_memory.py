"""Peak memory of a rank per ZeRO stage without other ranks: torch's own sharding, traced on fake tensors."""

from __future__ import annotations

import contextlib
import functools
import sys
import warnings
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.optim import SGD, Optimizer

from trimtab.core.errors import DependencyError, ValueGivenError
from trimtab.core.memory_model import PeakMemoryModel, aligned_peaks
from trimtab.core.parallelism import Parallelism
from trimtab.distributed.fsdp2 import names_of
from trimtab.measure.fake_tensors import FakeTensors
from trimtab.measure.memory_trace import Autocast, LossFn, Phase, TracedStep, cannot_trace, make_state
from trimtab.measure.storage_tracker import StorageTracker
from trimtab.planner.multi_rank_plan import WAYS, RankPeakMemory, Way, steps_shards_fused
from trimtab.plans.profile import Candidate
from trimtab.profiling.candidate_traces import Batches, Sizes, apply_candidate, at_two_sizes, has_two_sizes
from trimtab.techniques.mixed_precision import autocast as autocast_of

# Kinds of micro-batches with different memory: first, middle, last.
_DIFFERENT = 3
# Groups are named by a running number, from 0 in the job, and looked up by name outside of the replaced tables.
_NUMBER = 10**6
# DTensor caches results by mesh, and treats meshes of the same shape and names as equal.
_MESH_NAMES = ("ranks_that_are_absent",)
_TABLES = ("_pg_map", "_pg_names", "_pg_group_ranks", "_pg_backend_config", "_tags_to_pg", "_pg_to_tag")
_NEEDED = ("_World", "_update_default_pg", "_unregister_process_group", "_backend", "_default_pg_init_method")


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
    """Return a candidate's peaks per way to shard, none for too few samples; `ModelError` if it cannot be traced."""
    if not has_two_sizes(batch):
        return ()
    forward = functools.partial(autocast_of, candidate.precision, next(model.parameters()).device)
    seen: dict[str, Any] = {"autocast": forward, "counts_scratch": counts_scratch}

    def peak(way: Way, number: int) -> PeakMemoryModel:
        how = Parallelism(ranks, way[0], reduces_once=way[1])

        def trace(rows: Sizes, batches: Batches) -> PeakMemoryModel:
            return trace_rank(model, optimizer, loss_fn, batches, rows, how, num_micro_batches=number, **seen)

        return at_two_sizes(batch, trace)

    @functools.cache
    def whole(stage: int) -> PeakMemoryModel:  # with one micro-batch, gradients are reduced once in either way
        return peak((stage, True), 1)

    def of(way: Way) -> RankPeakMemory:
        fuses = way[0] < 2 or steps_shards_fused(type(optimizer).__name__)
        own = candidate if fuses else candidate.having(fused_optimizer=False)
        with apply_candidate(model, optimizer, own):
            return RankPeakMemory(candidate, way, whole(way[0]), peak(way, _DIFFERENT))

    return tuple(map(of, ways))


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
        model: real or fake model, as the optimizer.
        loss_fn: loss that returns a mean, or (sum, count).
        batches: micro-batches with the sizes in `rows`.
        rows: two micro-batch sizes in samples, smaller first and at least 2.
        num_micro_batches: micro-batches per step; more than three need no more memory than three.
        counts_scratch: add operator workspace.

    Raises:
        ModelError: the step cannot be traced.
        ValueGivenError: a single rank.
        DependencyError: torch has no fake process group.
    """
    loop, device = (model, optimizer, loss_fn, batches, autocast), next(model.parameters()).device.type
    with absent_ranks(how.ranks):
        if how.zero_stage >= 2:
            share, number = _Shard(how, mesh_of_all(device, how.ranks)), min(num_micro_batches, _DIFFERENT)
            with ShardStorages(has_copies=device == "cpu" and counts_scratch).watching() as storages:
                steps = _traced(*loop, share, storages, number, warms=True)
            return _through([step.by_phase(counts_scratch=counts_scratch) for step in steps], rows)
        steps = _traced(*loop, _Part(model, optimizer, how), StorageTracker(), 1, warms=False)
        phases = [step.by_phase(counts_scratch=counts_scratch) for step in steps]
        # DDP holds its buckets all the time, and copies each complete gradient into a bucket. With several
        # micro-batches, all gradients are held in addition until the last micro-batch has been added.
        peak = _through([[*step.again(own), own[-1]] for step, own in zip(steps, phases, strict=True)], rows)
        return peak.beside(steps[0].gradient_bytes) if num_micro_batches > 1 else peak


def _through(phases: list[list[Phase]], rows: tuple[int, int]) -> PeakMemoryModel:
    """Return the model of the peaks in the phases of a small and a large micro-batch."""
    parts = [
        aligned_peaks(ours, theirs, our_kinds, their_kinds)
        for (ours, our_kinds), (theirs, their_kinds) in zip(*phases, strict=True)
    ]
    return PeakMemoryModel.through([v for part, _ in parts for v in part], [v for _, part in parts for v in part], rows)


def _traced(
    model: nn.Module,
    optimizer: Optimizer,
    loss_fn: LossFn,
    batches: tuple[Any, Any],
    autocast: Autocast,
    share: _Part | _Shard,
    storages: StorageTracker,
    num_micro_batches: int,
    *,
    warms: bool,
) -> list[TracedStep]:
    """Trace a step for each batch; `warms`: after a step that creates the memory that is kept from then on."""
    fakes, steps = FakeTensors(), list[TracedStep]()
    how = (autocast, num_micro_batches, share.begin)
    try:
        model, optimizer = fakes.copy((model, optimizer))
        left = [fakes.copy(batch) for batch in batches]
        with fakes, storages:
            share.spread(model, optimizer)
            make_state(optimizer, storages)
            if warms:
                TracedStep(model, optimizer, storages, left[0]).run(loss_fn, left[0], *how)
            while left:
                steps.append(TracedStep(model, optimizer, storages, left[0], first=steps[0] if steps else None))
                steps[-1].run(loss_fn, left[0], *how)
                del left[0]  # freed here, because the next step does not hold it
    except Exception as error:  # an arbitrary model may use operators without a fake implementation
        raise cannot_trace(error) from error
    return steps


class _Part:
    """Rank with the whole model; at stage 1, the rank with the largest part of the optimizer state."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, how: Parallelism) -> None:
        self._kept = _largest_part(model, optimizer) if how.zero_stage == 1 else None

    def spread(self, model: nn.Module, optimizer: Optimizer) -> None:
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
    """Return the names of the parameters in the largest partition of torch's ZeroRedundancyOptimizer."""
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
        names = names_of(model, optimizer)
        self._shards.make(model)
        shards = dict(model.named_parameters())
        optimizer.state.clear()
        for group, held in zip(optimizer.param_groups, names, strict=True):
            group["params"] = [shards[name] for name in held]


class ShardStorages(StorageTracker):
    """Storages of FSDP2 models, including unsharded parameters: FSDP2 frees their storage but keeps the tensors.

    Args:
        has_copies: True if collectives copy the data they send, as Gloo does.
    """

    def __init__(self, *, has_copies: bool) -> None:
        super().__init__()
        from torch.distributed.tensor import DTensor

        self._dtensor: Any = DTensor
        self._has_copies = has_copies
        self._freed: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(each, self._dtensor) for each in types):
            return NotImplemented  # DTensor calls operators on its local shards, which are recorded
        result = super().__torch_dispatch__(func, types, args, kwargs)
        operators = torch.ops.c10d
        copying = (operators._reduce_scatter_base_.default, operators._allgather_base_.default)
        if self._has_copies and func in copying:
            number = len(self.sizes)
            self.sizes.append(max(each.numel() * each.element_size() for each in args[:2]))
            self._now.events += [(number, 1), (number, -1)]
        return result

    def number_of(self, tensor: Tensor) -> int:
        """Return the number of a tensor's storage; for a DTensor, that of its local shard."""
        return super().number_of(tensor._local_tensor if isinstance(tensor, self._dtensor) else tensor)

    @property
    def alive(self) -> set[int]:
        """Numbers of the storages that are alive and not freed by FSDP2."""
        return super().alive - self._freed

    def _died(self, key: int, number: int) -> None:
        if number in self._freed:
            self._freed.remove(number)
            del self._alive[key]
        else:
            super()._died(key, number)

    def _free(self, tensor: Tensor) -> None:
        number = self.number_of(tensor)
        if number not in self._freed:
            self._freed.add(number)
            self._now.events.append((number, -1))

    def _allocate(self, tensor: Tensor) -> None:
        number = self.number_of(tensor)
        if number in self._freed:
            self._freed.remove(number)
            self._now.events.append((number, 1))

    @contextlib.contextmanager
    def watching(self) -> Iterator[ShardStorages]:
        """Record what FSDP2 frees and reallocates, by patching torch's private functions; `DependencyError` without."""
        try:
            from torch.distributed.fsdp._fully_shard import _fsdp_param, _fsdp_param_group
        except ImportError:
            raise _unknown_torch("FSDP2 is in an unknown module") from None
        if not (hasattr(_fsdp_param, "alloc_storage") and hasattr(_fsdp_param, "free_storage")):
            raise _unknown_torch("FSDP2 frees parameters by unknown functions")
        with contextlib.ExitStack() as patches:
            for module in (_fsdp_param, _fsdp_param_group):
                for name, ours in (("alloc_storage", self._allocate), ("free_storage", self._free)):
                    if hasattr(module, name):
                        patches.enter_context(mock.patch.object(module, name, ours))
            yield self


# A fake process group for tracing, without real ranks; the job's groups are restored afterwards.


@contextlib.contextmanager
def absent_ranks(ranks: int) -> Iterator[None]:
    """Act as rank 0 of a fake process group inside the block, also if this process is a rank of a real job.

    The job's groups are set aside, not destroyed, and must not be used inside the block.

    Raises:
        ValueGivenError: a single rank.
        DependencyError: torch has no fake process group, or its groups in an unknown place.
    """
    if ranks < 2:
        hint = "Pass the planned number of ranks; a single process needs no trace of other ranks."
        raise ValueGivenError("ranks", got=str(ranks), expected="2 or more", hint=hint)
    try:
        from torch.testing._internal.distributed.fake_pg import FakeStore
    except ImportError:
        raise _unknown_torch("it has no fake process group") from None
    hook = sys.excepthook
    try:
        with mock.patch.multiple(c10d, **_emptied()):
            try:
                try:
                    c10d.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
                except Exception as error:
                    raise _unknown_torch(f"{type(error).__name__}: {error}") from error
                yield
            finally:
                _forget()
    finally:
        sys.excepthook = hook
        c10d._update_default_pg(c10d._world.default_pg)  # torch stores the rank outside of the replaced tables.


def mesh_of_all(kind: str, ranks: int) -> DeviceMesh:
    """Return a mesh of the fake ranks, distinct from the job's meshes."""
    return init_device_mesh(kind, (ranks,), mesh_dim_names=_MESH_NAMES)


def _emptied() -> dict[str, Any]:
    """Return empty replacements for torch's tables of process groups."""
    if not all(hasattr(c10d, name) for name in (*_TABLES, *_NEEDED, "_world", "_group_count")):
        raise _unknown_torch("its process groups are stored in unknown attributes")
    kept = {name: getattr(c10d, name) for name in ("_backend", "_default_pg_init_method")}
    return {"_world": c10d._World(), "_group_count": _NUMBER, **kept} | {name: {} for name in _TABLES}


def _forget() -> None:
    """Unregister the groups made in the block; torch's own function would destroy all of the job's."""
    for group, name in list(c10d._world.pg_names.items()):
        group.shutdown()
        c10d._unregister_process_group(name)  # type: ignore[attr-defined]


def _unknown_torch(reason: str) -> DependencyError:
    return DependencyError(
        "torch",
        problem=f"trimtab cannot trace the memory of several ranks with torch {torch.__version__} ({reason}).",
        hint="Install torch 2.13.",
        code="torch.version_unsupported",
    )
