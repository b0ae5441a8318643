"""Activation checkpointing of a model's blocks by a schedule, applied in place and reversible.

The class of a block is replaced by a subclass whose forward goes through `torch.utils.checkpoint` (non-reentrant).
Parameter names, state and `isinstance` checks are unaffected, and a copy of the model is a plain model. The first block
of a multi-block segment runs the whole segment; the following blocks, called in turn by the model's own code, return
the segment's result after checking that their input is that result.
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
from trimtab.core.recompute_schedule import KeptBlock, Part, RecomputedSegment, Schedule, schedule_of
from trimtab.measure.block_graph import Arguments, same_arguments
from trimtab.measure.blocks import find_blocks
from trimtab.runtime.forward_state import RecomputedForwards
from trimtab.runtime.recomputed_function import keeps_activations, recompute_call

_PART = "_trimtab_part"
# Attribute names under which DistributedDataParallel and torch.compile hold the wrapped model.
_WRAPPED = {"module", "_orig_mod"}
_WITHOUT = "Use a plan with recompute=None."
_PLAN_AGAIN = "Make a plan for this model with trimtab.plan(...)."


def use_schedule(model: nn.Module, blocks: Sequence[str], schedule: Schedule) -> Callable[[], None]:
    """Recompute the activations of a model's blocks by a schedule.

    Args:
        blocks: module names in execution order; stage i of the schedule is the i-th block. Segments of several blocks
            require a chain (`measure.linked_blocks`).

    Returns:
        A function that restores the original classes.

    Raises:
        ModelError: the class of a block cannot be replaced, or a block of a multi-block segment has hooks, as FSDP2
            adds.
    """
    modules = [model.get_submodule(name) for name in blocks]
    swaps = list(_swaps(modules, blocks, schedule))
    for index, _ in swaps:
        _check(blocks[index], modules[index])
    if len({id(modules[index]) for index, _ in swaps}) < len(swaps):
        raise _refused("Two entries of the recomputation schedule are the same module.", "recompute.block_repeated")
    heads = [part for _, part in swaps if isinstance(part, _Head)]
    plain = [(modules[index], type(modules[index])) for index, _ in swaps]
    hooks = (
        [model.register_forward_pre_hook(_Begins(heads)), model.register_forward_hook(_Ends(heads))] if heads else []
    )

    def undo() -> None:
        for hook in hooks:
            hook.remove()
        for module, kind in plain:
            # Skip blocks whose class the user replaced since.
            now = type(module)
            if issubclass(now, _Swapped) and now.__mro__[2] is kind:
                module.__class__ = kind
            module.__dict__.pop(_PART, None)

    try:
        for index, part in swaps:
            kind = _swapped(type(modules[index]))  # type: ignore[arg-type]  # a class is hashable
            modules[index].__dict__[_PART] = part
            modules[index].__class__ = kind
    except BaseException:  # A class that cannot be subclassed, or Ctrl-C after some blocks were replaced.
        undo()
        raise
    return undo


class _Hook:
    """Hook on the model's forward. A copy of the model has no segments, so a copied hook has none."""

    def __init__(self, heads: Sequence[_Head]) -> None:
        self._heads = heads

    def __reduce__(self) -> Any:
        return type(self), ((),)


class _Begins(_Hook):
    """Before a forward: drop the state left by an earlier forward that raised."""

    def __call__(self, *_: Any) -> None:
        for head in self._heads:
            head.forget()


class _Ends(_Hook):
    """After a forward: check that every block of every segment was called."""

    def __call__(self, *_: Any) -> None:
        if missed := [module for head in self._heads for module in head.left]:
            name = type(missed[0]).__mro__[2].__name__
            raise _broken(f"The model's forward did not call {name}, a block of a recomputed segment.")


