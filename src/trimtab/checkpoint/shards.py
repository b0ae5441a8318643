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

from trimtab.checkpoint.run_state import ModelState, keep_types
from trimtab.core.errors import FormatError, ModelError, OptimizerError, SaveError
from trimtab.core.state_parts import Load, Part, require_keys
from trimtab.measure.sharded_norms import is_sharded_itself
from trimtab.runtime.layout import align_state

_MODEL, _OPTIMIZER = "model", "optimizer"


class WithoutParameters(ModelState):
    """A model's state but for its parameters, which are among the shards."""

    def _own(self) -> dict[str, Any]:
        named = {name for name, _ in self._model.named_parameters(remove_duplicate=False)}
        return {name: value for name, value in self._model.state_dict().items() if name not in named}

    def _put(self, own: Mapping[str, Any]) -> None:
        self._model.load_state_dict(own, strict=False)


class Shards(Part):
    """Parameters, and the optimizer's state of those that this rank steps.

    Its `state_dict()` is what else there is of the optimizer: options of its groups, and what of its state is no
    tensor. The tensors are written by `write`, and read from the folder that it was made `at`.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path | None = None) -> None:
        self._model, self._optimizer, self._folder = model, optimizer, folder

    def at(self, folder: Path) -> Shards:
        """Return the same, read from a folder."""
        return Shards(self._model, self._optimizer, folder)

    def state_dict(self) -> dict[str, Any]:
        """Return what is no tensor of a parameter's state."""
        groups = [{key: value for key, value in group.items() if key != "params"} for group in self._groups()]
        others = {
            name: kept
            for name, state in self._states()
            if (kept := {key: value for key, value in state.items() if not isinstance(value, Tensor)})
        }
        return {"groups": groups, "others": others}

    def write(self, folder: Path) -> None:
        """Write the tensors; every rank calls it, with the same folder.

        Raises:
            SaveError: on all ranks, where one of them could not write.
        """
        from torch.distributed.checkpoint import HuggingFaceStorageWriter, save
        from torch.distributed.checkpoint.api import CheckpointException

        for module in self._model.modules():
            if is_sharded_itself(module) and hasattr(module, "reshard"):
                module.reshard()  # an evaluation may have left whole parameters
        tensors = self._parameters()
        for name, state in self._states():
            tensors |= {_key(key, name): value for key, value in state.items() if isinstance(value, Tensor)}
        try:
            save(tensors, storage_writer=HuggingFaceStorageWriter(str(folder), save_distributed=True))
        except CheckpointException as error:
            raise SaveError(str(folder), given=_reasons(error), expected="a disk that takes it") from None

    def loading(self, state: Any) -> Load:
        """Return what reads this rank's shards into the very same parameters, and has the optimizer go on.

        Raises:
            ModelError, OptimizerError: other names, shapes, types or groups than the run has.
        """
        require_keys("state.shards", state, ("groups", "others"))
        if len(state["groups"]) != len(groups := self._groups()):
            given, expected = (
                f"{len(groups)} groups of parameters",
                f"{len(state['groups'])}, as the run was saved with",
            )
            raise OptimizerError("optimizer", given=given, expected=expected)
        saved, parameters = self._saved(), self._parameters()
        _require_alike(saved, parameters)
        states = [self._room(saved, name, parameter) for name, parameter in self._stepped()]
        others = [state["others"].get(name, {}) for name, _ in self._stepped()]

        def load() -> None:
            rooms = {
                _key(key, name): room
                for (name, _), found in zip(self._stepped(), states, strict=True)
                for key, room in found.items()
            }
            self._read(parameters | rooms)
            whole = {
                i: found | kept for i, (found, kept) in enumerate(zip(states, others, strict=True)) if found | kept
            }
            packed = self._optimizer.state_dict()["param_groups"]
            options = [own | dict(then) for own, then in zip(packed, state["groups"], strict=True)]
            self._optimizer.load_state_dict({"state": whole, "param_groups": options})
            keep_types(self._optimizer, whole)
            align_state(self._optimizer)

        return load

    def _read(self, tensors: dict[str, Tensor]) -> None:
        from torch.distributed.checkpoint import HuggingFaceStorageReader, load

        load(tensors, storage_reader=HuggingFaceStorageReader(str(self._folder)), no_dist=True)

    def _saved(self) -> Mapping[str, Any]:
        """Return by its name what is known of each tensor that was written."""
        from torch.distributed.checkpoint import HuggingFaceStorageReader

        try:
            found = HuggingFaceStorageReader(str(self._folder)).read_metadata().state_dict_metadata
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise FormatError(str(self._folder), given=f"what cannot be read ({error})", expected="shards") from None
        return {name: each for name, each in found.items() if name.startswith((f"{_MODEL}.", f"{_OPTIMIZER}."))}

    def _room(self, saved: Mapping[str, Any], name: str, parameter: Tensor) -> dict[str, Tensor]:
        """Return where a parameter's state is read to."""
        found = {}
        for key, each in saved.items():
            kind, _, rest = key.partition(".")
            of, _, whose = rest.partition(".")
            if kind == _OPTIMIZER and whose == name:
                found[of] = _room_like(parameter, each)
        return found

    def _parameters(self) -> dict[str, Tensor]:
        return {f"{_MODEL}.{name}": parameter.detach() for name, parameter in self._model.named_parameters()}

    def _groups(self) -> list[dict[str, Any]]:
        return self._optimizer.param_groups

    def _stepped(self) -> Iterator[tuple[str, Tensor]]:
        """Yield what this rank steps by its name, in the optimizer's order."""
        names = {parameter: name for name, parameter in self._model.named_parameters()}
        for group in self._groups():
            yield from ((names[parameter], parameter) for parameter in group["params"])

    def _states(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        for name, parameter in self._stepped():
            if parameter in self._optimizer.state:
                yield name, self._optimizer.state[parameter]


def _key(key: str, name: str) -> str:
    return f"{_OPTIMIZER}.{key}.{name}"


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


def _reasons(error: Any) -> str:
    """Return what failed on which rank."""
    said = (f"rank {rank}: {failure}" for rank, (failure, _) in sorted(error.failures.items()))
    return "; ".join(said) or str(error)
