"""State of the model, the optimizer and the user's additional objects.

Saved between two windows, when no gradients are held. Loading validates a state completely before any change.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from trimtab.core.errors import FormatError, ModelError, OptimizerError, ValueGivenError
from trimtab.core.stateful import Load, Stateful, require_keys
from trimtab.techniques.memory_format import align_state
from trimtab.training.window_snapshot import can_be_written


def hidden_of(model: nn.Module) -> dict[str, Tensor | None]:
    """Return the non-persistent buffers, not part of `state_dict()`, by name.

    The buffers are not copied. A tensor with two names appears under both; a buffer registered as None has the value
    None.
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
    """Return a function that restores the buffers: in place if the shape is unchanged, otherwise as a new tensor.

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
    """Return the model's tensors by id of the saved tensors."""
    # Each tensor of the model is used once: two saved tensors must not share memory.
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
    """Return the names of buffers with a saved shape different from the model's: grown, added or removed."""
    now = dict(_named(model))
    return [name for name, value in saved.items() if _shape_of(value) != _shape_of(now.get(name))]


def _shape_of(value: Tensor | None) -> list[int] | None:
    return None if value is None else list(value.shape)


def _require_saved(now: Mapping[str, Tensor | None], saved: Mapping[str, Any]) -> None:
    """Raise `ModelError` for a buffer of the model without a saved value, or with a smaller saved shape."""
    # A model built for longer inputs than at the save would otherwise get a truncated buffer.
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


_HIDDEN = "hidden"  # non-persistent buffers, absent from state_dict() but used in training
_SAME_MODEL = "Build the model with the same architecture, sizes and dtypes as for the saved run."


class ModelState(Stateful):
    """State of a model: `state_dict()` and non-persistent buffers."""

    def __init__(self, model: nn.Module, name: str = "model") -> None:
        self._model, self._name = model, name

    def state_dict(self) -> dict[str, Any]:
        """Return references to the tensors, not copies."""
        own = {name: _detached(value) for name, value in self._own().items()}
        return {"own": own, _HIDDEN: hidden_of(self._model)}

    def buffers(self) -> dict[str, Any]:
        """Return the buffers only, because buffers differ between replicas."""
        named, known = dict(self._model.named_buffers(remove_duplicate=False)), self._model.state_dict().keys()
        own = {name: value.detach() for name, value in named.items() if name in known}
        return {"own": own, _HIDDEN: hidden_of(self._model)}

    def made_anew(self, state: Mapping[str, Any]) -> list[str]:
        """Return the names of non-persistent buffers with a different shape, which `loading` replaces."""
        return made_anew(self._model, state[_HIDDEN])

    def _own(self) -> dict[str, Any]:
        return self._model.state_dict()

    def _put(self, own: Mapping[str, Any]) -> None:
        self._model.load_state_dict(own)

    def loading(self, state: Any) -> Load:
        """Return a function for copying the values into the existing tensors.

        Non-persistent buffers of another shape are replaced: caches may have grown or appeared since.

        Raises:
            ModelError: Names, shapes or dtypes differ from the model's.
        """
        require_keys(f"state.{self._name}", state, ("own", _HIDDEN))
        _require_alike(self._name, state["own"], self._own())
        load_hidden = loading_hidden(self._model, state[_HIDDEN])

        def load() -> None:
            self._put(state["own"])
            load_hidden()

        return load