def use_plan(model: nn.Module, plan: Plan) -> Callable[[], None]:
    """Recompute the activations of a model's blocks as a plan specifies; return a function that undoes the change.

    Raises:
        ModelError: the model lacks the plan's blocks, has another number of blocks, or `use_schedule` raises.
    """
    model, blocks = _blocks_of(model, plan.recompute_blocks)
    if isinstance(model, torch.jit.ScriptModule):  # A scripted model has no modules by name either.
        raise _refused("A TorchScript model cannot recompute activations.", "recompute.scripted")
    try:
        schedule = schedule_of(str(plan.recompute.value), len(blocks))
    except ValueGivenError:
        raise ModelError(
            "plan.recompute",
            problem=f"The plan's recomputation schedule {plan.recompute.value!r:.80} does not cover exactly the "
            f"{len(blocks)} blocks of the model.",
            hint=_PLAN_AGAIN,
            code="recompute.blocks_differ",
        ) from None
    if plan.compiled.value and any(next(model.get_submodule(name).buffers(), None) is not None for name in blocks):
        problem = "The plan compiles and recomputes blocks that have buffers, whose updates would be applied twice."
        raise _refused(problem, "recompute.compiled_buffers")
    return use_schedule(model, blocks, schedule)


def _blocks_of(model: nn.Module, named: tuple[str, ...]) -> tuple[nn.Module, tuple[str, ...]]:
    """Return the model, or the model wrapped in it, that contains all named blocks; without names, find the blocks."""
    if not named:
        if not (blocks := find_blocks(model)):
            raise ModelError(
                "plan.recompute",
                problem=f"The plan recomputes activations, but no repeated blocks were found in "
                f"{type(model).__name__}.",
                hint=_PLAN_AGAIN,
                code="recompute.no_blocks",
            )
        return model, blocks
    for root in _roots(model):
        known = {name for name, _ in root.named_modules()}
        if known.issuperset(named):
            return root, named
    known = {name for name, _ in model.named_modules()}
    missing = next(name for name in named if name not in known)
    raise ModelError(
        "plan.recompute",
        problem=f"The plan recomputes the module {missing}, which {type(model).__name__} does not have.",
        hint=_PLAN_AGAIN,
        code="recompute.blocks_differ",
    )


def _roots(model: nn.Module) -> Iterator[nn.Module]:
    """Yield a model and the models that it wraps, since the plan may have been made before wrapping."""
    yield model
    children = dict(model.named_children())
    if len(children) == 1 and (inner := next(map(children.get, _WRAPPED & children.keys()), None)) is not None:
        yield from _roots(inner)


def _refused(problem: str, code: str) -> ModelError:
    return ModelError("plan.recompute", problem=problem, hint=_WITHOUT, code=code)


def _broken(problem: str) -> ModelError:
    hint = (
        "Call the blocks in order, pass each block's output to the next block, and pass equal other arguments to all "
        "blocks; or use a schedule whose segments have one block each."
    )
    return ModelError("plan.recompute", problem=problem, hint=hint, code="recompute.not_a_chain")


def _check(name: str, module: nn.Module) -> None:
    if isinstance(module, torch.jit.ScriptModule):
        raise _refused(f"The block {name} is a TorchScript module, which cannot be recomputed.", "recompute.scripted")
    if isinstance(module, _Swapped):
        problem = f"The block {name} is recomputed already, by another run or an earlier call."
        raise _refused(problem, "recompute.in_use")
    if "forward" in vars(module):
        problem = f"The forward of the block {name} was replaced on the instance, so its class cannot be changed."
        raise _refused(problem, "recompute.forward_replaced")


def _swaps(
    modules: Sequence[nn.Module], names: Sequence[str], schedule: Schedule
) -> Iterator[tuple[int, _Alone | _Head | _Follower]]:
    """Yield the index of each block that changes, with its new behaviour."""
    for part in schedule:
        if isinstance(part, KeptBlock):
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
                problem=f"A {type(module).__name__} in a recomputed segment of several blocks has hooks, which would "
                "run twice.",
                hint="Remove the hooks, or use a schedule whose segments have one block each.",
                code="recompute.hooks",
            )


