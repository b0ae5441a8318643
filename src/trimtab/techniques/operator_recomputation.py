"""Recomputation of single operators: a block keeps the results of some operators, and backward recomputes the rest.

A dispatch mode records every operator of the block's forward with all arguments. In place of a tensor, autograd saves a
recipe: the operators that compute the tensor from kept tensors. Backward runs a recipe when the tensor is needed, and
runs only the operators in the recipe; the block's Python code does not run again. This is the single-operator
rematerialization of Checkmate (Jain et al., arXiv:1910.02653) with a given set of kept results.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import weakref
from collections import Counter
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_flatten, tree_iter, tree_unflatten
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from trimtab.core.block_costs import ExpensiveOperator
from trimtab.core.errors import ModelError
from trimtab.measure.blocks import recomputing
from trimtab.measure.timing import clock_s, synchronize

_PRODUCTS = {
    "mm", "addmm", "bmm", "baddbmm", "_scaled_mm", "_grouped_mm", "convolution", "mkldnn_rnn_layer",
    "_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
}  # fmt: skip
_COLLECTIVES = {"c10d", "_c10d_functional"}  # Their declarations do not name the tensors that they overwrite.
_BATCH_STATISTICS = {"running_mean", "running_var"}
# Results of an operator that are smaller than the largest one by this factor are kept: means, variances, logsumexp.
_SMALLER = 16
_MOST_OPERATORS = 10**9
_DETACH = torch.ops.aten.detach.default


def is_product(operator: Any) -> bool:
    """Return True for matrix products, convolutions and attention."""
    return _name_of(operator) in _PRODUCTS


def draws(operator: Any, args: Any, kwargs: Any) -> bool:
    """Return True if a call of an operator draws random numbers."""
    if torch.Tag.nondeterministic_seeded not in operator.tags:
        return False
    given = _by_name(operator, args, kwargs)
    return bool(given.get("dropout_p", True))


@functools.cache
def _argument_names(operator: Any) -> tuple[str, ...]:
    return tuple(argument.name for argument in operator._schema.arguments)


@functools.cache
def _overwritten_names(operator: Any) -> tuple[str, ...]:
    """Return the arguments that an operator declares to overwrite."""
    return tuple(each.name for each in operator._schema.arguments if each.alias_info and each.alias_info.is_write)


def _by_name(operator: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    return dict(zip(_argument_names(operator), args, strict=False)) | dict(kwargs)


def _name_of(operator: Any) -> str:
    return str(operator.overloadpacket.__name__)


class _Value:
    """A tensor of the forward: kept, or recomputable as a result of a call.

    Attributes:
        call: the operator call that returns the tensor; None if it is unknown.
        tensor: the kept tensor, or None.
        is_blank: True for the result of a factory such as `empty_like`, possibly filled later.
        source: index of the expensive operator, if the tensor is a kept result; or None.
    """

    __slots__ = ("__weakref__", "call", "index", "is_blank", "saved", "source", "tensor", "version")

    def __init__(self, call: _Call | None = None, index: int = 0) -> None:
        self.call, self.index, self.is_blank = call, index, False
        self.source: int | None = None
        self.tensor: Tensor | None = None
        self.version: int | None = None
        self.saved: Callable[[], _Saved | None] = _nothing

    def keep(self, tensor: Tensor) -> _Value:
        """Hold a tensor of the forward until the backward."""
        # A detached alias, because a result refers to its graph, and the graph to this value. The parameter itself,
        # because a sharded parameter exchanges its storage.
        self.tensor = tensor if isinstance(tensor, nn.Parameter) else _alias(tensor)
        self.version = _version(self.tensor)
        return self

    def at_hand(self) -> Tensor | None:
        """Return the tensor if it need not be computed.

        Raises:
            ModelError: a kept tensor was changed in place, and cannot be recomputed.
        """
        if self.tensor is not None:
            if self.version == _version(self.tensor):
                return self.tensor
            if self.call is None or self.is_blank:
                raise _changed()
        saved = self.saved()
        return None if saved is None else saved.tensor


def _alias(tensor: Tensor) -> Tensor:
    """Return a detached alias with the tensor's version counter; inside a dispatch mode, `detach` makes a new one."""
    kept, left_out = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
    with torch._C._ForceDispatchKeyGuard(kept, left_out.remove(torch._C.DispatchKey.ADInplaceOrView)):
        return tensor.detach()