class OptimizerState(Stateful):
    """Parameter groups and state of an optimizer."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        return self._optimizer.state_dict()

    def loading(self, state: Any) -> Load:
        """Return a function that restores the optimizer.

        Raises:
            OptimizerError: The parameter groups differ in size.
        """
        require_keys("state.optimizer", state, ("state", "param_groups"))
        now = [len(group["params"]) for group in self._optimizer.param_groups]
        then = [len(group["params"]) for group in state["param_groups"]]
        if now != then:
            raise OptimizerError(
                "optimizer",
                got=f"{now} parameters per group",
                expected=f"{then}",
                problem=f"The numbers of parameters in the optimizer's groups are {now}, but {then} in the checkpoint.",
                hint="Build the optimizer with the same parameter groups as for the saved run.",
                code="optimizer.groups_differ",
            )

        def load() -> None:
            self._optimizer.load_state_dict(state)
            keep_types(self._optimizer, state["state"])
            align_state(self._optimizer)

        return load


def keep_types(optimizer: torch.optim.Optimizer, saved: Mapping[int, Mapping[str, Any]]) -> None:
    """Restore the dtypes of loaded optimizer state: torch casts the state to the parameter's dtype when loading."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for index, values in saved.items():
        own = optimizer.state[parameters[index]]
        for name, value in values.items():
            if isinstance(value, Tensor) and isinstance(own.get(name), Tensor) and own[name].dtype != value.dtype:
                own[name] = value.to(own[name].device, copy=True)


class AdditionalState(Stateful):
    """Objects of the user, such as a scheduler; `ValueGivenError` without `state_dict` and `load_state_dict`."""

    def __init__(self, things: Mapping[str, Any]) -> None:
        for name, thing in things.items():
            if not all(callable(getattr(thing, verb, None)) for verb in ("state_dict", "load_state_dict")):
                raise ValueGivenError(
                    f"checkpoints.also[{name!r}]",
                    got=type(thing).__name__,
                    expected="an object with state_dict() and load_state_dict()",
                    hint="Pass the object itself, such as a scheduler, or write a class with both methods for it.",
                    code="checkpoints.no_state_dict",
                )
        self._things = dict(things)

    def state_dict(self) -> dict[str, Any]:
        return {name: thing.state_dict() for name, thing in self._things.items()}

    def early_state(self) -> dict[str, Any]:
        """Return the states available before the first window.

        Iterables are skipped, because `state_dict()` of a data loader might start an epoch.
        """
        said = {}
        for name, thing in self._things.items():
            if not hasattr(thing, "__iter__"):
                with contextlib.suppress(Exception):  # an object created by the first step is queried at the save
                    said[name] = thing.state_dict()
        return said

    def loading(self, state: Any) -> Load:
        """Return a function that loads the states of all objects; an object validates the state itself."""
        require_keys("state.also", state, self._things)

        def load() -> None:
            for name, thing in self._things.items():
                thing.load_state_dict(state[name])

        return load


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


def _require_alike(what: str, saved: Any, now: Mapping[str, Any]) -> None:
    if not isinstance(saved, Mapping):
        raise FormatError(f"state.{what}", got=f"a {type(saved).__name__}", expected="a mapping")
    if missing := sorted(saved.keys() - now.keys()):
        raise names_differ(what, missing, "in the checkpoint but not in the model")
    if new := sorted(now.keys() - saved.keys()):
        raise names_differ(what, new, "in the model but not in the checkpoint")
    for name, value in saved.items():
        if _kind(value) != _kind(now[name]):
            raise kinds_differ(what, name, _kind(now[name]), _kind(value))


def names_differ(what: str, names: Sequence[str], where: str) -> ModelError:
    """Return the error for tensors missing from the model or the checkpoint.

    Args:
        where: Place of the tensors, "in the model but not in the checkpoint" or the reverse.
    """
    listed = f"{names[0]} and {len(names) - 1} more are" if len(names) > 1 else f"{names[0]} is"
    return ModelError(what, got=names[0], problem=f"{listed} {where}.", hint=_SAME_MODEL, code="model.names_differ")


def kinds_differ(what: str, name: str, now: str, then: str) -> ModelError:
    """Return the error for a tensor with a changed shape or dtype."""
    return ModelError(
        f"{what}: {name}",
        got=now,
        expected=then,
        problem=f"{name} is {now} in the model, but {then} in the checkpoint.",
        hint=_SAME_MODEL,
        code="model.shapes_differ",
    )


def _kind(value: Any) -> str:
    if not isinstance(value, Tensor):
        return type(value).__name__
    return f"{str(value.dtype).removeprefix('torch.')} of shape {tuple(value.shape)}"
