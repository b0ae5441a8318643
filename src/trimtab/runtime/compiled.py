"""A model's forward compiled by torch, in place: the model stays the object that it was."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_iter


def is_compiled(model: nn.Module) -> bool:
    """Return whether the model, or a part of it, is compiled already."""
    return any(hasattr(each, "_orig_mod") or each._compiled_call_impl is not None for each in model.modules())


class CompiledCall:
    """A model's forward, compiled when it is called first.

    Random numbers are drawn as without: dropout keeps its masks. A copy of the model is not compiled.

    Args:
        saw: called before each forward, outside of what is compiled: in it, a hook that is new to every run would have
            the model compiled anew.

    Attributes:
        is_on: whether it is called compiled; or as it was. began: when it was called first. shapes: of the tensors that
            it was called with, while somebody takes them; else None.
    """

    def __init__(self, model: nn.Module, saw: Callable[[], None]) -> None:
        model.compile(options={"fallback_random": True})
        compiled = model._compiled_call_impl
        assert compiled is not None
        self._model, self._compiled, self._saw = model, compiled, saw
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
        return self._compiled(*args, **kwargs) if self.is_on else self._model._call_impl(*args, **kwargs)

    def take_shapes(self) -> tuple[torch.Size, ...]:
        """Return the shapes since the last time."""
        shapes, self.shapes = tuple(self.shapes or ()), []
        return shapes

    def undo(self) -> None:
        """Leave the model as it was."""
        vars(self._model).pop("_compiled_call_impl", None)
