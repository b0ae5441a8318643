"""ZeRO stage 0: data parallelism with torch's DDP; gradients are reduced once per step."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from trimtab.distributed.host_gather import RankExchange
from trimtab.plans.plan import Plan
from trimtab.training.backend import Backend
from trimtab.training.gradient_sync import GradientSync

_MIB = 2**20
# DDP's argument for buffer synchronisation; torch 2.13 renamed it.
_NAMES = inspect.signature(DistributedDataParallel).parameters
BUFFERS = "forward_sync_buffers" if "forward_sync_buffers" in _NAMES else "broadcast_buffers"
_IGNORED = "_ddp_params_and_buffers_to_ignore"  # model attribute with names for DDP to ignore
_WHOLE_MIB = 2**30 // _MIB
# First steps in which PowerSGD sends full gradients, because low-rank factors of early gradients are the least accurate
# (the default of 1,000 would cover a whole short run).
_WHOLE_WINDOWS = 10


class DataParallel(Backend):
    """Backend that replicates the model.

    Buffers are local during the run, so that a rank can repeat a step alone; rank 0's buffers are broadcast at the end.
    """

    in_step = False
    may_retry = True

    def __init__(self) -> None:
        self.exchange = RankExchange(None)

    def spread(self, model: nn.Module, optimizer: torch.optim.Optimizer, plan: Plan) -> None:
        """Wrap the model in DDP; parameters and buffers are broadcast from rank 0."""
        self._inner, self.optimizer = model, optimizer
        if plan.memory_layout.value == "channels_last":
            _settle_strides(model)
        own: dict[str, Any] = {"bucket_cap_mb": _bucket_mib(plan), "gradient_as_bucket_view": True, BUFFERS: False}
        with _without_buffers(model):
            self.model = DistributedDataParallel(model, **own)
        self._sync = GradientSync(self.model, self.exchange)
        self._sync.require_all(optimizer, of_user=False)
        broadcast_buffers(model)
        if plan.powersgd_rank.value is not None:
            power = powerSGD_hook.PowerSGDState(
                None, matrix_approximation_rank=int(plan.powersgd_rank.value), start_powerSGD_iter=_WHOLE_WINDOWS
            )
            self.model.register_comm_hook(power, powerSGD_hook.powerSGD_hook)
        elif plan.reduce_dtype.value == "bf16":
            self.model.register_comm_hook(None, reduce_in_bf16)

    def settle(self) -> None:
        with self.exchange.explaining():
            self._sync.settle(self.optimizer)

    def begin(self, *, last: bool) -> None:
        self._sync.begin(last=last)

    def backward(self, loss: Tensor) -> None:
        with self.exchange.explaining():
            super().backward(loss)
            self._sync.complete()

    def end(self) -> None:
        self._sync.end()

    def gather(self, error: BaseException | None) -> None:
        if error is None:
            with self.exchange.explaining():
                broadcast_buffers(self._inner)
        else:
            self.exchange.failed(error)
        self.exchange.close()
        del self.model  # its hooks on the parameters go with it


@contextlib.contextmanager
def _without_buffers(model: nn.Module) -> Iterator[None]:
    """Hide buffers from DDP's constructor, which would write rank 0's values into expanded buffers and raise."""
    before = getattr(model, _IGNORED, None)
    setattr(model, _IGNORED, {*(before or ()), *(name for name, _ in model.named_buffers())})
    try:
        yield
    finally:
        delattr(model, _IGNORED)
        if before is not None:
            setattr(model, _IGNORED, before)


def _settle_strides(model: nn.Module) -> None:
    """Give 1x1 convolution kernels the strides of their gradients: DDP lays out buckets by the parameters."""
    for parameter in model.parameters():
        if parameter.dim() == 4 and parameter.shape[2:].numel() == 1:
            laid_out = torch.empty_like(parameter.data, memory_format=torch.channels_last)
            parameter.data = laid_out.copy_(parameter.data)


def broadcast_buffers(model: nn.Module) -> None:
    """Broadcast rank 0's buffers."""
    broadcast_first(model.buffers())


def broadcast_first(tensors: Iterable[Tensor]) -> None:
    """Broadcast rank 0's values of tensors; strides may differ between ranks.

    Non-contiguous tensors are sent as contiguous copies: gloo sends raw memory, beyond the elements of an expanded
    tensor, and NCCL refuses strides.
    """
    with torch.no_grad():
        for tensor in tensors:
            own = tensor.detach()
            sent = own.contiguous()
            dist.broadcast(sent, src=0)
            if sent is not own and not own.is_inference():
                _each_once(own, own).copy_(_each_once(sent, own))


def _each_once(tensor: Tensor, like: Tensor) -> Tensor:
    """Return a view of a tensor without the elements that share memory in `like`."""
    for dim, stride in enumerate(like.stride()):
        if stride == 0 and tensor.shape[dim] > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def reduce_in_bf16(state, bucket):  # type: ignore[no-untyped-def]
    """Reduce a bucket of gradients in bf16: half the bytes, and 8 bits of precision (torch's own hook refuses CPUs)."""
    return mean_in_bf16(bucket.buffer())


def mean_in_bf16(whole: Tensor) -> torch.futures.Future[Tensor]:
    """Average a tensor over ranks in place; each rank's contribution is rounded to bf16 once."""
    sent = torch.div(whole, dist.get_world_size(), out=torch.empty_like(whole, dtype=torch.bfloat16))
    future: torch.futures.Future[Any] = dist.all_reduce(sent, async_op=True).get_future()
    return future.then(lambda done: whole.copy_(done.value()[0]))


def _bucket_mib(plan: Plan) -> float | None:
    if plan.powersgd_rank.value is not None:
        return _WHOLE_MIB  # with several buckets, PowerSGD's collectives have no fixed order over gloo
    size = plan.bucket_bytes.value
    return None if size is None else int(size) / _MIB
