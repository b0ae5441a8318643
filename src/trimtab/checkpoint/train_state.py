"""State of the model, the optimizer and the user's additional objects, whole or in shards.

Saved between two windows, when no gradients are held. Loading validates a state completely before any change.

Ranks write and read shards with torch's distributed checkpoint, as safetensors. The files hold tensor data and offsets,
and no executable content. A different number of ranks can load the files: a rank reads its part from all files.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trimtab.core.errors import FormatError, ModelError, OptimizerError, ValueGivenError
from trimtab.core.stateful import Load, Stateful, require_keys
from trimtab.measure.gradient_norms import is_sharded_itself
from trimtab.state.object_snapshots import same_value
from trimtab.techniques.memory_format import align_state
from trimtab.training.window_snapshot import can_be_written

_HIDDEN = "hidden"  # non-persistent buffers, absent from state_dict() but used in training
_MODEL, _OPTIMIZER = "model", "optimizer"  # prefixes of the names of sharded tensors
_SAME_MODEL = "Build the model with the same architecture, sizes and dtypes as for the saved run."
_RESUME_FROM_ANOTHER = "Resume from another checkpoint."
_PREFIX = "shard-"  # torch's file name prefix; other files in the folder are ignored
# Dtypes that round-trip: torch's writer accepts further types, but its reader returns them as other types.
_TYPES = {
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8),
}
_LIMIT = timedelta(minutes=30)  # maximum wait of the fastest rank for the slowest


# Buffers that are not part of `state_dict()`.


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
    if not isinstance(saved, Mapping) or not all(isinstance(each, Tensor | None) for each in saved.values()):
        raise FormatError(
            "state.model.hidden",
            got=f"{saved!r:.80}",
            expected="the model's non-persistent buffers: a mapping from names to tensors or None",
            hint="Load an unchanged state of a trimtab run.",
        )
    now = dict(_named(model))
    _require_saved(now, saved)
    places = {name: _place(model, name) for name in saved}
    device = next(model.parameters()).device

    def load() -> None:
        # Each tensor of the model is used once: two saved tensors must not share memory.
        rooms, used = dict[int, Tensor](), set[int]()
        for name, value in saved.items():
            (module, key), own = places[name], now.get(name)
            if value is not None and id(value) not in rooms:
                fits = own is not None and own.shape == value.shape and can_be_written(own) and id(own) not in used
                room = own if own is not None and fits else value.to(device if own is None else own.device, copy=True)
                with torch.no_grad():
                    room.copy_(value)
                rooms[id(value)] = room
                used.add(id(room))
            found = None if value is None else rooms[id(value)]
            if found is not own or key not in module._buffers:
                module.register_buffer(key, found, persistent=False)

    return load


def _require_saved(now: Mapping[str, Tensor | None], saved: Mapping[str, Any]) -> None:
    """Raise `ModelError` for a buffer of the model without a saved value, or with a smaller saved shape."""
    # A model built for longer inputs than at the save would otherwise get a truncated buffer.
    for name, value in saved.items():
        own = now.get(name)
        if own is None or value is None:
            continue
        is_alike = own.dtype is value.dtype and own.ndim == value.ndim
        if not is_alike or any(then < size for size, then in zip(own.shape, value.shape, strict=True)):
            now_is, was = (f"{_name(each.dtype)} of shape {list(each.shape)}" for each in (own, value))
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
            raise _names_differ("model's buffers", name, f"The model's buffer {name} is not in the checkpoint.")


def _place(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    """Return the module and attribute name of a buffer; raises `ModelError` if the model has no such module."""
    path, _, key = name.rpartition(".")
    try:
        module = model.get_submodule(path)
    except AttributeError:
        problem = f"The checkpoint has a buffer {name}, but the model has no module {path!r}."
        raise _names_differ("model's buffers", name, problem) from None
    if key not in module._buffers and hasattr(module, key):
        problem = f"The checkpoint has a buffer {name}, but that attribute of the model is not a buffer."
        raise _names_differ("model's buffers", name, problem)
    return module, key


def _names_differ(what: str, name: str, problem: str) -> ModelError:
    return ModelError(what, got=name, problem=problem, hint=_SAME_MODEL, code="model.names_differ")


def _require_alike(what: str, saved: Mapping[str, str], now: Mapping[str, str]) -> None:
    """Raise `ModelError` unless the tensors, as descriptions by name, are the same."""
    for names, where in (
        (saved.keys() - now.keys(), "in the checkpoint but not in the model"),
        (now.keys() - saved.keys(), "in the model but not in the checkpoint"),
    ):
        if names:
            first = min(names)
            listed = f"{first} and {len(names) - 1} more are" if len(names) > 1 else f"{first} is"
            raise _names_differ(what, first, f"{listed} {where}.")
    for name, then in saved.items():
        if now[name] != then:
            raise ModelError(
                f"{what}: {name}",
                got=now[name],
                expected=then,
                problem=f"{name} is {now[name]} in the model, but {then} in the checkpoint.",
                hint=_SAME_MODEL,
                code="model.shapes_differ",
            )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _kinds(values: Mapping[str, Any]) -> dict[str, str]:
    """Return dtype and shape of tensors, and the type of other values, as text by name."""
    return {
        name: f"{_name(value.dtype)} of shape {tuple(value.shape)}"
        if isinstance(value, Tensor)
        else type(value).__name__
        for name, value in values.items()
    }


# State held whole by each rank.


class ModelState(Stateful):
    """State of a model: `state_dict()` and non-persistent buffers."""

    def __init__(self, model: nn.Module, name: str = "model") -> None:
        self._model, self._name = model, name

    def state_dict(self) -> dict[str, Any]:
        """Return references to the tensors, not copies."""
        own = {name: value.detach() if isinstance(value, Tensor) else value for name, value in self._own().items()}
        return {"own": own, _HIDDEN: hidden_of(self._model)}

    def buffers(self) -> dict[str, Any]:
        """Return the buffers only, because buffers differ between replicas."""
        named, known = dict(self._model.named_buffers(remove_duplicate=False)), self._model.state_dict().keys()
        own = {name: value.detach() for name, value in named.items() if name in known}
        return {"own": own, _HIDDEN: hidden_of(self._model)}

    def reshaped_buffers(self, state: Mapping[str, Any]) -> list[str]:
        """Return the names of non-persistent buffers with a changed shape: grown, added or removed since the save."""
        now = dict(_named(self._model))

        def shape_of(value: Tensor | None) -> torch.Size | None:
            return None if value is None else value.shape

        return [name for name, value in state[_HIDDEN].items() if shape_of(value) != shape_of(now.get(name))]

    def _own(self) -> dict[str, Any]:
        return self._model.state_dict()

    def _put(self, own: Mapping[str, Any]) -> None:
        try:
            self._model.load_state_dict(own)
        except RuntimeError:
            keys = None
            # Quantised layers write values that their `load_state_dict` rejects (scales of bitsandbytes).
            with contextlib.suppress(TypeError):  # An override may lack `strict`.
                keys = self._model.load_state_dict(own, strict=False)
            if keys is None:  # The override returns nothing, so the names are unknown.
                raise
            self._require_restored(own, keys.missing_keys, keys.unexpected_keys)

    def _require_restored(self, own: Mapping[str, Any], missing: Sequence[str], rejected: Sequence[str]) -> None:
        for name in missing:
            raise ModelError(
                f"{self._name}: {name}",
                got="no value in the checkpoint",
                problem=f"The model's load_state_dict expects {name}, but the model's state_dict does not contain it.",
                hint=f"Include {name} in the model's state_dict, or override load_state_dict to accept a state without "
                "it.",
                code="model.state_not_saved",
            )
        now = self._own()
        for name in rejected:
            if not same_value(now[name], own[name]):
                raise ModelError(
                    f"{self._name}: {name}",
                    got=f"{now[name]!r:.80}",
                    expected=f"{own[name]!r:.80}",
                    problem=f"{name} is {now[name]!r:.80} in the model, but {own[name]!r:.80} in the checkpoint, and "
                    "the model's load_state_dict does not restore it.",
                    hint="Quantise the same weights with the same settings as in the saved run, or resume from another "
                    "checkpoint.",
                    code="model.state_not_restored",
                )

    def loading(self, state: Any) -> Load:
        """Return a function for copying the values into the existing tensors.

        Non-persistent buffers of another shape are replaced: caches may have grown or appeared since.

        Raises:
            ModelError: Names, shapes or dtypes differ from the model's. The returned function raises this error for a
                value that the model's `load_state_dict` does not restore.
        """
        require_keys(f"state.{self._name}", state, ("own", _HIDDEN))
        if not isinstance(state["own"], Mapping):
            raise FormatError(f"state.{self._name}", got=f"a {type(state['own']).__name__}", expected="a mapping")
        _require_alike(self._name, _kinds(state["own"]), _kinds(self._own()))
        load_hidden = loading_hidden(self._model, state[_HIDDEN])

        def load() -> None:
            self._put(state["own"])
            load_hidden()

        return load


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
            problem = f"The numbers of parameters in the optimizer's groups are {now}, but {then} in the checkpoint."
            raise _groups_differ(f"{now} parameters per group", problem)
        return lambda: _load_optimizer(self._optimizer, state)


def _groups_differ(got: str, problem: str) -> OptimizerError:
    hint = "Build the optimizer with the same parameter groups as for the saved run."
    return OptimizerError("optimizer", got=got, problem=problem, hint=hint, code="optimizer.groups_differ")


def _load_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Load a state and restore its dtypes: torch casts the state to the parameter's dtype when loading."""
    optimizer.load_state_dict(state)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for index, values in state["state"].items():
        own = optimizer.state[parameters[index]]
        for name, value in values.items():
            if isinstance(value, Tensor) and isinstance(own.get(name), Tensor) and own[name].dtype != value.dtype:
                own[name] = value.to(own[name].device, copy=True)
    align_state(optimizer)


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


