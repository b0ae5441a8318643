"""Peak memory of a rank's step, traced on fake tensors with the model replicated or sharded by torch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Protocol
from unittest import mock

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trimtab.core.errors import DependencyError
from trimtab.core.memory_model import PeakMemoryModel
from trimtab.core.trace_alignment import aligned_peaks
from trimtab.measure.fake_tensors import FakeTensors
from trimtab.measure.storage_lifetimes import Autocast, LossFn, Phase, TracedStep, cannot_trace, make_state
from trimtab.measure.storage_tracker import StorageTracker


class ShardingMethod(Protocol):
    """A sharding method: distributes a model over ranks and announces micro-batches."""

    def spread(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Shard a fake model, and let the optimizer hold only the parameters that this rank steps."""

    def begin(self, *, last: bool) -> None:
        """Announce a micro-batch; `last` is True for the window's last one."""


def trace_replica(
    model: nn.Module,
    optimizer: Optimizer,
    loss_fn: LossFn,
    batches: tuple[Any, Any],
    rows: tuple[int, int],
    *,
    share: ShardingMethod,
    num_micro_batches: int = 1,
    autocast: Autocast = contextlib.nullcontext,
    counts_scratch: bool = False,
) -> PeakMemoryModel:
    """Return the peak of a rank that holds the complete model (DDP, ZeRO-1).

    The gradient buckets are held all the time. With a single micro-batch, each gradient is copied into a bucket when
    complete. With several, all gradients are held in addition to the buckets until the last micro-batch has been added.

    Args:
        model: Model, real or fake.
        optimizer: Optimizer, real or fake.
        loss_fn: Loss that returns a mean, or (sum, count).
        batches: Micro-batches with the sizes in `rows`.
        rows: The two micro-batch sizes in samples, smaller first and at least 2.
        share: Sharding of the optimizer state.
        num_micro_batches: Micro-batches per window. More than two need the same memory as two.
        autocast: Context of the forward.
        counts_scratch: True to add operator workspace.

    Raises:
        ModelError: The step cannot be traced.
    """
    steps = _traced(model, optimizer, loss_fn, batches, autocast, share, StorageTracker())
    phases = [step.by_phase(counts_scratch=counts_scratch) for step in steps]
    few, many = ([*step.again(found), found[-1]] for step, found in zip(steps, phases, strict=True))
    peak = _through(few, many, rows)
    return peak.beside(steps[0].gradient_bytes) if num_micro_batches > 1 else peak


def trace_shard(
    model: nn.Module,
    optimizer: Optimizer,
    loss_fn: LossFn,
    batches: tuple[Any, Any],
    rows: tuple[int, int],
    *,
    share: ShardingMethod,
    num_micro_batches: int = 1,
    autocast: Autocast = contextlib.nullcontext,
    counts_scratch: bool = False,
) -> PeakMemoryModel:
    """Return the peak of a rank that holds shards of the parameters (FSDP2).

    Other arguments are those of `trace_replica`.

    Args:
        num_micro_batches: Micro-batches per window. More than three need the same memory as three.
    """
    device = next(model.parameters()).device.type
    with ShardStorages(has_copies=device == "cpu" and counts_scratch).watching() as storages:
        steps = _traced(model, optimizer, loss_fn, batches, autocast, share, storages, num_micro_batches, warms=True)
    few, many = (step.by_phase(counts_scratch=counts_scratch) for step in steps)
    return _through(few, many, rows)


def _through(few: list[Phase], many: list[Phase], rows: tuple[int, int]) -> PeakMemoryModel:
    parts = [
        aligned_peaks(ours, theirs, our_kinds, their_kinds)
        for (ours, our_kinds), (theirs, their_kinds) in zip(few, many, strict=True)
    ]
    return PeakMemoryModel.through([v for part, _ in parts for v in part], [v for _, part in parts for v in part], rows)


def _traced(
    model: nn.Module,
    optimizer: Optimizer,
    loss_fn: LossFn,
    batches: tuple[Any, Any],
    autocast: Autocast,
    share: ShardingMethod,
    storages: StorageTracker,
    num_micro_batches: int = 1,
    *,
    warms: bool = False,
) -> list[TracedStep]:
    """Trace a step for each batch.

    Args:
        warms: True to run a step first, which creates the memory that is kept from then on.
    """
    fakes, steps = FakeTensors(), list[TracedStep]()
    try:
        model, optimizer = fakes.copy((model, optimizer))
        left = [fakes.copy(batch) for batch in batches]
        with fakes, storages:
            share.spread(model, optimizer)
            make_state(optimizer, storages)
            if warms:
                TracedStep(model, optimizer, storages, left[0]).run(
                    loss_fn, left[0], autocast, num_micro_batches, share.begin
                )
            while left:
                steps.append(TracedStep(model, optimizer, storages, left[0], first=steps[0] if steps else None))
                steps[-1].run(loss_fn, left[0], autocast, num_micro_batches, share.begin)
                del left[0]  # freed here, because the next step does not hold it
    except Exception as error:  # an arbitrary model may use operators without a fake implementation
        raise cannot_trace(error) from error
    return steps


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
        if self._has_copies and func in _copying():
            self._come_and_go(max(each.numel() * each.element_size() for each in args[:2]))
        return result

    def _come_and_go(self, num_bytes: int) -> None:
        self.sizes.append(num_bytes)
        number = len(self.sizes) - 1
        self._now.events += [(number, 1), (number, -1)]

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
        """Record the storages that FSDP2 frees and reallocates, by patching two private functions of torch.

        Raises:
            DependencyError: This torch version has no such functions.
        """
        try:
            from torch.distributed.fsdp._fully_shard import _fsdp_param, _fsdp_param_group
        except ImportError:
            raise _unknown_torch() from None
        if not (hasattr(_fsdp_param, "alloc_storage") and hasattr(_fsdp_param, "free_storage")):
            raise _unknown_torch()
        with contextlib.ExitStack() as patches:
            for module in (_fsdp_param, _fsdp_param_group):
                for name, ours in (("alloc_storage", self._allocate), ("free_storage", self._free)):
                    if hasattr(module, name):
                        patches.enter_context(mock.patch.object(module, name, ours))
            yield self


def _copying() -> tuple[Any, ...]:
    operators = torch.ops.c10d
    return (operators._reduce_scatter_base_.default, operators._allgather_base_.default)


def _unknown_torch() -> DependencyError:
    return DependencyError(
        "torch",
        got=torch.__version__,
        expected="2.13",
        problem=f"The memory of FSDP2 cannot be traced with torch {torch.__version__}.",
        hint="Install torch 2.13.",
        code="dependency.torch_version",
    )
