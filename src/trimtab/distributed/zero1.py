"""ZeRO stage 1: data parallelism, with optimizer state and parameter updates sharded between ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer

from trimtab.core.errors import OptimizerError
from trimtab.distributed.ddp import DataParallel
from trimtab.plans.plan import Plan
from trimtab.techniques.memory_format import align_state
from trimtab.techniques.mixed_precision import MixedPrecision


class Zero1Backend(DataParallel):
    """Backend with replicas of the model and torch's ZeroRedundancyOptimizer around the user's own optimizer.

    The user's optimizer steps this rank's parameters: during the run, groups hold only this rank's parameters, with the
    options and learning rates set by the user's loop.
    """

    def spread(self, model: nn.Module, optimizer: torch.optim.Optimizer, plan: Plan) -> None:
        """Partition the parameters between ranks, and drop the state of other ranks' parameters."""
        kinds = {p.dtype for group in optimizer.param_groups for p in group["params"]}
        if len(kinds) > 1:
            dtypes = ", ".join(sorted(map(str, kinds)))
            problem = f"ZeRO stage 1 needs parameters of one dtype, but the optimizer has parameters of {dtypes}."
            hint = "Use a plan with another zero_stage, or convert the parameters to one dtype."
            raise OptimizerError("plan.zero_stage", problem=problem, hint=hint, code="optimizer.dtypes_differ")
        super().spread(model, optimizer, plan)
        self._user, self._whole = optimizer, [list(group["params"]) for group in optimizer.param_groups]
        groups = [dict(group) | {"params": list(group["params"])} for group in optimizer.param_groups]
        self.optimizer = ZeroRedundancyOptimizer(groups, optimizer_class=self._share)  # type: ignore[arg-type]

    def _share(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        """Return the user's optimizer, restricted to this rank's parameters."""
        for group, own in zip(self._user.param_groups, groups, strict=True):
            group["params"] = list(own["params"])
        kept = {parameter for group in groups for parameter in group["params"]}
        for parameter in [each for each in self._user.state if each not in kept]:
            del self._user.state[parameter]
        return self._user

    @contextlib.contextmanager
    def stepping(self) -> Iterator[None]:
        rates = [group["lr"] for group in self._user.param_groups]
        for user, whole in zip(self._user.param_groups, self.optimizer.param_groups, strict=True):
            whole.update({name: value for name, value in user.items() if name != "params"})
        try:
            yield
        finally:
            for user, rate in zip(self._user.param_groups, rates, strict=True):
                user["lr"] = rate

    def step(self, precision: MixedPrecision) -> bool:
        with self.exchange.explaining():
            return super().step(precision)

    def gather(self, error: BaseException | None) -> None:
        """Restore the user's optimizer with all parameters, and the state sent by their owners."""
        owners = dict(self.optimizer._param_to_rank)  # type: ignore[attr-defined]
        for group, parameters in zip(self._user.param_groups, self._whole, strict=True):
            group["params"] = parameters
        if error is None:
            for parameters in self._whole:
                for parameter in parameters:
                    with self.exchange.explaining():
                        _send_state(self._user, parameter, owners[parameter])
            align_state(self._user)  # Received tensors are contiguous, unlike some parameters.
        super().gather(error)


def _send_state(optimizer: torch.optim.Optimizer, parameter: Tensor, owner: int) -> None:
    """Broadcast the optimizer state of a parameter from its owner."""
    is_own = dist.get_rank() == owner
    state = optimizer.state.get(parameter, {}) if is_own else {}
    shapes = {key: _Shape(value) if isinstance(value, Tensor) else value for key, value in state.items()}
    received: list[Any] = [shapes]
    dist.broadcast_object_list(received, src=owner)
    found = {}
    for key, value in received[0].items():
        if isinstance(value, _Shape):
            tensor = state[key] if is_own else value.empty(parameter)
            sent = tensor.to(parameter.device).contiguous()  # gloo sends raw memory and ignores strides
            dist.broadcast(sent, src=owner)
            found[key] = tensor if is_own else sent.to(value.device_of(parameter))
        else:
            found[key] = value
    if found:
        optimizer.state[parameter] = found


class _Shape:
    """Shape, dtype and device of a state tensor."""

    def __init__(self, tensor: Tensor) -> None:
        self.shape, self.dtype, self.on_host = tuple(tensor.shape), tensor.dtype, not tensor.is_cuda

    def device_of(self, parameter: Tensor) -> torch.device:
        """Return the device for the tensor: the CPU, or the parameter's device."""
        return torch.device("cpu") if self.on_host else parameter.device

    def empty(self, parameter: Tensor) -> Tensor:
        """Return an empty contiguous tensor."""
        return torch.empty(self.shape, dtype=self.dtype, device=self.device_of(parameter))
