"""A model's blocks recompute their activations by a schedule: in place, reversible, by torch's own checkpointing.

A block's class is swapped for one whose forward goes through `torch.utils.checkpoint` (non-reentrant): names, state and
`isinstance` stay, and a copy is a plain model again. A segment of several blocks is run by its first one; the others,
called in their turn by the model's own code, hand on what they are given, which has to be what the segment made.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from trimtab.core.errors import ModelError, ValueGivenError
from trimtab.core.plan import Plan
from trimtab.core.recompute import Kept, Part, Schedule, Segment, schedule_of
from trimtab.measure.blocks import find_blocks
from trimtab.measure.linked_blocks import Arguments, same_arguments
from trimtab.runtime.forward_state import Forwards
from trimtab.runtime.recomputed import keeps_activations, recomputed

_PART = "_trimtab_part"
# What DistributedDataParallel and torch.compile call what they wrap.
_WRAPPED = {"module", "_orig_mod"}
_OF_THE_PLAN = "the model that the plan was made for"
_AT_ONCE = "the blocks of a segment one after another, each handed what the one before returned and nothing else anew"


def use_schedule(model: nn.Module, blocks: Sequence[str], schedule: Schedule) -> Callable[[], None]:
    """Have a model's blocks recompute by a schedule; returns what puts back what was.

    Args:
        blocks: names of modules, in the order they run in; stage i of the schedule is the i-th. Segments of several are
            for blocks that are a chain (`measure.linked_blocks`).

    Raises:
        ModelError: a block cannot be swapped, or one of a segment of several has hooks of its own, as FSDP2's.
    """
    modules = [model.get_submodule(name) for name in blocks]
    swaps = list(_swaps(modules, blocks, schedule))
    for index, _ in swaps:
        _check(blocks[index], modules[index])
    if len({id(modules[index]) for index, _ in swaps}) < len(swaps):
        raise _refused("a block that is in the schedule twice", "each once")
    heads = [part for _, part in swaps if isinstance(part, _Head)]
    plain = [(modules[index], type(modules[index])) for index, _ in swaps]
    hooks = (
        [model.register_forward_pre_hook(_Begins(heads)), model.register_forward_hook(_Ends(heads))] if heads else []
    )

    def undo() -> None:
        for hook in hooks:
            hook.remove()
        for module, kind in plain:
            if isinstance(module, _Swapped) and type(module).__mro__[2] is kind:  # else somebody swapped it since
                module.__class__ = kind
            module.__dict__.pop(_PART, None)

    try:
        for index, part in swaps:
            kind = _swapped(type(modules[index]))
            modules[index].__dict__[_PART] = part
            modules[index].__class__ = kind
    except BaseException:  # a class that cannot be derived from, or Ctrl-C, with some swapped
        undo()
        raise
    return undo


class _Hook:
    """Of the model's forward; that of a copy of the model knows of no segments, for it has none."""

    def __init__(self, heads: Sequence[_Head]) -> None:
        self._heads = heads

    def __reduce__(self) -> Any:
        return type(self), ((),)


class _Begins(_Hook):
    """A forward begins: what an earlier one left, that raised, is forgotten."""

    def __call__(self, *_: Any) -> None:
        for head in self._heads:
            head.forget()


class _Ends(_Hook):
    """It is over: every segment was handed on to its end."""

    def __call__(self, *_: Any) -> None:
        if any(head.left for head in self._heads):
            raise _broken("a block of a segment that was not called")


