"""Activation checkpointing of a function by torch's non-reentrant checkpointing, with the state of the first run.

For the recomputation, buffers get their values from before the forward, and their current values afterwards. Buffers
that a forward changes, such as batch statistics, therefore change once, and the recomputation reads the same values.
The module `forward_state` does this for all other state.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    set_checkpoint_early_stop,
)

from trimtab.measure.object_snapshots import version_of
from trimtab.measure.recompute_listeners import recomputing
from trimtab.runtime.forward_state import ForwardState, RecomputedForwards
from trimtab.runtime.recomputation_check import RecomputationCheck, argument_changed, buffer_changed

_SMALL = 2**16  # Bytes of a buffer that is copied at every forward.
_Context = contextlib.AbstractContextManager[Any]


def keeps_activations() -> bool:
    """Return True if a forward must keep its activations, or has none to keep.

    Activations are kept under `torch.func` transforms (such as per-sample gradients), which do not support saved-tensor
    hooks, and in forward-mode differentiation, whose tangents would be missing in a recomputation.
    """
    in_transform = torch._C._functorch.peek_interpreter_stack() is not None
    return not torch.is_grad_enabled() or in_transform or forward_ad._current_level >= 0


def recompute_call(
    function: Callable[..., Any], forwards: RecomputedForwards, args: Any, kwargs: Any, *, in_part: bool = False
) -> Any:
    """Call a function with activation checkpointing and return its result.

    Args:
        function: the function.
        forwards: the modules that the function runs.
        args: positional arguments.
        kwargs: keyword arguments.
        in_part: keep the results of matrix products and attention (selective checkpointing).

    Raises:
        ModelError: the function makes a change that its recomputation would repeat.
    """
    if keeps_activations():
        return function(*args, **kwargs)
    if torch.compiler.is_compiling():  # torch.compile handles buffers itself.
        selective = functools.partial(create_selective_checkpoint_contexts, _policy)
        options: dict[str, Any] = {"context_fn": selective} if in_part else {}
        return checkpoint(function, *args, use_reentrant=False, **options, **kwargs)
    leaves, structure = tree_flatten((args, kwargs))
    places = [index for index, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    tensors = [leaves[index] for index in places]
    rest = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    first = [(args, kwargs)]  # The first run fills the caller's own lists and dicts, the recomputation fills copies.
    del args, kwargs
    state = forwards.begin()
    check = RecomputationCheck(forwards.names) if state.is_watched else None

    def call(_: Tensor | None, *given: Tensor) -> Any:
        is_first = bool(first)
        if is_first:
            again, named = first.pop()
        else:
            all_leaves = list(rest)
            for index, tensor in zip(places, given, strict=True):
                all_leaves[index] = tensor
            again, named = tree_unflatten(all_leaves, structure)
        versions = _versions(given)
        with _casts_each_time() if in_part else contextlib.nullcontext():
            result = function(*again, **named)
        if is_first and _versions(given) != versions:
            raise argument_changed(forwards.names)
        if check is not None:
            check(result)
        return result

    # torch finds the devices of random generators, and detects overwritten tensors, in positional arguments only.
    context = functools.partial(_contexts, forwards, in_part, state)
    # A checked recomputation runs to its end; torch stops others after the last tensor needed by backward.
    with contextlib.nullcontext() if check is None else set_checkpoint_early_stop(False):
        return checkpoint(call, _of_device(forwards.modules), *tensors, use_reentrant=False, context_fn=context)


def _versions(tensors: Sequence[Tensor]) -> list[int | None]:
    return [version_of(tensor) for tensor in tensors]


@contextlib.contextmanager
def _casts_each_time() -> Iterator[None]:
    """Disable autocast's weight cache within the block.

    Selective checkpointing identifies operators by their order, which must be equal in forward and recomputation. With
    the cache, only the recomputation would contain the cast of a weight that an earlier block has cast already.
    """
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


def _of_device(modules: Sequence[nn.Module]) -> Tensor | None:
    parameter = next((p for module in modules for p in module._parameters.values() if p is not None), None)
    return None if parameter is None else torch.empty(0, device=parameter.device)


def _contexts(forwards: RecomputedForwards, in_part: bool, state: ForwardState) -> tuple[_Context, _Context]:
    first: _Context
    again: _Context
    first = again = contextlib.nullcontext()
    if in_part:
        first, again = create_selective_checkpoint_contexts(_policy)
    buffers = _SavedBuffers(forwards.buffered)
    noting = _CombinedContexts(buffers.noting, state.noting, lambda: first)
    return noting, _CombinedContexts(recomputing, state.as_it_was, buffers.as_they_were, lambda: again)


class _CombinedContexts:
    """Several contexts combined, outermost first; can be entered repeatedly."""

    def __init__(self, *make: Callable[[], _Context]) -> None:
        self._make = make
        self._stacks: list[contextlib.ExitStack] = []

    def __enter__(self) -> None:
        with contextlib.ExitStack() as stack:
            for make in self._make:
                stack.enter_context(make())
            self._stacks.append(stack.pop_all())

    def __exit__(self, *error: Any) -> None:
        self._stacks.pop().__exit__(*error)


# Names of buffers that a forward was seen to change, by module and training mode.
_moving: weakref.WeakKeyDictionary[nn.Module, dict[bool, set[str]]] = weakref.WeakKeyDictionary()


def _moved_by(module: nn.Module, mode: bool) -> set[str] | None:
    """Return the names of buffers that a module changes in a training mode; None if no forward was observed."""
    return _moving.get(module, {}).get(mode)


class _SavedBuffers:
    """Buffers of some modules from before a forward."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = modules
        self._before: dict[tuple[nn.Module, str], Tensor] = {}

    @contextlib.contextmanager
    def noting(self) -> Iterator[None]:
        """Copy small buffers and buffers that change: all buffers in the first forward, later those seen to change.

        The first forward compares values and therefore synchronises, because batch statistics change without a new
        version. Small buffers are always copied, because a layer may start to run in a later call (stochastic depth,
        unfreezing).

        Raises:
            ModelError: a large buffer changed for the first time in a later call, so that no copy exists.
        """
        seen = [(m, name, b, b._version) for m in self._modules for name, b in m._buffers.items() if b is not None]
        modes = {module: module.training for module in self._modules}  # A forward may change the training mode.
        moves = {module: _moved_by(module, mode) for module, mode in modes.items()}
        copies = {
            (m, name): b.clone()
            for m, name, b, _ in seen
            if moves[m] is None or name in moves[m] or b.nbytes <= _SMALL  # type: ignore[operator]
        }
        yield
        for module, names in moves.items():
            if names is None:
                _moving.setdefault(module, {})[modes[module]] = set()
        for module, name, buffer, version in seen:
            now, copy, names = module._buffers.get(name), copies.get((module, name)), moves[module]
            moved = now is not buffer or buffer._version != version or name in (names or ())
            if moved or (names is None and copy is not None and not _is_same(copy, buffer)):
                _moving[module][modes[module]].add(name)
                if copy is None and now is buffer:
                    raise buffer_changed(name)
                self._before[module, name] = buffer if copy is None else copy
            elif copy is not None:  # Batch statistics change without a new version.
                self._before[module, name] = copy

    @contextlib.contextmanager
    def as_they_were(self) -> Iterator[None]:
        """Use the copied buffers within the block, and restore the current buffers afterwards."""
        found = [(module, dict(module._buffers)) for module in self._modules]
        try:
            for (module, name), before in self._before.items():
                module._buffers[name] = before.clone()
            yield
        finally:
            for module, buffers in found:
                module._buffers.update(buffers)


def _is_same(ours: Tensor, theirs: Tensor) -> bool:
    """Return True if two tensors are equal; False for tensors without values, as in tracing."""
    try:
        return torch.equal(ours, theirs)
    except RuntimeError:
        return False


_DEAR = {
    "mm", "addmm", "bmm", "baddbmm", "_scaled_mm", "_grouped_mm", "convolution", "mkldnn_rnn_layer",
    "_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
}  # fmt: skip


def _policy(_: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Save results of matrix products and attention, except if random numbers are drawn, which must be drawn again."""
    name = getattr(getattr(operator, "overloadpacket", None), "__name__", "")
    if name not in _DEAR or _draws(operator, args, kwargs):
        return CheckpointPolicy.PREFER_RECOMPUTE
    return CheckpointPolicy.MUST_SAVE


def _draws(operator: Any, args: Any, kwargs: Any) -> bool:
    if torch.Tag.nondeterministic_seeded not in operator.tags:
        return False
    names = [argument.name for argument in operator._schema.arguments]
    given = dict(zip(names, args, strict=False)) | dict(kwargs)
    return bool(given.get("dropout_p", 0.0))
