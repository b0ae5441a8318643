"""Application of a plan to a model and optimizer, with an undo for each change; one run per model at a time."""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from trimtab.core.choice import Scalar
from trimtab.core.errors import LoopError
from trimtab.core.stateful import Stateful
from trimtab.measure.timing import seconds_between, stamp, wait_for
from trimtab.planner.statistics import Interval, ratio_interval
from trimtab.plans.plan import Plan
from trimtab.settings import SETTINGS
from trimtab.settings.base import LiveLoop, Setting
from trimtab.state.peak_memory import most_bytes
from trimtab.techniques import memory_format, optimizers
from trimtab.techniques.compiled_call import CompiledCall
from trimtab.techniques.cuda_graphs import GraphReplayer
from trimtab.techniques.low_bit_state import rounding_steps
from trimtab.techniques.muon import Momentum
from trimtab.training.accumulation import drop_gradients
from trimtab.training.window import ForwardRecorder

# Comparison of compiled and uncompiled steps during training; compilation is turned off if it is slower.

# Warm-up windows, in which kernels are compiled and selected, then pairs of a compiled and an uncompiled window. The
# first pair is discarded.
WARM_UP, PAIRS = 20, 12
WINDOWS = WARM_UP + 2 * PAIRS + 1  # Number of windows after which the check decides.
# The GPU must have this multiple of the peak memory so far, since an uncompiled model may hold activations that the
# compiler removes.
_MORE = 1.5
Note = Callable[[str, Mapping[str, Any]], None]


class CompileCheck:
    """Runs a few uncompiled windows, in pairs with compiled windows, and turns compilation off if it is slower.

    A window is the time between two optimizer steps, including the loop's own work. Pairs whose input shapes differ,
    for example because of an evaluation, are ignored. Each rank decides for itself. Uncompiled windows are not run if
    they may exceed memory, because the plan may fit only when compiled.
    """

    def __init__(self, call: CompiledCall, optimizer: torch.optim.Optimizer, device: torch.device, note: Note) -> None:
        self._call, self._device, self._note = call, device, note
        self._stamps: list[float | torch.cuda.Event] = []
        self._work: list[tuple[torch.Size, ...]] = []
        self._gain: Interval | None = None
        self._is_decided = False
        call.shapes = []
        self._hook = optimizer.register_step_post_hook(lambda *_: self._stepped())

    def _stepped(self) -> None:
        if self._is_decided:
            return
        event = stamp(self._device)
        self._stamps.append(time.perf_counter() if event is None else event)
        self._work.append(self._call.take_shapes())
        done = len(self._stamps)
        if done == WARM_UP and not self._has_room():
            self._is_decided, self._call.shapes = True, None
            self._note("compile_unchecked", {"reason": "the GPU may not have enough memory for an uncompiled step"})
            return
        self._call.is_on = _is_compiled_in(done)
        if done >= WINDOWS:
            self._is_decided, self._call.shapes = True, None
            self._decide()

    def _has_room(self) -> bool:
        """Return True if the device has memory for an uncompiled window."""
        if self._device.type != "cuda":
            return True
        return _MORE * torch.cuda.max_memory_allocated(self._device) <= most_bytes(self._device)

    def _decide(self) -> None:
        self._gain = self._measured()
        self._call.is_on = self._gain is None or self._gain.high >= 1
        if not self._call.is_on:
            self._note("account", self._figures() | {"pays": False})

    def _measured(self) -> Interval | None:
        """Return the interval of uncompiled over compiled time; None with fewer than two usable pairs."""
        ratios = []
        wait_for(self._stamps[-1])  # The host may be many windows ahead of the device.
        for first in range(WARM_UP + 2, WARM_UP + 2 * PAIRS, 2):
            pair = {_is_compiled_in(i): seconds_between(*self._stamps[i - 1 : i + 1]) for i in (first, first + 1)}
            if self._work[first] == self._work[first + 1] and min(pair.values()) > 0:
                ratios.append(pair[False] / pair[True])
        return ratio_interval(ratios) if len(ratios) > 1 else None

    def _figures(self) -> dict[str, Any]:
        """Return the fraction of step time saved; None if unknown."""
        return {"technique": "compile", "gain": None if self._gain is None else 1 - 1 / self._gain.mean}

    def close(self) -> None:
        """End the check and record the gain, when the run closes."""
        self._hook.remove()
        self._note("account", self._figures())


