"""Low-bit state of the user's Adam, AdamW or SGD object, whose groups, learning rates and state_dict() stay its own.

In each step, the state of a chunk of a parameter is read as fp32, torch's fused step of the optimizer's class updates
the chunk, and the state is stored again, so fp32 state exists for a single chunk only. `state_dict()` returns plain
state that any torch optimizer of the class can load, and a state that was saved is stored again without a change.
Formats: `low_bit_storage`.
"""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adam import adam
from torch.optim.sgd import sgd

from trimtab.core.errors import ModelError, OptimizerError
from trimtab.core.stateful import Load, Stateful, checked_state
from trimtab.measure.gradient_norms import is_flat_sharded, is_sharded
from trimtab.techniques.low_bit_storage import NOISE_LIMIT, Storage, round_stochastically, storage_of
from trimtab.techniques.memory_format import sparse_module
from trimtab.techniques.optimizers import first_post_hook, has_own_step, is_dense, refuse_closure

LEAST_ELEMENTS = 4096  # Smaller parameters keep their state, as in both papers.
# Elements updated at once: temporary tensors stay in a CPU's cache, and kernels fill a GPU. Multiples of all blocks.
_CHUNKS = {"cpu": 2**18, "cuda": 2**22}
# Names of the states of a parameter, and True if a state has negative values.
_ADAM = {"exp_avg": True, "exp_avg_sq": False}
_MOST, _MOMENTUM = "max_exp_avg_sq", "momentum_buffer"
_STATES = _ADAM | {_MOST: False, _MOMENTUM: True}
_CLASSES = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)
_UNCHANGED = 'Leave "optimizer_state" out of adapt, or use a plan with optimizer_state="user".'
_HOST = torch.device("cpu")
_ON_HOST = (
    "The device has too little memory for the plain optimizer state, so that a part was restored in host memory. Free "
    "device memory and call optimizer.load_state_dict(optimizer.state_dict()) before the next step."
)
_rounding: weakref.WeakKeyDictionary[torch.optim.Optimizer, RoundingSteps] = weakref.WeakKeyDictionary()
# Gradients of the parameters that were stepped, hidden until the optimizer's own step ends.
_hidden: weakref.WeakKeyDictionary[torch.optim.Optimizer, list[tuple[Tensor, Tensor]]] = weakref.WeakKeyDictionary()


