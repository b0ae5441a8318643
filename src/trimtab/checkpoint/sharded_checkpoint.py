"""Sharded checkpoints: ranks write and read shards with torch's distributed checkpoint, as safetensors.

The files hold tensor data and offsets, and no executable content. A different number of ranks can load the files:
a rank reads its part from all files.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trimtab.checkpoint.train_state import ModelState, keep_types, kinds_differ, names_differ
from trimtab.core.errors import FormatError, OptimizerError, SaveError
from trimtab.core.stateful import Load, Stateful, require_keys
from trimtab.measure.gradient_norms import is_sharded_itself
from trimtab.techniques.memory_format import align_state

_MODEL, _OPTIMIZER = "model", "optimizer"
# Entries of a rank's shard state that are merged across ranks.
MERGED = ("members", "others")
_RESUME_FROM_ANOTHER = "Resume from another checkpoint."
_PREFIX = "shard-"  # torch's file name prefix; other files in the folder are ignored
# Dtypes that round-trip: torch's writer accepts further types, but its reader returns them as other types.
_TYPES = {
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8),
}
_LIMIT = timedelta(minutes=30)  # maximum wait of the fastest rank for the slowest


def require_writable(tensors: Mapping[str, Tensor]) -> None:
    """Raise `FormatError` for a dtype unsupported by sharded files."""
    for name, tensor in tensors.items():
        if tensor.dtype not in _TYPES:
            known = ", ".join(sorted(str(each).removeprefix("torch.") for each in _TYPES))
            raise FormatError(
                name,
                got=str(tensor.dtype),
                expected=known,
                problem=f"{name} has dtype {tensor.dtype}, which sharded checkpoints cannot store.",
                hint=f"Use one of these dtypes: {known}.",
                code="shards.dtype_unsupported",
            )


def write(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Write this rank's shards, with all ranks into one folder; `SaveError` if writing failed on any rank."""
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict_saver import save

    writer = _writer_type()(str(folder), save_distributed=True)
    devices = {tensor.device for tensor in tensors.values() if tensor.is_cuda}
    try:
        # torch's copy to the CPU waits for the streams of the current device only.
        with torch.cuda.device(devices.pop()) if devices else contextlib.nullcontext():
            save(tensors, storage_writer=writer, process_group=_host_group(dist.group.WORLD))
    except CheckpointException as error:
        raise _not_written(folder, _reasons(error)) from None
    if writer.failure is not None:
        raise _not_written(folder, str(writer.failure)) from writer.failure


def stored_tensors(folder: Path) -> Mapping[str, Any]:
    """Return torch's metadata of the stored tensors, by name; `FormatError` if a file is not a valid sharded file."""
    try:
        found: Mapping[str, Any] = _reader_type()(str(folder)).read_metadata().state_dict_metadata
    except Exception as error:
        raise _unreadable(folder, str(error)) from None
    return found


def read_shards(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Read this rank's part of each tensor in place, without communication; `FormatError` if reading failed."""
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict_loader import load

    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
            load(tensors, storage_reader=_reader_type()(str(folder)), no_dist=True)
    except CheckpointException as error:
        raise _unreadable(folder, _reasons(error)) from None


def _not_written(folder: Path, reason: str) -> SaveError:
    return SaveError(
        str(folder),
        got=reason,
        problem=f"The model's shards could not be written to {folder} ({reason}).",
        hint="Fix the cause and save again; earlier checkpoints are intact.",
    )


def _unreadable(folder: Path, reason: str) -> FormatError:
    return FormatError(
        str(folder),
        got=reason,
        problem=f"The model's shards in {folder} cannot be read ({reason}).",
        hint="Resume from another checkpoint, and update torch if this one passes `trimtab checkpoint verify`.",
        code="shards.unreadable",
    )


@functools.cache
def _host_group(job: Any) -> Any:
    """Return a Gloo group of all ranks, as planning a save needs no GPU. A collective call."""
    return dist.new_group(backend="gloo", timeout=_LIMIT)


@functools.cache
def _writer_type() -> Any:
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.futures import Future

    class Writer(HuggingFaceStorageWriter):
        """Writer that stores an exception instead of raising: the other ranks wait for a result."""

        failure: Exception | None = None

        def write_data(self, plan: Any, planner: Any) -> Any:
            try:
                return super().write_data(plan, planner)
            except Exception as error:
                self.failure = error
                none: Any = Future()
                none.set_result([])
                return none

    return Writer


@functools.cache
def _reader_type() -> Any:
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

    class Reader(HuggingFaceStorageReader):
        """Reader for sharded files only."""

        def __init__(self, path: str) -> None:
            super().__init__(path)
            shards: Any = _ShardFileSystem(self.fs)
            self.fs = shards

    return Reader


class _ShardFileSystem:
    """File system wrapper with a list of sharded files only."""

    def __init__(self, files: Any) -> None:
        self._files = files

    def ls(self, path: Any) -> list[str]:
        return [each for each in self._files.ls(path) if Path(each).name.startswith(_PREFIX)]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._files, name)