class _Swapped:
    """Mixin placed before a block's own class in the method resolution order."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        part: _Alone | _Head | _Follower = self.__dict__[_PART]
        return part.run(self, super().forward, args, kwargs)  # type: ignore[misc]

    def __reduce_ex__(self, protocol: Any) -> Any:
        reduced: Any = super().__reduce_ex__(max(2, protocol))
        _, (kind, *others), *rest = reduced
        if rest and isinstance(rest[0], dict):
            rest[0] = {name: value for name, value in rest[0].items() if name != _PART}
        return _plain, (type(self).__mro__[2] if kind is type(self) else kind, *others), *rest


def _plain(kind: type[nn.Module], *others: Any) -> nn.Module:
    return kind.__new__(kind, *others)


@functools.cache
def _swapped(plain: type[nn.Module]) -> type[nn.Module]:
    return type(plain.__name__, (_Swapped, plain), {"__module__": plain.__module__, "__qualname__": plain.__qualname__})


class _Alone:
    """A block checkpointed by itself, entirely or except for its expensive operations."""

    def __init__(self, name: str, module: nn.Module, *, in_part: bool) -> None:
        self._forwards, self._in_part = RecomputedForwards({name: module}), in_part

    def run(self, module: Any, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Return the block's output."""
        return recompute_call(forward, self._forwards, args, kwargs, in_part=self._in_part)


def _segments(segment: RecomputedSegment) -> Iterator[tuple[int, ...]]:
    """Yield the stages of a segment and of all nested segments."""
    yield tuple(segment.stages)
    for part in segment.parts:
        if isinstance(part, RecomputedSegment):
            yield from _segments(part)


class _Head:
    """The first block of a multi-block segment, which runs the whole segment.

    Attributes:
        left: blocks of the segment that the model's code has not called yet.
        made: the segment's output; None if the segment did not run (gradients disabled) and each block runs by itself.
    """

    def __init__(self, segment: RecomputedSegment, modules: Sequence[nn.Module], names: Sequence[str]) -> None:
        named = dict(zip(segment.stages, zip(names, modules, strict=True), strict=True))
        self._stages = tuple(segment.stages)
        # Created here, because torch.compile cannot add dictionary keys while tracing.
        self._forwards = {
            stages: RecomputedForwards(dict(named[each] for each in stages)) for stages in _segments(segment)
        }
        self._parts = segment.parts
        self._modules = dict(zip(segment.stages, modules, strict=True))
        self._plain = {index: functools.partial(type(m).forward, m) for index, m in self._modules.items()}
        self.forget()

    def forget(self) -> None:
        """Reset the state of the current forward."""
        self.left: list[nn.Module] = []
        self.made: Any = None
        self._given: Arguments = (), {}
        self._under: Any = None

    def run(self, module: Any, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Return the output of the segment's last block."""
        self.forget()
        if keeps_activations():
            return forward(*args, **kwargs)
        made = recompute_call(self._run, self._forwards[self._stages], (self._parts, *args), kwargs)
        self.left = list(self._modules.values())[1:]
        self.made, self._given, self._under = made, (args[1:], kwargs), _ambient()
        return made

    def hand_on(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Return the segment's output for the next block of the segment.

        Raises:
            ModelError: the block is out of order, its arguments differ, or grad mode or autocast changed.
        """
        name = type(module).__mro__[2].__name__
        if not self.left or self.left[0] is not module:
            raise _broken(f"The model's forward called {name}, a block of a recomputed segment, out of order.")
        if not args or args[0] is not self.made or not same_arguments((args[1:], kwargs), self._given):
            raise _broken(
                f"The arguments of {name} are not the previous block's output and the other arguments of the first "
                "block of its recomputed segment."
            )
        if _ambient() != self._under:
            raise _broken(f"Grad mode or autocast changed within a recomputed segment, before {name}.")
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
        if isinstance(part, RecomputedSegment):
            forwards = self._forwards[tuple(part.stages)]
            return lambda *args, **kwargs: recompute_call(self._run, forwards, (part.parts, *args), kwargs)
        return self._plain[part.index]


def _ambient() -> tuple[Any, ...]:
    """Return grad mode and autocast settings."""
    kinds = ("cpu", "cuda")
    casts = tuple((torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds)
    return (torch.is_grad_enabled(), casts)


class _Follower:
    """A later block of a segment: returns the segment's output, or runs by itself if the segment did not run."""

    def __init__(self, head: _Head) -> None:
        self._head = head

    def run(self, module: Any, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Return the segment's output, or the block's own output if the segment did not run."""
        if self._head.made is None:
            return forward(*args, **kwargs)
        return self._head.hand_on(module, args, kwargs)