def _nothing() -> None:
    return None


def _version(tensor: Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version


class _Saved:
    """A tensor saved by autograd. The recomputed tensor is released together with the last reference by autograd."""

    __slots__ = ("__weakref__", "sample", "tensor", "value")

    def __init__(self, value: _Value) -> None:
        self.value = value
        self.tensor: Tensor | None = None
        self.sample: Callable[[Any], None] | None = None


class _Call:
    """Call of an operator with values in place of tensors.

    Attributes:
        number: position in the forward; a call uses only results of calls with smaller numbers.
        inputs: the values among the arguments.
        source: index of the call among expensive operators if its results are kept, or None.
    """

    __slots__ = ("_random", "_structure", "_written", "inputs", "leaves", "number", "operator", "results", "source")

    def __init__(self, number: int, operator: Any, leaves: list[Any], structure: Any, written: Sequence[int]) -> None:
        self.number, self.operator, self.leaves, self._structure = number, operator, leaves, structure
        self._written = frozenset(written)
        self._random: _RandomState | None = None
        self.inputs = [leaf for leaf in leaves if isinstance(leaf, _Value)]
        self.results: list[Callable[[], _Value | None]] = []
        self.source: int | None = None

    def note_random(self, device: torch.device) -> None:
        self._random = _RandomState(device)

    def run(self, tensor_of: Callable[[_Value], Tensor], copy_of: Callable[[_Value], Tensor]) -> tuple[Any, ...]:
        """Run the operator again and return the results; `copy_of` returns tensors that the operator may overwrite."""
        leaves = list(self.leaves)
        for place, leaf in enumerate(leaves):
            if isinstance(leaf, _Value):
                leaves[place] = copy_of(leaf) if place in self._written else tensor_of(leaf)
        args, kwargs = tree_unflatten(leaves, self._structure)
        with contextlib.nullcontext() if self._random is None else self._random.restored():
            return _results_of(self.operator(*args, **kwargs))


def _results_of(result: Any) -> tuple[Any, ...]:
    return tuple(result) if isinstance(result, tuple | list) else (result,)


class _RandomState:
    """State of torch's default random generator of a device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        with _disable_current_modes():
            self._state = self._now()

    def _now(self) -> Tensor:
        return torch.get_rng_state() if self._device.type == "cpu" else torch.cuda.get_rng_state(self._device)

    def _set(self, state: Tensor) -> None:
        if self._device.type == "cpu":
            torch.set_rng_state(state)
        else:
            torch.cuda.set_rng_state(state, self._device)

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        with _disable_current_modes():
            now = self._now()
            self._set(self._state)
        try:
            yield
        finally:
            with _disable_current_modes():
                self._set(now)


def _compute(wanted: _Value) -> Tensor:
    """Return a value's tensor after running all necessary calls once."""
    calls = _needed(wanted)
    uses = Counter(value for call in calls for value in dict.fromkeys(call.inputs))
    made: dict[_Value, Tensor] = {}

    def tensor_of(value: _Value) -> Tensor:
        found = made.get(value)
        found = value.at_hand() if found is None else found
        assert found is not None
        return found

    def copy_of(value: _Value) -> Tensor:
        if value in made and uses[value] == 1 and value.saved() is None:
            return made[value]
        # Batch statistics may have changed since, which does not affect a layer's result.
        return (tensor_of(value) if value.tensor is None else value.tensor).clone()

    for call in calls:
        results = call.run(tensor_of, copy_of)
        for value in dict.fromkeys(call.inputs):
            uses[value] -= 1
            if not uses[value]:
                made.pop(value, None)
        for get in call.results:
            value = get()
            if value is None:
                continue
            if uses[value] or value is wanted:
                made[value] = results[value.index]
            if (saved := value.saved()) is not None:  # Another backward needs it soon.
                saved.tensor = results[value.index]
        del results
    return made[wanted]


def _needed(wanted: _Value) -> list[_Call]:
    """Return the calls to run for a value, in the order of the forward."""
    found: dict[int, _Call] = {}
    left = [wanted]
    while left:
        value = left.pop()
        if value.call is not None and value.call.number not in found and value.at_hand() is None:
            found[value.call.number] = value.call
            left += value.call.inputs
    return [found[number] for number in sorted(found)]


class OperatorRecorder(TorchDispatchMode):
    """Dispatch mode that records the operators of a block's forward.

    Args:
        kept: indices of the expensive operators with kept results, in the order of the forward; None for all matrix
            products, convolutions and attention without dropout. Expensive operators are matrix products, convolutions,
            attention, and operators that draw random numbers.
        check: returns a comparison of a recomputed tensor with the forward's, or None.
    """

    supports_higher_order_operators = True

    def __init__(self, kept: Container[int] | None, check: Callable[[], Callable[[Any], None]] | None = None) -> None:
        super().__init__()
        self._kept, self._check = kept, check
        self._calls = self._expensive = 0
        self._overwritten: list[_Value] = []
        # By storage, then by offset, shape, stride and dtype. A weak reference keeps the address from being used again.
        self._values: dict[StorageWeakRef, dict[Any, _Value]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is _DETACH or not isinstance(func, OpOverload) or func.namespace == "prim":
            return func(*args, **kwargs)  # Computes no tensor, or is a higher-order operator, whose results are kept.
        self._note_versions()
        leaves, structure = tree_flatten((args, kwargs))
        is_random, source = draws(func, args, kwargs), None
        if is_random or is_product(func):
            source, self._expensive = self._expensive, self._expensive + 1
        is_kept = self._is_kept(func, args, kwargs, source, is_random=is_random)
        is_kept |= any(isinstance(leaf, Tensor) and not _is_plain(leaf) for leaf in leaves)
        written = _written(func, leaves, args, kwargs)
        values = [self._input(leaf, place in written) if _is_plain(leaf) else leaf for place, leaf in enumerate(leaves)]
        self._calls += 1
        call = _Call(self._calls, func, values, structure, written)
        call.source = source if is_kept else None
        if not is_kept and is_random:
            call.note_random(next(leaf.device for leaf in leaves if isinstance(leaf, Tensor)))
        result = self._run(func, args, kwargs, source, is_random=is_random)
        if written and not _is_batch_norm(func):
            self._overwrote(call, leaves, written, result, is_kept=is_kept)
        else:
            self._made(call, result, is_kept=is_kept, is_blank=_is_factory(func, leaves))
        return result

    def call(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call the block's forward."""
        return function(*args, **kwargs)

    def _run(self, func: Any, args: Any, kwargs: Any, source: int | None, *, is_random: bool) -> Any:
        return func(*args, **kwargs)

    def _is_kept(self, func: Any, args: Any, kwargs: Any, source: int | None, *, is_random: bool) -> bool:
        """Return True if the results of a call are kept."""
        if source is None:
            return bool(func.namespace != "aten")  # Such an operator may depend on more than its arguments.
        if is_random and not _is_replayable(func, args, kwargs):
            return True
        return not is_random if self._kept is None else source in self._kept

    def _input(self, tensor: Tensor, is_written: bool) -> _Value:
        value = self._value_of(tensor)
        if value.is_blank and not is_written:  # A kernel that torch does not show may have filled it.
            value = self._values[_storage(tensor)][_geometry(tensor)] = _Value().keep(tensor)
        return value

    def _value_of(self, tensor: Tensor) -> _Value:
        views, place = self._values.setdefault(_storage(tensor), {}), _geometry(tensor)
        if place not in views:
            views[place] = _Value().keep(tensor)
        return views[place]

    def _made(self, call: _Call, result: Any, *, is_kept: bool, is_blank: bool) -> None:
        """Record the new tensors among the results of a call."""
        tensors = [(index, each) for index, each in enumerate(_results_of(result)) if _is_plain(each)]
        most = max((each.nbytes for _, each in tensors), default=0)
        for index, tensor in tensors:
            views, place = self._values.setdefault(_storage(tensor), {}), _geometry(tensor)
            if place in views:
                continue
            value = views[place] = _Value(None if is_kept else call, index)
            value.is_blank, value.source = is_blank, call.source
            call.results.append(weakref.ref(value))
            if is_kept or tensor.nbytes * _SMALLER <= most:
                value.keep(tensor)

    def _overwrote(self, call: _Call, leaves: list[Any], written: list[int], result: Any, *, is_kept: bool) -> None:
        """Record a call that overwrites arguments. The tensors are kept from then on, unless the call is replayable.

        A call is replayable if a recomputable tensor without views is overwritten as a whole.
        """
        for place in written:
            tensor, before = leaves[place], call.leaves[place]
            storage, geometry = _storage(tensor), _geometry(tensor)
            is_whole = set(self._values[storage]) == {geometry}
            is_own = result is tensor and place == 0 and torch.Tag.inplace_view not in call.operator.tags
            if is_whole and is_own and before.tensor is None and not is_kept:
                value = _Value(call)
                call.results.append(weakref.ref(value))
            else:
                value = _Value().keep(tensor)
                self._overwritten.append(value)
                value.source = before.source if call.source is None else call.source
            self._values[storage] = {geometry: value}

    def _note_versions(self) -> None:
        """Read the versions of overwritten tensors, which torch increments after the operator returns."""
        for value in self._overwritten:
            value.version = None if value.tensor is None else _version(value.tensor)
        self._overwritten.clear()

    def pack(self, tensor: Tensor) -> Any:
        """Return the object that autograd holds in place of a tensor."""
        if not _is_plain(tensor):
            return tensor
        self._note_versions()
        value = self._input(tensor, is_written=False)
        saved = value.saved()
        if saved is None:
            saved = _Saved(value)
            value.saved = weakref.ref(saved)
            if self._check is not None and value.tensor is None:
                saved.sample = self._check()
                saved.sample(tensor)
        return saved

    def unpack(self, saved: Any) -> Tensor:
        """Return the tensor of an object from `pack`, recomputed if necessary."""
        if not isinstance(saved, _Saved):
            return saved  # type: ignore[no-any-return]  # a tensor without a recipe
        found = saved.value.at_hand()
        if found is None:
            found = self._recompute(saved.value)
            if saved.sample is not None:
                saved.sample(found)
        return found

    def _recompute(self, value: _Value) -> Tensor:
        with torch.no_grad(), torch._C._DisableAutocast(), recomputing():
            return _compute(value)

    def close(self, result: Any) -> None:
        """Keep the block's results, and forget all values that backward does not need.

        The following block holds the results until the backward of this block in any case.
        """
        self._note_versions()
        for tensor in tree_iter(result):
            if _is_plain(tensor) and (value := self._value_of(tensor)).tensor is None:
                value.keep(tensor)
        self._values.clear()


def keep_operators(function: Callable[..., Any], args: Any, kwargs: Any, recorder: OperatorRecorder) -> Any:
    """Call a function, and keep only the results of the expensive operators that the recorder names.

    Raises:
        ModelError: in the backward, if a kept tensor was changed in place ("recompute.side_effects"), or a recomputed
            tensor differs ("recompute.differs").
    """
    with saved_tensors_hooks(recorder.pack, recorder.unpack), recorder:
        result = recorder.call(function, args, kwargs)
    recorder.close(result)
    return result


class OperatorSurvey(OperatorRecorder):
    """Recorder that keeps all results of expensive operators, and measures bytes and seconds.

    Attributes:
        found: the expensive operators, after the forward.
        forward_s: seconds of the forward, without `more_s`.
        more_s: seconds for recording the operators, and for recomputing tensors in the backward.
    """

    def __init__(self) -> None:
        super().__init__(range(_MOST_OPERATORS))
        self.forward_s = self.more_s = self._operators_s = 0.0
        self.found: list[ExpensiveOperator] = []
        self._saved: list[weakref.ref[_Saved]] = []
        self._device = torch.device("cpu")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensor = next((each for each in tree_iter((args, kwargs)) if isinstance(each, Tensor)), None)
        self._device = self._device if tensor is None else tensor.device
        start, before = self._settled_s(), self._operators_s
        result = super().__torch_dispatch__(func, types, args, kwargs)
        self.more_s += self._settled_s() - start - (self._operators_s - before)
        return result

    def call(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        start = self._settled_s()
        result = super().call(function, args, kwargs)
        self.forward_s = self._settled_s() - start - self.more_s
        return result

    def _run(self, func: Any, args: Any, kwargs: Any, source: int | None, *, is_random: bool) -> Any:
        start = self._settled_s()
        result = super()._run(func, args, kwargs, source, is_random=is_random)
        seconds = self._settled_s() - start
        self._operators_s += seconds
        if source is not None:
            num_bytes = sum(each.nbytes for each in _results_of(result) if isinstance(each, Tensor))
            self.found.append(ExpensiveOperator(num_bytes, seconds, is_random))
        return result

    def _recompute(self, value: _Value) -> Tensor:
        start = self._settled_s()
        found = super()._recompute(value)
        self.more_s += self._settled_s() - start
        return found

    def _settled_s(self) -> float:
        synchronize(self._device)
        return clock_s()

    def pack(self, tensor: Tensor) -> Any:
        saved = super().pack(tensor)
        if isinstance(saved, _Saved):
            self._saved.append(weakref.ref(saved))
        return saved

    def close(self, result: Any) -> None:
        super().close(result)
        left = [saved.value for get in self._saved if (saved := get()) is not None]
        seen: set[_Value] = set()
        while left:
            value = left.pop()
            if value in seen:
                continue
            seen.add(value)
            if value.source is not None:
                self.found[value.source] = replace(self.found[value.source], is_needed=True)
            elif value.call is not None and value.tensor is None:
                left += value.call.inputs


def selective_contexts(kept: Container[int] | None) -> Any:
    """Return the contexts of torch's selective checkpointing, which torch.compile understands, for the same results."""
    count = itertools.count()

    def policy(_: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        is_random = draws(operator, args, kwargs)
        if not (is_random or is_product(operator)):
            return CheckpointPolicy.PREFER_RECOMPUTE
        index = next(count)
        is_kept = not is_random if kept is None else index in kept
        return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def _storage(tensor: Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())


def _geometry(tensor: Tensor) -> Any:
    return (
        tensor.storage_offset(),
        tuple(tensor.shape),
        tensor.stride(),
        tensor.dtype,
        tensor.is_conj(),
        tensor.is_neg(),
    )


def _is_plain(value: Any) -> bool:
    """Return True for a tensor with its own storage, not for a tensor of tensors such as a DTensor."""
    if not isinstance(value, Tensor) or value.layout is not torch.strided:
        return False
    return not value.is_nested and not is_traceable_wrapper_subclass(value)


def _is_batch_norm(operator: Any) -> bool:
    return "batch_norm" in _name_of(operator)


def _is_factory(operator: Any, leaves: list[Any]) -> bool:
    name = _name_of(operator)
    return name.endswith("_like") or name.startswith("new_") or not any(isinstance(leaf, Tensor) for leaf in leaves)


def _is_replayable(operator: Any, args: Any, kwargs: Any) -> bool:
    """Return True if a call draws from a default generator whose state can be read."""
    if _by_name(operator, args, kwargs).get("generator") is not None or operator.namespace != "aten":
        return False
    tensor = next((each for each in tree_iter((args, kwargs)) if isinstance(each, Tensor)), None)
    kind = "" if tensor is None else tensor.device.type
    # A generator's state cannot be read while a CUDA graph is captured.
    return kind == "cpu" or (kind == "cuda" and not torch.cuda.is_current_stream_capturing())


def _written(operator: Any, leaves: list[Any], args: Any, kwargs: Any) -> list[int]:
    """Return the places of the tensors that a call overwrites."""
    if _is_batch_norm(operator):
        given = _by_name(operator, args, kwargs)
        over = [given.get(name) for name in _BATCH_STATISTICS] if given.get("training", True) else []
    elif operator.namespace in _COLLECTIVES:
        over = list(tree_iter((args, kwargs)))
    elif names := _overwritten_names(operator):
        given = _by_name(operator, args, kwargs)
        over = list(tree_iter([given.get(name) for name in names]))
    else:
        return []
    tensors = {id(each) for each in over if isinstance(each, Tensor)}
    return [place for place, leaf in enumerate(leaves) if id(leaf) in tensors and _is_plain(leaf)]


def _changed() -> ModelError:
    return ModelError(
        "plan.recompute",
        problem="A tensor from which a block recomputes its activations was changed in place after the block used it.",
        hint="Use out-of-place operations (relu, not relu_), update parameters after the backward, or use a plan with "
        "recompute=None.",
        code="recompute.side_effects",
    )
