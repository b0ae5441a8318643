"""State of the model, the optimizer and the user's additional objects.

Saved between two windows, when no gradients are held. Loading validates a state completely before any change.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from trimtab.checkpoint.non_persistent_buffers import hidden_of, loading_hidden, made_anew
from trimtab.core.errors import FormatError, ModelError, OptimizerError, ValueGivenError
from trimtab.core.stateful import Load, Stateful, require_keys
from trimtab.runtime.memory_format import align_state

_HIDDEN = "hidden"  # non-persistent buffers, absent from state_dict() but used in training
_SAME_MODEL = "Build the model with the same architecture, sizes and dtypes as for the saved run."


class ModelState(Stateful):
    """State of a model: `state_dict()` and non-persistent buffers.

    Args:
        model: Model to save.
        name: Name of the part, for errors.
    """

    def __init__(self, model: nn.Module, name: str = "model") -> None:
        self._model, self._name = model, name

    def state_dict(self) -> dict[str, Any]:
        """Return references to the tensors, not copies."""
        own = {name: _detached(value) for name, value in self._own().items()}
        return {"own": own, _HIDDEN: hidden_of(self._model)}

    def buffers(self) -> dict[str, Any]:
        """Return the buffers only, which differ between replicas."""
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
        """Return a function that copies the values into the existing tensors.

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
        """Return the optimizer's `state_dict()`."""
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
    """Restore the dtypes of loaded optimizer state: torch casts it to the parameter's dtype when loading."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for index, values in saved.items():
        own = optimizer.state[parameters[index]]
        for name, value in values.items():
            if isinstance(value, Tensor) and isinstance(own.get(name), Tensor) and own[name].dtype != value.dtype:
                own[name] = value.to(own[name].device, copy=True)


class AdditionalState(Stateful):
    """Additional user objects with `state_dict` and `load_state_dict`, such as a scheduler.

    Raises:
        ValueGivenError: An object lacks `state_dict` or `load_state_dict`.
    """

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
        """Return the `state_dict()` of each object by name."""
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
        """Return a function that loads each object's state. The objects validate their own states."""
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
        what: Name of the part of the state.
        names: Names of the tensors.
        where: Place of the tensors, "in the model but not in the checkpoint" or the reverse.
    """
    listed = f"{names[0]} and {len(names) - 1} more are" if len(names) > 1 else f"{names[0]} is"
    return ModelError(what, got=names[0], problem=f"{listed} {where}.", hint=_SAME_MODEL, code="model.names_differ")


def kinds_differ(what: str, name: str, now: str, then: str) -> ModelError:
    """Return the error for a tensor with a changed shape or dtype.

    Args:
        what: Name of the part of the state.
        name: Name of the tensor.
        now: Dtype and shape in the model.
        then: Dtype and shape in the checkpoint.
    """
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
