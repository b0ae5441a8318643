"""Activation checkpointing of a model's blocks by a schedule, applied in place and reversible.

The forward of a block goes through `torch.utils.checkpoint` (non-reentrant), see `techniques.replaced_classes`. The
first block of a multi-block segment runs the whole segment; the following blocks, called in turn by the model's own
code, return the segment's result after checking that their input is that result. A block kept in part does not go
through `torch.utils.checkpoint`: see `techniques.operator_recomputation`.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from trimtab.core.block_costs import BlockOperators
from trimtab.core.errors import ModelError, ValueGivenError
from trimtab.core.recompute_schedule import KeptBlock, Part, RecomputedSegment, Schedule, schedule_of
from trimtab.measure.blocks import Arguments, find_blocks, recomputing, same_arguments
from trimtab.state.forward_state import ForwardState, RecomputedForwards, is_traced
from trimtab.state.object_snapshots import version_of
from trimtab.techniques.operator_recomputation import (
    OperatorRecorder,
    OperatorSurvey,
    keep_operators,
    selective_contexts,
)
from trimtab.techniques.replaced_classes import call_of, is_replaced, own_class, replace_forwards

# Comparison of a recomputed forward with the original forward.

_MOST_VALUES = 4096  # Largest number of values compared per result tensor.
_ROUNDING = 1e-3  # Relative; atomic additions on a GPU change the order of a sum, and so its last bits.
_UNITS_OF_ROUNDING = 4  # Multiples of the machine epsilon of the result's dtype.


class RecomputationCheck:
    """Callable for the results of the forward and its recomputation; the second call compares them.

    Raises:
        ModelError: the recomputation's result differs (code "recompute.differs").
    """

    def __init__(self, names: str) -> None:
        self._names, self._tolerance = names, _ROUNDING
        self._first: list[Tensor] | None = None

    def __call__(self, result: Any) -> None:
        # A recorder of operators must not record those of this comparison.
        with _disable_current_modes():
            values = [_sample(each) for each in tree_leaves(result) if isinstance(each, Tensor) and _is_readable(each)]
            if self._first is None:
                self._first, self._tolerance = values, _tolerance(values)
            elif len(values) != len(self._first) or not all(map(self._is_close, self._first, values)):
                raise ModelError(
                    "plan.recompute",
                    problem=f"The recomputed forward of {self._names} returned a different result than the first "
                    "forward.",
                    hint="Pass values that change between calls (a random number, a counter, an iterator's item) to "
                    f"{self._names} as arguments, or use a plan with recompute=None.",
                    code="recompute.differs",
                )

    def _is_close(self, before: Tensor, again: Tensor) -> bool:
        if before.shape != again.shape:
            return False
        finite = before.isfinite() & again.isfinite()
        before, again = before.double()[finite], again.double()[finite]
        return bool((again - before).norm() <= self._tolerance * before.norm())


def _sample(tensor: Tensor) -> Tensor:
    flat = tensor.detach().reshape(-1)
    return flat[:: max(1, flat.numel() // _MOST_VALUES)].clone()


def _is_readable(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_meta and not tensor.is_complex()


def _tolerance(values: list[Tensor]) -> float:
    """Return the relative tolerance for the dtypes of `values` and of autocast."""
    types = {value.dtype for value in values if value.is_floating_point()}
    kinds = {value.device.type for value in values}
    types |= {torch.get_autocast_dtype(kind) for kind in kinds if torch.is_autocast_enabled(kind)}
    return max((_UNITS_OF_ROUNDING * torch.finfo(each).eps for each in types), default=0.0) + _ROUNDING


# Activation checkpointing of a function by torch's non-reentrant checkpointing, with the state of the first run.

_SMALL = 2**16  # Bytes of a buffer that is copied at every forward.
_Context = contextlib.AbstractContextManager[Any]


def keeps_activations() -> bool:
    """Return True if a forward must keep its activations, or has none to keep.

    Activations are kept under `torch.func` transforms (such as per-sample gradients), which do not support saved-tensor
    hooks, and in forward-mode differentiation, whose tangents would be missing in a recomputation.
    """
    if not torch.is_grad_enabled():
        return True
    if torch.compiler.is_compiling():
        return False
    return torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0


def recompute_call(function: Callable[..., Any], forwards: RecomputedForwards, args: Any, kwargs: Any) -> Any:
    """Call a function with activation checkpointing and return its result.

    Args:
        forwards: the modules that the function runs.

    Raises:
        ModelError: the function makes a change that its recomputation would repeat.
    """
    if keeps_activations():
        return function(*args, **kwargs)
    if torch.compiler.is_compiling():  # torch.compile handles buffers itself.
        return checkpoint(function, *args, use_reentrant=False, **kwargs)
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
        versions = list(map(version_of, given))
        result = function(*again, **named)
        if is_first and list(map(version_of, given)) != versions:
            raise ModelError(
                "plan.recompute",
                problem=f"The forward of {forwards.names} changes an argument in place, so that activation "
                "checkpointing would recompute it from changed inputs.",
                hint=f"Use out-of-place operations in {forwards.names} (relu, not relu_), or use a plan with "
                "recompute=None.",
                code="recompute.side_effects",
            )
        if check is not None:
            check(result)
        return result

    # torch finds the devices of random generators, and detects overwritten tensors, in positional arguments only.
    context = functools.partial(_contexts, forwards, state)
    # A checked recomputation runs to its end; torch stops others after the last tensor needed by backward.
    with contextlib.nullcontext() if check is None else set_checkpoint_early_stop(False):
        return checkpoint(call, _of_device(forwards.modules), *tensors, use_reentrant=False, context_fn=context)


def _of_device(modules: Sequence[nn.Module]) -> Tensor | None:
    parameter = next((p for module in modules for p in module._parameters.values() if p is not None), None)
    return None if parameter is None else torch.empty(0, device=parameter.device)


def _contexts(forwards: RecomputedForwards, state: ForwardState) -> tuple[_Context, _Context]:
    buffers = _SavedBuffers(forwards.buffered)
    return (
        _CombinedContexts(buffers.noting, state.noting),
        _CombinedContexts(recomputing, state.as_it_was, buffers.as_they_were),
    )


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


# Names of buffers that a forward was seen to change.
_moving: weakref.WeakKeyDictionary[nn.Module, set[str]] = weakref.WeakKeyDictionary()


class _SavedBuffers:
    """Buffers of some modules from before a forward."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = modules
        self._before: dict[tuple[nn.Module, str], Tensor] = {}

    @contextlib.contextmanager
    def noting(self) -> Iterator[None]:
        """Copy small buffers, batch statistics and buffers that change; all buffers in a module's first forward.

        Batch statistics change without a new version. Small buffers are always copied, because a layer may start to run
        in a later call (stochastic depth, unfreezing).

        Raises:
            ModelError: a large buffer changed for the first time in a later call, so that no copy exists.
        """
        seen: list[tuple[nn.Module, str, Tensor, int, Tensor | None]] = []
        for module in self._modules:
            names = None if isinstance(module, _NormBase) else _moving.get(module)
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    is_copied = names is None or name in names or buffer.nbytes <= _SMALL
                    seen.append((module, name, buffer, buffer._version, buffer.clone() if is_copied else None))
        yield
        for module, name, buffer, version, copy in seen:
            names, now = _moving.setdefault(module, set()), module._buffers.get(name)
            if now is not buffer or buffer._version != version:
                names.add(name)
                if copy is None and now is buffer:
                    raise ModelError(
                        "plan.recompute",
                        problem=f"The large buffer {name} of a recomputed block changed for the first time in a later "
                        "forward, for which no copy exists.",
                        hint="Repeat the step, since the next forward copies the buffer, or use a plan with "
                        "recompute=None.",
                        code="recompute.side_effects",
                    )
            if copy is not None or now is not buffer:
                self._before[module, name] = buffer if copy is None else copy

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