def use_plan(model: nn.Module, plan: Plan) -> Callable[[], None]:
    """Have a model's blocks recompute as a plan says; returns what puts back what was.

    Raises:
        ModelError: the model has no blocks, or not so many, or not those; others as of `use_schedule`.
    """
    model, blocks = _blocks_of(model, plan.recompute_blocks)
    if isinstance(model, torch.jit.ScriptModule):  # which has no modules by name either
        raise _refused("a scripted model", "one of Python's modules")
    try:
        schedule = schedule_of(str(plan.recompute.value), len(blocks))
    except ValueGivenError:
        given = f"{plan.recompute.value!r:.80} for a model of {len(blocks)} blocks"
        raise ModelError("plan.recompute", given=given, expected="a schedule of as many") from None
    if plan.compiled.value and any(next(model.get_submodule(name).buffers(), None) is not None for name in blocks):
        raise _refused("a plan that compiles too, and blocks with buffers, which would move twice", "one of the two")
    return use_schedule(model, blocks, schedule)


def _blocks_of(model: nn.Module, named: tuple[str, ...]) -> tuple[nn.Module, tuple[str, ...]]:
    """Return the model that has all blocks that are named, itself or what it wraps, with their names; else its own."""
    if not named:
        if not (blocks := find_blocks(model)):
            raise ModelError("plan.recompute", given="a model without blocks", expected=_OF_THE_PLAN)
        return model, blocks
    for root in _roots(model):
        known = {name for name, _ in root.named_modules()}
        if known.issuperset(named):
            return root, named
    known = {name for name, _ in model.named_modules()}
    missing = next(name for name in named if name not in known)
    raise ModelError("plan.recompute", given=f"a model without {missing}", expected=_OF_THE_PLAN)


def _roots(model: nn.Module) -> Iterator[nn.Module]:
    """Yield a model, then what it wraps: its plan may have been made before it was wrapped."""
    yield model
    children = dict(model.named_children())
    if len(children) == 1 and (inner := next(map(children.get, _WRAPPED & children.keys()), None)) is not None:
        yield from _roots(inner)


def _refused(given: str, expected: str) -> ModelError:
    return ModelError("plan.recompute", given=given, expected=expected, way_out="Plan without it, or leave it out.")


def _broken(given: str) -> ModelError:
    return ModelError("plan.recompute", given=given, expected=_AT_ONCE, way_out="Segments of single blocks need none.")


def _check(name: str, module: nn.Module) -> None:
    if isinstance(module, torch.jit.ScriptModule):
        raise _refused(f"{name}, a scripted module", "a module of Python's")
    if isinstance(module, _Swapped):
        raise _refused(f"{name}, which recomputes already", "a block of no other schedule")
    if "forward" in vars(module):
        raise _refused(f"{name}, whose forward was replaced on the module itself", "a forward of its class")


def _swaps(
    modules: Sequence[nn.Module], names: Sequence[str], schedule: Schedule
) -> Iterator[tuple[int, _Alone | _Head | _Follower]]:
    """Yield blocks with what their forward is to be."""
    for part in schedule:
        if isinstance(part, Kept):
            if part.in_part:
                yield part.index, _Alone(names[part.index], modules[part.index], in_part=True)
        elif len(part.stages) == 1:
            yield part.stages[0], _Alone(names[part.stages[0]], modules[part.stages[0]], in_part=False)
        else:
            first, *others = part.stages
            _check_hooks([modules[index] for index in part.stages])
            head = _Head(part, [modules[index] for index in part.stages], [names[index] for index in part.stages])
            yield first, head
            yield from ((index, _Follower(head)) for index in others)


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
        return part.run(self, super().forward, args, kwargs)  # type: ignore[misc]

    def __reduce_ex__(self, protocol: Any) -> Any:
        _, (kind, *others), *rest = super().__reduce_ex__(max(2, protocol))
        if rest and isinstance(rest[0], dict):
            rest[0] = {name: value for name, value in rest[0].items() if name != _PART}
        return _plain, (type(self).__mro__[2] if kind is type(self) else kind, *others), *rest


def _plain(kind: type[nn.Module], *others: Any) -> nn.Module:
    return kind.__new__(kind, *others)


