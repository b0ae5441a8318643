"""CUDA graph capture and replay of a model's calls; calls that cannot be captured run eagerly.

The first call of a kind runs eagerly, so that kernels are selected and compiled. The second is checked for host
synchronisation, which cannot be captured. The third is captured and, like all later calls, replayed. A kind comprises
the input shapes and everything else that may change the forward's control flow. Calls without gradients, calls under
hooks or dispatch modes, and a forward whose predecessor still awaits backward run eagerly.
"""

from __future__ import annotations

import contextlib
import functools
import random
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils._python_dispatch import _get_current_dispatch_mode
from torch.utils._pytree import tree_flatten, tree_unflatten

from trimtab.core.choice import Compiled, is_recorded
from trimtab.core.errors import LoopError

# Capture of a forward and its backward pass as two CUDA graphs, with copies of inputs, outputs and gradients.

_MOST_GAPS = 2  # Largest ratio of memory to values for which a copy keeps the strides of a tensor.


class UncapturableModel(Exception):
    """The model cannot be captured, for the `reason` (a clause) with a stable `code`."""

    def __init__(self, reason: str, code: str) -> None:
        self.code = code
        super().__init__(reason, code)

    def __str__(self) -> str:
        return str(self.args[0])


class ReplayToken:
    """Marker for a replayed forward, alive while its backward may come; `is_open` until the backward has run."""

    __slots__ = ("__weakref__", "is_open")

    def __init__(self) -> None:
        self.is_open = True


