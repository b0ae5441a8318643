"""ZeRO stages 2 and 3 with torch's FSDP2: gradients, optimizer state and parameters are sharded by block."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import distribute_tensor

from trimtab.core.errors import OptimizerError
from trimtab.distributed.ddp import broadcast_first
from trimtab.distributed.host_gather import RankExchange
from trimtab.measure.blocks import find_blocks
from trimtab.planner.multi_rank_plan import steps_shards_fused
from trimtab.plans.plan import Plan
from trimtab.training.backend import Backend
from trimtab.training.used_parameters import ShardedParameterUse

Name = str


def names_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[list[Name]]:
    """Return the parameter names of an optimizer, by group; `OptimizerError` for a parameter outside of the model."""
    known = {parameter: name for name, parameter in model.named_parameters()}
    groups = [group["params"] for group in optimizer.param_groups]
    if any(parameter not in known for params in groups for parameter in params):
        raise OptimizerError(
            "optimizer",
            problem="The optimizer has a parameter that does not belong to the model.",
            hint="Build the optimizer from model.parameters().",
            code="optimizer.foreign_parameters",
        )
    return [[known[parameter] for parameter in params] for params in groups]


def point_at(
    optimizer: torch.optim.Optimizer,
    names: list[list[Name]],
    parameters: Mapping[Name, nn.Parameter],
    move: Callable[[Tensor, Any], Tensor],
) -> None:
    """Replace an optimizer's parameters by the new parameters of the same names, and move their state.

    Args:
        move: converts a state tensor with the old parameter's shape for the new parameter.
    """
    before = [group["params"] for group in optimizer.param_groups]
    state: dict[Tensor, Any] = {}
    for group, old_parameters, new_names in zip(optimizer.param_groups, before, names, strict=True):
        group["params"] = [parameters[name] for name in new_names]
        for old, new in zip(old_parameters, group["params"], strict=True):
            if old in optimizer.state:
                # Scalars, such as step counts, and tensors of other shapes belong to every shard.
                state[new] = {
                    key: move(value, new)
                    if isinstance(value, Tensor) and value.dim() and value.shape == old.shape
                    else value
                    for key, value in optimizer.state[old].items()
                }
    optimizer.state.clear()
    optimizer.state.update(state)


class FsdpShards:
    """Sharding of a model, and its behaviour within a step.

    Args:
        gather_dtype: dtype of parameter all-gather, as in `Parallelism`; plans always gather in the parameters' dtype.
    """

    def __init__(
        self, zero_stage: int, mesh: DeviceMesh, *, reduces_once: bool, reduce_dtype: str, gather_dtype: str = "fp32"
    ) -> None:
        self._stage, self._mesh, self._reduces_once = zero_stage, mesh, reduces_once
        self._gather_dtype = torch.bfloat16 if gather_dtype == "bf16" else None
        # The parameters' dtype; with a smaller gather dtype, gradients would be accumulated in that dtype.
        self._adds_in = None if self._gather_dtype is None else torch.float32
        self._sends_bf16 = reduce_dtype == "bf16"

    def make(self, model: nn.Module, named: tuple[str, ...] = ()) -> None:
        """Shard the model's blocks and the remaining parameters; blocks are detected or given by name."""
        how: dict[str, Any] = {
            "mesh": self._mesh,
            "reshard_after_forward": self._stage == 3,
            "mp_policy": MixedPrecisionPolicy(param_dtype=self._gather_dtype, reduce_dtype=self._adds_in),
        }
        for block in blocks_apart(model, named):
            fully_shard(block, **how)
        self._model: Any = fully_shard(model, **how)
        if self._sends_bf16:
            send_in_bf16(model)

    def begin(self, *, last: bool) -> None:
        """Set, before a micro-batch, the handling of parameters and gradients after its backward."""
        if self._reduces_once:
            self._model.set_requires_gradient_sync(last)
        if self._stage == 2:
            self._model.set_reshard_after_backward(last)