def require_low_bit(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Raise an error if the state of the optimizer cannot be stored in few bits.

    Raises:
        OptimizerError: another class than torch's own Adam, AdamW or SGD, an unsupported option, a replaced step, no
            state, or sparse gradients.
        ModelError: the model is sharded, or has no large parameter.
    """
    given = type(optimizer).__name__
    if type(optimizer) not in _CLASSES:
        expected = "torch.optim.Adam, AdamW or SGD"
        raise OptimizerError("optimizer", got=given, expected=expected, hint=_UNCHANGED, code="optimizer_state.class")
    if has_own_step(optimizer):
        raise OptimizerError(
            "optimizer",
            got=f"{given} with a replaced step",
            expected="an optimizer with the step of its class",
            hint=_UNCHANGED,
            code="optimizer_state.own_step",
        )
    for name in ("differentiable", "capturable", "dampening"):
        if any(group.get(name) for group in optimizer.param_groups):
            raise OptimizerError(
                "optimizer",
                got=f"{name}={next(group[name] for group in optimizer.param_groups if group.get(name))}",
                expected=f"no {name}, because low-bit state starts from zeros and is updated in place",
                hint=_UNCHANGED,
                code="optimizer_state.option",
            )
    if not any(_states_of(optimizer, group) for group in optimizer.param_groups):
        expected = "an optimizer with state, such as SGD with momentum"
        raise OptimizerError("optimizer", got=given, expected=expected, hint=_UNCHANGED, code="optimizer_state.none")
    if sparse := sparse_module(model, optimizer):
        got, expected = f"sparse gradients of {sparse}", "dense gradients"
        raise OptimizerError("optimizer", got=got, expected=expected, hint=_UNCHANGED, code="optimizer_state.sparse")
    if is_sharded(model) or is_flat_sharded(model):
        got, expected = "sharded parameters", "unsharded parameters"
        raise ModelError("model", got=got, expected=expected, hint=_UNCHANGED, code="optimizer_state.sharded")
    if not any(_large(optimizer)):
        raise ModelError(
            "model",
            got="a model without large parameters on a CPU or CUDA device",
            expected=f"a dense trainable parameter with at least {LEAST_ELEMENTS} elements",
            hint=_UNCHANGED,
            code="optimizer_state.small",
        )


def use_low_bit(optimizer: torch.optim.Optimizer, kind: str) -> Callable[[], None]:
    """Store the state of all large parameters in few bits; return a function that restores plain state.

    Existing state is converted and continues. Parameters added to the optimizer later keep plain state. Undoing needs
    memory for the plain state: state that does not fit on the device is kept in host memory, with a warning.

    Args:
        optimizer: optimizer that `require_low_bit` accepts.
        kind: storage, one of `low_bit_storage.KINDS`.
    """
    return _LowBitState(optimizer, kind).end


def bytes_saved(optimizer: torch.optim.Optimizer, kind: str) -> int:
    """Return the bytes by which low-bit state is smaller than plain state in the dtypes of the parameters."""
    saved = 0
    for group, parameter in _large(optimizer):
        for is_signed in _states_of(optimizer, group).values():
            stored = storage_of(kind, torch.device("meta"), is_signed=is_signed).zeros(parameter.numel())
            saved += parameter.nbytes - sum(each.nbytes for each in stored)
    return saved


def rounding_steps(optimizer: torch.optim.Optimizer) -> RoundingSteps:
    """Return the counter that seeds the stochastic rounding of an optimizer with low-bit state."""
    return _rounding[optimizer]


def drop_hidden(optimizer: torch.optim.Optimizer) -> None:
    """Release the gradients that low-bit state hid from an optimizer step that raised."""
    _hidden.pop(optimizer, None)


class RoundingSteps(Stateful):
    """Number of steps with low-bit state: the seed of the next step's stochastic rounding."""

    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, int]:
        return {"steps": self.count}

    def loading(self, state: Any) -> Load:
        checked = checked_state("state.optimizer_state", state, integers=("steps",))

        def load() -> None:
            self.count = checked["steps"]

        return load