def _reasons(error: Any) -> str:
    """Return the failures by rank, as text."""
    said = (f"rank {rank}: {failure}" for rank, (failure, _) in sorted(error.failures.items()))
    return "; ".join(said) or str(error)


class WithoutParameters(ModelState):
    """State of a model without the parameters, because parameters are stored as shards."""

    def _own(self) -> dict[str, Any]:
        # `state_dict` of a wrapper may use other names than `named_parameters`.
        whole = self._model.state_dict(keep_vars=True)
        # Read afterwards, because `state_dict` reshards an FSDP model.
        parameters = {id(parameter) for parameter in self._model.parameters()}
        return {name: value for name, value in whole.items() if id(value) not in parameters}

    def _put(self, own: Mapping[str, Any]) -> None:
        self._model.load_state_dict(own, strict=False)


class ShardedState(Stateful):
    """Sharded parameters, and the optimizer state of the parameters stepped by this rank.

    `state_dict()` returns the rest of the optimizer: group options, the group of each parameter, and state entries that
    are not tensors. Tensors are read from `folder`.

    Args:
        folder: Checkpoint to read from.
        every: Optimizer with the groups of all parameters, if this rank steps only some of them (ZeRO-1).
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        folder: Path | None = None,
        every: torch.optim.Optimizer | None = None,
    ) -> None:
        self._model, self._optimizer, self._folder, self._every = model, optimizer, folder, every or optimizer

    def at(self, folder: Path, every: torch.optim.Optimizer) -> ShardedState:
        """Return a copy for reading from `folder`."""
        return ShardedState(self._model, self._optimizer, folder, every)

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's non-tensor state and the names of state tensors.

        Raises:
            FormatError: A state tensor is sharded differently from its parameter, so ranks would overwrite values.
            OptimizerError: The optimizer steps a parameter that does not belong to the model.
        """
        self._settle()
        groups = [dict(group) for group in self._optimizer.state_dict()["param_groups"]]
        for group in groups:
            del group["params"]
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
        """Return contiguous parameters and optimizer state to write, by name; `FormatError` for unknown dtypes."""
        self._settle()
        found = self._parameters()
        for _, name, parameter in self._stepped(self._optimizer):
            for key, value in self._optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    found[_key(name, key)] = value.detach()
        found = {name: value if _is_cut(value) else value.contiguous() for name, value in found.items()}
        require_writable(found)
        return found

    def loading(self, state: Any) -> Load:
        """Return a function that loads this rank's shards in place and restores the optimizer.

        Raises:
            ModelError, OptimizerError: Names, shapes, dtypes or groups differ from the run's.
            FormatError: The sharded files are invalid or incomplete.
        """
        require_keys("state.shards", state, ("groups", *MERGED))
        self._require_groups(state["groups"], state["members"])
        assert self._folder is not None
        folder, saved, parameters = self._folder, stored_tensors(self._folder), self._parameters()
        _require_alike(saved, parameters)
        stepped = [(name, parameter) for _, name, parameter in self._stepped(self._optimizer)]
        rooms = {
            name: {key: _room_like(parameter, _found(saved, name, key)) for key in state["members"][name]["tensors"]}
            for name, parameter in stepped
        }

        def load() -> None:
            flat = {_key(name, key): room for name, found in rooms.items() for key, room in found.items()}
            read_shards(folder, parameters | flat)
            whole = {i: rooms[name] | state["others"].get(name, {}) for i, (name, _) in enumerate(stepped)}
            whole = {index: found for index, found in whole.items() if found}
            packed = self._optimizer.state_dict()["param_groups"]
            options = [own | dict(then) for own, then in zip(packed, state["groups"], strict=True)]
            self._optimizer.load_state_dict({"state": whole, "param_groups": options})
            keep_types(self._optimizer, whole)
            align_state(self._optimizer)

        return load

    def _require_groups(self, groups: Any, members: Mapping[str, Any]) -> None:
        if len(groups) != (number := len(self._optimizer.param_groups)):
            problem = f"The optimizer has {number} parameter groups, but the saved optimizer had {len(groups)}."
            raise _groups_differ(f"{number} groups", problem)
        now = {name: index for index, name, _ in self._stepped(self._every)}
        for name in sorted(now.keys() | members.keys()):
            if name not in members:
                raise _groups_differ(name, f"The optimizer steps {name}, which the saved optimizer did not step.")
            if name not in now:
                raise _groups_differ(name, f"The saved optimizer stepped {name}, which the optimizer does not step.")
            if now[name] != (saved := members[name]["group"]):
                problem = f"{name} is in the optimizer's group {now[name]}, but was saved in group {saved}."
                raise _groups_differ(f"{name} in group {now[name]}", problem)

    def _settle(self) -> None:
        """Reshard all parameters: an evaluation may have left some FSDP modules unsharded."""
        for module in self._model.modules():
            reshard: Any = getattr(module, "reshard", None)
            if is_sharded_itself(module) and reshard is not None:
                reshard()

    def _parameters(self) -> dict[str, Tensor]:
        return {f"{_MODEL}.{name}": parameter.detach() for name, parameter in self._model.named_parameters()}

    def _stepped(self, optimizer: torch.optim.Optimizer) -> Iterator[tuple[int, str, Tensor]]:
        """Yield (group index, name, parameter) of an optimizer's parameters in order."""
        names = {parameter: name for name, parameter in self._model.named_parameters()}
        for index, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                if parameter not in names:
                    raise OptimizerError(
                        "optimizer",
                        problem=f"The optimizer's group {index} has a parameter of shape {tuple(parameter.shape)} that "
                        "does not belong to the model.",
                        hint="Build the optimizer from model.parameters().",
                        code="optimizer.foreign_parameters",
                    )
                yield index, names[parameter], parameter