# Attribute names under which DistributedDataParallel and torch.compile hold the wrapped model.
_WRAPPED = {"module", "_orig_mod"}
_WITHOUT = "Use a plan with recompute=None."
_PLAN_AGAIN = "Make a plan for this model with trimtab.plan(...)."


def use_schedule(model: nn.Module, blocks: Sequence[str], schedule: Schedule) -> Callable[[], None]:
    """Recompute the activations of a model's blocks by a schedule; return a function that restores the classes.

    Args:
        blocks: module names in execution order; stage i of the schedule is the i-th block. Segments of several blocks
            require a chain (`measure.linked_blocks`).

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
    restore = replace_forwards([modules[index] for index, _ in swaps], [part for _, part in swaps])
    hooks: list[Any] = []
    if heads:
        hooks = [model.register_forward_pre_hook(_Begins(heads)), model.register_forward_hook(_Ends(heads))]

    def undo() -> None:
        for hook in hooks:
            hook.remove()
        restore()

    return undo


def survey_operators(model: nn.Module, blocks: Sequence[str], step: Callable[[], object]) -> tuple[BlockOperators, ...]:
    """Return the operators of every block, measured in a step's first micro-batch."""
    undo = use_schedule(model, blocks, tuple(KeptBlock(index, in_part=True) for index in range(len(blocks))))
    surveys = [OperatorSurvey() for _ in blocks]
    try:
        for name, survey in zip(blocks, surveys, strict=True):
            call_of(model.get_submodule(name)).survey = survey
        step()
    finally:
        undo()
    return tuple(BlockOperators(tuple(each.found), each.forward_s, each.more_s) for each in surveys)


class _Begins:
    """Hook before the model's forward: drops the state left by an earlier forward that raised."""

    def __init__(self, heads: Sequence[_Head] = ()) -> None:
        self._heads = heads

    def __reduce__(self) -> Any:
        return type(self), ()  # A copy of the model has no segments.

    def __call__(self, *_: Any) -> None:
        for head in self._heads:
            head.forget()