@functools.cache
def _swapped(plain: type[nn.Module]) -> type[nn.Module]:
    return type(plain.__name__, (_Swapped, plain), {"__module__": plain.__module__, "__qualname__": plain.__qualname__})


class _Alone:
    """A block that recomputes by itself: all, or what is cheap."""

    def __init__(self, name: str, module: nn.Module, *, in_part: bool) -> None:
        self._forwards, self._in_part = Forwards({name: module}), in_part

    def run(self, module: Any, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Return what the block makes of its arguments."""
        return recomputed(forward, self._forwards, args, kwargs, in_part=self._in_part)


def _segments(segment: Segment) -> Iterator[tuple[int, ...]]:
    """Yield the stages of a segment, and of every segment inside."""
    yield tuple(segment.stages)
    for part in segment.parts:
        if isinstance(part, Segment):
            yield from _segments(part)


class _Head:
    """The first block of a segment, which runs all of it.

    Attributes:
        left: blocks that the model's own code has still to call. made: what the segment made; None where it was not
            run, as without gradients, and each block runs by itself.
    """

    def __init__(self, segment: Segment, modules: Sequence[nn.Module], names: Sequence[str]) -> None:
        named = dict(zip(segment.stages, zip(names, modules, strict=True), strict=True))
        self._stages = tuple(segment.stages)
        # Made here, for a compiler takes no new keys while it traces.
        self._forwards = {stages: Forwards(dict(named[each] for each in stages)) for stages in _segments(segment)}
        self._parts = segment.parts
        self._modules = dict(zip(segment.stages, modules, strict=True))
        self._plain = {index: functools.partial(type(m).forward, m) for index, m in self._modules.items()}
        self.forget()

    def forget(self) -> None:
        """Nothing was run."""
        self.left: list[nn.Module] = []
        self.made: Any = None
        self._given: Arguments = (), {}
        self._under: Any = None

    def run(self, module: Any, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Return what the last block of the segment makes."""
        self.forget()
        if keeps_activations():
            return forward(*args, **kwargs)
        made = recomputed(self._run, self._forwards[self._stages], (self._parts, *args), kwargs)
        self.left = list(self._modules.values())[1:]
        self.made, self._given, self._under = made, (args[1:], kwargs), _ambient()
        return made

    def hand_on(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Return what the segment made, to the next of its blocks.

        Raises:
            ModelError: it is another one, or it is given something else, or other settings are in force.
        """
        name = type(module).__mro__[2].__name__
        if not self.left or self.left[0] is not module:
            raise _broken(f"a {name} that is called out of turn")
        if not args or args[0] is not self.made or not same_arguments((args[1:], kwargs), self._given):
            raise _broken(f"other arguments than those of the first one for a {name}")
        if _ambient() != self._under:
            raise _broken(f"gradients or autocast switched on or off before a {name}")
        self.left.pop(0)
        made = self.made
        if not self.left:
            self.forget()
        return made

    def _run(self, parts: Schedule, x: Any, *args: Any, **kwargs: Any) -> Any:
        for part in parts:
            x = self._of(part)(x, *args, **kwargs)
        return x

    def _of(self, part: Part) -> Callable[..., Any]:
        if isinstance(part, Segment):
            forwards = self._forwards[tuple(part.stages)]
            return lambda *args, **kwargs: recomputed(self._run, forwards, (part.parts, *args), kwargs)
        return self._plain[part.index]


def _ambient() -> tuple[Any, ...]:
    """Return the settings that a forward is run under."""
    kinds = ("cpu", "cuda")
    casts = tuple((torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds)
    return (torch.is_grad_enabled(), casts)


class _Follower:
    """Another block of a segment: it was run, or runs by itself where the segment was not."""

    def __init__(self, head: _Head) -> None:
        self._head = head

    def run(self, module: Any, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Return what the segment made, or what the block makes by itself."""
        if self._head.made is None:
            return forward(*args, **kwargs)
        return self._head.hand_on(module, args, kwargs)
