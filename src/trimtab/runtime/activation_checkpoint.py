"""A model's blocks recompute their activations by a schedule: in place, reversible, by torch's own checkpointing.

A block's class is swapped for one whose forward goes through `torch.utils.checkpoint` (non-reentrant): names, state and
`isinstance` stay, and a copy is a plain model again. A segment of several blocks is run by its first one; the others,
called in their turn by the model's own code, hand on what they are given, which has to be what the segment made.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from trimtab.core.errors import ModelError, ValueGivenError
from trimtab.core.plan import Plan
from trimtab.core.recompute import Kept, Part, Schedule, Segment, schedule_of
from trimtab.measure.blocks import find_blocks
from trimtab.measure.chain import Arguments, same_arguments

_PART = "_trimtab_part"
_AT_ONCE = "the blocks of a segment one after another, each handed what the one before returned and nothing else anew"


def use_schedule(model: nn.Module, blocks: Sequence[str], schedule: Schedule) -> Callable[[], None]:
    """Have a model's blocks recompute by a schedule; returns what puts back what was.

    Args:
        blocks: names of modules, in the order they run in; stage i of the schedule is the i-th. Segments of several are
            for blocks that are a chain (`chain_of`).

    Raises:
        ModelError: a block cannot be swapped, or one of a segment of several has hooks of its own, as FSDP2's.
    """
    modules = [model.get_submodule(name) for name in blocks]
    swaps = list(_swaps(modules, schedule))
    for index, _ in swaps:
        _check(blocks[index], modules[index])
    before = [(modules[index], type(modules[index])) for index, _ in swaps]

    def undo() -> None:
        for module, plain in before:
            module.__class__ = plain
            module.__dict__.pop(_PART, None)

    for index, part in swaps:
        modules[index].__class__ = _swapped(type(modules[index]))
        modules[index].__dict__[_PART] = part
    return undo


def use_plan(model: nn.Module, plan: Plan) -> Callable[[], None]:
    """Have a model's blocks recompute as a plan says; returns what puts back what was.

    Raises:
        ModelError: the model has no blocks, or not so many, or not those; others as of `use_schedule`.
    """
    known = {name for name, _ in model.named_modules()}
    blocks = plan.recompute_blocks or find_blocks(model)
    missing = next((name for name in blocks if name not in known), None)
    if missing is not None or not blocks:
        given = "a model without blocks" if missing is None else f"a model without {missing}"
        raise ModelError("plan.recompute", given=given, expected="the model that the plan was made for")
    try:
        schedule = schedule_of(str(plan.recompute.value), len(blocks))
    except ValueGivenError:
        given = f"{plan.recompute.value!r:.80} for a model of {len(blocks)} blocks"
        raise ModelError("plan.recompute", given=given, expected="a schedule of as many") from None
    return use_schedule(model, blocks, schedule)


def _check(name: str, module: nn.Module) -> None:
    if isinstance(module, torch.jit.ScriptModule):
        raise ModelError(
            "plan.recompute",
            given=f"{name}, a scripted module",
            expected="modules of Python",
            way_out="Script nothing.",
        )


def _swaps(modules: Sequence[nn.Module], schedule: Schedule) -> Iterator[tuple[int, _Alone | _Head | _Follower]]:
    """Yield blocks with what their forward is to be."""
    for part in schedule:
        if isinstance(part, Kept):
            if part.in_part:
                yield part.index, _Alone(in_part=True)
        elif part.parts == (Kept(part.stages[0]),):
            yield part.stages[0], _Alone(in_part=False)
        else:
            first, *others = part.stages
            _check_hooks([modules[index] for index in part.stages])
            head = _Head(part, [modules[index] for index in part.stages])
            yield first, head
            yield from ((index, _Follower(head, is_last=index == others[-1])) for index in others)


def _check_hooks(modules: Sequence[nn.Module]) -> None:
    names = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    for module, name in itertools.product(modules, names):
        if getattr(module, name):
            raise ModelError(
                "plan.recompute",
                given=f"a {type(module).__name__} with hooks of its own in a segment of several blocks",
                expected="blocks that are called once, which those of a segment are not",
                way_out="Segments of single blocks can have hooks.",
            )


class _Swapped:
    """Put before a block's own class."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        part: _Alone | _Head | _Follower = self.__dict__[_PART]
        return part.run(self, functools.partial(super().forward), args, kwargs)  # type: ignore[misc]

    def __reduce_ex__(self, protocol: Any) -> Any:
        state = {name: value for name, value in self.__dict__.items() if name != _PART}
        return _plain, (type(self).__mro__[2],), state


