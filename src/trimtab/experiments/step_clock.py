"""Clock of the phases of a step (data, forward, backward, optimizer, ...), whose times add up to the step time."""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._pytree import tree_iter

from trimtab.experiments.phase_result import PHASES
from trimtab.losses import parts_of
from trimtab.measure.blocks import find_parts, listen_to_recomputation
from trimtab.measure.timing import seconds_between, stamp, wait_for

Label = tuple[str, str]  # phase, and class of module or ""
_REST: Label = ("rest", "")
_queue_callback: Callable[[Callable[[], None]], None] = torch.autograd.Variable._execution_engine.queue_callback


class StepClock:
    """Seconds by phase and class of module, while `on`.

    Args:
        device: Device of the steps.
        waits: True if gradients are reduced over ranks, so that waiting after a backward counts as communication.
    """

    def __init__(self, device: torch.device, *, waits: bool = False) -> None:
        self._device, self._waits = device, waits
        self._is_on = False
        self._clear()

    def _clear(self) -> None:
        self._open = [_REST]
        self._readings: list[tuple[Any, Label]] = []  # time, and the label of the interval that ends there

    @contextlib.contextmanager
    def on(self, model: nn.Module, *, parts: bool = True) -> Iterator[None]:
        """Time the steps of a model inside the context.

        Args:
            model: Model of the steps.
            parts: True to split forward and backward by class of module, with hooks on the modules.
        """
        self._clear()
        with contextlib.ExitStack() as stack:
            for handle in self._hooks(model, parts=parts):
                stack.callback(handle.remove)
            stack.enter_context(listen_to_recomputation(lambda: self.phase("recompute")))
            self._is_on = True
            stack.callback(setattr, self, "_is_on", False)
            self._read()
            yield
            self._read()

    def seconds(self) -> dict[Label, float]:
        """Return the seconds by label since the timer was last switched on. Synchronizes the device."""
        if self._readings:
            wait_for(self._readings[-1][0])
        found: Counter[Label] = Counter()
        for (before, _), (after, label) in itertools.pairwise(self._readings):
            found[label] += seconds_between(before, after)  # type: ignore[assignment]
        return dict(found)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Attribute time inside the context to a phase, except for time in nested phases."""
        depth = self._enter(name)
        try:
            yield
        finally:
            self._leave(depth)

    def forward(self, loss_fn: Callable[..., Any], *given: Any) -> Any:
        """Compute a loss as the forward phase, and time its backward later. Returns the loss, a mean or `Summed`."""
        if not self._is_on:
            return loss_fn(*given)
        with self.phase("forward"):
            result = loss_fn(*given)
        loss = parts_of(result).loss
        if isinstance(loss, Tensor) and loss.requires_grad:
            loss.register_hook(self._backward_begins)
        return result

    def _backward_begins(self, _: Tensor) -> None:
        if self._is_on:
            depth = self._enter("backward")
            _queue_callback(lambda: self._backward_ends(depth))

    def _backward_ends(self, depth: int) -> None:
        self._leave(depth)
        if self._waits:  # DDP waits for its communication in queued callbacks, which run before this one
            depth = self._enter("communication")
            _queue_callback(lambda: self._leave(depth))

    def _hooks(self, model: nn.Module, *, parts: bool) -> Iterator[Any]:
        optimizers: list[int] = []
        yield register_optimizer_step_pre_hook(lambda *_: optimizers.append(self._enter("optimizer")))
        yield register_optimizer_step_post_hook(lambda *_: self._leave(optimizers.pop()))
        depths: list[int] = []  # of the modules in progress

        def begin(module: nn.Module, *_: Any) -> None:
            depths.append(self._enter(*self._label_of(module)))

        def end(module: nn.Module, given: Any, result: Any) -> None:
            self._leave(depths.pop())
            if self._open[-1][0] == "forward":
                self._await_gradients(type(module).__name__, given, result)

        for part in dict.fromkeys(find_parts(model)) if parts else ():
            yield part.register_forward_pre_hook(begin)
            yield part.register_forward_hook(end, always_call=True)  # a recomputation stops by raising an exception

    def _label_of(self, module: nn.Module) -> Label:
        """Return the label of a module's call.

        A call during backward is recomputation; outside the loss, the phase stays.
        """
        phase, part = self._open[-1]
        again = {"forward": "forward", "backward": "recompute", "recompute": "recompute"}
        return (again[phase], type(module).__name__) if phase in again else (phase, part)

    def _await_gradients(self, part: str, given: Any, result: Any) -> None:
        """Start a module's backward label when the gradient of its output arrives."""

        def arrives(_: Tensor) -> None:
            if self._open[-1][0] == "backward":
                self._read()
                self._open[-1] = ("backward", part)

        handed_on = {id(each) for each in tree_iter(given)}
        for tensor in tree_iter(result):
            if isinstance(tensor, Tensor) and tensor.grad_fn is not None and id(tensor) not in handed_on:
                tensor.register_hook(arrives)

    def _enter(self, phase: str, part: str = "") -> int:
        self._read()
        self._open.append((phase, part))
        return len(self._open) - 1

    def _leave(self, depth: int) -> None:
        self._read()
        del self._open[max(1, depth) :]

    def _read(self) -> None:
        if self._is_on:
            event = stamp(self._device)
            self._readings.append((time.perf_counter() if event is None else event, self._open[-1]))


def by_phase(seconds: Mapping[Label, float]) -> dict[str, float]:
    """Return the seconds of every phase present, in order."""
    present = {phase for phase, _ in seconds}
    return {
        phase: math.fsum(s for (name, _), s in seconds.items() if name == phase) for phase in PHASES if phase in present
    }


def by_part(seconds: Mapping[Label, float]) -> dict[str, float]:
    """Return the seconds of forward and backward by module class, as "forward Linear"."""
    found = {label: s for label, s in seconds.items() if label[0] in ("forward", "backward")}
    return {" ".join(label).strip(): s for label, s in sorted(found.items())}
