"""Non-persistent buffers: statistics, masks and caches that training uses but `state_dict()` leaves out.

A cache may grow with the longest input or be created by the first forward. A newly built model has the initial cache,
which loading replaces with the saved one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from trimtab.core.errors import FormatError, ModelError
from trimtab.core.stateful import Load
from trimtab.runtime.window_snapshot import can_be_written


def hidden_of(model: nn.Module) -> dict[str, Tensor | None]:
    """Return the non-persistent buffers by name, not copied. A tensor with two names appears under both.

    The value is None for a buffer registered as None.
    """
    seen: dict[int, Tensor] = {}
    return {
        name: None if value is None else seen.setdefault(id(value), value.detach()) for name, value in _named(model)
    }


def _named(model: nn.Module) -> Iterator[tuple[str, Tensor | None]]:
    known = model.state_dict().keys()
    for path, module in model.named_modules(remove_duplicate=False):
        for key, value in module._buffers.items():
            name = f"{path}.{key}" if path else key
            if name not in known and (value is not None or key in module._non_persistent_buffers_set):
                yield name, value


def loading_hidden(model: nn.Module, saved: Any) -> Load:
    """Return a function that restores the buffers: in place if the shape is unchanged, else by replacing the tensor.

    Raises:
        ModelError: The model has a buffer that was not saved, that had a smaller shape or another dtype when saved, or
            whose name belongs to a different kind of attribute.
        FormatError: The saved values are not tensors.
    """
    where = "state.model.hidden"
    if not isinstance(saved, Mapping) or not all(isinstance(each, Tensor | None) for each in saved.values()):
        raise FormatError(
            where,
            got=f"{saved!r:.80}",
            expected="the model's non-persistent buffers: a mapping from names to tensors or None",
            hint="Load an unchanged state of a trimtab run.",
        )
    now = dict(_named(model))
    _require_saved(now, saved)
    places = {name: _place(model, name) for name in saved}
    device = next(model.parameters()).device

    def load() -> None:
        rooms = _rooms(saved, now)
        for name, value in saved.items():
            (module, key), own = places[name], now.get(name)
            if value is not None and id(value) not in rooms:
                rooms[id(value)] = value.to(device if own is None else own.device, copy=True)
            room = None if value is None else rooms[id(value)]
            if room is not own or key not in module._buffers:
                module.register_buffer(key, room, persistent=False)
            if value is not None and own is not None and room is own:
                with torch.no_grad():
                    own.copy_(value)

    return load


def _rooms(saved: Mapping[str, Tensor | None], now: Mapping[str, Tensor | None]) -> dict[int, Tensor]:
    """Return the model's tensor for each saved tensor, by id of the saved one.

    Only tensors of equal shape match. Each tensor of the model is used once: two saved tensors must not share memory.
    """
    rooms, taken = dict[int, Tensor](), set[int]()
    for name, value in saved.items():
        own = now.get(name)
        if value is None or own is None or id(value) in rooms or id(own) in taken:
            continue
        if own.shape == value.shape and can_be_written(own):
            rooms[id(value)] = own
            taken.add(id(own))
    return rooms


def made_anew(model: nn.Module, saved: Mapping[str, Tensor | None]) -> list[str]:
    """Return the names of buffers whose saved shape differs from the model's: grown, added or removed."""
    now = dict(_named(model))
    return [name for name, value in saved.items() if _shape_of(value) != _shape_of(now.get(name))]


def _shape_of(value: Tensor | None) -> list[int] | None:
    return None if value is None else list(value.shape)


def _require_saved(now: Mapping[str, Tensor | None], saved: Mapping[str, Any]) -> None:
    """Raise `ModelError` for a buffer of the model without a saved value, or with a smaller saved shape.

    A model built for longer inputs than at the save would otherwise get a truncated buffer.
    """
    for name, value in saved.items():
        own = now.get(name)
        if own is not None and value is not None and not _has_grown(own, value):
            now_is, was = (
                f"{str(each.dtype).removeprefix('torch.')} of shape {list(each.shape)}" for each in (own, value)
            )
            raise ModelError(
                "model's buffers",
                got=f"{name}: {now_is}",
                expected=f"{was}, or smaller in each dimension",
                problem=f"The model's buffer {name} is {now_is}, and the saved {was} cannot replace it.",
                hint=f"Build the model as it was saved: {name} may have at most the saved size in each dimension.",
                code="model.buffer_differs",
            )
    held = {id(value) for name, value in now.items() if name in saved}
    for name, value in now.items():
        if value is not None and name not in saved and id(value) not in held:
            raise _unlike(name, f"The model's buffer {name} is not in the checkpoint.")


def _has_grown(own: Tensor, saved: Tensor) -> bool:
    alike = own.dtype is saved.dtype and own.ndim == saved.ndim
    return alike and all(then >= size for size, then in zip(own.shape, saved.shape, strict=True))


def _place(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    """Return the module and attribute name of a buffer; raises `ModelError` if the model has no such module."""
    path, _, key = name.rpartition(".")
    try:
        module = model.get_submodule(path)
    except AttributeError:
        raise _unlike(name, f"The checkpoint has a buffer {name}, but the model has no module {path!r}.") from None
    if key not in module._buffers and hasattr(module, key):
        raise _unlike(name, f"The checkpoint has a buffer {name}, but that attribute of the model is not a buffer.")
    return module, key


def _unlike(name: str, problem: str) -> ModelError:
    hint = "Build the model with the same code and settings as for the saved run."
    return ModelError("model's buffers", got=name, problem=problem, hint=hint, code="model.names_differ")
