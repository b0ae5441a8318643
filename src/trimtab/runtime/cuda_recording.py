"""A forward and its backward recorded as two CUDA graphs, each launched whole from then on.

A GPU whose kernels are small waits for its host, which launches them one by one; a graph is one launch. It computes in
memory of its own, which its next launch writes over: inputs are copied into it, and outputs and gradients out of it.
Nothing that Python does between kernels is repeated, so that what depends on that is refused.
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

_MOST_GAPS = 2  # times what a tensor's values take that a copy of its strides may take


class Unrecordable(Exception):
    """What a model does cannot be recorded, and why."""


class Token:
    """Of a forward that was launched: alive while its backward may come.

    Attributes:
        is_open: whether it has not come yet.
    """

    __slots__ = ("__weakref__", "is_open")

    def __init__(self) -> None:
        self.is_open = True


class Recording:
    """What a model does with inputs of one kind.

    Args:
        model: whose parameters it trains. forward: called once to be recorded, on copies of the inputs.
        args, kwargs: inputs of that kind. beside: another one, whose memory it shares: none of the two is launched
            between the other's forward and its backward.

    Raises:
        Unrecordable: it draws random numbers of the host, or its output is none that a graph could give again. Others:
            torch cannot record it, as where the host waits for what the device has computed.
    """

    def __init__(
        self,
        model: nn.Module,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        beside: Recording | None = None,
    ) -> None:
        self.parameters = tuple(p for p in model.parameters() if p.requires_grad)
        leaves, spec = tree_flatten((args, kwargs))
        copies = [copy_in_place(each) if isinstance(each, Tensor) else each for each in leaves]
        self._inputs = [written(each) for each in copies if isinstance(each, Tensor)]
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
            # As a loop goes back: outside of autocast, under which products of the backward would be cast too.
            with torch.autocast("cuda", enabled=False), self._recorded(self._backward):
                found = torch.autograd.grad(wanted, trained, self._given, allow_unused=True)
        self._outputs = [each.detach() for each in outputs]
        self._where = [index for index, each in enumerate(found) if each is not None]
        self._gradients = [each.detach() for each in found if each is not None]

    @contextlib.contextmanager
    def _recorded(self, graph: torch.cuda.CUDAGraph) -> Iterator[None]:
        """Record what is launched inside; what other threads do meanwhile, as loaders that pin memory, is theirs."""
        before = torch.cuda.current_stream()
        try:
            with torch.cuda.graph(graph, pool=self.pool, stream=self._stream, capture_error_mode="thread_local"):
                yield
        except BaseException:
            torch.cuda.set_stream(before)
            _end(self.pool, self._stream)
            raise

    def launch(self, tensors: Sequence[Tensor], token: Token) -> Any:
        """Return what the model computes of the tensors among such inputs."""
        for ours, theirs in zip(self._inputs, tensors, strict=True):
            ours.copy_(written(theirs), non_blocking=True)
        found = iter(_Launch.apply(self, token, *self.parameters))
        return tree_unflatten([None if is_none else next(found) for is_none in self._is_none], self._spec)

    def forward(self) -> list[Tensor]:
        """Launch the forward; returns copies of its outputs."""
        self._forward.replay()
        return [each.clone() for each in self._outputs]

    def constant(self, outputs: Sequence[Tensor]) -> list[Tensor]:
        """Return those of its outputs that have no gradient."""
        return [each for each, reached in zip(outputs, self._reached, strict=True) if not reached]

    def backward(self, given: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Launch the backward; returns copies of the gradients of the parameters.

        Args:
            given: of each output; None: nothing asked for it. What is reached by such alone has no gradient.

        Raises:
            LoopError: memory was given back.
        """
        if not self._gradients:
            given_back, way_out = "one after run.close()", "Go back before the run is closed."
            raise LoopError("loss.backward", given=given_back, expected="one within the run", way_out=way_out)
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
        """Give its memory back."""
        torch.cuda.synchronize(self._device)
        self._forward.reset()
        self._backward.reset()
        self._inputs, self._given, self._outputs, self._gradients = [], [], [], []


def copy_in_place(tensor: Tensor) -> Tensor:
    """Return a copy with the strides that a tensor has: of others, a compiled model would be compiled anew.

    As `clone` has where its memory has gaps, as rows of tokens less their last do. Where most of it would be gaps it is
    a clone: a column of all that is held is not worth as much memory again.
    """
    found = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    if found.untyped_storage().nbytes() > _MOST_GAPS * tensor.nbytes:
        return tensor.detach().clone()
    found = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    written(found).copy_(written(tensor.detach()))
    return found


