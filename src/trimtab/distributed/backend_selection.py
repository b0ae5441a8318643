"""Selection of the sharding backend for a plan."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch import nn

from trimtab.core.errors import ValueGivenError
from trimtab.distributed.host_gather import connect
from trimtab.distributed.process_group import has_peers
from trimtab.distributed.rank_consistency import require_alike
from trimtab.measure.gradient_norms import is_flat_sharded, is_sharded
from trimtab.plans.plan import Plan
from trimtab.training.backend import Backend, UserBackend
from trimtab.training.gradient_sync import data_parallel
from trimtab.training.metadata_exchange import MetadataExchange, SingleProcessExchange

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
        job = "one process" if ranks == 1 else f"{ranks} processes"
        raise ValueGivenError(
            "plan.num_ranks",
            problem=f"The plan is for {plan.num_ranks} ranks, but the job has {job}.",
            hint="Start that number of ranks with torchrun and train inside `with trimtab.process_group():`, or make a "
            "new plan for this job. A checkpoint of another number of ranks can be resumed with the new plan: "
            'Checkpoints(accepts=("ranks", "plan")).',
            code="plan.ranks_differ",
        )
    if ranks == 1:
        return UserBackend(SingleProcessExchange())
    if not is_to_share(model):
        problem = f"The plan distributes the model (zero_stage={stage}), but it is already wrapped in DDP or FSDP."
        hint = "Pass the model without its wrapper, or use a plan with zero_stage=None to keep the wrapper."
        raise ValueGivenError("plan.zero_stage", problem=problem, hint=hint, code="plan.model_wrapped")
    if plan.engine.value == "deepspeed" and options.get("nonfinite") in ("skip", "stop"):
        problem = f'nonfinite="{options["nonfinite"]}" is not available: DeepSpeed skips non-finite steps itself.'
        hint = 'Use nonfinite="warn", "error" or "continue", or a plan with the torch engine.'
        raise ValueGivenError("nonfinite", problem=problem, hint=hint, code="deepspeed.nonfinite")
    if int(stage) >= 2 or plan.engine.value == "deepspeed":
        _require_no_layout(model, plan)
    module, name = _DEEPSPEED if plan.engine.value == "deepspeed" else _BACKENDS[int(stage)]
    backend: Backend = getattr(importlib.import_module(module), name)()
    require_one_plan(plan, options, backend.exchange)
    return backend


def _require_no_flat_shards(model: nn.Module) -> None:
    """Raise `ValueGivenError` for a model in FSDP1 on several ranks."""
    # Each rank would use the norm of its own shard, for clipping and for detecting non-finite gradients.
    if has_peers() and is_flat_sharded(model):
        raise ValueGivenError(
            "model",
            problem="The model uses FullyShardedDataParallel (FSDP1), which trimtab does not support on several ranks.",
            hint="Call torch.distributed.fsdp.fully_shard(model) (FSDP2) instead, before building the optimizer. "
            "DistributedDataParallel, and the unwrapped model with a plan that has a zero_stage, work too.",
            code="model.fsdp1",
        )


def _require_no_layout(model: nn.Module, plan: Plan) -> None:
    """Raise `ValueGivenError` for parameters that are not, or would not be, contiguous."""
    # FSDP2 and DeepSpeed would raise only after sharding a part of the model.
    backend = f"{'DeepSpeed' if plan.engine.value == 'deepspeed' else 'FSDP2'} (zero_stage={plan.zero_stage.value})"
    if plan.memory_layout.value != "keep":
        problem = f'{backend} shards contiguous parameters only, not memory_layout="{plan.memory_layout.value}".'
        hint = 'Use memory_layout="keep", or the torch engine with zero_stage 0 or 1.'
        raise ValueGivenError("plan.memory_layout", problem=problem, hint=hint, code="plan.layout_with_shards")
    for name, parameter in model.named_parameters():
        if not parameter.is_contiguous():
            raise ValueGivenError(
                "model",
                got=f"{name} with strides {tuple(parameter.stride())}",
                expected=f"contiguous parameters, as {backend} requires",
                hint="Set parameter.data = parameter.data.contiguous() before building the optimizer, or use the torch "
                "engine with zero_stage 0 or 1.",
                code="model.not_contiguous",
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
        how = "has DTensor parameters" if is_parallel else "is wrapped in DistributedDataParallel or FSDP"
        raise ValueGivenError(
            "model",
            problem=f"The model {how}, but planning on several ranks needs the plain model.",
            hint="Plan and start with the plain model: the plan chooses how the ranks share it. To keep your own "
            "wrapper, start with trimtab.Plan.fixed(rows) instead of planning.",
            code="model.parallel",
        )
    if any(isinstance(module, nn.SyncBatchNorm) for module in model.modules()):
        problem = "SyncBatchNorm layers communicate in the forward, but planning runs the model on one rank alone."
        hint = "Plan with BatchNorm, and call SyncBatchNorm.convert_sync_batchnorm before trimtab.start."
        raise ValueGivenError("model", problem=problem, hint=hint, code="model.sync_batch_norm")


def require_one_plan(plan: Plan, options: Mapping[str, Any], exchange: MetadataExchange) -> None:
    """Raise `ValueGivenError` on every rank if plans or options differ between ranks."""
    values = {name: getattr(plan, name).value for name in Plan.effects()}
    values |= {"batch_size": plan.batch_size, "batch_rule": plan.batch_rule, "recompute_blocks": plan.recompute_blocks}
    values |= options
    expected = "the same plan and options on all ranks"
    hint = "Make the plan on one rank, load its JSON on all ranks, and pass the same options to trimtab.start."
    require_alike("plan", values, exchange, expected=expected, hint=hint)
