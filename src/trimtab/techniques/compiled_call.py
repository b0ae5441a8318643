"""In-place compilation of a model's calls or of its blocks by torch.compile, and capture as CUDA graphs."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_iter

from trimtab.core.choice import COMPILED_BLOCKS, Compiled, is_by_compiler, is_recorded
from trimtab.core.errors import ValueGivenError
from trimtab.techniques.compiled_blocks import (
    OPTIONS,
    CompiledBlocks,
    KeyValueCaches,
    has_compiled_blocks,
    repeated_blocks,
)
from trimtab.techniques.cuda_graphs import GraphReplayer


def is_compiled(model: nn.Module) -> bool:
    """Return True if the model or a submodule is compiled already."""
    modules = list(model.modules())
    is_called = any(hasattr(each, "_orig_mod") or each._compiled_call_impl is not None for each in modules)
    return is_called or has_compiled_blocks(modules)


@functools.cache
def start_compiler(device: torch.device) -> None:
    """Load torch's compiler by compiling a trivial model with its backward, once per process and kind of device.

    The start takes longer than the compilation of a block (docs/measured.md), and is not part of a model's compilation.
    """
    weight = torch.ones(8, 8, device=device, requires_grad=True)  # Without random numbers, which belong to the loop.

    def forward(x: Tensor) -> Tensor:
        return nn.functional.linear(nn.functional.gelu(nn.functional.linear(x, weight)), weight)

    torch.compile(forward, **OPTIONS)(torch.ones(4, 8, device=device)).sum().backward()


def check_available(compiled: Compiled, device: torch.device) -> None:
    """Raise `ValueGivenError` if a plan uses CUDA graphs and the device is not a CUDA device."""
    if is_recorded(compiled) and device.type != "cuda":
        raise ValueGivenError(
            "plan.compiled",
            got=f"CUDA graphs (compiled={compiled!r}) for a model on the device {device.type!r}",
            expected="a model on a CUDA device",
            hint="Move the model to the GPU before trimtab.start, or use a plan with compiled=False.",
            code="compiled.no_cuda",
        )


def require_as_written(compiled: Compiled, model: nn.Module) -> None:
    """Raise `ValueGivenError` if a plan compiles a model that the user has compiled already."""
    if compiled and is_compiled(model):
        raise ValueGivenError(
            "plan.compiled",
            problem=f"The plan compiles the model (compiled={compiled!r}), but the model or one of its submodules is "
            "compiled already.",
            hint="Remove torch.compile from the loop, or use a plan with compiled=False. To resume a checkpoint with "
            'that plan, pass Checkpoints(accepts=("plan",)).',
            code="compiled.twice",
        )


def require_blocks(compiled: Compiled, model: nn.Module) -> None:
    """Raise `ValueGivenError` if a plan compiles the blocks of a model without repeated blocks."""
    if compiled == COMPILED_BLOCKS and not repeated_blocks(model):
        raise ValueGivenError(
            "plan.compiled",
            got=f"{compiled!r} for a {type(model).__name__} without repeated blocks",
            expected="a model with several equal blocks, such as the layers of a transformer",
            hint="Use a plan with compiled=True or compiled=False.",
            code="compiled.no_blocks",
        )


def noting_calls(model: nn.Module, note: Callable[[], None]) -> Callable[[], None]:
    """Call `note` before each forward of a model; return a function that ends this.

    In a model compiled in place, hooks are part of the compiled code, and hooks added later are not called, so its call
    is wrapped. The call is also wrapped if a model rejects hooks, as a scripted model does.
    """
    called: Any = model._compiled_call_impl
    before = called
    if called is None:
        try:
            return model.register_forward_pre_hook(lambda *_: note()).remove
        except Exception:  # Raised by torch or by the model's own class.
            called = model._call_impl

    def noted(*args: Any, **kwargs: Any) -> Any:
        note()
        return called(*args, **kwargs)

    model._compiled_call_impl = noted

    def end() -> None:
        model._compiled_call_impl = before

    return end


class CompiledCall:
    """A model's call, compiled at its first call, captured as a CUDA graph at a later call, or both.

    Random numbers are the same as without compilation, so dropout masks are unchanged. A copy of the model is not
    compiled. `saw` is called before each forward, outside of the compiled code, since a new hook would cause a
    recompilation.

    Attributes:
        shapes: shapes of input tensors since the last `take_shapes`; None if shapes are not collected.
        recorder: captures and replays CUDA graphs; None without graphs.
    """

    def __init__(self, model: nn.Module, saw: Callable[[], None], compiled: Compiled = True) -> None:
        called: Any = model._call_impl
        self._caches = KeyValueCaches(model) if is_by_compiler(compiled) else None
        self._blocks = CompiledBlocks(model) if compiled == COMPILED_BLOCKS else None
        if is_by_compiler(compiled) and self._blocks is None:
            model.compile(**OPTIONS)
            called = model._compiled_call_impl
        self.recorder = GraphReplayer(model, called) if is_recorded(compiled) else None
        self._model, self._called, self._saw = model, self.recorder or called, saw
        self._is_on = True
        self.shapes: list[torch.Size] | None = None
        model._compiled_call_impl = self

    @property
    def is_on(self) -> bool:
        """True if calls use the compiled code; False runs the original forward."""
        return self._is_on

    @is_on.setter
    def is_on(self, value: bool) -> None:
        if value != self._is_on and self._blocks is not None:
            self._blocks.turn(on=value)
        self._is_on = value

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's forward."""
        self._saw()
        if self.shapes is not None:
            self.shapes += [each.shape for each in tree_iter((args, kwargs)) if isinstance(each, Tensor)]
        if not self._is_on:
            return self._model._call_impl(*args, **kwargs)
        with contextlib.nullcontext() if self._caches is None else self._caches.off():
            return self._called(*args, **kwargs)

    def take_shapes(self) -> tuple[torch.Size, ...]:
        """Return the input shapes collected since the last call, and clear them."""
        shapes, self.shapes = tuple(self.shapes or ()), []
        return shapes

    def undo(self) -> None:
        """Restore the model's original call."""
        vars(self._model).pop("_compiled_call_impl", None)
        if self._blocks is not None:
            self._blocks.undo()
        if self.recorder is not None:
            self.recorder.forget()
