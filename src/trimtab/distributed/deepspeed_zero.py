"""Stages 1 to 3 by DeepSpeed: it holds the shards, and the user's own optimizer object steps them.

DeepSpeed is told which backward is a window's last, and by what gradients are divided before their norm is taken; the
loop keeps counts, learning rates and precision. The model is called itself, not through DeepSpeed's engine, which would
switch an outer autocast off on CUDA.
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

from trimtab.core.errors import DependencyError, LoopError
from trimtab.core.plan import Plan
from trimtab.decide.deepspeed_config import config_of
from trimtab.distributed.data_parallel import broadcast_buffers
from trimtab.distributed.deepspeed_state import clean, put_state, take
from trimtab.distributed.exchange import RankExchange
from trimtab.runtime.precision import MixedPrecision
from trimtab.runtime.used_parameters import EveryParameter


class DeepSpeedZero:
    """A run's backend: DeepSpeed's ZeRO.

    Attributes:
        config: what DeepSpeed was configured with.
    """

    in_step = True
    may_retry = False

    def __init__(self) -> None:
        self.exchange = RankExchange(None)
        self._window = contextlib.ExitStack()

    def spread(self, model: nn.Module, optimizer: torch.optim.Optimizer, plan: Plan) -> None:
        """Hand both to DeepSpeed: parameters become rank 0's, the optimizer's groups then hold flat shards.

        Raises:
            DependencyError: DeepSpeed is not installed.
        """
        self.config = config_for(model, plan)
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
        self._used, self._is_last = EveryParameter(model, self.exchange), False
        if had:
            put_state(self._zero, had)

    def settle(self) -> None:
        """Do nothing."""

    def begin(self, *, last: bool) -> None:
        """Say, before its forward, whether the micro-batch is its window's last."""
        self._is_last = last
        self._zero.clear_backward_seen_flag()  # as the engine's own forward does
        if not self._once:
            self._engine.set_gradient_accumulation_boundary(last)
        elif not self._engine.inside_no_sync_ctxt:
            self._window.enter_context(self._engine.coalesce_grad_reduction())

    def begin_backward(self, loss: Tensor) -> None:
        """In the first windows, require that ranks used the same parameters."""
        self._used.begin_backward(loss)

    def backward(self, loss: Tensor) -> None:
        """Run it, of the loss as it is; after a window's last every parameter has a gradient on every rank."""
        self._engine.backward(loss, scale_wrt_gas=False)
        self._used.end_backward(last=self._is_last)

    def multiply(self, factor: float | Tensor) -> None:
        """Refuse: the window's gradient lies in DeepSpeed's shards, where no loop can look at it."""
        raise LoopError("run.unscale", given="DeepSpeed, which holds the gradient", expected="run.step() alone")

    def finish(self, factor: float | Tensor, clip_norm: float | None, *, wants_norm: bool = False) -> Tensor | None:
        """Note what the gradient is to be multiplied by, and its limit; return its norm, which the step fills in."""
        self._zero.loss_scale = 1.0 / float(factor)  # which gradients are divided by
        self._zero.clip_grad = clip_norm or 0.0
        self._norm = torch.zeros(()) if clip_norm is not None or wants_norm else None
        return self._norm

    def step(self, precision: MixedPrecision) -> bool:
        """Step the shards; returns whether it did: not by a gradient that is no number."""
        self._window.close()
        self._engine.set_gradient_accumulation_boundary(True)
        try:
            with _quiet():
                self._engine.step()
        finally:
            self._zero.loss_scale = 1.0  # or the next backward would multiply by it
        self._forget()
        if self._norm is not None:
            self._norm.fill_(float(self._engine.get_global_grad_norm()))
        return bool(self._engine.was_step_applied())

    def end(self) -> None:
        """Give the window up, on every rank between the same two micro-batches."""
        self._used.reset()
        self.model.zero_grad(set_to_none=True)
        self._window.close()  # finds no gradient, and reduces nothing
        zero = self._zero
        zero.zero_grad(set_to_none=True)
        done = zero.params_already_reduced  # flags in a list at stages 1 and 2, in a dict at stage 3
        for key in range(len(done)) if isinstance(done, list) else done:
            done[key] = False
        zero._backward_active_depth = 0  # a backward that raised has not left
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
        if self._stage == 3:  # a parameter without a gradient would have that of an earlier window
            self._zero.grad_partitions_flat_buffer.zero_()

    def stepping(self) -> contextlib.AbstractContextManager[None]:
        """Return nothing more: DeepSpeed steps by the user's groups themselves."""
        return contextlib.nullcontext()

    def gather(self, error: BaseException | None) -> None:
        """Take DeepSpeed off the model and the optimizer, which have whole parameters and state again."""
        self._used.close()
        if error is not None:
            self.exchange.failed(error)
            self.exchange.close()
            return
        full, states = take(self._zero, [each for whole in self._whole for each in whole])
        with _quiet():
            self._engine.destroy()
        for hook in (self._engine.module_forward_pre_hook, self._engine.module_forward_post_hook):
            hook.remove()
        clean(self.model, full)
        nn.functional.linear = self._linear
        for group, whole in zip(self.optimizer.param_groups, self._whole, strict=True):
            group["params"] = whole
        self.optimizer.state.clear()
        self.optimizer.state.update(states)
        del self._engine, self._zero
        _let_go()
        self.exchange.close()


def config_for(model: nn.Module, plan: Plan) -> dict[str, Any]:
    """Return what DeepSpeed is configured with for a model; raises as `config_of`."""
    return config_of(plan, sum(p.numel() for p in model.parameters()))


def _ready() -> Any:
    """Return the package, on the process group there is."""
    os.environ.setdefault("LOCAL_RANK", str(dist.get_node_local_rank(fallback_rank=dist.get_rank())))
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # or it looks for one, and says on standard output what it found
    try:
        import deepspeed
    except ImportError as error:
        way_out = "pip install 'trimtab[deepspeed]'"
        raise DependencyError("deepspeed", given="a plan that needs it", expected="it", way_out=way_out) from error
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # or it is compiled on first use
    with _quiet():
        deepspeed.init_distributed(dist_backend=dist.get_backend(), dist_init_required=False)
    backend = deepspeed.comm.comm.cdb
    if hasattr(dist, "all_gather_single"):  # torch's names since 2.13, which warns of the old ones at each call
        backend.all_gather_function = dist.all_gather_single
        backend.reduce_scatter_function = dist.reduce_scatter_single
    return deepspeed


def _let_go() -> None:
    """Have DeepSpeed forget the process group, which may be another one in the next run."""
    import deepspeed
    from deepspeed.utils import groups

    groups._release_process_group_references(group=None)
    deepspeed.comm.comm.cdb = None


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Have DeepSpeed say errors alone: it logs to standard output."""
    logger = logging.getLogger("DeepSpeed")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)