def _is_compiled_in(window: int) -> bool:
    """Return True if window number `window` (from 0) runs compiled. The order alternates from pair to pair."""
    pair, second = divmod(window - WARM_UP, 2)
    return not 0 <= pair < PAIRS or second == pair % 2


_active: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def require_free(model: nn.Module) -> None:
    """Raise `LoopError` if another run uses the model."""
    if model in _active:
        raise LoopError(
            "model",
            problem=f"Another run is active for this {type(model).__name__}.",
            hint="Call run.close() on the other run first, or use `with trimtab.start(...) as run:`. Start one run for "
            "all epochs. If the other run is out of reach, build model and optimizer again. To train one "
            "model with two optimizers, combine them in one torch.optim.Optimizer (docs/own_loop.md).",
            code="run.model_in_use",
        )


def lay_out(model: nn.Module, optimizer: torch.optim.Optimizer, plan: Plan) -> contextlib.ExitStack:
    """Apply the settings that must precede sharding; return an exit stack that undoes them.

    Raises:
        ModelError, OptimizerError, ValueGivenError: the loop does not support a setting; nothing has changed.
    """
    loop = LiveLoop(model, model, optimizer, plan)
    for setting, value in _values(plan):
        setting.require(loop, value)
    with contextlib.ExitStack() as undo:
        _apply(loop, undo, before_sharding=True)
        if _steps_fused_on_cpu(optimizer):
            undo.callback(optimizer.register_step_pre_hook(memory_format.align_gradients).remove)
        return undo.pop_all()


def _values(plan: Plan) -> Iterator[tuple[Setting, Scalar]]:
    """Yield the settings of a plan with another value than their default."""
    for name, setting in SETTINGS.items():
        value = getattr(plan, name).value
        if value != setting.default:
            yield setting, value


def _apply(loop: LiveLoop, undo: contextlib.ExitStack, *, before_sharding: bool) -> None:
    for setting, value in _values(loop.plan):
        if setting.before_sharding == before_sharding and (revert := setting.apply(loop, value)) is not None:
            undo.callback(revert)


def _steps_fused_on_cpu(optimizer: torch.optim.Optimizer) -> bool:
    """Return True if the optimizer has fused groups on the CPU.

    The fused CPU kernels assume gradients with the strides of the parameters, not guaranteed by `autograd.grad`.
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
    """Apply the remaining settings of a plan in place; return an exit stack that undoes them.

    Args:
        called: the model as the loop calls it (`model` or its wrapper).
        forward: records the calls of `called`.
        note: called with an event's name and values; None disables checks during training.
        make_state: allocate the optimizer state now, because running out of memory within the first step is
            unrecoverable.
    """
    loop = LiveLoop(model, called, optimizer, plan, forward.note)
    with contextlib.ExitStack() as undo:
        _active.add(model)
        undo.callback(_active.discard, model)
        _apply(loop, undo, before_sharding=False)
        call = loop.compiled_call
        if call is None:
            undo.callback(forward.watch(called))
        # CUDA graphs are not compared with eager execution: the memory pools of both would be held at once.
        elif note is not None and call.recorder is not None:
            undo.callback(_note_launches, call.recorder, note)
        elif note is not None:
            undo.callback(CompileCheck(call, optimizer, loop.device, note).close)
        undo.callback(optimizer.register_load_state_dict_post_hook(memory_format.align_state).remove)
        if make_state:
            undo.callback(optimizers.make_state(optimizer))
        memory_format.align_state(optimizer)
        drop_gradients(optimizer)
        return undo.pop_all()


def technique_states(model: nn.Module, optimizer: torch.optim.Optimizer, plan: Plan) -> Iterator[tuple[str, Stateful]]:
    """Yield the parts of a run's state that belong to an applied plan, by name."""
    if plan.optimizer.value == "muon":
        yield "muon", Momentum(model, optimizer)
    if plan.optimizer_state.value != "user":
        yield "optimizer_state", rounding_steps(optimizer)


def _note_launches(recorder: GraphReplayer, note: Note) -> None:
    """Record the number of graph replays, and the reason if there were none."""
    code, why = recorder.refusal_code, recorder.refusal
    if not why and not recorder.launches:
        code, why = recorder.left_code, recorder.left
    note("cuda_graphs", {"launches": recorder.launches, "refusal": why or None, "code": code or None})