# State in shards.


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
        for name, tensor in found.items():
            if tensor.dtype not in _TYPES:
                known = ", ".join(sorted(map(_name, _TYPES)))
                raise FormatError(
                    name,
                    got=str(tensor.dtype),
                    expected=known,
                    problem=f"{name} has dtype {tensor.dtype}, which sharded checkpoints cannot store.",
                    hint=f"Use one of these dtypes: {known}.",
                    code="shards.dtype_unsupported",
                )
        return {name: value if _is_cut(value) else value.contiguous() for name, value in found.items()}

    def loading(self, state: Any) -> Load:
        """Return a function that loads this rank's shards in place and restores the optimizer.

        Raises:
            ModelError, OptimizerError: Names, shapes, dtypes or groups differ from the run's.
            FormatError: The sharded files are invalid or incomplete.
        """
        require_keys("state.shards", state, ("groups", "members", "others"))
        self._require_groups(state["groups"], state["members"])
        assert self._folder is not None
        folder, saved, parameters = self._folder, stored_tensors(self._folder), self._parameters()
        _require_alike(
            _MODEL,
            {
                name.removeprefix(f"{_MODEL}."): f"{_name(each.properties.dtype)} of shape {tuple(each.size)}"
                for name, each in saved.items()
                if name.startswith(f"{_MODEL}.")
            },
            _kinds({name.removeprefix(f"{_MODEL}."): each for name, each in parameters.items()}),
        )
        stepped = [(name, parameter) for _, name, parameter in self._stepped(self._optimizer)]
        rooms = {
            name: {key: _room(parameter, saved, name, key) for key in state["members"][name]["tensors"]}
            for name, parameter in stepped
        }

        def load() -> None:
            flat = {_key(name, key): room for name, found in rooms.items() for key, room in found.items()}
            read_shards(folder, parameters | flat)
            whole = {i: rooms[name] | state["others"].get(name, {}) for i, (name, _) in enumerate(stepped)}
            packed = self._optimizer.state_dict()["param_groups"]
            options = [own | dict(then) for own, then in zip(packed, state["groups"], strict=True)]
            found = {index: each for index, each in whole.items() if each}
            _load_optimizer(self._optimizer, {"state": found, "param_groups": options})

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


