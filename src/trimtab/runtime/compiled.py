"""A model's forward compiled by torch, in place: the model stays the object that it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn


def is_compiled(model: nn.Module) -> bool:
    """Return whether the model, or a part of it, is compiled already."""
    return any(hasattr(each, "_orig_mod") or each._compiled_call_impl is not None for each in model.modules())


def use_compiled(model: nn.Module, saw: Callable[[], None]) -> Callable[[], None]:
    """Have the model's forward compiled when it is called next; returns what puts it back.

    Random numbers are drawn as without: dropout keeps its masks. A copy of the model is not compiled.

    Args:
        saw: called before each forward, outside of what is compiled: in it, a hook that is new to every run would have
            the model compiled anew.
    """
    model.compile(options={"fallback_random": True})
    compiled = model._compiled_call_impl
    assert compiled is not None

    def call(*args: Any, **kwargs: Any) -> Any:
        saw()
        return compiled(*args, **kwargs)

    model._compiled_call_impl = call

    def undo() -> None:
        vars(model).pop("_compiled_call_impl", None)

    return undo