class CapturedGraphs:
    """Captured forward and backward of a model for one kind of input.

    Args:
        forward: called once during capture, on copies of the inputs.
        args, kwargs: inputs of this kind.
        beside: another capture whose memory pool is shared. Neither may be replayed between the other's forward and
            backward.

    Raises:
        UncapturableModel: the forward draws random numbers on the host, or its output cannot be reproduced by a graph.
        RuntimeError: torch cannot capture the forward, for example because the host synchronises.
    """

    def __init__(
        self,
        model: nn.Module,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        beside: CapturedGraphs | None = None,
    ) -> None:
        self.parameters = tuple(p for p in model.parameters() if p.requires_grad)
        leaves, spec = tree_flatten((args, kwargs))
        copies = [copy_in_place(each) if isinstance(each, Tensor) else each for each in leaves]
        self._inputs = [without_expanded_dimensions(each) for each in copies if isinstance(each, Tensor)]
        self._device = self._inputs[0].device
        self._forward, self._backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        self.pool: Any = torch.cuda.graph_pool_handle() if beside is None else beside.pool
        self._stream = _stream_of(self._device)
        taken, named = tree_unflatten(copies, spec)
        with torch.cuda.device(self._device), _stood_for(model, self.parameters) as trained:
            torch.clear_autocast_cache()  # Casts of weights must be part of the capture.
            with _same_random_numbers(), self._recorded(self._forward):
                found = forward(*taken, **named)
            torch.clear_autocast_cache()
            leaves, self._spec = tree_flatten(found)
            outputs, self._is_none = [each for each in leaves if each is not None], [each is None for each in leaves]
            self._reached = _reached(outputs, trained, self.parameters)
            wanted = [each for each, reached in zip(outputs, self._reached, strict=True) if reached]
            self._given = [torch.zeros_like(each) for each in wanted]
            # As in a training loop, backward runs outside of autocast, which would cast its products too.
            with torch.autocast("cuda", enabled=False), self._recorded(self._backward):
                found = torch.autograd.grad(wanted, trained, self._given, allow_unused=True)
        self._outputs = [each.detach() for each in outputs]
        self._where = [index for index, each in enumerate(found) if each is not None]
        self._gradients = [each.detach() for each in found if each is not None]

    @contextlib.contextmanager
    def _recorded(self, graph: torch.cuda.CUDAGraph) -> Iterator[None]:
        """Capture the kernels launched in the block.

        Thread-local capture mode permits CUDA calls of other threads, such as loaders that pin memory.
        """
        before = torch.cuda.current_stream()
        try:
            with torch.cuda.graph(graph, pool=self.pool, stream=self._stream, capture_error_mode="thread_local"):
                yield
        except BaseException:
            torch.clear_autocast_cache()
            torch.cuda.set_stream(before)
            _end(self.pool, self._stream)
            raise

    def launch(self, tensors: Sequence[Tensor], token: ReplayToken) -> Any:
        """Replay the forward on new input tensors and return its output."""
        for ours, theirs in zip(self._inputs, tensors, strict=True):
            ours.copy_(without_expanded_dimensions(theirs), non_blocking=True)
        found = iter(_Replay.apply(self, token, *self.parameters))  # type: ignore[no-untyped-call]
        return tree_unflatten([None if is_none else next(found) for is_none in self._is_none], self._spec)

    def forward(self) -> list[Tensor]:
        """Replay the forward graph; return copies of its outputs."""
        self._forward.replay()
        return [each.clone() for each in self._outputs]

    def constant(self, outputs: Sequence[Tensor]) -> list[Tensor]:
        """Return the outputs that do not require a gradient."""
        return [each for each, reached in zip(outputs, self._reached, strict=True) if not reached]

    def backward(self, given: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Replay the backward graph; return copies of the parameter gradients.

        Args:
            given: gradient of each output; None for outputs without gradient. Parameters reached only by the latter get
                None.

        Raises:
            LoopError: the graphs were released by `close`.
        """
        if not self._gradients:
            raise LoopError(
                "loss.backward",
                problem="A backward pass was called after run.close(), which released the CUDA graphs of its forward.",
                hint="Call run.backward before run.close().",
                code="graphs.closed",
            )
        asked = [(each, reached) for each, reached in zip(given, self._reached, strict=True) if reached]
        for ours, (theirs, _) in zip(self._given, asked, strict=True):
            ours.zero_() if theirs is None else ours.copy_(theirs)
        self._backward.replay()
        found: list[Tensor | None] = [None] * len(self.parameters)
        arrives = frozenset[int]().union(*(reached for each, reached in asked if each is not None))
        for index, each in zip(self._where, torch._foreach_mul(self._gradients, 1), strict=True):
            found[index] = each if index in arrives else None
        return found

    def close(self) -> None:
        """Release the graphs and their memory."""
        torch.cuda.synchronize(self._device)
        self._forward.reset()
        self._backward.reset()
        self._inputs, self._given, self._outputs, self._gradients = [], [], [], []


def copy_in_place(tensor: Tensor) -> Tensor:
    """Return a copy with the same strides, because other strides would cause recompilation of a compiled model.

    If gaps would more than double the memory, as for a column of a large tensor, the copy is a `clone` instead.
    """
    found = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    if found.untyped_storage().nbytes() > _MOST_GAPS * tensor.nbytes:
        return tensor.detach().clone()
    found = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    without_expanded_dimensions(found).copy_(without_expanded_dimensions(tensor.detach()))
    return found


def without_expanded_dimensions(tensor: Tensor) -> Tensor:
    """Return a view without expanded (stride 0) dimensions, which cannot be written to."""
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if size > 1 and stride == 0:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


class _Replay(torch.autograd.Function):
    """Autograd function for a replay."""

    @staticmethod
    def forward(ctx: Any, recording: CapturedGraphs, token: ReplayToken, *_: Tensor) -> tuple[Tensor, ...]:
        found = recording.forward()
        ctx.recording, ctx.token = recording, token
        ctx.mark_non_differentiable(*recording.constant(found))
        ctx.set_materialize_grads(False)
        return tuple(found)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *given: Tensor | None) -> tuple[Any, ...]:
        if not ctx.token.is_open:
            raise LoopError(
                "loss.backward",
                problem="A second backward pass through the same forward is not possible with CUDA graphs, because the "
                "first pass overwrites the saved activations.",
                hint="Call backward once per forward, or use a plan with compiled=False or compiled=True.",
                code="graphs.second_backward",
            )
        ctx.token.is_open = False
        return None, None, *ctx.recording.backward(given)


def _reached(
    outputs: Sequence[Any], trained: Sequence[nn.Parameter], parameters: Sequence[nn.Parameter]
) -> list[frozenset[int]]:
    """Return the indices of the parameters that the gradient of each output reaches.

    Args:
        outputs: leaves of the forward's output.
        trained: substitutes of the model's own `parameters` during capture.

    Raises:
        UncapturableModel: an output is not a tensor, no output requires a gradient, or a gradient reaches another
            tensor.
    """
    if (other := next((each for each in outputs if not isinstance(each, Tensor)), None)) is not None:
        raise UncapturableModel(
            f"the forward returns a {type(other).__name__} in addition to tensors", "graphs.outputs"
        )
    own, stood_for = {id(each): index for index, each in enumerate(trained)}, set(map(id, parameters))
    found = []
    for each in outputs:
        leaves = list(_leaves(each))
        if any(id(leaf) in stood_for for leaf in leaves):
            reason = "the model has a second reference to a parameter, as torch's recurrent layers do"
            raise UncapturableModel(reason, "graphs.parameters_referenced")
        if any(id(leaf) not in own for leaf in leaves):
            reason = "the forward computes gradients of a tensor that is not a parameter of the model"
            raise UncapturableModel(reason, "graphs.other_tensor_trained")
        found.append(frozenset(own[id(leaf)] for leaf in leaves))
    if not any(found):
        raise UncapturableModel("no output of the forward requires a gradient", "graphs.no_gradient")
    return found


def _leaves(output: Tensor) -> Iterator[Tensor]:
    """Yield the leaf tensors that the gradient of an output reaches."""
    if output.grad_fn is None and output.requires_grad:
        yield output
    waiting, seen = [output.grad_fn], set[Any]()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if (leaf := getattr(node, "variable", None)) is not None:
            yield leaf
        waiting += [following for following, _ in node.next_functions]


@functools.cache
def _stream_of(device: torch.device) -> torch.cuda.Stream:
    """Return the single capture stream of a device: cuBLAS keeps a workspace per stream until the process ends."""
    return torch.cuda.Stream(device)


def _end(pool: Any, stream: torch.cuda.Stream) -> None:
    """Clean up after a failed capture, which torch leaves open in its allocator and random generators.

    The generators are reset by a successful capture.
    """
    with contextlib.suppress(RuntimeError):
        torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), pool)
        torch._C._cuda_releasePool(torch.cuda.current_device(), pool)
    with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream, capture_error_mode="thread_local"):
        torch.zeros(1, device=stream.device)


@contextlib.contextmanager
def _same_random_numbers() -> Iterator[None]:
    """Raise `UncapturableModel` if the block draws random numbers on the host, which a replay would not draw again."""
    before = _host_states()
    yield
    if any(ours != theirs for ours, theirs in zip(before, _host_states(), strict=True)):
        raise UncapturableModel("the forward draws random numbers on the CPU", "graphs.random_on_cpu")


def _host_states() -> list[Any]:
    numpy = sys.modules.get("numpy")
    theirs = [] if numpy is None else [repr(numpy.random.get_state())]
    return [random.getstate(), torch.get_rng_state().numpy().tobytes(), *theirs]


@contextlib.contextmanager
def _stood_for(model: nn.Module, parameters: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Replace the parameters of a model by others with the same memory during capture.

    Autograd's node of a parameter is bound to the stream of its creation and runs the user's hooks in each backward;
    neither belongs in the capture.
    """
    others = {id(each): nn.Parameter(each.detach()) for each in parameters}
    for each in parameters:
        vars(others[id(each)]).update(vars(each))
    places = [(module._parameters, name, p) for module in model.modules() for name, p in module._parameters.items()]
    try:
        for held, name, p in places:
            held[name] = others.get(id(p), p)
        yield [others[id(each)] for each in parameters]
    finally:
        for held, name, p in places:
            held[name] = p


# Model state that a captured forward depends on: addresses of tensors, and attributes of modules.

_CONSTANTS = (bool, int, float, str, type(None), torch.dtype)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_FEW = 256  # In larger containers, such as a vocabulary, only the length is compared.
_MINE = "_compiled_call_impl"  # The attribute that holds the captured call itself.


class ModuleState:
    """Attributes and tensor addresses of all modules, compared at each call.

    This covers the addresses of parameters, buffers and other tensors, plain values, and items of lists, tuples, dicts
    and sets. Deeper nesting is not followed.
    """

    def __init__(self, model: nn.Module) -> None:
        self.modules = tuple(model.modules())
        self._device = next(model.parameters()).device
        held = [vars(module) for module in self.modules]
        self._hooks = [found for each in held for name in _HOOKS if (found := each.get(name)) is not None]
        self._tensors = [each[name] for each in held for name in ("_parameters", "_buffers")]
        self._parts, self._held = [each["_modules"] for each in held], held
        own = {_MINE, *vars(nn.Module())}
        others = [(each, name) for each in held for name in each if name not in own]
        self._values = [(each, name) for each, name in others if _is_plain(each[name])]
        self._things = [(each, name) for each, name in others if not _is_plain(each[name])]
        self._kept: list[Any] = []
        self._seen: list[Any] = []
        self._plain: list[Any] = []

    @property
    def has_hooks(self) -> bool:
        """True if a module has hooks, or global module hooks exist."""
        return any(self._hooks) or bool(torch.nn.modules.module._has_any_global_hook())

    @property
    def modes(self) -> list[bool]:
        """Training mode of each module."""
        return [module.training for module in self.modules]

    def has_changed(self) -> bool:
        """Return True if anything changed since the last call; True in the first call."""
        plain = [held.get(name) for held, name in self._values]
        kept = [each for each in chain.from_iterable(map(dict.values, self._tensors)) if each is not None]
        for held, name in self._things:
            kept.append(value := held.get(name))
            if isinstance(value, dict | list | tuple | set):
                plain.append(len(value))
                if len(value) <= _FEW:
                    kept += value.values() if isinstance(value, dict) else value
        seen = [len(each) - (_MINE in each) for each in self._held]
        seen += map(id, chain.from_iterable(map(dict.values, self._parts)))
        seen += map(id, kept)
        tensors = [each for each in kept if isinstance(each, Tensor)]
        seen += [each.data_ptr() if each.layout is torch.strided else 0 for each in tensors]
        seen += [each.requires_grad for each in tensors]
        # Values read from tensors of another device are constants in the captured graph.
        seen += [each._version for each in tensors if each.device != self._device]
        if seen == self._seen and _is_same(plain, self._plain):
            return False
        # The references keep freed addresses from being reused by other objects.
        self._seen, self._plain, self._kept = seen, plain, kept
        return True


def _is_plain(value: Any) -> bool:
    return isinstance(value, _CONSTANTS) or (
        type(value) is tuple and all(isinstance(each, _CONSTANTS) for each in value)
    )


def _is_same(ours: list[Any], theirs: list[Any]) -> bool:
    try:
        return ours == theirs
    except Exception:  # A value was replaced by an object that cannot be compared.
        return False


LAUNCHES_FROM = 3  # Number of the first call of a kind that is replayed.
MOST_KINDS = 3  # Each kind holds memory. Micro-batches usually have one or two sizes.
_PLAIN = (bool, int, float, str, torch.dtype, torch.device, type(None))
Kind = tuple[Any, ...]


def steps_to_launch(compiled: Compiled) -> int:
    """Return the number of steps after which captured graphs are replayed; 0 if the plan uses no graphs."""
    return LAUNCHES_FROM if is_recorded(compiled) else 0


@dataclass
class _CapturedCall:
    """A kind of call, the number of such calls, and the captured graphs."""

    kind: Kind
    calls: int = 0
    recording: CapturedGraphs | None = None


class GraphReplayer:
    """Calls a model, replaying CUDA graphs where possible.

    Args:
        forward: the eager call, which is captured.
        record: constructor of captured graphs.

    Attributes:
        is_on: False disables capture and replay.
        launches: number of replays.
        refusal, refusal_code: reason why capture failed and is disabled, and its code such as "graphs.synchronizes".
        left, left_code: last known reason for an eager call since the last replay, and its code.
    """

    def __init__(
        self, model: nn.Module, forward: Callable[..., Any], record: Callable[..., CapturedGraphs] = CapturedGraphs
    ) -> None:
        self._model, self._forward, self._record = model, forward, record
        self._state = ModuleState(model)
        self._device = next(model.parameters()).device
        self._kinds: list[_CapturedCall] = []
        self._last: Callable[[], ReplayToken | None] = lambda: None
        self.is_on, self.launches = True, 0
        self.refusal = self.refusal_code = self.left = self.left_code = ""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model, by replay if possible."""
        tensors, kind = self._look(args, kwargs) if self.is_on else ([], None)
        seen = None if kind is None or self._is_waited_for() else self._seen(kind)
        if seen is None or seen.calls == 1:
            return self._called(args, kwargs)
        if seen.calls < LAUNCHES_FROM:
            return self._watched(args, kwargs)
        if seen.recording is None:
            seen.recording = self._recorded(args, kwargs)
        if seen.recording is None:
            return self._called(args, kwargs)
        token = ReplayToken()
        self._last = weakref.ref(token)
        self.launches += 1
        self._leave("", "")
        return seen.recording.launch(tensors, token)

    def forget(self) -> None:
        """Release all captured graphs and their memory."""
        for recording in self._made():
            recording.close()
        self._kinds = []

    def _made(self) -> list[CapturedGraphs]:
        return [seen.recording for seen in self._kinds if seen.recording is not None]

    def _called(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the model eagerly. If memory runs out, release all captured graphs, disable capture and retry."""
        try:
            return self._forward(*args, **kwargs)
        except torch.cuda.OutOfMemoryError:
            if not self._made() or self._is_waited_for():
                raise
        self._give_up("graphs.out_of_memory", "an eager call ran out of memory next to captured graphs")
        return self._forward(*args, **kwargs)

    def _leave(self, code: str, reason: str) -> None:
        self.left_code, self.left = code, reason

    def _give_up(self, code: str, reason: str) -> None:
        self.refusal_code, self.refusal = code, reason
        self.forget()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _is_waited_for(self) -> bool:
        """Return True if the last replay awaits its backward, whose tensors another replay would overwrite."""
        token = self._last()
        return token is not None and token.is_open

    def _look(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Tensor], Kind | None]:
        """Return the input tensors and the kind of a call; the kind is None if the call cannot be replayed."""
        if self.refusal or not torch.is_grad_enabled() or self._is_looked_into():
            return [], None
        leaves, spec = tree_flatten((args, kwargs))
        tensors = [each for each in leaves if isinstance(each, Tensor)]
        if not tensors or not all(map(self._may_be_copied, tensors)):
            self._leave("graphs.inputs", "an input tensor is on another device, requires a gradient or is a subclass")
            return [], None
        if not all(isinstance(each, (Tensor, *_PLAIN)) for each in leaves):
            self._leave("graphs.inputs", "an input is neither a tensor nor a bool, int, float, str, dtype or device")
            return [], None
        shapes = [
            (each.shape, each.stride(), each.dtype, each.device) if isinstance(each, Tensor) else (type(each), each)
            for each in leaves
        ]
        cast = torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda")
        return tensors, (spec, shapes, cast, self._state.modes)

    def _is_looked_into(self) -> bool:
        """Return True if modules have hooks, or a dispatch mode, a functorch transform or another capture is active."""
        if self._state.has_hooks:
            self._leave("graphs.hooks", "modules of the model have hooks")
            return True
        is_captured = self._device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        is_changed = torch._C._functorch.peek_interpreter_stack() is not None
        return is_captured or is_changed or _get_current_dispatch_mode() is not None

    def _may_be_copied(self, tensor: Tensor) -> bool:
        return type(tensor) is Tensor and tensor.device == self._device and not tensor.requires_grad

    def _seen(self, kind: Kind) -> _CapturedCall | None:
        """Count a call and return the entry of its kind; None if the limit of kinds is reached."""
        if self._state.has_changed():  # Captured graphs refer to the old parameters and the old module state.
            if self._kinds:
                self._leave("graphs.state_changes", "attributes, parameters or buffers are replaced between calls")
            self.forget()
            self._state = ModuleState(self._model)
            self._state.has_changed()
        seen = next((each for each in self._kinds if each.kind == kind), None)
        if seen is None:
            if len(self._made()) >= MOST_KINDS:
                return None
            waiting = [each for each in self._kinds if each.recording is None]
            if len(self._kinds) >= MOST_KINDS:  # A kind that has not been captured is replaced.
                self._kinds.remove(waiting[0])
            seen = _CapturedCall(kind)
            self._kinds.append(seen)
        seen.calls += 1
        return seen

    def _watched(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the model with CUDA's synchronisation warnings on; torch does not recover well from a failed capture."""
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            with _told_of_waiting(self._device):
                found = self._called(args, kwargs)
        for each in warned:
            if "called a synchronizing CUDA operation" in str(each.message):
                self._give_up("graphs.synchronizes", "the forward waits for the GPU, as .item() or .cpu() does")
            elif "debug mode is a prototype" not in str(each.message):
                warnings.warn_explicit(each.message, each.category, each.filename, each.lineno)
        return found

    def _recorded(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CapturedGraphs | None:
        beside = next(iter(self._made()), None)
        try:
            found = self._record(self._model, self._forward, args, kwargs, beside)
            if self._state.has_changed():
                found.close()
                raise UncapturableModel(
                    "the forward replaces attributes or buffers of its modules", "graphs.state_changes"
                )
            return found
        except torch.cuda.OutOfMemoryError:
            self._give_up("graphs.out_of_memory", "memory ran out during capture")
        except Exception as error:  # A forward may do many things that cannot be captured; it then runs eagerly.
            if isinstance(error, UncapturableModel):
                self._give_up(error.code, str(error))
            else:
                self._give_up("graphs.capture_failed", f"capture failed ({_first_said(error)})")
        return None


@contextlib.contextmanager
def _told_of_waiting(device: torch.device) -> Iterator[None]:
    """Have torch warn about host synchronisations with the GPU."""
    if device.type != "cuda":
        yield
        return
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def _first_said(error: BaseException) -> str:
    """Return type and first line of the original error, since ending a failed capture raises another error."""
    while error.__context__ is not None:
        error = error.__context__
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