class _Ends(_Begins):
    """Hook after the model's forward: checks that every block of every segment was called."""

    def __call__(self, *_: Any) -> None:
        if missed := [module for head in self._heads for module in head.left]:
            name = own_class(missed[0]).__name__
            raise _broken(f"The model's forward did not call {name}, a block of a recomputed segment.")


def use_recomputation(
    model: nn.Module, notation: str, blocks: tuple[str, ...], *, is_compiled: bool = False
) -> Callable[[], None]:
    """Recompute the activations of a model's blocks by a schedule; return a function that undoes the change.

    Args:
        notation: schedule in the notation of `trimtab.core.recompute_schedule`, or "every_block".
        blocks: names of the modules that the schedule refers to; (): the blocks found in the module tree.
        is_compiled: True if the model is compiled afterwards.

    Raises:
        ModelError: the model lacks the blocks, has another number of blocks, or `use_schedule` raises.
    """
    model, blocks = _blocks_of(model, blocks)
    if isinstance(model, torch.jit.ScriptModule):  # A scripted model has no modules by name either.
        raise _refused("A TorchScript model cannot recompute activations.", "recompute.scripted")
    try:
        schedule = schedule_of(notation, len(blocks))
    except ValueGivenError:
        raise ModelError(
            "plan.recompute",
            problem=f"The plan's recomputation schedule {notation!r:.80} does not cover exactly the {len(blocks)} "
            "blocks of the model.",
            hint=_PLAN_AGAIN,
            code="recompute.blocks_differ",
        ) from None
    if is_compiled and any(next(model.get_submodule(name).buffers(), None) is not None for name in blocks):
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
    for root in wrapped_models(model):
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


def wrapped_models(model: nn.Module) -> Iterator[nn.Module]:
    """Yield a model and the models that it wraps, since the plan may have been made before wrapping."""
    yield model
    children = dict(model.named_children())
    if len(children) == 1 and (inner := next(map(children.get, _WRAPPED & children.keys()), None)) is not None:
        yield from wrapped_models(inner)


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
    if is_replaced(module):
        problem = f"The block {name} is recomputed already, by another run or an earlier call."
        raise _refused(problem, "recompute.in_use")
    if "forward" in vars(module):
        problem = f"The forward of the block {name} was replaced on the instance, so its class cannot be changed."
        raise _refused(problem, "recompute.forward_replaced")


def _swaps(
    modules: Sequence[nn.Module], names: Sequence[str], schedule: Schedule
) -> Iterator[tuple[int, _Alone | _InPart | _Head | _Follower]]:
    """Yield the index of each block that changes, with its new behaviour."""
    for part in schedule:
        if isinstance(part, KeptBlock):
            if part.in_part:
                yield part.index, _InPart(names[part.index], modules[part.index], part.results)
        elif len(part.stages) == 1:
            yield part.stages[0], _Alone(names[part.stages[0]], modules[part.stages[0]])
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


class _Alone:
    """A block checkpointed by itself."""

    def __init__(self, name: str, module: nn.Module) -> None:
        self._forwards = RecomputedForwards({name: module})

    def run(self, module: Any, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        return recompute_call(forward, self._forwards, args, kwargs)


class _InPart:
    """A block that keeps the results of some operators and recomputes the others."""

    def __init__(self, name: str, module: nn.Module, results: tuple[int, ...] | None) -> None:
        self._name, self._module, self._calls = name, module, 0
        self._kept = None if results is None else frozenset(results)
        self.survey: OperatorSurvey | None = None

    def run(self, module: Any, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if keeps_activations():
            return forward(*args, **kwargs)
        if torch.compiler.is_compiling():
            selective = functools.partial(selective_contexts, self._kept)
            return checkpoint(forward, *args, use_reentrant=False, context_fn=selective, **kwargs)
        if self.survey is not None:
            survey, self.survey = self.survey, None  # A step may have more micro-batches.
            return keep_operators(forward, args, kwargs, survey)
        # Recomputed tensors are compared in calls 1, 2, 4, 8, ...
        is_checked = not self._calls & (self._calls + 1) and not is_traced([self._module])
        self._calls += 1
        check = functools.partial(RecomputationCheck, self._name) if is_checked else None
        return keep_operators(forward, args, kwargs, OperatorRecorder(self._kept, check))


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
        name = own_class(module).__name__
        if not self.left or self.left[0] is not module:
            raise _broken(f"The model's forward called {name}, a block of a recomputed segment, out of order.")
        if not args or args[0] is not self.made or not same_arguments((args[1:], kwargs), self._given):
            raise _broken(
                f"{name}, a block within a recomputed segment, was not called with the previous block's output as "
                "first argument and otherwise with the arguments of the segment's first block."
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
        if self._head.made is None:
            return forward(*args, **kwargs)
        return self._head.hand_on(module, args, kwargs)