def merge_shards(parts: Iterator[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge the shard state of all ranks; `FormatError` if two ranks disagree about a parameter."""
    first = {key: dict(value) if isinstance(value, Mapping) else value for key, value in next(parts).items()}
    for part in parts:
        for name, said in part["members"].items():
            if first["members"].setdefault(name, said) != said:
                raise _inconsistent(name, f"The ranks' files disagree about the optimizer state of {name}.")
        first["others"] |= part["others"]
    return first


def _inconsistent(got: str, problem: str) -> FormatError:
    hint = _RESUME_FROM_ANOTHER
    return FormatError("state.shards", got=got, problem=problem, hint=hint, code="shards.inconsistent")


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


def _room(parameter: Tensor, saved: Mapping[str, Any], name: str, key: str) -> Tensor:
    """Return an empty tensor for saved values: sharded like the parameter if the shapes agree, otherwise unsharded."""
    if (found := saved.get(_key(name, key))) is None:
        problem = f"The checkpoint lists optimizer state {key} of {name}, but its sharded files do not contain it."
        raise _inconsistent(f"{key} of {name}", problem)
    size, kind = found.size, found.properties.dtype
    if size == parameter.shape and len(size):
        return torch.empty_like(parameter.detach(), dtype=kind)
    return torch.empty(size, dtype=kind)


# Files of shards.


def write_shards(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Write this rank's shards, with all ranks into one folder; `OSError` or another error if that failed."""
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.distributed.checkpoint.state_dict_saver import save
    from torch.futures import Future

    writer: Any = HuggingFaceStorageWriter(str(folder), save_distributed=True)
    failures: list[Exception] = []

    def write_data(plan: Any, planner: Any, writes: Callable[..., Any] = writer.write_data) -> Any:
        """Keep an exception instead of raising: torch may fail to send it, and the other ranks wait for a result."""
        try:
            return writes(plan, planner)
        except Exception as error:
            failures.append(error)
            none: Any = Future()
            none.set_result([])
            return none

    writer.write_data = write_data
    devices = {tensor.device for tensor in tensors.values() if tensor.is_cuda}
    try:
        # torch's copy to the CPU waits for the streams of the current device only.
        with torch.cuda.device(devices.pop()) if devices else contextlib.nullcontext():
            save(tensors, storage_writer=writer, process_group=_host_group(dist.group.WORLD))
    except CheckpointException as error:
        raise OSError(_reasons(error)) from None
    if failures:
        raise failures[0]


def stored_tensors(folder: Path) -> Mapping[str, Any]:
    """Return torch's metadata of the stored tensors, by name; `FormatError` if a file is not a valid sharded file."""
    try:
        found: Mapping[str, Any] = _reader(folder).read_metadata().state_dict_metadata
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
            load(tensors, storage_reader=_reader(folder), no_dist=True)
    except CheckpointException as error:
        raise _unreadable(folder, _reasons(error)) from None


def _unreadable(folder: Path, reason: str) -> FormatError:
    problem = f"The model's shards in {folder} cannot be read ({reason})."
    hint = "Resume from another checkpoint, and update torch if this one passes `trimtab checkpoint verify`."
    return FormatError(str(folder), got=reason, problem=problem, hint=hint, code="shards.unreadable")


def _reasons(error: Any) -> str:
    """Return the failures by rank, as text."""
    said = (f"rank {rank}: {failure}" for rank, (failure, _) in sorted(error.failures.items()))
    return "; ".join(said) or str(error)


@functools.cache
def _host_group(job: Any) -> Any:
    """Return a Gloo group of all ranks, as planning a save needs no GPU. A collective call."""
    return dist.new_group(backend="gloo", timeout=_LIMIT)


def _reader(folder: Path) -> Any:
    """Return torch's reader for the sharded files of a folder."""
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

    reader: Any = HuggingFaceStorageReader(str(folder))
    lists = reader.fs.ls
    reader.fs.ls = lambda path: [each for each in lists(path) if Path(each).name.startswith(_PREFIX)]
    return reader
