"""Application of a plan to a model and optimizer, with an undo for each change; one run per model at a time."""

from __future__ import annotations

import contextlib
import weakref

import torch
from torch import nn

from trimtab.core.compile_mode import Compiled
from trimtab.core.errors import LoopError
from trimtab.core.plan import Plan
from trimtab.runtime import (
    activation_checkpoint,
    compiled_call,
    dropout,
    loss_head,
    memory_format,
    muon,
    optimizers,
    precision,
)
from trimtab.runtime.call_order import ForwardRecorder
from trimtab.runtime.compile_check import CompileCheck, Note
from trimtab.runtime.cuda_graphs import GraphReplayer
from trimtab.runtime.global_flags import retained_memory
from trimtab.runtime.weight_decay import use_weight_decay

_active: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def require_free(model: nn.Module) -> None:
    """Raise `LoopError` if another run uses the model."""
    if model in _active:
        raise LoopError(
            "model",
            problem=f"Another run is active for this {type(model).__name__}.",
            hint="Call run.close() on the other run first, or use `with trimtab.start(...) as run:`. To train one "
            "model with two optimizers, combine them in one torch.optim.Optimizer (docs/own_loop.md).",
            code="run.model_in_use",
        )


def lay_out(model: nn.Module, optimizer: torch.optim.Optimizer, plan: Plan) -> contextlib.ExitStack:
    """Apply the changes that must precede sharding: optimizer kind, weight decay, Muon, memory format.

    Returns:
        An exit stack that undoes the changes.
    """
    compiled_call.require_as_written(_compiled(plan), model)
    with contextlib.ExitStack() as undo:
        if plan.fused_optimizer.value and not optimizers.is_fused(optimizer):
            if sparse := memory_format.sparse_module(model, optimizer):
                raise memory_format.sparse_gradient(sparse)
            undo.callback(optimizers.use_fused(optimizer))  # May refuse, so comes before any other change.
        if plan.weight_decay.value is not None:
            undo.callback(use_weight_decay(optimizer, float(plan.weight_decay.value)))
        if plan.optimizer.value == "muon":
            undo.callback(muon.use_muon(model, optimizer))
        if plan.memory_layout.value == "channels_last":
            undo.callback(memory_format.use_channels_last(model, optimizer))
        if _steps_fused_on_cpu(optimizer):
            undo.callback(optimizer.register_step_pre_hook(memory_format.align_gradients).remove)
        return undo.pop_all()


def _steps_fused_on_cpu(optimizer: torch.optim.Optimizer) -> bool:
    """Return True if the optimizer has fused groups on the CPU.

    The fused CPU kernels assume that gradients have the strides of their parameters, which gradients from
    `autograd.grad` may not have.
    """
    fused = (p for group in optimizer.param_groups if group.get("fused") for p in group["params"])
    return any(p.device.type == "cpu" for p in fused)


def apply_plan(
    model: nn.Module,
    called: nn.Module,
    optimizer: torch.optim.Optimizer,
    plan: Plan,
    forward: ForwardRecorder,
    note: Note | None,
    *,
    make_state: bool = False,
) -> contextlib.ExitStack:
    """Apply the remaining changes of a plan in place. A failure undoes the changes made so far.

    Args:
        called: the model as the loop calls it (`model` or its wrapper).
        forward: records the calls of `called`.
        note: called with an event's name and values; None disables checks during training.
        make_state: allocate the optimizer state now, because running out of memory within the first step is
            unrecoverable.

    Returns:
        An exit stack that undoes the changes.

    Raises:
        ValueGivenError: the device does not support a setting of the plan.
    """
    compiled_call.check_available(_compiled(plan), next(model.parameters()).device)
    with contextlib.ExitStack() as undo:
        _active.add(model)
        undo.callback(_active.discard, model)
        if plan.loss_chunk.value is not None:
            undo.callback(loss_head.use_chunks(model, int(plan.loss_chunk.value)))
        if plan.dropout.value is not None:
            undo.callback(dropout.use_dropout(model, float(plan.dropout.value)))
        if plan.recompute.value is not None:
            undo.callback(activation_checkpoint.use_plan(model, plan))
        if plan.precision.value == "tf32":
            undo.callback(precision.tf32.hold())
        if plan.allocator.value == "retain":
            undo.callback(retained_memory.hold())
        if plan.compiled.value:
            call = compiled_call.CompiledCall(called, forward.note, _compiled(plan))
            undo.callback(call.undo)
            # CUDA graphs are not compared with eager execution: the memory pools of both would be held at once.
            if note is not None and call.recorder is not None:
                undo.callback(_note_launches, call.recorder, note)
            elif note is not None:
                undo.callback(CompileCheck(call, optimizer, next(model.parameters()).device, note).close)
        else:
            undo.callback(forward.watch(called))
        undo.callback(optimizer.register_load_state_dict_post_hook(memory_format.align_state).remove)
        if make_state:
            undo.callback(optimizers.make_state(optimizer))
        memory_format.align_state(optimizer)
        optimizers.drop_gradients(optimizer)
        return undo.pop_all()


def _compiled(plan: Plan) -> Compiled:
    value = plan.compiled.value
    return value if isinstance(value, str) else bool(value)


def _note_launches(recorder: GraphReplayer, note: Note) -> None:
    """Record the number of graph replays, and the reason if there were none."""
    code, why = recorder.refusal_code, recorder.refusal
    if not why and not recorder.launches:
        code, why = recorder.left_code, recorder.left
    note("cuda_graphs", {"launches": recorder.launches, "refusal": why or None, "code": code or None})
