"""A function whose backward runs it again, by torch's checkpointing, in the state of its first run.

Buffers are as they were before the forward while it is run again, and as they are now afterwards: what moves them, as
batch statistics, does so once, and what reads them reads the same. `forward_state` does so for everything else.
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

from trimtab.measure.recomputing import recomputing
from trimtab.runtime.forward_state import Forwards, ForwardState
from trimtab.runtime.recomputation_check import RecomputationCheck, argument_changed, buffer_changed

_SMALL = 2**16  # bytes of a buffer that is copied at every forward
_Context = contextlib.AbstractContextManager[Any]


def keeps_activations() -> bool:
    """Return whether a forward keeps its activations, or has none to keep.

    It keeps them under `torch.func` transforms (gradients per sample), which take no hooks of saved tensors, and in
    forward-mode differentiation, whose tangents a recomputation would not have.
    """
    in_transform = torch._C._functorch.peek_interpreter_stack() is not None
    return not torch.is_grad_enabled() or in_transform or forward_ad._current_level >= 0


def recomputed(
    function: Callable[..., Any], forwards: Forwards, args: Any, kwargs: Any, *, in_part: bool = False
) -> Any:
    """Return what a function makes of its arguments; its backward runs it again.

    Args:
        forwards: of the modules that it runs.
        in_part: keep what matrix products and attention make.

    Raises:
        ModelError: the function changes what running it again would change twice.
    """
    if keeps_activations():
        return function(*args, **kwargs)
    if torch.compiler.is_compiling():  # which knows of buffers itself
        selective = functools.partial(create_selective_checkpoint_contexts, _policy)
        options = {"context_fn": selective} if in_part else {}
        return checkpoint(function, *args, use_reentrant=False, **options, **kwargs)
    leaves, structure = tree_flatten((args, kwargs))
    places = [index for index, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    tensors = [leaves[index] for index in places]
    rest = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    first = [(args, kwargs)]  # the first run fills the caller's own lists and dicts, the second one copies of them
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

    # Of arguments by position alone torch knows which devices draw random numbers, and whether one was written over.
    context = functools.partial(_contexts, forwards, in_part, state)
    # A checked recomputation runs to its end; torch stops others after the last tensor that the backward needs.
    with contextlib.nullcontext() if check is None else set_checkpoint_early_stop(False):
        return checkpoint(call, _of_device(forwards.modules), *tensors, use_reentrant=False, context_fn=context)


def _versions(tensors: Sequence[Tensor]) -> list[int | None]:
    """Return the number of in-place changes of each tensor; None for inference tensors, which do not count them."""
    return [None if tensor.is_inference() else tensor._version for tensor in tensors]


@contextlib.contextmanager
def _casts_each_time() -> Iterator[None]:
    """Have autocast cast a weight whenever it is used.

    Of one that another block has used before, its cache would leave out a cast which is not there when it is run again:
    what is kept in part is found by its place among the operators.
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


def _contexts(forwards: Forwards, in_part: bool, state: ForwardState) -> tuple[_Context, _Context]:
    first: _Context
    again: _Context
    first = again = contextlib.nullcontext()
    if in_part:
        first, again = create_selective_checkpoint_contexts(_policy)
    buffers = _Buffers(forwards.buffered)
    noting = _All(buffers.noting, state.noting, lambda: first)
    return noting, _All(recomputing, state.as_it_was, buffers.as_they_were, lambda: again)


class _All:
    """Contexts in one, the outermost first, that may be entered again."""

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


# Names of each module's buffers that a forward was seen to move, in training mode and out of it.
_moving: weakref.WeakKeyDictionary[nn.Module, dict[bool, set[str]]] = weakref.WeakKeyDictionary()


def _moved_by(module: nn.Module, mode: bool) -> set[str] | None:
    """Return the names of those that a module moves in a mode; None of one that was not seen in it."""
    return _moving.get(module, {}).get(mode)


class _Buffers:
    """The buffers of some modules, as they were before a forward."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = modules
        self._before: dict[tuple[nn.Module, str], Tensor] = {}

    @contextlib.contextmanager
    def noting(self) -> Iterator[None]:
        """Copy small ones, and those that move: all of them the first time, then those that did.

        The first time by their values, for which the device is waited for: batch statistics move without a new version.
        Small ones are always copied, because a layer may begin to run in a later call (stochastic depth, unfreezing).

        Raises:
            ModelError: a large one moved for the first time in a later call, so that no copy of it was made.
        """
        seen = [(m, name, b, b._version) for m in self._modules for name, b in m._buffers.items() if b is not None]
        modes = {module: module.training for module in self._modules}  # which a forward may change
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
            elif copy is not None:  # batch statistics move without a new version
                self._before[module, name] = copy

    @contextlib.contextmanager
    def as_they_were(self) -> Iterator[None]:
        """Have copies of them in their places; then they are as they were found."""
        found = [(module, dict(module._buffers)) for module in self._modules]
        try:
            for (module, name), before in self._before.items():
                module._buffers[name] = before.clone()
            yield
        finally:
            for module, buffers in found:
                module._buffers.update(buffers)


def _is_same(ours: Tensor, theirs: Tensor) -> bool:
    """Return whether two hold the same; of those without memory, as a trace has them, not."""
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
    """Keep what matrix products and attention make; but what draws random numbers, which those after it go on from."""
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
