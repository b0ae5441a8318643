"""CUDA graph capture and replay of a model's calls; calls that cannot be captured run eagerly.

The first call of a kind runs eagerly, so that kernels are selected and compiled. The second is checked for host
synchronisation, which cannot be captured. The third is captured and, like all later calls, replayed. A kind comprises
the input shapes and everything else that may change the forward's control flow. Calls without gradients, calls under
hooks or dispatch modes, and a forward whose predecessor still awaits backward run eagerly.
"""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode
from torch.utils._pytree import tree_flatten

from trimtab.core.compile_mode import Compiled, is_recorded
from trimtab.runtime.captured_module_state import ModuleState
from trimtab.runtime.cuda_graph_capture import CapturedGraphs, ReplayToken, UncapturableModel

LAUNCHES_FROM = 3  # Number of the first call of a kind that is replayed.
MOST_KINDS = 3  # Each kind holds memory. Micro-batches usually have one or two sizes.
_PLAIN = (bool, int, float, str, torch.dtype, torch.device, type(None))
Kind = tuple[Any, ...]


def steps_to_launch(compiled: Compiled) -> int:
    """Return the number of steps after which captured graphs are replayed; 0 if the plan uses no graphs."""
    return LAUNCHES_FROM if is_recorded(compiled) else 0


@dataclass
class _CapturedCall:
    """A kind of call, the number of such calls, and the captured graphs."""

    kind: Kind
    calls: int = 0
    recording: CapturedGraphs | None = None


