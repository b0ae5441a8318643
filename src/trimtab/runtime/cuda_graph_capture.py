"""Capture of a forward and its backward pass as two CUDA graphs, with copies of inputs, outputs and gradients.

With small kernels, a GPU waits for the host to launch each kernel; a graph replay is a single launch. Graphs use fixed
memory that every replay overwrites, so inputs are copied in, and outputs and gradients are copied out. Python code
between kernels is not repeated, so models that depend on it are refused.
"""

from __future__ import annotations

import contextlib
import functools
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils._pytree import tree_flatten, tree_unflatten

from trimtab.core.errors import LoopError

_MOST_GAPS = 2  # Largest ratio of memory to values for which a copy keeps the strides of a tensor.


class UncapturableModel(Exception):
    """The model cannot be captured; the message is the reason.

    Args:
        reason: clause with the model's forward, a parameter or an output as subject.
        code: stable identifier of the reason.
    """

    def __init__(self, reason: str, code: str) -> None:
        self.code = code
        super().__init__(reason, code)

    def __str__(self) -> str:
        return str(self.args[0])


class ReplayToken:
    """Marker for a replayed forward, alive while its backward may come.

    Attributes:
        is_open: True until the backward has run.
    """

    __slots__ = ("__weakref__", "is_open")

    def __init__(self) -> None:
        self.is_open = True


class CapturedGraphs:
    """Captured forward and backward of a model for one kind of input.

    Args:
        model: the model with the trained parameters.
        forward: called once during capture, on copies of the inputs.
        args: positional inputs of this kind.
        kwargs: keyword inputs of this kind.
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
            with _same_random_numbers(), _casting_anew(), self._recorded(self._forward):
                found = forward(*taken, **named)
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
        trained: parameters substituted during capture.
        parameters: the model's own parameters.

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
def _casting_anew() -> Iterator[None]:
    """Clear the autocast weight cache before and after, so that weight casts are part of the capture."""
    torch.clear_autocast_cache()
    try:
        yield
    finally:
        torch.clear_autocast_cache()


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