def written(tensor: Tensor) -> Tensor:
    """Return the part of a tensor that is written to: of a dimension that lies on one place, as of an expanded one."""
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if size > 1 and stride == 0:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


class _Launch(torch.autograd.Function):
    """One launch, as autograd sees it."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, recording: Recording, token: Token, *_: Tensor
    ) -> tuple[Tensor, ...]:
        found = recording.forward()
        ctx.recording, ctx.token = recording, token
        ctx.mark_non_differentiable(*recording.constant(found))
        ctx.set_materialize_grads(False)
        return tuple(found)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *given: Tensor | None) -> tuple[Any, ...]:  # type: ignore[override]
        if not ctx.token.is_open:
            raise LoopError(
                "loss.backward",
                given="a second backward of one forward",
                expected="one: what CUDA graphs have computed is written over in it",
                way_out="Use a plan without them: compiled=False or True.",
            )
        ctx.token.is_open = False
        return None, None, *ctx.recording.backward(given)


def _reached(
    outputs: Sequence[Any], trained: Sequence[nn.Parameter], parameters: Sequence[nn.Parameter]
) -> list[frozenset[int]]:
    """Return of each output which parameters, by index, its gradient arrives at.

    Args:
        trained: what stands for the parameters.

    Raises:
        Unrecordable: one is no tensor, none has a gradient, or one would reach what does not stand for a parameter.
    """
    if (other := next((each for each in outputs if not isinstance(each, Tensor)), None)) is not None:
        raise Unrecordable(f"its forward returns a {type(other).__name__} beside tensors")
    own, stood_for = {id(each): index for index, each in enumerate(trained)}, set(map(id, parameters))
    found = []
    for each in outputs:
        leaves = list(_leaves(each))
        if any(id(leaf) in stood_for for leaf in leaves):
            raise Unrecordable("it holds parameters in another place too, as torch's recurrent layers do")
        if any(id(leaf) not in own for leaf in leaves):
            raise Unrecordable("its forward trains a tensor that is none of its parameters")
        found.append(frozenset(own[id(leaf)] for leaf in leaves))
    if not any(found):
        raise Unrecordable("its output has no gradient")
    return found


def _leaves(output: Tensor) -> Iterator[Tensor]:
    """Yield the tensors that the gradient of an output arrives at."""
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
    """Return what all is recorded on: of each stream cuBLAS keeps a workspace to the end of the process."""
    return torch.cuda.Stream(device)


def _end(pool: Any, stream: torch.cuda.Stream) -> None:
    """End a recording that torch has left open, as it does where one fails: in its allocator and its random numbers.

    Of these, by one that succeeds.
    """
    with contextlib.suppress(RuntimeError):
        torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), pool)
        torch._C._cuda_releasePool(torch.cuda.current_device(), pool)
    with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream, capture_error_mode="thread_local"):
        torch.zeros(1, device=stream.device)


@contextlib.contextmanager
def _casting_anew() -> Iterator[None]:
    """Under autocast, have weights cast inside, by what is launched: not by a cache, of before or for after."""
    torch.clear_autocast_cache()
    try:
        yield
    finally:
        torch.clear_autocast_cache()


@contextlib.contextmanager
def _same_random_numbers() -> Iterator[None]:
    """Raise `Unrecordable` where the host's random numbers were drawn inside: a launch would repeat what followed."""
    before = _host_states()
    yield
    if any(ours != theirs for ours, theirs in zip(before, _host_states(), strict=True)):
        raise Unrecordable("its forward draws random numbers on the host")


def _host_states() -> list[Any]:
    numpy = sys.modules.get("numpy")
    theirs = [] if numpy is None else [repr(numpy.random.get_state())]
    return [random.getstate(), torch.get_rng_state().numpy().tobytes(), *theirs]


@contextlib.contextmanager
def _stood_for(model: nn.Module, parameters: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Have a model compute with others in its parameters' place, of the same memory, while it is recorded.

    Autograd's node of a parameter keeps to the stream that it was made on, and has hooks of its own, which are called
    as gradients arrive at each launch: neither belongs into what is recorded.
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
