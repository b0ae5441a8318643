"""ZeRO stages 1 to 3 with DeepSpeed: DeepSpeed holds the shards and steps the user's own optimizer object.

trimtab marks a step's last micro-batch and passes the divisor of gradients before the norm; the loop keeps counts,
learning rates and precision. The model is called directly, because DeepSpeed's engine would disable an outer autocast
on CUDA.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trimtab.core.errors import DependencyError, LoopError, ValueGivenError
from trimtab.distributed.ddp import broadcast_buffers
from trimtab.distributed.host_gather import RankExchange
from trimtab.plans.plan import Plan
from trimtab.techniques.mixed_precision import MixedPrecision
from trimtab.training.used_parameters import AllParametersCheck

State = dict[Tensor, dict[str, Any]]
# Reduction bucket if the plan has no size: DeepSpeed's default takes 2 GB on every rank.
BUCKET_BYTES = 2**26
_LEFT = {"_external_params", "all_parameters", "applied_pre_backward_ref_cnt", "pre_bwd_fn", "post_bwd_fn"}


def put_state(zero: Any, had: dict[Any, dict[str, Any]]) -> None:
    """Copy existing optimizer state into the shards; DeepSpeed starts without state."""
    from deepspeed.utils import safe_set_full_optimizer_state, safe_set_local_optimizer_state

    kinds: dict[str, Any] = next(iter(had.values()))
    sharded = hasattr(zero, "fp32_partitioned_groups_flat")
    for flat in zero.fp32_partitioned_groups_flat if sharded else zero.single_partition_of_fp32_groups:
        zero.optimizer.state[flat] = {k: torch.zeros_like(flat) if _is_whole(v) else _copy(v) for k, v in kinds.items()}
    _link(zero)
    for parameter, state in had.items():
        for key in filter(lambda key: _is_whole(state[key]), state):
            if sharded:  # DeepSpeed's setter for full state ignores the last rank's padding and raises
                size = parameter.partition_numel()
                padding = size * dist.get_world_size() - state[key].numel()
                padded = nn.functional.pad(state[key].flatten(), (0, padding))
                safe_set_local_optimizer_state(parameter, padded.narrow(0, size * dist.get_rank(), size), key)
            else:
                safe_set_full_optimizer_state(parameter, state[key], key)


def gather_full_state(zero: Any, parameters: list[Tensor]) -> tuple[dict[Tensor, Tensor], State]:
    """Return full parameters and their full optimizer state; a collective."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    _link(zero)
    kinds: dict[str, Any] = next(iter(zero.optimizer.state.values()), {})
    full = {each: safe_get_full_fp32_param(each).clone().view(_shape(each)) for each in parameters}
    states: State = {}
    for each in parameters if kinds else []:
        states[each] = {
            key: safe_get_full_optimizer_state(each, key).clone().view(_shape(each))
            if _is_whole(value)
            else _copy(value)
            for key, value in kinds.items()
        }
    return full, states


def restore_plain_model(model: nn.Module, full: dict[Tensor, Tensor]) -> None:
    """Turn a destroyed engine's model back into a plain torch model, with the same parameter objects."""
    for parameter, value in full.items():
        parameter.data = value.to(parameter.dtype)
        for name in [name for name in vars(parameter) if name not in ("requires_grad", "data", "grad")]:
            delattr(parameter, name)
    for module in model.modules():
        if "_original_parameters" in vars(module):
            module._parameters = vars(module).pop("_original_parameters")
        for name in [name for name in vars(module) if name.startswith("ds_") or name in _LEFT]:
            delattr(module, name)


def _link(zero: Any) -> None:
    # DeepSpeed links only the first group's state, after its first step
    if hasattr(zero, "_hp_optimizer_states_linked"):
        zero._hp_optimizer_states_linked = False
        zero._lazy_init_hp_params_optimizer_state()


def _shape(parameter: Any) -> torch.Size:
    found: torch.Size = getattr(parameter, "ds_shape", parameter.shape)
    return found


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _is_whole(value: object) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0