class _LowBitState:
    """Low-bit state in an optimizer's `state`, and hooks that step the parameters with such state."""

    def __init__(self, optimizer: torch.optim.Optimizer, kind: str) -> None:
        self._optimizer, self._kind = optimizer, kind
        self._large = {parameter for _, parameter in _large(optimizer)}
        self._storages: dict[tuple[torch.device, bool], Storage] = {}
        self._new: set[Tensor] = set()
        self._loaded: Mapping[Tensor, Any] = {}
        self._steps = RoundingSteps()
        self._generators: dict[torch.device, torch.Generator] = {}
        self._drawn: dict[torch.device, Tensor] = {}
        self._hooks: list[Any] = []
        try:
            self._store_all()
        except BaseException:  # Out of memory, or Ctrl-C, after some states were converted.
            self.end()
            raise
        self._hooks = [
            optimizer.register_step_pre_hook(self._step),
            first_post_hook(optimizer, self._show),
            # Before the hook of channels_last, which restores the strides of plain state.
            optimizer.register_state_dict_post_hook(self._save, prepend=True),
            optimizer.register_load_state_dict_pre_hook(self._begin_load),
            optimizer.register_load_state_dict_post_hook(self._load),
        ]
        vars(optimizer)["__getstate__"] = self._copied
        _rounding[optimizer] = self._steps

    def _storage(self, device: torch.device, *, is_signed: bool) -> Storage:
        if (device, is_signed) not in self._storages:
            self._storages[device, is_signed] = storage_of(self._kind, device, is_signed=is_signed)
        return self._storages[device, is_signed]

    def _parameters(self) -> Iterator[tuple[dict[str, Any], Tensor, dict[str, Storage]]]:
        """Yield the large parameters that the optimizer still has, each with its group and the storage by state."""
        for group in self._optimizer.param_groups:
            names = _states_of(self._optimizer, group)
            for parameter in group["params"] if names else ():
                if parameter in self._large:
                    device = parameter.device
                    storages = {name: self._storage(device, is_signed=signed) for name, signed in names.items()}
                    yield group, parameter, storages

    def _store_all(self) -> None:
        """Convert plain state to low-bit state, parameter by parameter, and create missing state."""
        for group, parameter, storages in self._parameters():
            self._store(group, parameter, storages)
        self._drawn.clear()

    def _store(self, group: dict[str, Any], parameter: Tensor, storages: Mapping[str, Storage]) -> None:
        state, found = self._optimizer.state.get(parameter, {}), dict[str, Any]()
        for name, storage in storages.items():
            found |= dict(zip(_keys(name, storage), self._stored(parameter, storage, state, name), strict=True))
        if not state:
            self._new.add(parameter)
        if _MOMENTUM not in storages:
            # torch's fused step reads step counters on the parameter's device, others on the host.
            device = parameter.device if group["fused"] else "cpu"
            found["step"] = torch.as_tensor(state.get("step", 0)).to(device, torch.float32, copy=True)
        self._optimizer.state[parameter] = found

    def _stored(self, parameter: Tensor, storage: Storage, state: Mapping[str, Any], name: str) -> tuple[Tensor, ...]:
        keys = _keys(name, storage)
        if all(key in state for key in keys):
            return tuple(state[key] for key in keys)
        stored = storage.zeros(parameter.numel())
        if isinstance(plain := state.get(name), Tensor):
            values = _flat(_laid_out_as(parameter, plain.to(parameter.device)))
            noise = self._noise(parameter)
            for begin, end in _chunks(parameter):
                storage.write(stored, begin, values[begin:end].float(), noise)
        return stored

    def _noise(self, parameter: Tensor) -> Tensor:
        """Return random integers for the chunks of a parameter; none if nothing is rounded stochastically.

        All chunks of a step share the integers, because each element by itself is then rounded without bias.
        """
        device = parameter.device
        if device in self._drawn:
            return self._drawn[device]
        if self._kind != "bf16" and not any(each.dtype is torch.bfloat16 for each in self._large):
            return torch.empty(0, dtype=torch.int32, device=device)
        most = min(_CHUNKS[device.type], max(each.numel() for each in self._large))
        generator = self._generators.setdefault(device, torch.Generator(device))
        generator.manual_seed(self._steps.count)
        how: dict[str, Any] = {"dtype": torch.int32, "device": device, "generator": generator}
        self._drawn[device] = torch.randint(NOISE_LIMIT, (most,), **how)
        return self._drawn[device]

    def _begin_load(self, optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
        """Withhold the state of large parameters from torch, which would copy fp32 state to the device, or round it."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        large = {index for index in saved["state"] if index < len(parameters) and parameters[index] in self._large}
        self._loaded = {parameters[index]: saved["state"][index] for index in large}
        return saved | {"state": {index: state for index, state in saved["state"].items() if index not in large}}

    def _load(self, optimizer: torch.optim.Optimizer) -> None:
        optimizer.state.update({parameter: dict(state) for parameter, state in self._loaded.items()})
        self._loaded = {}
        self._new.clear()
        self._store_all()

    @torch.no_grad()
    def _step(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Step the large parameters and hide their gradients from the optimizer.

        If the optimizer's own step raises and is called again, these parameters are not stepped twice.

        Raises:
            OptimizerError: the step has a closure; nothing has changed.
        """
        reason = "large parameters are stepped before it would run"
        refuse_closure(args, kwargs, reason, code="optimizer_state.closure")
        # GradScaler passes the overflow flag to fused optimizers, which check it themselves.
        overflow = getattr(optimizer, "found_inf", None)
        is_applied = overflow is None or not bool(overflow)
        hidden = _hidden[optimizer] = []
        for group, parameter, storages in self._parameters():
            if parameter.grad is None:
                continue
            if is_applied:
                if not _is_low_bit(self._optimizer.state.get(parameter, {}), storages):  # The user's code replaced it.
                    self._store(group, parameter, storages)
                self._step_parameter(group, parameter, storages)
                self._new.discard(parameter)
            hidden.append((parameter, parameter.grad))
            parameter.grad = None
        self._drawn.clear()
        self._steps.count += is_applied

    def _step_parameter(self, group: dict[str, Any], parameter: Tensor, storages: Mapping[str, Storage]) -> None:
        assert parameter.grad is not None
        state, weights = self._optimizer.state[parameter], _flat(parameter.detach())
        gradient = _flat(_laid_out_as(parameter, parameter.grad))
        stored = {name: tuple(state[key] for key in _keys(name, each)) for name, each in storages.items()}
        step, noise = state.get("step"), self._noise(parameter)
        for begin, end in _chunks(parameter):
            chunk = weights[begin:end]
            # Half-precision weights are updated in fp32.
            exact = chunk if chunk.dtype in (torch.float32, torch.float64) else chunk.float()
            values = {name: each.read(stored[name], begin, end).to(exact.dtype) for name, each in storages.items()}
            _update(group, exact, gradient[begin:end].to(exact.dtype), values, step)
            for name, each in storages.items():
                each.write(stored[name], begin, values[name].float(), noise)
            if exact is not chunk:
                chunk.copy_(round_stochastically(exact, noise) if chunk.dtype is torch.bfloat16 else exact)
        if step is not None:
            step += 1

    def _show(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for parameter, gradient in _hidden.pop(optimizer, ()):
            parameter.grad = gradient

    def _low_bit(self) -> Iterator[tuple[Tensor, dict[str, bool]]]:
        """Yield the parameters with low-bit state, each with the stored states, and True for negative values."""
        # By the keys: the user may have changed momentum or amsgrad since.
        for parameter in self._large:
            state = self._optimizer.state.get(parameter, {})
            held = {key.partition(".")[0] for key in state if "." in key}
            if names := {name: is_signed for name, is_signed in _STATES.items() if name in held}:
                yield parameter, names

    def _save(self, optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
        """Put plain fp32 state into a new `state_dict()`, in host memory, because a GPU may have no room for it."""
        index_of = {p: i for i, p in enumerate(p for group in optimizer.param_groups for p in group["params"])}
        for parameter, names in self._low_bit():
            if parameter in self._new:
                saved["state"].pop(index_of[parameter], None)
            else:
                saved["state"][index_of[parameter]] = self._plain(parameter, names, torch.float32, _HOST)

    def _plain(
        self, parameter: Tensor, names: Mapping[str, bool], dtype: torch.dtype, device: torch.device
    ) -> dict[str, Any]:
        """Return the state of a parameter as torch's optimizers hold it, in a given dtype and on a given device."""
        state = self._optimizer.state[parameter]
        found = {"step": state["step"]} if "step" in state else {}
        for name, is_signed in names.items():
            storage = self._storage(parameter.device, is_signed=is_signed)
            stored = tuple(state[key] for key in _keys(name, storage))
            found[name] = torch.empty_like(parameter, dtype=dtype, device=device, requires_grad=False)
            flat = _flat(found[name])
            for begin, end in _chunks(parameter):
                flat[begin:end] = storage.read(stored, begin, end)
        return found

    def _make_plain(self, states: MutableMapping[Tensor, Any]) -> None:
        """Replace low-bit state by plain state; state that no step has used is removed."""
        is_on_host = False
        for parameter, names in list(self._low_bit()):
            if parameter in self._new:
                states.pop(parameter, None)
                continue
            plain = None
            with contextlib.suppress(torch.OutOfMemoryError):
                plain = self._plain(parameter, names, parameter.dtype, parameter.device)
            if plain is None:
                plain, is_on_host = self._plain(parameter, names, parameter.dtype, _HOST), True
            states[parameter] = plain
        if is_on_host:
            warnings.warn(_ON_HOST, RuntimeWarning, stacklevel=2)

    def _copied(self) -> dict[str, Any]:
        """Return the attributes that a copy or a pickle of the optimizer gets: with plain state, as it has no hooks."""
        copied: dict[str, Any] = type(self._optimizer).__getstate__(self._optimizer)
        copied["state"] = copied["state"].copy()
        self._make_plain(copied["state"])
        return copied

    def end(self) -> None:
        """Restore plain state, and remove the hooks even if this fails."""
        try:
            self._make_plain(self._optimizer.state)
        finally:
            for hook in self._hooks:
                hook.remove()
            vars(self._optimizer).pop("__getstate__", None)
            _rounding.pop(self._optimizer, None)


def _large(optimizer: torch.optim.Optimizer) -> Iterator[tuple[dict[str, Any], Tensor]]:
    """Yield the parameters with low-bit state, each with its group."""
    for group in optimizer.param_groups:
        for p in group["params"] if _states_of(optimizer, group) else ():
            is_real = p.is_floating_point() and p.layout is torch.strided and p.device.type in _CHUNKS
            if is_real and p.requires_grad and p.numel() >= LEAST_ELEMENTS and is_dense(p):
                yield group, p


def _states_of(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> dict[str, bool]:
    """Return the names of the states in a group, and True for a state with negative values."""
    if isinstance(optimizer, torch.optim.SGD):
        return {_MOMENTUM: True} if group["momentum"] else {}
    return _ADAM | ({_MOST: False} if group["amsgrad"] else {})


def _keys(name: str, storage: Storage) -> tuple[str, ...]:
    """Return the keys of a state's stored tensors, unlike torch's key, so that no code takes them for plain state."""
    return tuple(f"{name}.{each}" for each in storage.names)


def _is_low_bit(state: Mapping[str, Any], storages: Mapping[str, Storage]) -> bool:
    return all(key in state for name, storage in storages.items() for key in _keys(name, storage))


def _chunks(parameter: Tensor) -> Iterator[tuple[int, int]]:
    size, numel = _CHUNKS[parameter.device.type], parameter.numel()
    for begin in range(0, numel, size):
        yield begin, min(begin + size, numel)


def _flat(tensor: Tensor) -> Tensor:
    """Return a view of a dense tensor's elements in the order of memory."""
    strides = tensor.stride()
    return tensor.permute(sorted(range(tensor.dim()), key=lambda each: -strides[each])).view(-1)


def _laid_out_as(parameter: Tensor, tensor: Tensor) -> Tensor:
    """Return a tensor with the strides of a parameter; a copy if they differ."""
    if tensor.stride() == parameter.stride():
        return tensor
    return torch.empty_like(parameter, dtype=tensor.dtype, requires_grad=False).copy_(tensor)


def _update(
    group: Mapping[str, Any], weights: Tensor, gradient: Tensor, values: Mapping[str, Tensor], step: Tensor | None
) -> None:
    """Take torch's fused step on a chunk; `step` is not changed."""
    common: dict[str, Any] = {name: group[name] for name in ("lr", "weight_decay", "maximize")}
    if step is None:
        more = {name: group[name] for name in ("momentum", "dampening", "nesterov")}
        sgd([weights], [gradient], [values[_MOMENTUM]], fused=True, **common, **more)
        return
    most = [values[_MOST]] if _MOST in values else []
    adam(
        [weights],
        [gradient],
        *([values[name]] for name in _ADAM),
        most,
        [step.to(weights.device, torch.float32, copy=True)],
        fused=True,
        decoupled_weight_decay=group["decoupled_weight_decay"],
        amsgrad=group["amsgrad"],
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        eps=group["eps"],
        **common,
    )
