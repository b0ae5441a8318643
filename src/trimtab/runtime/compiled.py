"""A model's calls compiled by torch, launched as CUDA graphs, or both; in place: it stays the object that it was."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_iter

from trimtab.core.compiled import Compiled, is_by_compiler, is_recorded
from trimtab.core.errors import ValueGivenError
from trimtab.runtime.cuda_graphs import Recorder


def is_compiled(model: nn.Module) -> bool:
    """Return whether the model, or a part of it, is compiled already."""
    return any(hasattr(each, "_orig_mod") or each._compiled_call_impl is not None for each in model.modules())


def check_available(compiled: Compiled, device: torch.device) -> None:
    """Raise `ValueGivenError` where a plan launches graphs and the device knows none."""
    if is_recorded(compiled) and device.type != "cuda":
        raise ValueGivenError(
            "plan.compiled", given=f"{compiled!r} on {device.type}", expected="a CUDA device for graphs"
        )


def require_as_written(compiled: Compiled, model: nn.Module) -> None:
    """Raise `ValueGivenError` where a plan compiles a model that the loop has compiled."""
    if compiled and is_compiled(model):
        raise ValueGivenError(
            "plan.compiled",
            given=f"{compiled!r}, for a model of which the loop has compiled all or a part",
            expected="False for it, or a model that is as it was written",
            way_out='A run that was kept goes on by another plan with Checkpoints(accepts=("plan",)).',
        )


def noting_calls(model: nn.Module, note: Callable[[], None]) -> Callable[[], None]:
    """Have each call of a model noted, before its forward; returns what ends that.

    Of a model that is compiled in place hooks are a part of what is compiled: those that come later are not seen. A
    model that takes no hooks, as a scripted one, is noted as it is called.
    """
    called: Any = model._compiled_call_impl
    before = called
    if called is None:
        try:
            return model.register_forward_pre_hook(lambda *_: note()).remove
        except Exception:  # of torch or of the model's own class
            called = model._call_impl

    def noted(*args: Any, **kwargs: Any) -> Any:
        note()
        return called(*args, **kwargs)

    model._compiled_call_impl = noted

    def end() -> None:
        model._compiled_call_impl = before

    return end


class CompiledCall:
    """A model's call, compiled when it is first called, recorded when it is called again, or both.

    Random numbers are drawn as without: dropout keeps its masks. A copy of the model is not compiled.

    Args:
        saw: called before each forward, outside of what is compiled: in it, a hook that is new to every run would have
            the model compiled anew. compiled: how, as a plan says it.

    Attributes:
        is_on: whether it is called compiled; or as it was. began: when it was called first. shapes: of the tensors that
            it was called with, while somebody takes them; else None. recorder: what launches graphs; None: nothing.
    """

    def __init__(self, model: nn.Module, saw: Callable[[], None], compiled: Compiled = True) -> None:
        called: Any = model._call_impl
        if is_by_compiler(compiled):
            model.compile(options={"fallback_random": True})
            called = model._compiled_call_impl
        self.recorder = Recorder(model, called) if is_recorded(compiled) else None
        self._model, self._called, self._saw = model, self.recorder or called, saw
        self.is_on = True
        self.shapes: list[torch.Size] | None = None
        self.began: float | None = None
        model._compiled_call_impl = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model."""
        self._saw()
        if self.began is None:
            self.began = time.perf_counter()
        if self.shapes is not None:
            self.shapes += [each.shape for each in tree_iter((args, kwargs)) if isinstance(each, Tensor)]
        return self._called(*args, **kwargs) if self.is_on else self._model._call_impl(*args, **kwargs)

    def take_shapes(self) -> tuple[torch.Size, ...]:
        """Return the shapes since the last time."""
        shapes, self.shapes = tuple(self.shapes or ()), []
        return shapes

    def undo(self) -> None:
        """Leave the model as it was."""
        vars(self._model).pop("_compiled_call_impl", None)
        if self.recorder is not None:
            self.recorder.forget()