def config_of(plan: Plan, num_elements: int) -> dict[str, Any]:
    """Return the configuration for `deepspeed.initialize` of a plan with the DeepSpeed engine.

    Micro-batch boundaries, loss scaling, clipping and autocast stay with trimtab's loop; their entries are neutral.
    `num_elements` of the parameters is an upper bound for buckets.

    Raises:
        ValueGivenError: the plan has a different engine, or settings that DeepSpeed does not support here.
    """
    if plan.engine.value != "deepspeed":
        raise ValueGivenError("plan.engine", got=repr(plan.engine.value), expected="'deepspeed'")
    for name, is_bad in (("precision", plan.precision.value == "fp16"), ("compiled", bool(plan.compiled.value))):
        if is_bad:
            problem = f"engine='deepspeed' does not support {name}={getattr(plan, name).value!r}."
            raise ValueGivenError(f"plan.{name}", problem=problem, hint=f"Choose another {name}, or engine='torch'.")
    if plan.batch_rule is not None:
        problem = "engine='deepspeed' does not support an adaptive batch size: DeepSpeed does not expose gradients."
        hint = "Plan without adapt='batch', or choose engine='torch'."
        raise ValueGivenError("plan.batch_rule", problem=problem, hint=hint)
    wanted = int(plan.bucket_bytes.value or BUCKET_BYTES) // 4
    bucket = max(2, min(wanted, num_elements // 2 * 2 + 2))  # DeepSpeed's stages require an even number.
    zero = {
        "stage": plan.zero_stage.value,
        "overlap_comm": False,
        "reduce_bucket_size": bucket,
        "allgather_bucket_size": bucket,
        "stage3_prefetch_bucket_size": bucket,
        "stage3_param_persistence_threshold": 0,
        "memory_efficient_linear": False,  # True would replace torch.nn.functional.linear in the whole process.
    }
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
        "communication_data_type": str(plan.reduce_dtype.value),
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
    }


class DeepSpeedZero:
    """Backend that shards with DeepSpeed's ZeRO.

    Attributes:
        config: DeepSpeed configuration.
    """

    in_step = True
    may_retry = False
    accumulates_alone = False

    def __init__(self) -> None:
        self.exchange = RankExchange(None)
        self._window = contextlib.ExitStack()

    def spread(self, model: nn.Module, optimizer: torch.optim.Optimizer, plan: Plan) -> None:
        """Pass model and optimizer to DeepSpeed, which broadcasts rank 0's parameters; groups then hold flat shards."""
        self.config = config_of(plan, sum(each.numel() for each in model.parameters()))
        self._stage = int(plan.zero_stage.value or 0)
        self._once = bool(plan.reduces_once.value) and self._stage > 1
        deepspeed = _ready()
        self.model, self.optimizer, self._linear = model, optimizer, nn.functional.linear
        self._whole = [list(group["params"]) for group in optimizer.param_groups]
        broadcast_buffers(model)
        had = {each: optimizer.state.pop(each) for whole in self._whole for each in whole if each in optimizer.state}
        with _quiet():
            self._engine: Any = deepspeed.initialize(
                model=model, optimizer=optimizer, config=self.config, dist_init_required=False
            )[0]
        self._zero: Any = self._engine.optimizer
        self._used, self._is_last = AllParametersCheck(model, self.exchange), False
        if had:
            put_state(self._zero, had)

    def settle(self) -> None:
        """Do nothing."""

    def begin(self, *, last: bool) -> None:
        """Mark, before the forward, the last micro-batch of a step."""
        self._is_last = last
        self._zero.clear_backward_seen_flag()  # as DeepSpeed's own forward does
        if not self._once:
            self._engine.set_gradient_accumulation_boundary(last)
        elif not self._engine.inside_no_sync_ctxt:
            self._window.enter_context(self._engine.coalesce_grad_reduction())

    def begin_backward(self, loss: Tensor) -> None:
        self._used.begin_backward(loss)

    def backward(self, loss: Tensor) -> None:
        """Run the backward of the unscaled loss; after the last, all parameters have gradients on all ranks."""
        self._engine.backward(loss, scale_wrt_gas=False)
        self._used.end_backward(last=self._is_last)

    def multiply(self, factor: float | Tensor) -> None:
        problem = "run.unscale() is not available with DeepSpeed, which keeps gradients in its own shards."
        hint = "Call run.step() only, and clip gradients with trimtab.start(..., clip_norm=...)."
        raise LoopError("run.unscale", problem=problem, hint=hint, code="deepspeed.no_unscale")

    def finish(self, factor: float | Tensor, clip_norm: float | None, *, wants_norm: bool = False) -> Tensor | None:
        """Set the factor on the gradient and the clipping limit; return the norm, a tensor that the step fills."""
        self._zero.loss_scale = 1.0 / float(factor)  # DeepSpeed divides gradients by its loss scale
        self._zero.clip_grad = clip_norm or 0.0
        self._norm = torch.zeros(()) if clip_norm is not None or wants_norm else None
        return self._norm

    def step(self, precision: MixedPrecision) -> bool:
        """Step the shards; return False if the step was skipped because of a non-finite gradient."""
        self._window.close()
        self._engine.set_gradient_accumulation_boundary(True)
        try:
            with _quiet():
                self._engine.step()
        finally:
            self._zero.loss_scale = 1.0  # The next backward would multiply by it.
        self._forget()
        if self._norm is not None:
            self._norm.fill_(float(self._engine.get_global_grad_norm()))
        return bool(self._engine.was_step_applied())

    def end(self) -> None:
        self._used.reset()
        self.model.zero_grad(set_to_none=True)
        self._window.close()  # Without gradients, leaving the context reduces nothing.
        zero = self._zero
        zero.zero_grad(set_to_none=True)
        done = zero.params_already_reduced  # flags are a list at stages 1 and 2, and a dict at stage 3
        for key in range(len(done)) if isinstance(done, list) else done:
            done[key] = False
        zero._backward_active_depth = 0  # A backward that raised did not decrement it.
        zero.clear_backward_seen_flag()
        if self._stage < 3:
            for held in (zero.averaged_gradients, zero.all_grad_tensors):
                held.update(dict.fromkeys(held))
            for bucket in zero.ipg_buckets.values():
                bucket.clear()
            zero._release_ipg_buffers()
        else:
            for bucket in zero.ipg_buckets.values():
                bucket.clear_params()
            zero._partition_all_parameters()
        self._forget()

    def _forget(self) -> None:
        if self._stage == 3:  # A parameter without a gradient would keep that of an earlier step.
            self._zero.grad_partitions_flat_buffer.zero_()

    def stepping(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def gather(self, error: BaseException | None) -> None:
        """Remove DeepSpeed from model and optimizer, and restore full parameters and state."""
        self._used.close()
        if error is not None:
            self.exchange.failed(error)
            self.exchange.close()
            return
        full, states = gather_full_state(self._zero, [each for whole in self._whole for each in whole])
        with _quiet():
            self._engine.destroy()
        for hook in (self._engine.module_forward_pre_hook, self._engine.module_forward_post_hook):
            hook.remove()
        restore_plain_model(self.model, full)
        nn.functional.linear = self._linear
        for group, whole in zip(self.optimizer.param_groups, self._whole, strict=True):
            group["params"] = whole
        self.optimizer.state.clear()
        self.optimizer.state.update(states)
        del self._engine, self._zero
        _let_go()
        self.exchange.close()


def _ready() -> Any:
    """Return the deepspeed package, initialised on the existing process group."""
    os.environ.setdefault("LOCAL_RANK", str(dist.get_node_local_rank(fallback_rank=dist.get_rank())))
    if not torch.cuda.is_available():
        # otherwise DeepSpeed searches for an accelerator and prints the result
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    try:
        import deepspeed
    except ImportError as error:
        problem = "The plan uses DeepSpeed, which is not installed."
        hint = "Install it: pip install 'trimtab[deepspeed]'."
        raise DependencyError("deepspeed", problem=problem, hint=hint) from error
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # otherwise compiled on first use
    with _quiet():
        deepspeed.init_distributed(dist_backend=dist.get_backend(), dist_init_required=False)
    backend = deepspeed.comm.comm.cdb
    if hasattr(dist, "all_gather_single"):  # Names since torch 2.13, which warns about the old ones at every call.
        backend.all_gather_function = dist.all_gather_single
        backend.reduce_scatter_function = dist.reduce_scatter_single
    return deepspeed


def _let_go() -> None:
    """Have DeepSpeed release the process group, which may differ in the next run."""
    import deepspeed
    from deepspeed.utils import groups

    groups._release_process_group_references(group=None)
    deepspeed.comm.comm.cdb = None


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Restrict DeepSpeed's log, which goes to standard output, to errors."""
    logger = logging.getLogger("DeepSpeed")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)
