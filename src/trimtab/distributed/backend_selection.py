"""Selection of the sharding backend for a plan."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch import nn

from trimtab.core.errors import ValueGivenError
from trimtab.core.plan import Plan
from trimtab.distributed.host_gather import connect, has_peers
from trimtab.distributed.rank_consistency import require_alike
from trimtab.measure.sharded_norms import is_flat_sharded, is_sharded
from trimtab.runtime.backend import Backend, UserBackend
from trimtab.runtime.gradient_sync import data_parallel
from trimtab.runtime.metadata_exchange import MetadataExchange, SingleProcessExchange

# Backend by ZeRO stage, imported on demand: torch's sharded optimizer alone takes a second to import.
_BACKENDS = {
    0: ("trimtab.distributed.ddp", "DataParallel"),
    1: ("trimtab.distributed.zero1", "Zero1Backend"),
    2: ("trimtab.distributed.fsdp2", "FullySharded"),
    3: ("trimtab.distributed.fsdp2", "FullySharded"),
}
_DEEPSPEED = ("trimtab.distributed.deepspeed_backend", "DeepSpeedZero")


def backend_of(model: nn.Module, plan: Plan, options: Mapping[str, Any]) -> Backend:
    """Return the backend that distributes a model by its plan, or keeps the loop's own wrapper.

    Args:
        model: model of the loop.
        plan: plan to apply.
        options: options of the run, required to agree between ranks.

    Raises:
        ValueGivenError: the plan is for a different world size, the model is already wrapped or uses FSDP1, or plans
            differ between ranks (on every rank).
    """
    _require_no_flat_shards(model)
    stage = plan.zero_stage.value
    if stage is None:
        exchange = connect(model)
        if exchange is not None:
            require_one_plan(plan, options, exchange)
        return UserBackend(
            exchange or SingleProcessExchange(has_peers=has_peers()), in_step=exchange is not None and is_sharded(model)
        )
    ranks = dist.get_world_size() if has_peers() else 1
    if ranks != plan.num_ranks:
        raise ValueGivenError(
            "plan.num_ranks",
            got=f"{plan.num_ranks}, in {_processes(ranks)}",
            expected=f"{ranks}, or as many processes as ranks",
            hint="Start as many with torchrun, and train inside `with trimtab.joined():`. Or plan anew for these; "
            'a run that was saved on others goes on by it with Checkpoints(accepts=("ranks", "plan")).',
        )
    if ranks == 1:
        return UserBackend(SingleProcessExchange())
    if not is_to_share(model):
        raise ValueGivenError(
            "plan.zero_stage",
            got=f"{stage}, for a model that the loop has wrapped",
            expected="the model itself, which the plan wraps; or none, to keep the loop's own",
        )
    if plan.engine.value == "deepspeed" and options.get("nonfinite") in ("skip", "stop"):
        raise ValueGivenError(
            "nonfinite",
            got=f"{options['nonfinite']} with DeepSpeed, which skips such steps by itself",
            expected="warn, error or continue with this engine",
        )
    if int(stage) >= 2 or plan.engine.value == "deepspeed":
        _require_no_layout(model, plan)
    module, name = _DEEPSPEED if plan.engine.value == "deepspeed" else _BACKENDS[int(stage)]
    backend: Backend = getattr(importlib.import_module(module), name)()
    require_one_plan(plan, options, backend.exchange)
    return backend


def _require_no_flat_shards(model: nn.Module) -> None:
    """Raise `ValueGivenError` for a model in FSDP1 on several ranks.

    Every rank would use the norm of the local shard for clipping and for detecting non-finite gradients.
    """
    if has_peers() and is_flat_sharded(model):
        raise ValueGivenError(
            "model",
            got="one in FSDP1 (FullyShardedDataParallel), whose shards are flat, on one of several ranks",
            expected="FSDP2, DistributedDataParallel, or the model itself with a plan that shares it (zero_stage)",
            hint="Wrap it by torch.distributed.fsdp.fully_shard, and make its optimizer after that.",
        )


def _require_no_layout(model: nn.Module, plan: Plan) -> None:
    """Raise `ValueGivenError` for parameters that are not, or would not be, contiguous.

    FSDP2 and DeepSpeed shard only contiguous parameters, but would raise after sharding a part of the model.
    """
    sharer = f"stage {plan.zero_stage.value} of {'DeepSpeed' if plan.engine.value == 'deepspeed' else 'FSDP2'}"
    if plan.memory_layout.value != "keep":
        raise ValueGivenError(
            "plan.memory_layout",
            got=f"{plan.memory_layout.value}, at {sharer}, whose shards have no layout",
            expected="keep, or a stage of 0 or 1 of torch's engine",
        )
    for name, parameter in model.named_parameters():
        if not parameter.is_contiguous():
            raise ValueGivenError(
                "model",
                got=f"{name} with strides {tuple(parameter.stride())}, at {sharer}, whose shards have no layout",
                expected="contiguous parameters, or a stage of 0 or 1 of torch's engine",
                hint="parameter.data = parameter.data.contiguous(), before the model's optimizer is made.",
            )


def is_to_share(model: nn.Module) -> bool:
    """Return True for a model on several ranks without a wrapper by the loop."""
    return has_peers() and data_parallel(model) is None and not is_sharded(model) and not is_flat_sharded(model)


def require_plannable(model: nn.Module) -> None:
    """Raise `ValueGivenError` if planning on several ranks would deadlock.

    Measurements run on a single rank, or for different numbers of steps per rank, so the model must not use
    collectives.
    """
    if not has_peers():
        return
    _require_no_flat_shards(model)
    is_parallel = any(type(each).__name__ == "DTensor" for each in model.parameters())
    if is_parallel or not is_to_share(model):
        by = "DTensor holds in parts" if is_parallel else "DistributedDataParallel or FSDP wraps"
        raise ValueGivenError(
            "model",
            got=f"one that {by}, on one of several ranks",
            expected="the model itself: its plan says how the ranks share it",
            hint="Plan and start it without the wrap. To keep the wrap, start it with trimtab.Plan.fixed(rows).",
        )
    if any(isinstance(module, nn.SyncBatchNorm) for module in model.modules()):
        raise ValueGivenError(
            "model",
            got="SyncBatchNorm, on several ranks of which one measures by itself",
            expected="modules that send nothing in their forward",
            hint="Plan with BatchNorm, and convert it before trimtab.start.",
        )


def require_one_plan(plan: Plan, options: Mapping[str, Any], exchange: MetadataExchange) -> None:
    """Raise `ValueGivenError` on every rank if plans or options differ between ranks."""
    values = {name: getattr(plan, name).value for name in Plan.marks()}
    values |= {"batch_rows": plan.batch_rows, "batch_rule": plan.batch_rule, "recompute_blocks": plan.recompute_blocks}
    values |= options
    expected, hint = (
        "one plan on all ranks, started with the same options",
        "Plan on one rank, hand its JSON to the others.",
    )
    require_alike("plan", values, exchange, what="plans", expected=expected, hint=hint)


def _processes(number: int) -> str:
    return "one process" if number == 1 else f"{number} processes"