def _groups_differ(got: str, problem: str) -> OptimizerError:
    hint = "Build the optimizer with the same parameter groups as for the saved run."
    return OptimizerError("optimizer", got=got, problem=problem, hint=hint, code="optimizer.groups_differ")


def merge_shards(parts: Iterator[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge the shard state of all ranks; `FormatError` if two ranks disagree about a parameter."""
    first = {key: dict(value) if key in MERGED else value for key, value in next(parts).items()}
    for part in parts:
        for name, said in part["members"].items():
            if first["members"].setdefault(name, said) != said:
                raise FormatError(
                    "state.shards",
                    got=name,
                    problem=f"The ranks' files disagree about the optimizer state of {name}.",
                    hint=_RESUME_FROM_ANOTHER,
                    code="shards.inconsistent",
                )
        first["others"] |= part["others"]
    return first


def _key(name: str, key: Any) -> str:
    return f"{_OPTIMIZER}.{name}:{key}"


def _is_cut(value: Tensor) -> bool:
    return hasattr(value, "placements")


def _require_apart(name: str, key: Any, value: Tensor, parameter: Tensor) -> None:
    """Raise `FormatError` for optimizer state that ranks would overwrite or could not restore exactly."""
    if type(key) is not str:
        raise FormatError(
            "optimizer",
            got=f"{key!r}",
            problem=f"The optimizer's state of {name} has the key {key!r}, which is not a string.",
            hint="Use strings as keys of the optimizer's state.",
            code="optimizer.state_key",
        )
    if not _is_cut(parameter) or value.dim() == 0:
        return
    if not _is_cut(value) or value.shape != parameter.shape or value.placements != parameter.placements:  # type: ignore[attr-defined]
        raise FormatError(
            "optimizer",
            got=f"{key} of {name}, shape {tuple(value.shape)}",
            problem=f"The optimizer state {key} of {name} has shape {tuple(value.shape)} and is not sharded like its "
            "parameter, so that the ranks would overwrite each other's values in a checkpoint.",
            hint="Use an optimizer with one state element per parameter element, such as Adam or SGD, or a plan with "
            "zero_stage=1, which keeps each parameter's state on one rank.",
            code="optimizer.state_not_sharded",
        )


def _found(saved: Mapping[str, Any], name: str, key: str) -> Any:
    if (found := saved.get(_key(name, key))) is None:
        raise FormatError(
            "state.shards",
            got=f"{key} of {name}",
            problem=f"The checkpoint lists optimizer state {key} of {name}, but its sharded files do not contain it.",
            hint=_RESUME_FROM_ANOTHER,
            code="shards.inconsistent",
        )
    return found


def _room_like(parameter: Tensor, saved: Any) -> Tensor:
    """Return an empty tensor for saved values: sharded like the parameter if the shapes agree, otherwise unsharded."""
    size, kind = saved.size, saved.properties.dtype
    if size == parameter.shape and len(size):
        return torch.empty_like(parameter.detach(), dtype=kind)
    return torch.empty(size, dtype=kind)


def _require_alike(saved: Mapping[str, Any], now: Mapping[str, Tensor]) -> None:
    then = {name: each for name, each in saved.items() if name.startswith(f"{_MODEL}.")}
    for names, where in (
        (then.keys() - now.keys(), "in the checkpoint but not in the model"),
        (now.keys() - then.keys(), "in the model but not in the checkpoint"),
    ):
        if names:
            raise names_differ(_MODEL, sorted(name.removeprefix(f"{_MODEL}.") for name in names), where)
    for name, each in then.items():
        saved_as, kind = _kind(each.properties.dtype, each.size), _kind(now[name].dtype, now[name].shape)
        if saved_as != kind:
            raise kinds_differ(_MODEL, name.removeprefix(f"{_MODEL}."), kind, saved_as)


def _kind(dtype: torch.dtype, size: torch.Size) -> str:
    return f"{str(dtype).removeprefix('torch.')} of shape {tuple(size)}"