class _InBf16:
    """Reduce-scatter in bf16: FSDP2 casts gradients into its buffers, and the result back.

    FSDP2's own `reduce_dtype` also sets the dtype for accumulation over micro-batches (see FSDPParam), and bf16 drops
    contributions below 1/256 of the sum.
    """

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a bf16 buffer, whatever the requested dtype."""
        return torch.empty(*size, dtype=torch.bfloat16, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> dist.Work | None:
        """Run the reduce-scatter."""
        work: dist.Work | None = _REDUCE_SCATTER(output_tensor, input_tensor, op=op, group=group, async_op=async_op)
        return work


# torch 2.13 renamed it, and warns about the old name.
_REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def send_in_bf16(model: nn.Module) -> None:
    """Send a sharded model's gradients in bf16, accumulated in their dtype."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_reduce_scatter(_InBf16())  # type: ignore[arg-type]  # torch's base class is private


class FullySharded(Backend):
    """Backend with FSDP2: every rank holds a shard of every parameter, gathered while a block runs.

    At stage 2, parameters stay gathered from a step's first forward to the last backward; at stage 3, only while the
    block runs. The model stays sharded after the run, because torch cannot undo `fully_shard`.
    """

    in_step = True
    may_retry = False

    def __init__(self) -> None:
        self.exchange = RankExchange(None)

    def spread(self, model: nn.Module, optimizer: torch.optim.Optimizer, plan: Plan) -> None:
        """Shard model and optimizer with its state; `OptimizerError` if torch has no step of it for shards."""
        require_step_of_shards(optimizer, fused=bool(plan.fused_optimizer.value))
        names, device = names_of(model, optimizer), next(model.parameters()).device
        broadcast_first((*model.parameters(), *model.buffers()))
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        self._shards = FsdpShards(
            int(plan.zero_stage.value or 0),
            mesh,
            reduces_once=bool(plan.reduces_once.value),
            reduce_dtype=str(plan.reduce_dtype.value),
        )
        self._shards.make(model, plan.recompute_blocks)
        self.model = model
        self._used = ShardedParameterUse(model, self.exchange)
        point_at(
            optimizer,
            names,
            dict(model.named_parameters()),
            lambda value, parameter: distribute_tensor(value, parameter.device_mesh, parameter.placements),
        )
        self.optimizer = optimizer

    def begin(self, *, last: bool) -> None:
        self._shards.begin(last=last)
        self._used.begin(last=last)

    def begin_backward(self, loss: Tensor) -> None:
        self._used.begin_backward(loss)

    def backward(self, loss: Tensor) -> None:
        with self.exchange.explaining():
            self._used.backward(lambda: super(FullySharded, self).backward(loss))

    def end(self) -> None:
        self.begin(last=True)
        self._used.reset()

    def gather(self, error: BaseException | None) -> None:
        """End the run; the model stays sharded."""
        self.end()
        self._used.close()
        if error is not None:
            self.exchange.failed(error)
        self.exchange.close()


def require_step_of_shards(optimizer: torch.optim.Optimizer, *, fused: bool = False) -> None:
    """Raise `OptimizerError` for a fused step that torch supports only for whole parameters.

    Args:
        fused: the plan switches the fused step on.
    """
    name, is_fused = type(optimizer).__name__, any(group.get("fused") for group in optimizer.param_groups)
    if (fused or is_fused) and not steps_shards_fused(name):
        raise OptimizerError(
            "optimizer",
            got=f"{name}(fused=True)",
            expected=f"{name}(fused=False) at ZeRO stages 2 and 3, because torch has no fused step for shards",
            hint="Build the optimizer with fused=False and use a plan with fused_optimizer=False, or use ZeRO stage 0 "
            "or 1.",
            code="optimizer.fused_with_shards",
        )


def blocks_apart(model: nn.Module, named: tuple[str, ...]) -> list[nn.Module]:
    """Return a model's blocks without parameters shared with other modules; the root module keeps shared parameters."""
    modules = dict(model.named_modules(remove_duplicate=False))
    blocks = [modules[name] for name in find_blocks(model, named)]

    def uses(module: nn.Module) -> Counter[Tensor]:
        """Return the number of submodules by parameter that they hold."""
        return Counter(p for each in set(module.modules()) for p in set(each.parameters(recurse=False)))

    everywhere = uses(model)
    within = ((block, uses(block)) for block in blocks)
    return [block for block, own in within if own and all(everywhere[p] == count for p, count in own.items())]