def _plain(kind: type[nn.Module]) -> nn.Module:
    return kind.__new__(kind)


@functools.cache
def _swapped(plain: type[nn.Module]) -> type[nn.Module]:
    return type(plain.__name__, (_Swapped, plain), {"__module__": plain.__module__, "__qualname__": plain.__qualname__})


class _Alone:
    """A block that recomputes by itself: all, or what is cheap."""

    def __init__(self, *, in_part: bool) -> None:
        self._in_part = in_part

    def run(self, module: Any, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Return what the block makes of its arguments."""
        return _recomputed(forward, (module,), args, kwargs, in_part=self._in_part)


class _Head:
    """The first block of a segment, which runs all of it."""

    def __init__(self, segment: Segment, modules: Sequence[nn.Module]) -> None:
        self._parts = segment.parts
        self._modules = dict(zip(segment.stages, modules, strict=True))
        self._forwards = {index: functools.partial(type(m).forward, m) for index, m in self._modules.items()}
        self.made: Any = None
        self.given: Arguments = (), {}

    def run(self, module: Any, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Return what the last block of the segment makes."""
        self.given = args[1:], kwargs
        self.made = _recomputed(self._run, tuple(self._modules.values()), (self._parts, *args), kwargs)
        return self.made

    def _run(self, parts: Schedule, x: Any, *args: Any, **kwargs: Any) -> Any:
        for part in parts:
            x = self._of(part)(x, *args, **kwargs)
        return x

    def _of(self, part: Part) -> Callable[..., Any]:
        if isinstance(part, Segment):
            modules = tuple(self._modules[index] for index in part.stages)
            return lambda *args, **kwargs: _recomputed(self._run, modules, (part.parts, *args), kwargs)
        forward = self._forwards[part.index]
        if part.in_part:
            modules = (self._modules[part.index],)
            return lambda *args, **kwargs: _recomputed(forward, modules, args, kwargs, in_part=True)
        return forward


class _Follower:
    """Another block of a segment: it was run."""

    def __init__(self, head: _Head, *, is_last: bool) -> None:
        self._head, self._is_last = head, is_last

    def run(self, module: Any, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Return what it is given, the segment's output.

        Raises:
            ModelError: it is given something else.
        """
        made = self._head.made
        if not args or args[0] is not made or not same_arguments((args[1:], kwargs), self._head.given):
            given = f"other arguments than those of the first one for a {type(module).__mro__[2].__name__}"
            raise ModelError("plan.recompute", given=given, expected=_AT_ONCE, way_out="Plan the model anew.")
        if self._is_last:
            self._head.made, self._head.given = None, ((), {})
        return made


def _recomputed(
    function: Callable[..., Any], modules: Sequence[nn.Module], args: Any, kwargs: Any, *, in_part: bool = False
) -> Any:
    """Return what a function makes of its arguments; its backward runs it again."""
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    options: dict[str, Any] = {"use_reentrant": False}
    if not torch.compiler.is_compiling():  # which knows of buffers itself, and takes no context but this one
        options["context_fn"] = functools.partial(_contexts, modules, in_part)
    elif in_part:
        options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, _policy)
    return checkpoint(function, *args, **options, **kwargs)


_Context = contextlib.AbstractContextManager[Any]


def _contexts(modules: Sequence[nn.Module], in_part: bool) -> tuple[_Context, _Context]:
    first: _Context
    again: _Context
    first = again = contextlib.nullcontext()
    if in_part:
        first, again = create_selective_checkpoint_contexts(_policy)
    return first, _recomputing(modules, again)


@contextlib.contextmanager
def _recomputing(modules: Sequence[nn.Module], inner: _Context) -> Iterator[None]:
    """Leave buffers as they are: what moves them, as batch statistics, did so the first time."""
    within = [module for block in modules for module in block.modules() if module._buffers]
    before = [(module, dict(module._buffers)) for module in within]
    try:
        for module, buffers in before:
            module._buffers.update({name: None if b is None else b.clone() for name, b in buffers.items()})
        with inner:
            yield
    finally:
        for module, buffers in before:
            module._buffers.update(buffers)


_DEAR = (
    "mm", "addmm", "bmm", "baddbmm", "convolution", "mkldnn_rnn_layer", "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention", "_scaled_dot_product_attention_math",
)  # fmt: skip


def _policy(_: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Keep what matrix products and attention make."""
    name = getattr(getattr(operator, "overloadpacket", None), "__name__", "")
    return CheckpointPolicy.MUST_SAVE if name in _DEAR else CheckpointPolicy.PREFER_RECOMPUTE
