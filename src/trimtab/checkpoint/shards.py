"""What ranks hold in shards, each writing and reading its own: torch's distributed checkpoint, as safetensors.

Its files hold numbers, and where in a whole tensor they belong; nothing in them can run. A job of another number of
ranks reads from all of them what is its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trimtab.checkpoint import shard_files
from trimtab.checkpoint.run_state import ModelState, keep_types
from trimtab.core.errors import FormatError, ModelError, OptimizerError
from trimtab.core.state_parts import Load, Part, require_keys
from trimtab.measure.sharded_norms import is_sharded_itself
from trimtab.runtime.layout import align_state

_MODEL, _OPTIMIZER = "model", "optimizer"
# Of a rank's shards, what every rank adds its own to.
MERGED = ("members", "others")


class WithoutParameters(ModelState):
    """A model's state but for its parameters, which are among the shards."""

    def _own(self) -> dict[str, Any]:
        whole = self._model.state_dict(keep_vars=True)  # a wrapper may give them other names there
        parameters = {id(parameter) for parameter in self._model.parameters()}  # after it, which puts them in shards
        return {name: value for name, value in whole.items() if id(value) not in parameters}

    def _put(self, own: Mapping[str, Any]) -> None:
        self._model.load_state_dict(own, strict=False)


class Shards(Part):
    """Parameters, and the optimizer's state of those that this rank steps.

    Its `state_dict()` is what else there is of the optimizer: options of its groups, which parameter is in which, and
    what of its state is no tensor. The tensors are read from the folder that it was made `at`.

    Args:
        every: as the run steps them, where this rank steps a part of them: an optimizer whose groups have them all.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        folder: Path | None = None,
        every: torch.optim.Optimizer | None = None,
    ) -> None:
        self._model, self._optimizer, self._folder, self._every = model, optimizer, folder, every or optimizer

    def at(self, folder: Path, every: torch.optim.Optimizer) -> Shards:
        """Return the same, read from a folder."""
        return Shards(self._model, self._optimizer, folder, every)

    def state_dict(self) -> dict[str, Any]:
        """Return what is no tensor of a parameter's state, and which tensors there are.

        Raises:
            FormatError: a rank's own part of a state is not cut as its parameter is, so that ranks would overwrite it.
            OptimizerError: it steps what is not the model's.
        """
        self._settle()
        groups = [_options(group) for group in self._optimizer.state_dict()["param_groups"]]
        members, others = {}, {}
        for index, name, parameter in self._stepped(self._optimizer):
            state = self._optimizer.state.get(parameter, {})
            tensors = [key for key, value in state.items() if isinstance(value, Tensor)]
            for key in tensors:
                _require_apart(name, key, state[key], parameter)
            members[name] = {"group": index, "tensors": tensors}
            if kept := {key: value for key, value in state.items() if key not in tensors}:
                others[name] = kept
        return {"groups": groups, "members": members, "others": others}

    def tensors(self) -> dict[str, Tensor]:
        """Return what is written: parameters and state by their names, dense.

        Raises:
            FormatError: they are of a type that files of shards cannot hold.
        """
        self._settle()
        found = self._parameters()
        for _, name, parameter in self._stepped(self._optimizer):
            for key, value in self._optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    found[_key(name, key)] = value.detach()
        found = {name: value if _is_cut(value) else value.contiguous() for name, value in found.items()}
        shard_files.require_writable(found)
        return found

    def loading(self, state: Any) -> Load:
        """Return what reads this rank's shards into the very same parameters, and has the optimizer go on.

        Raises:
            ModelError, OptimizerError: other names, shapes, types or groups than the run has. FormatError: files of
                shards that are none, or lack one.
        """
        require_keys("state.shards", state, ("groups", *MERGED))
        self._require_groups(state["groups"], state["members"])
        assert self._folder is not None
        folder, saved, parameters = self._folder, shard_files.written(self._folder), self._parameters()
        _require_alike(saved, parameters)
        stepped = [(name, parameter) for _, name, parameter in self._stepped(self._optimizer)]
        rooms = {
            name: {key: _room_like(parameter, _found(saved, name, key)) for key in state["members"][name]["tensors"]}
            for name, parameter in stepped
        }

        def load() -> None:
            flat = {_key(name, key): room for name, found in rooms.items() for key, room in found.items()}
            shard_files.read(folder, parameters | flat)
            whole = {i: rooms[name] | state["others"].get(name, {}) for i, (name, _) in enumerate(stepped)}
            whole = {index: found for index, found in whole.items() if found}
            packed = self._optimizer.state_dict()["param_groups"]
            options = [own | dict(then) for own, then in zip(packed, state["groups"], strict=True)]
            self._optimizer.load_state_dict({"state": whole, "param_groups": options})
            keep_types(self._optimizer, whole)
            align_state(self._optimizer)

        return load

    def _require_groups(self, groups: Any, members: Mapping[str, Any]) -> None:
        expected = "the groups of parameters that the run was saved with"
        if len(groups) != (number := len(self._optimizer.param_groups)):
            given = f"{number} groups of parameters"
            raise OptimizerError("optimizer", given=given, expected=f"{len(groups)}, as the run was saved with")
        now = {name: index for index, name, _ in self._stepped(self._every)}
        for name in sorted(now.keys() | members.keys()):
            if name not in now or name not in members:
                whose = "the checkpoint" if name in members else "the optimizer"
                raise OptimizerError("optimizer", given=f"{name} in {whose} alone", expected=expected)
            if now[name] != members[name]["group"]:
                given = f"{name} in group {now[name]}, not {members[name]['group']}"
                raise OptimizerError("optimizer", given=given, expected=expected)

    def _settle(self) -> None:
        """Have every parameter be in shards: an evaluation may have left some whole."""
        for module in self._model.modules():
            if is_sharded_itself(module) and hasattr(module, "reshard"):
                module.reshard()

    def _parameters(self) -> dict[str, Tensor]:
        return {f"{_MODEL}.{name}": parameter.detach() for name, parameter in self._model.named_parameters()}

    def _stepped(self, optimizer: torch.optim.Optimizer) -> Iterator[tuple[int, str, Tensor]]:
        """Yield what an optimizer steps, in its order: group, name, parameter."""
        names = {parameter: name for name, parameter in self._model.named_parameters()}
        for index, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                if parameter not in names:
                    given = "a parameter that is not the model's"
                    raise OptimizerError("optimizer", given=given, expected="the model's parameters alone")
                yield index, names[parameter], parameter


def merged(parts: Iterator[Mapping[str, Any]]) -> dict[str, Any]:
    """Return what ranks have said of their shards as one.

    Raises:
        FormatError: two of them say otherwise of one parameter.
    """
    first = {key: dict(value) if key in MERGED else value for key, value in next(parts).items()}
    for part in parts:
        for name, said in part["members"].items():
            if first["members"].setdefault(name, said) != said:
                given, expected = f"ranks that differ about {name}", "one state of a parameter"
                raise FormatError("state.shards", given=given, expected=expected)
        first["others"] |= part["others"]
    return first


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def _key(name: str, key: Any) -> str:
    return f"{_OPTIMIZER}.{name}:{key}"


def _is_cut(value: Tensor) -> bool:
    return hasattr(value, "placements")


def _require_apart(name: str, key: Any, value: Tensor, parameter: Tensor) -> None:
    """Raise `FormatError` for what ranks would write one over the other, or not get back as it was."""
    if type(key) is not str:
        given, expected = f"{key!r} in the optimizer's state of {name}", "texts as keys"
        raise FormatError("optimizer", given=given, expected=expected)
    if not _is_cut(parameter) or value.dim() == 0:
        return
    if not _is_cut(value) or value.shape != parameter.shape or value.placements != parameter.placements:  # type: ignore[attr-defined]
        raise FormatError(
            "optimizer",
            given=f"{key} of {name}, a state of shape {tuple(value.shape)} that is not cut as its parameter",
            expected="an optimizer whose state has an element for each of a parameter, as Adam's and SGD's",
            way_out="Share the model at stage 1, where every parameter's state is whole.",
        )


def _found(saved: Mapping[str, Any], name: str, key: str) -> Any:
    if (found := saved.get(_key(name, key))) is None:
        raise FormatError("state.shards", given=f"no {key} of {name}", expected="the state that the checkpoint names")
    return found


def _room_like(parameter: Tensor, saved: Any) -> Tensor:
    """Return a tensor of a saved one's size and type, cut as the parameter is where it is one of its elements."""
    size, kind = saved.size, saved.properties.dtype
    if size == parameter.shape and len(size):
        return torch.empty_like(parameter.detach(), dtype=kind)
    return torch.empty(size, dtype=kind)


def _require_alike(saved: Mapping[str, Any], now: Mapping[str, Tensor]) -> None:
    then = {name: each for name, each in saved.items() if name.startswith(f"{_MODEL}.")}
    if apart := sorted(then.keys() ^ now.keys()):
        where = "the checkpoint" if apart[0] in then else "the model"
        given = f"{apart[0].removeprefix('model.')} in {where} alone"
        raise ModelError("model", given=given, expected="the model that the run was saved with")
    for name, each in then.items():
        kinds = [_kind(each.properties.dtype, each.size), _kind(now[name].dtype, now[name].shape)]
        if kinds[0] != kinds[1]:
            expected = f"{kinds[0]}, as the run was saved with"
            raise ModelError(f"model: {name.removeprefix('model.')}", given=kinds[1], expected=expected)


def _kind(dtype: torch.dtype, size: torch.Size) -> str:
    return f"{str(dtype).removeprefix('torch.')} of shape {tuple(size)}"