class GraphReplayer:
    """Calls a model, replaying CUDA graphs where possible.

    Args:
        model: the model.
        forward: the eager call, which is captured.
        record: constructor of captured graphs.

    Attributes:
        is_on: False disables capture and replay.
        launches: number of replays.
        refusal: reason why capture failed and is disabled; "" otherwise.
        refusal_code: code of `refusal`, such as "graphs.synchronizes"; "" otherwise.
        left: last known reason for an eager call since the last replay; "" otherwise.
        left_code: code of `left`; "" otherwise.
    """

    def __init__(
        self, model: nn.Module, forward: Callable[..., Any], record: Callable[..., CapturedGraphs] = CapturedGraphs
    ) -> None:
        self._model, self._forward, self._record = model, forward, record
        self._state = ModuleState(model)
        self._device = next(model.parameters()).device
        self._kinds: list[_CapturedCall] = []
        self._last: Callable[[], ReplayToken | None] = lambda: None
        self.is_on, self.launches = True, 0
        self.refusal = self.refusal_code = self.left = self.left_code = ""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model, by replay if possible."""
        tensors, kind = self._look(args, kwargs) if self.is_on else ([], None)
        seen = None if kind is None or self._is_waited_for() else self._seen(kind)
        if seen is None or seen.calls == 1:
            return self._called(args, kwargs)
        if seen.calls < LAUNCHES_FROM:
            return self._watched(args, kwargs)
        if seen.recording is None:
            seen.recording = self._recorded(args, kwargs)
        if seen.recording is None:
            return self._called(args, kwargs)
        token = ReplayToken()
        self._last = weakref.ref(token)
        self.launches += 1
        self._leave("", "")
        return seen.recording.launch(tensors, token)

    def forget(self) -> None:
        """Release all captured graphs and their memory."""
        for recording in self._made():
            recording.close()
        self._kinds = []

    def _made(self) -> list[CapturedGraphs]:
        return [seen.recording for seen in self._kinds if seen.recording is not None]

    def _called(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the model eagerly. If memory runs out, release all captured graphs, disable capture and retry."""
        try:
            return self._forward(*args, **kwargs)
        except torch.cuda.OutOfMemoryError:
            if not self._made() or self._is_waited_for():
                raise
        self._give_up("graphs.out_of_memory", "an eager call ran out of memory next to captured graphs")
        return self._forward(*args, **kwargs)

    def _leave(self, code: str, reason: str) -> None:
        self.left_code, self.left = code, reason

    def _give_up(self, code: str, reason: str) -> None:
        self.refusal_code, self.refusal = code, reason
        self.forget()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _is_waited_for(self) -> bool:
        """Return True if the last replay awaits its backward, whose tensors another replay would overwrite."""
        token = self._last()
        return token is not None and token.is_open

    def _look(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Tensor], Kind | None]:
        """Return the input tensors and the kind of a call; the kind is None if the call cannot be replayed."""
        if self.refusal or not torch.is_grad_enabled() or self._is_looked_into():
            return [], None
        leaves, spec = tree_flatten((args, kwargs))
        tensors = [each for each in leaves if isinstance(each, Tensor)]
        if not tensors or not all(map(self._may_be_copied, tensors)):
            self._leave("graphs.inputs", "an input tensor is on another device, requires a gradient or is a subclass")
            return [], None
        if not all(isinstance(each, (Tensor, *_PLAIN)) for each in leaves):
            self._leave("graphs.inputs", "an input is neither a tensor nor a bool, int, float, str, dtype or device")
            return [], None
        shapes = [
            (each.shape, each.stride(), each.dtype, each.device) if isinstance(each, Tensor) else (type(each), each)
            for each in leaves
        ]
        cast = torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda")
        return tensors, (spec, shapes, cast, self._state.modes)

    def _is_looked_into(self) -> bool:
        """Return True if modules have hooks, or a dispatch mode, a functorch transform or another capture is active."""
        if self._state.has_hooks:
            self._leave("graphs.hooks", "modules of the model have hooks")
            return True
        is_captured = self._device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        is_changed = torch._C._functorch.peek_interpreter_stack() is not None
        return is_captured or is_changed or _get_current_dispatch_mode() is not None

    def _may_be_copied(self, tensor: Tensor) -> bool:
        return type(tensor) is Tensor and tensor.device == self._device and not tensor.requires_grad

    def _seen(self, kind: Kind) -> _CapturedCall | None:
        """Count a call and return the entry of its kind; None if the limit of kinds is reached."""
        if self._state.has_changed():  # Captured graphs refer to the old parameters and the old module state.
            if self._kinds:
                self._leave("graphs.state_changes", "attributes, parameters or buffers are replaced between calls")
            self.forget()
            self._state = ModuleState(self._model)
            self._state.has_changed()
        seen = next((each for each in self._kinds if each.kind == kind), None)
        if seen is None:
            if len(self._made()) >= MOST_KINDS:
                return None
            waiting = [each for each in self._kinds if each.recording is None]
            if len(self._kinds) >= MOST_KINDS:  # A kind that has not been captured is replaced.
                self._kinds.remove(waiting[0])
            seen = _CapturedCall(kind)
            self._kinds.append(seen)
        seen.calls += 1
        return seen

    def _watched(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the model with CUDA's synchronisation warnings on; torch does not recover well from a failed capture."""
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            with _told_of_waiting(self._device):
                found = self._called(args, kwargs)
        for each in warned:
            if "called a synchronizing CUDA operation" in str(each.message):
                self._give_up("graphs.synchronizes", "the forward waits for the GPU, as .item() or .cpu() does")
            elif "debug mode is a prototype" not in str(each.message):
                warnings.warn_explicit(each.message, each.category, each.filename, each.lineno)
        return found

    def _recorded(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CapturedGraphs | None:
        beside = next(iter(self._made()), None)
        try:
            found = self._record(self._model, self._forward, args, kwargs, beside)
            if self._state.has_changed():
                found.close()
                raise UncapturableModel(
                    "the forward replaces attributes or buffers of its modules", "graphs.state_changes"
                )
            return found
        except torch.cuda.OutOfMemoryError:
            self._give_up("graphs.out_of_memory", "memory ran out during capture")
        except Exception as error:  # A forward may do many things that cannot be captured; it then runs eagerly.
            if isinstance(error, UncapturableModel):
                self._give_up(error.code, str(error))
            else:
                self._give_up("graphs.capture_failed", f"capture failed ({_first_said(error)})")
        return None


@contextlib.contextmanager
def _told_of_waiting(device: torch.device) -> Iterator[None]:
    """Have torch warn about host synchronisations with the GPU."""
    if device.type != "cuda":
        yield
        return
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def _first_said(error: BaseException) -> str:
    """Return type and first line of the original error, since ending a failed capture raises another error."""
    while error.__context__ is not None:
        error = error.__context__
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
